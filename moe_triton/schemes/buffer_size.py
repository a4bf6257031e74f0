"""HCCL_BUFFSIZE: how many bytes a group's sizes need.

The published formulas (docs/limits.md, "Window memory: HCCL_BUFFSIZE") are their schemes'. On A3 they bound
layouts from above: a window that these bytes hold is large enough for the layout.
"""

from __future__ import annotations

from moe_triton.core.config import Config
from moe_triton.core.hccl import DEFAULT_MEGABYTES, MEGABYTE, too_small
from moe_triton.layout import SLOT_ALIGN, UB_ALIGN, align
from moe_triton.limits.formula import ITEM_BYTES, Formula
from moe_triton.limits.rule import UNTIL_V3
from moe_triton.schemes import layout_of, scheme_type

EXCHANGE_TAIL_BYTES = 44  # a row's scale in a 32-byte unit, and its origin


def _exchange(c: Config) -> int:
    row = align(ITEM_BYTES * c.hidden, UB_ALIGN)
    slots = align(row + EXCHANGE_TAIL_BYTES, SLOT_ALIGN) + align(ITEM_BYTES * c.hidden, SLOT_ALIGN)
    return 2 * max(c.shared_capacity, c.routed_capacity) * slots


# The window between two tensor-parallel ranks, besides that of their group: A is the larger of what a rank of
# routed and one of shared experts can receive, so that all ranks come to the same result.
EXCHANGE_FORMULA = Formula(
    "A3, tensor parallelism of two, besides",
    "2 * (A * Align512(Align32(2 * H) + 44) + A * Align512(2 * H))",
    _exchange,
    UNTIL_V3,
)


def needed_buffer_bytes(config: Config) -> int:
    """Bytes that HCCL_BUFFSIZE has to cover for a `Config` that keeps every rule.

    By the published formula, or of a scheme that has none what its layout takes.
    """
    config = config.normalized()
    if (formulas := scheme_type(config).formulas.get(config.version)) is None:
        return layout_of(config).data_bytes
    return min(f.needed(config) for f in formulas if config.generation in f.generations)


def needed_exchange_bytes(config: Config) -> int:
    """The same for the window between two tensor-parallel ranks, which HCCL_BUFFSIZE bounds by itself."""
    return EXCHANGE_FORMULA.needed(config.normalized())


def check_buffer_size(
    config: Config, megabytes: int = DEFAULT_MEGABYTES, *, tensor_parallel: bool = False
) -> None:
    """Checks that windows of this size are large enough.

    Args:
        config: one that keeps every rule.
        megabytes: HCCL_BUFFSIZE.
        tensor_parallel: whether there is a window between two tensor-parallel ranks besides.

    Raises:
        ArgumentError: one is not; the message gives the value to set for both.
    """
    windows = {f"{config.product} {config.scheme}": needed_buffer_bytes(config)}
    if tensor_parallel:
        windows["tensor parallelism"] = needed_exchange_bytes(config)
    name, needed = max(windows.items(), key=lambda item: item[1])
    if needed > megabytes * MEGABYTE:
        rule = f"the window of {name} needs {needed} bytes for these sizes"
        raise too_small(f"{megabytes} MB", rule, max(needed, layout_of(config.normalized()).data_bytes))
