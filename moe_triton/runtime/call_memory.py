"""How much private memory a buffer's calls take, before anything is made."""

from __future__ import annotations

import math
from typing import Any

import torch

from moe_triton.core.row_formats import AS_THEY_ARE
from moe_triton.operators.buffer import COMBINE_OF_BUFFER, DISPATCH_OF_BUFFER, attributes_of
from moe_triton.operators.description import Operator, Symbols
from moe_triton.operators.variants import CombineVariant, DispatchVariant, Variant
from moe_triton.schemes.scheme import Scheme

FIRST_CALL_BYTES = 8 << 20
"""What a process takes until its calls repeat: to load kernels, and for Python's objects (measured: 5 MB)."""


def call_bytes(scheme: Scheme) -> int:
    """Private bytes that a plain dispatch and its combine take on this rank, when most rows arrive.

    Scratch memory, outputs, and what the process itself takes.
    """
    site, dtype = scheme.site, torch.bfloat16
    config = site.config
    tables, is_paired = scheme.tables_of(config), site.exchange_rank is not None
    keeps = tables is not None  # and then takes weights
    sizes = {
        "BS": config.num_max_tokens_per_rank,
        "rows": site.capacity,
        "row_format": AS_THEY_ARE,
        **attributes_of(config, site.rank, site.exchange_rank, table_words=tables.num_words if tables else 0),
    }
    outputs = 0
    calls: tuple[tuple[Operator, Variant], ...] = (
        (
            DISPATCH_OF_BUFFER,
            DispatchVariant(dtype, weights=keeps, keeps_tables=keeps, exchange=is_paired),
        ),
        (COMBINE_OF_BUFFER, CombineVariant(dtype, weights=keeps, exchange=is_paired)),
    )
    for operator, variant in calls:
        likes: dict[str, Any] = {
            argument.name: torch.empty(1, columns, dtype=dtype, device="meta")
            for argument, columns in zip(operator.tensors[:2], (config.hidden, config.num_topk), strict=True)
        }
        s = Symbols(operator, sizes | likes)
        for output in operator.returned(variant):
            if output.name == "tokens" and scheme.place("rows", dtype.itemsize):
                continue
            shape, kind = s.spec(output)
            outputs += math.prod(shape) * kind.itemsize
    return FIRST_CALL_BYTES + outputs + scheme.workspace_bytes(*(variant for _, variant in calls))
