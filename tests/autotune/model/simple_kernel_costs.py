"""Kernel costs without a compiler for NPUs: Ascend C kernels counted, Triton kernels by bytes at a rate."""

from __future__ import annotations

from autotune.model.constants import Machine
from autotune.model.cost import Cost, KernelCost, Work
from autotune.model.kernel_costs import movement
from autotune.model.kernel_costs.counted.price import counted
from moe_triton.core.kernel import AscendCKernel, TritonKernel

OF_TOKENS, OF_ROWS = ("pack", "weighted_sum"), ("arrange", "stamps")
ROW_BYTES = 14336


def simple_kernel_costs(kernel: AscendCKernel | TritonKernel) -> KernelCost:
    """Time of a kernel: more with more tokens or received rows, and less with more cores."""
    if isinstance(kernel, AscendCKernel):
        return counted

    def kernel_cost(work: Work, machine: Machine) -> Cost:
        rows = 0
        if kernel.name in OF_TOKENS:
            rows = work.traffic.topk_idx.size if kernel.name == "weighted_sum" else len(work.traffic.topk_idx)
        elif kernel.name in OF_ROWS:
            rows = work.traffic.num_rows
        cycles = rows * ROW_BYTES / movement.bytes_per_cycle(machine, work.blocks) / work.blocks
        return Cost({"start": 1.0, "rows": movement.us_of(machine, cycles)})

    return kernel_cost
