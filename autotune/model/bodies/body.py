"""`Body`: the time of one launch, as a function of its cores and of what it has to move.

Those of Triton kernels replay the NPU compiler's own output (`autotune.model.bodies.replay`), those of
Ascend C kernels what a run of the kernel says that it does (`autotune.model.bodies.counted`).
"""

from __future__ import annotations

from autotune.model.bodies.counted.price import counted
from autotune.model.bodies.replay import replayed
from autotune.model.cost import Body
from moe_triton.core.kernel import AscendCKernel, TritonKernel


def body_of(kernel: AscendCKernel | TritonKernel) -> Body:
    """The body of a kernel."""
    return counted if isinstance(kernel, AscendCKernel) else replayed
