"""`Body`: the time of one launch, as a function of its cores and of what it has to move.

Those of Triton kernels replay the NPU compiler's own output (`autotune.model.bodies.replay`); those of
Ascend C kernels are formulas, one each (`autotune.model.bodies.ascendc`).
"""

from __future__ import annotations

from autotune.model.bodies.ascendc import FORMULAS
from autotune.model.bodies.replay import replayed
from autotune.model.cost import Body, NoFormulaError
from moe_triton.core.kernel import AscendCKernel, TritonKernel


def body_of(kernel: AscendCKernel | TritonKernel) -> Body:
    """The body of a kernel.

    Raises:
        NoFormulaError: an Ascend C kernel without a formula.
    """
    if not isinstance(kernel, AscendCKernel):
        return replayed
    if kernel.name not in FORMULAS:
        raise NoFormulaError(f"{kernel.name} has no formula")
    return FORMULAS[kernel.name]
