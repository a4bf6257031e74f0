"""`Body`: the time of one launch, as a function of its cores and of what it has to move.

Those of Triton kernels replay the NPU compiler's own output (`autotune.model.kernel_costs.replay`), those of
Ascend C kernels what a run of the kernel says that it does (`autotune.model.kernel_costs.counted`).
"""

from __future__ import annotations

from autotune.model.cost import KernelCost
from autotune.model.kernel_costs.counted.price import counted
from autotune.model.kernel_costs.replay import replayed
from moe_triton.core.kernel import AscendCKernel, TritonKernel


def kernel_cost_of(kernel: AscendCKernel | TritonKernel) -> KernelCost:
    """The cost of a kernel."""
    return counted if isinstance(kernel, AscendCKernel) else replayed
