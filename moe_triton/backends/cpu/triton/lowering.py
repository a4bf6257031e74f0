"""From linalg on tensors to the LLVM dialect: three runs of stock passes, with edits in between."""

from __future__ import annotations

import re
from pathlib import Path

from moe_triton.backends.cpu.triton import rewrites
from moe_triton.backends.cpu.triton.toolchain import TARGET_TRIPLE, find_toolchain, run_tool
from moe_triton.core.errors import ToolchainError
from moe_triton.core.kernel import TritonKernel

_FUSE = (
    "--convert-elementwise-to-linalg",
    "--linalg-generalize-named-ops",
    "--linalg-fuse-elementwise-ops",
    "--canonicalize",
    "--cse",
)
_BUFFERIZE = (
    "--linalg-fuse-elementwise-ops",
    "--canonicalize",
    "--cse",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--canonicalize",
    "--cse",
    "--buffer-hoisting",
    "--buffer-loop-hoisting",
    "--canonicalize",
    f"--promote-buffers-to-stack=max-alloc-size-in-bytes={1 << 26}",
)
_TO_LLVM = (
    "--convert-linalg-to-loops",
    "--fold-memref-alias-ops",
    "--canonicalize",
    "--loop-invariant-code-motion",
    "--arith-expand",
    "--convert-scf-to-cf",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-vector-to-llvm",
    "--convert-arith-to-llvm",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--convert-arith-to-llvm",
    "--convert-index-to-llvm",
    "--reconcile-unrealized-casts",
    "--canonicalize",
    "--cse",
)


def lower(text: str, kernel: TritonKernel, *, noalias: bool) -> str:
    """LLVM-dialect text with the packed entry, from the adapter's text (``named_ops=False``).

    Args:
        noalias: no two pointer arguments of any call overlap, unless none of them is written.
    """
    function = kernel.fn.__name__
    text = rewrites.drop_annotations(rewrites.unique_names(text))
    if noalias:
        text = rewrites.forward_loads(text)
    text = _run(_FUSE, text)
    text = rewrites.clone_cheap_producers(text)
    text = rewrites.store_bfloat16_as_integers(text)
    text = rewrites.round_through_bits(text)
    text = _run(_BUFFERIZE, text)
    text = rewrites.carry_in_place(text)
    text = rewrites.hoist_buffers(text)
    text = rewrites.copy_partial_blocks_with_loops(text)
    _check_buffers(text, kernel)
    if noalias:
        text = rewrites.store_in_place(text)
    text = rewrites.vectorize_rows(text)
    text = _run(_TO_LLVM, text)
    _check_dialect(text, kernel)
    if noalias:
        text = rewrites.mark_noalias(text, function)
    text = rewrites.copy_ahead(rewrites.read_ahead(text))
    text = rewrites.append_packed_entry(text, function, [arg.type for arg in kernel.args])
    text = rewrites.widen_fp16_loops(text)
    text = rewrites.prefer_wide_vectors(text)
    return rewrites.set_target_triple(text, TARGET_TRIPLE)


def _run(passes: tuple[str, ...], text: str) -> str:
    command: list[str | Path] = [find_toolchain().bishengir_opt, "--mlir-print-unique-ssa-ids", *passes, "-"]
    return rewrites.unique_names(run_tool(command, text))


def _check_buffers(text: str, kernel: TritonKernel) -> None:
    """Refuse code that would leak memory or grow the stack with every row."""
    if "memref.alloc(" in text:
        raise ToolchainError(f"kernel {kernel.name}: a buffer would be allocated and never freed")
    if re.search(r"^ {6,}%[\w-]+ = memref\.alloca", text, flags=re.M):
        raise ToolchainError(f"kernel {kernel.name}: a buffer inside a loop would grow the stack")


def _check_dialect(text: str, kernel: TritonKernel) -> None:
    """Refuse operations outside the LLVM dialect: translating them ends the process."""
    operations = set(re.findall(r"^\s*(?:%[\w:, %-]+ = )?\"?([a-z_]+\.[\w.]+)", text, flags=re.M))
    foreign = sorted(operation for operation in operations if not operation.startswith("llvm."))
    if foreign:
        raise ToolchainError(f"kernel {kernel.name}: no lowering to LLVM for {', '.join(foreign)}")
