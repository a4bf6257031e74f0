"""Shapes and dtypes of what setup returns (docs/operators.md, "Outputs of the halves").

Sizes may be symbolic.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_triton.torch_npu_ops.plans.shapes import Output

COMMAND_WORDS = 16  # int32 of comm_cmd_info per row and per flag


def _align(value: Any, unit: int) -> Any:
    return (value + unit - 1) // unit * unit


def dispatch_setup(
    sizes: tuple[Any, Any, Any],
    dtype: torch.dtype,
    num_ranks: int,
    num_local_experts: int,
    num_shared_experts: int,
    quantize: bool,
) -> tuple[Output, Output, Output]:
    """y, expand_idx and comm_cmd_info of a dispatch_setup.

    Args:
        sizes: (BS, H, K).
        dtype: of x.
        num_ranks: EP.
        num_local_experts: of this rank; 1 where it holds a shared expert.
        num_shared_experts: S as passed, whether or not ranks hold them.
        quantize: whether rows travel as int8.
    """
    batch, hidden, topk = sizes
    results = batch * (topk + num_shared_experts)
    width = _align(_align(hidden, 32) + 4, 512) if quantize else _align(_align(2 * hidden, 32), 512) // 2
    return (
        ((results, width), torch.int8 if quantize else dtype),
        ((batch * topk,), torch.int32),
        (((results + num_ranks * num_local_experts) * COMMAND_WORDS,), torch.int32),
    )


def combine_setup(sizes: tuple[Any, Any], num_ranks: int) -> tuple[Output, Output]:
    """quant_expand_x and comm_cmd_info of a combine_setup; sizes are (A, H)."""
    rows, hidden = sizes
    width = _align(_align(hidden, 32) + _align(hidden, 8) // 8 * 4, 512)
    return ((rows, width), torch.int8), (((rows + num_ranks) * COMMAND_WORDS,), torch.int32)
