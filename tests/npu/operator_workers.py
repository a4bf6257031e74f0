"""What ranks run of torch_npu's operators on the stand-in; each function as ``f(rank, num_ranks, ...)``."""

from __future__ import annotations

import torch
import torch.distributed as dist

from moe_triton import torch_npu_ops as ops
from tests.distributed import buffer_runs
from tests.distributed.operator_cases import OperatorCase
from tests.distributed.operator_runs import run_rank
from tests.npu import standin


def run_case(process: int, num_processes: int, case: OperatorCase, policy: str) -> bytes:
    """What one process gets in each round, for `tests.distributed.operator_runs.check`."""
    standin.install(policy, seed=case.seed + process)
    if case.tp == 2:  # memfabric knows the ranks of the first group that asks
        ops.configure(backend="npu")
        ops._npu_distribute_barrier(torch.zeros(1), ops.group_name(), num_processes)
    try:
        return run_rank(process, num_processes, case, backend="npu")
    finally:
        ops.release(ops.group_name())
        dist.barrier()  # and nobody makes the next windows while these are given up
        ops.configure()


def run_buffer(process: int, num_processes: int, case: OperatorCase, policy: str) -> bytes:
    """The same by way of an `EPBuffer`."""
    standin.install(policy, seed=case.seed + process)
    try:
        return buffer_runs.run_rank(process, num_processes, case, backend="npu")
    finally:
        dist.barrier()
