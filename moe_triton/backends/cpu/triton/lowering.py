"""From linalg on tensors to the LLVM dialect: three runs of stock passes, with edits in between."""

from __future__ import annotations

from pathlib import Path

from moe_triton.backends.cpu.triton import ir
from moe_triton.backends.cpu.triton import rewrite_ahead as ahead
from moe_triton.backends.cpu.triton import rewrite_buffers as buffers
from moe_triton.backends.cpu.triton import rewrite_llvm as llvm
from moe_triton.backends.cpu.triton import rewrite_tensors as tensors
from moe_triton.backends.cpu.triton.rewrite_fusion import fuse_loops
from moe_triton.backends.cpu.triton.rewrite_vectors import narrow_by_shuffles, vectorize_rows
from moe_triton.backends.cpu.triton.targets import Target
from moe_triton.backends.cpu.triton.toolchain import find_toolchain, run_tool
from moe_triton.core.errors import ToolchainError
from moe_triton.core.kernel import TritonKernel

# Without the pattern that makes one copy of two, from x to a view and from there to y, and writes nothing to
# the view any more. It asks whether the view's name has other users, not whether its memory has: what reads
# that by another name would find what was there before. Builds of bishengir-opt differ, also those of one
# version: aarch64's 1.2.0 has it, x86-64's has it in passes of its own.
_CANONICALIZE = "--canonicalize=disable-patterns='(anonymous namespace)::FoldRedundantCopy'"

_FUSE = (
    "--convert-elementwise-to-linalg",
    "--linalg-generalize-named-ops",
    "--linalg-fuse-elementwise-ops",
    _CANONICALIZE,
    "--cse",
)
_BUFFERIZE = (
    "--linalg-fuse-elementwise-ops",
    _CANONICALIZE,
    "--cse",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    _CANONICALIZE,
    "--cse",
    "--buffer-hoisting",
    "--buffer-loop-hoisting",
    _CANONICALIZE,
    f"--promote-buffers-to-stack=max-alloc-size-in-bytes={1 << 26}",
)
_TO_LLVM = (
    "--convert-linalg-to-loops",
    "--fold-memref-alias-ops",
    _CANONICALIZE,
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
    _CANONICALIZE,
    "--cse",
)


def lower(text: str, kernel: TritonKernel, *, noalias: bool, target: Target, streams: bool = False) -> str:
    """LLVM-dialect text with the packed entry, from the adapter's text (``named_ops=False``).

    Between passes, no pass does these things, or one drops information.

    Args:
        text: the adapter's.
        kernel: whose it is.
        noalias: no two pointer arguments of any call overlap, unless none of them is written.
        target: what it is for.
        streams: whether rows that it copies bypass the caches.
    """
    module = ir.read(text)
    tensors.drop_annotations(module)
    if noalias:
        tensors.forward_loads(module)
    module = _run(_FUSE, module)
    tensors.clone_cheap_producers(module)
    tensors.round_through_bits(module)
    tensors.store_bfloat16_as_integers(module)
    module = _run(_BUFFERIZE, module)
    buffers.carry_in_place(module)
    buffers.hoist_buffers(module)
    buffers.copy_partial_blocks_with_loops(module)
    _check_buffers(module, kernel)
    if noalias:
        buffers.store_in_place(module)
    vectorize_rows(module, target.tile_elements)
    narrow_by_shuffles(module)
    if noalias:
        fuse_loops(module)
    module = _run(_TO_LLVM, module)
    _check_dialect(module, kernel)
    if noalias:
        llvm.mark_noalias(module)
    ahead.read_ahead(module)
    (ahead.copy_past_caches if streams else ahead.copy_ahead)(module)
    llvm.append_packed_entry(module, kernel.fn.__name__, [arg.type for arg in kernel.args])
    llvm.widen_fp16_loops(module, target.fp16_lanes)
    llvm.prefer_wide_vectors(module, target.vector_bits)
    llvm.set_target_triple(module, target.triple)
    return str(module)


def _run(passes: tuple[str, ...], module: ir.Operation) -> ir.Operation:
    command: list[str | Path] = [find_toolchain().bishengir_opt, *ir.AS_READ, *passes, "-"]
    return ir.read(run_tool(command, str(module)))


def _check_buffers(module: ir.Operation, kernel: TritonKernel) -> None:
    """Refuse code that would leak memory or grow the stack with every row."""
    if module.walk("memref.alloc"):
        raise ToolchainError(f"kernel {kernel.name}: a buffer would be allocated and never freed")
    outermost = [function.body for function in module.walk("func.func")]
    if any(buffer.block not in outermost for buffer in module.walk("memref.alloca")):
        raise ToolchainError(f"kernel {kernel.name}: a buffer inside a loop would grow the stack")


def _check_dialect(module: ir.Operation, kernel: TritonKernel) -> None:
    """Refuse operations outside the LLVM dialect: translating them ends the process."""
    if foreign := sorted({each.name for each in module.walk() if not each.name.startswith("llvm.")}):
        raise ToolchainError(f"kernel {kernel.name}: no lowering to LLVM for {', '.join(foreign)}")
