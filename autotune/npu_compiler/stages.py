"""A kernel's IR at every stage on its way to the NPU, as files."""

from __future__ import annotations

from pathlib import Path

from autotune.npu_compiler.compile import LOG, MODULE, PLAN, compiled_for, npu_ir, run_compiler
from autotune.npu_compiler.socs import Soc
from moe_triton.backends.cpu.triton.frontend import triton_ir
from moe_triton.core.kernel import TritonKernel

TTIR, LINALG, PASSES = "kernel.ttir.mlir", "kernel.mlir", "passes"

STAGES = {
    TTIR: "Triton IR, after the passes that all of Triton's back ends share",
    LINALG: "linalg on tensors, from the Ascend adapter: the input of the NPU compiler",
    PASSES: "the NPU compiler's IR after each of its passes that changed anything, by number",
    MODULE: "its last module: the instruction stream, every UB offset decided",
    PLAN: "its memory plan",
    LOG: "its messages",
}

_PRINT = ("--mlir-print-ir-after-all", "--mlir-print-ir-after-change")


def save_stages(kernel: TritonKernel, soc: Soc, folder: Path) -> list[str]:
    """Compiles a kernel again, and keeps all stages.

    Returns:
        The names of `STAGES` that were written: a compiler that fails writes no module, and that for 950 no
            plan.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TTIR).write_text(triton_ir(kernel))
    printing = (*_PRINT, f"--mlir-print-ir-tree-dir={folder / PASSES}")
    compiled = run_compiler(npu_ir(kernel), compiled_for(kernel, soc), folder, (*soc.options, *printing))
    (folder / LOG).write_text(compiled.log)
    return [name for name in STAGES if (folder / name).exists()]
