"""The reference model: dispatch and combine of a whole deployment in one process, plainly.

NumPy and torch, a loop per sentence of docs/operators.md; no windows, no flags, no kernels. The library is
bit-equal to it. `dispatch_all`, `combine_all` and `combine_add_rms_norm_all` are the operators of torch_npu,
as functions of all ranks' inputs; `dispatch` and `combine` are those of `moe_triton.buffer`.

How long ranks were waited for (performance_info) is measured, so the model says only whose entries may
change. Memory behind the last row and of inactive tokens is undefined, so the model's outputs end where the
determined part does.
"""

from __future__ import annotations

from moe_triton.reference.arithmetic import dequantize, quantize_row, through_blocks
from moe_triton.reference.buffer import Received, combine, dispatch
from moe_triton.reference.combine import (
    AddRmsNormReference,
    CombineInputs,
    CombineReference,
    combine_add_rms_norm_all,
    combine_all,
)
from moe_triton.reference.deployment import Deployment
from moe_triton.reference.dispatch import DispatchInputs, DispatchReference, dispatch_all, expand_index
from moe_triton.reference.per_rank import ReceivedPerRank, combine_per_rank, dispatch_per_rank

__all__ = [
    "AddRmsNormReference",
    "CombineInputs",
    "CombineReference",
    "Deployment",
    "DispatchInputs",
    "DispatchReference",
    "Received",
    "ReceivedPerRank",
    "combine",
    "combine_add_rms_norm_all",
    "combine_all",
    "combine_per_rank",
    "dispatch",
    "dispatch_all",
    "dispatch_per_rank",
    "expand_index",
    "dequantize",
    "quantize_row",
    "through_blocks",
]
