"""HCCL_BUFFSIZE: the bytes that a group's window may take, and how many its sizes need.

The published formulas (docs/limits.md, "Window memory: HCCL_BUFFSIZE").
On A3 they bound `moe_triton.layout` from above: a window that these bytes hold is large enough for the
layout. A2's formula leaves out what goes with a row (a scale and a stamp of 32 bytes each), which the 2 MB of
a zone cover in all but large groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from moe_triton.core.config import Config
from moe_triton.core.hccl import DEFAULT_MEGABYTES, MEGABYTE, too_small
from moe_triton.layout import (
    BLOCK_BYTES,
    BLOCK_DATA_BYTES,
    SLOT_ALIGN,
    UB_ALIGN,
    SlotLayout,
    align,
)
from moe_triton.limits.rule import EITHER, SINCE_V4, UNTIL_V3, Generations
from moe_triton.schemes import SCHEMES, layout_of

ITEM_BYTES = 2  # bf16 and fp16
EXCHANGE_TAIL_BYTES = 44  # a row's scale in a 32-byte unit, and its origin


@dataclass(frozen=True)
class Formula:
    """Bytes that one scheme needs.

    Attributes:
        title: of which scheme.
        text: the formula, for the documentation.
        needed: the same as a function.
        generations: of the published limits that have it. Where none is chosen, the smallest result counts.
    """

    title: str
    text: str
    needed: Callable[[Config], int]
    generations: Generations = EITHER


def _packed_bytes(c: Config) -> int:
    """A row, its scale and its stamp, before they are cut into blocks or rounded up to a slot."""
    return SlotLayout(c.hidden, ITEM_BYTES).packed_bytes


def _two_zones(c: Config, dispatch_slot: int) -> int:
    dispatch = c.num_local_experts * c.num_max_tokens_per_rank * c.num_ranks * dispatch_slot
    combine_slot = align(ITEM_BYTES * c.hidden, SLOT_ALIGN)
    return 2 * (dispatch + c.num_results_per_token * c.num_max_tokens_per_rank * combine_slot)


def _fullmesh_v1(c: Config) -> int:
    return _two_zones(c, align(_packed_bytes(c), SLOT_ALIGN))


def _fullmesh_v2(c: Config) -> int:
    return _two_zones(c, -(-_packed_bytes(c) // BLOCK_DATA_BYTES) * BLOCK_BYTES)


def _first_version(c: Config) -> int:
    slots = c.num_ranks * c.num_local_experts + c.num_topk + 1
    return 2 * c.num_max_tokens_per_rank * ITEM_BYTES * (c.hidden + 128) * slots + 2 * MEGABYTE


def _a2_fullmesh(c: Config) -> int:
    rows = c.num_max_tokens_per_rank * c.num_ranks * min(c.num_local_experts, c.num_topk)
    return 2 * (rows * c.hidden * ITEM_BYTES + 2 * MEGABYTE)


def _a2_hierarchy(c: Config) -> int:
    token = c.hidden * ITEM_BYTES + 4 * align(c.num_topk, 8) * 4
    return c.num_experts * c.num_max_tokens_per_rank * token + (4 + 100) * MEGABYTE


def _a2_hierarchy_v4(c: Config) -> int:
    token = c.hidden * ITEM_BYTES + 16 * align(c.num_topk, 8)
    block = align(c.num_max_tokens_per_rank * token, SLOT_ALIGN)
    return (c.num_experts + c.num_ranks // 4) * block + 8 * MEGABYTE


def _exchange(c: Config) -> int:
    row = align(ITEM_BYTES * c.hidden, UB_ALIGN)
    slots = align(row + EXCHANGE_TAIL_BYTES, SLOT_ALIGN) + align(ITEM_BYTES * c.hidden, SLOT_ALIGN)
    return 2 * max(c.shared_capacity, c.routed_capacity) * slots


_A2_HIERARCHY = Formula(
    "A2, hierarchy",
    "M * maxBs * (H * 2 + 4 * Align8(K) * 4) + 4 MB + 100 MB",
    _a2_hierarchy,
)
_A2_HIERARCHY_V4 = Formula(
    "A2, V2, hierarchy",
    "(M + EP / 4) * Align512(maxBs * (2 * H + 16 * Align8(K))) + 8 MB",
    _a2_hierarchy_v4,
    SINCE_V4,
)
_A2_FULLMESH = Formula("A2, fullmesh", "2 * (maxBs * EP * min(localE, K) * H * 2 + 2 MB)", _a2_fullmesh)

# By product, version and scheme.
FORMULAS: dict[tuple[str, int, str], tuple[Formula, ...]] = {
    ("A3", 2, "fullmesh_v1"): (
        Formula(
            "A3, V2, fullmesh_v1",
            "2 * (localE * maxBs * EP * Align512(Align32(2 * H) + 64) + (K + S) * maxBs * Align512(2 * H))",
            _fullmesh_v1,
        ),
    ),
    ("A3", 2, "fullmesh_v2"): (
        Formula(
            "A3, V2, fullmesh_v2",
            "2 * (localE * maxBs * EP * ceil((Align32(2 * H) + 64) / 480) * 512 "
            "+ (K + S) * maxBs * Align512(2 * H))",
            _fullmesh_v2,
        ),
    ),
    ("A3", 1, "fullmesh_v1"): (
        Formula("A3, V1", "2 * maxBs * 2 * (H + 128) * (EP * localE + K + 1) + 2 MB", _first_version),
    ),
    ("A2", 1, "fullmesh"): (_A2_FULLMESH,),
    ("A2", 2, "fullmesh"): (_A2_FULLMESH,),
    ("A2", 1, "hierarchy"): (_A2_HIERARCHY,),
    ("A2", 2, "hierarchy"): (replace(_A2_HIERARCHY, generations=UNTIL_V3), _A2_HIERARCHY_V4),
}
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
    formulas = FORMULAS.get((config.product, config.version, config.scheme))
    if formulas is None:
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
        raise too_small(f"{megabytes} MB", rule, max(needed, _layout_bytes(config)))


def _layout_bytes(config: Config) -> int:
    """What the layout takes; 0 of a scheme that is not served."""
    served = config.scheme in SCHEMES[config.product]
    return layout_of(config.normalized()).data_bytes if served else 0
