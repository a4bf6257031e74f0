"""The compiler gate: compiles every Triton kernel for the NPU, on a machine without one.

- `gate.stream` parses the compiler's last module, `gate.report` counts its instructions, and
  `gate.costs` estimates which pipe bounds it;
- `gate.families` and `gate.table` list the kernels and sizes;
- `gate.golden` keeps and compares the figures, `gate.page` writes them into the docs.
"""

from __future__ import annotations

from autotune.gate.report import GateReport, report_of
from autotune.npu_compiler.compile import compile_kernel, notes_of, reason_of
from autotune.npu_compiler.socs import SOCS, soc_named
from moe_triton.core.errors import ToolchainError
from moe_triton.core.kernel import TritonKernel

__all__ = ["SOCS", "GateReport", "compile_for_npu", "soc_named"]


def compile_for_npu(kernel: TritonKernel, soc: str = "Ascend910B3") -> GateReport:
    """Compile a kernel with the NPU compiler, up to the last step, whose program only CANN has.

    Args:
        kernel: built for the NPU (``target="npu"`` where its factory knows targets).
        soc: ``Ascend910B3`` (A2), ``Ascend910_9391`` (A3) or, as an outlook, ``Ascend950PR_9589``.

    Raises:
        ToolchainError: Triton or the compiler rejects it, or a tool is missing.
    """
    compiled = compile_kernel(kernel, soc_named(soc))
    if not compiled.module:
        reason = reason_of(compiled.log)
        raise ToolchainError(f"the NPU compiler rejects {kernel.name} for {soc}: {reason}")
    return report_of(kernel.name, soc, compiled.module, compiled.plan, notes_of(compiled.log))
