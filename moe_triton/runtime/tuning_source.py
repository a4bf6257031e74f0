"""Where the settings of a buffer come from: the caller, a table, or the kernels themselves."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moe_triton.core.kernel import TritonKernel
from moe_triton.core.row_formats import ROW_FORMATS
from moe_triton.core.space import text_of
from moe_triton.operators.variants import CombineVariant, DispatchVariant, Variant
from moe_triton.schemes.scheme import Scheme
from moe_triton.tables import KernelSettings


def tuning_source(scheme: Scheme, settings: KernelSettings, dtype: torch.dtype) -> dict[str, str]:
    """Who says how operators are cut into parts, and what settings each Triton kernel has.

    Args:
        scheme: whose plans.
        settings: of its kernels.
        dtype: of tokens.

    Returns:
        By name, ``dispatch_tokens``, ``combine_tokens``, what else a table of pipelines has set, and
        ``<operator>.<kernel>``: the value and source.
    """
    context = scheme.context
    sources = {
        f"{name}_tokens": f"{part.tokens}: {part.source}" for name, part in context.part_tokens.items()
    }
    for name, source in context.sources.items():
        value = context.num_blocks if name == "num_blocks" else getattr(context.tuning, name)
        sources[name] = f"{value}: {source}"
    for operator, kernel in launched(scheme, dtype):
        chosen = settings.chosen(kernel)
        sources[f"{operator}.{kernel.name}"] = f"{text_of(chosen.settings)}: {chosen.source}"
    return sources


def launched(scheme: Scheme, dtype: torch.dtype) -> Iterator[tuple[str, TritonKernel]]:
    """The kernels of plain calls that there is anything to choose of: dispatches with and without int8."""
    context = scheme.context
    own = scheme.local_bypass and context.exchange_rank is None and not context.config.num_special_experts
    given = torch.int32 if context.capabilities.is_asynchronous else None  # the host has copied them
    formats = (row_format for name, row_format in ROW_FORMATS.items() if name in (None, "int8"))
    dispatches = (
        DispatchVariant(dtype, each, False, True, local_bypass=own, given_ids=given) for each in formats
    )
    variants: list[tuple[str, Variant]] = [("dispatch", each) for each in dispatches]
    tokens = context.config.num_max_tokens_per_rank
    for operator, variant in (*variants, ("combine", CombineVariant(dtype, True, local_bypass=own))):
        for launch in scheme.whole(variant, 0, context.parts(operator, tokens)).launches:
            kernel = launch.kernel
            if isinstance(kernel, TritonKernel) and kernel.space is not None:
                yield operator, kernel
