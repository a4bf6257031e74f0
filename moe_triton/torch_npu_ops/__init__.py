"""torch_npu's MoE functions on moe_triton: change the import and keep the calls.

``from moe_triton import torch_npu_ops as torch_npu``. Groups are named by `group_name`; what torch_npu has no
argument for is set by `configure`.
"""

from __future__ import annotations

from moe_triton.torch_npu_ops.experts import npu_moe_update_expert
from moe_triton.torch_npu_ops.group import _npu_distribute_barrier, npu_moe_distribute_buffer_reset
from moe_triton.torch_npu_ops.masks import clean_mask, lost, query_fault, query_mask, update_mask
from moe_triton.torch_npu_ops.npu_moe import (
    npu_moe_distribute_combine,
    npu_moe_distribute_combine_add_rms_norm,
    npu_moe_distribute_combine_setup,
    npu_moe_distribute_combine_teardown,
    npu_moe_distribute_combine_v2,
    npu_moe_distribute_dispatch,
    npu_moe_distribute_dispatch_setup,
    npu_moe_distribute_dispatch_teardown,
    npu_moe_distribute_dispatch_v2,
)
from moe_triton.torch_npu_ops.registry import group_name, process_group, register_group, release, synchronize
from moe_triton.torch_npu_ops.settings import configure
from moe_triton.torch_npu_ops.watching import flight, metrics, status

__all__ = [
    "_npu_distribute_barrier",
    "npu_moe_distribute_buffer_reset",
    "npu_moe_distribute_combine_setup",
    "npu_moe_distribute_combine_teardown",
    "npu_moe_distribute_dispatch_setup",
    "npu_moe_distribute_dispatch_teardown",
    "clean_mask",
    "configure",
    "flight",
    "group_name",
    "lost",
    "metrics",
    "npu_moe_distribute_combine",
    "npu_moe_distribute_combine_add_rms_norm",
    "npu_moe_distribute_combine_v2",
    "npu_moe_distribute_dispatch",
    "npu_moe_distribute_dispatch_v2",
    "npu_moe_update_expert",
    "process_group",
    "query_fault",
    "query_mask",
    "register_group",
    "release",
    "status",
    "synchronize",
    "update_mask",
]
