"""Launching one kernel from Python. Plans are run natively; this serves host functions and tests."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from moe_triton.backends.cpu.triton.loader import load
from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import Arg, TritonKernel


def overlaps(kernel: TritonKernel, extents: Sequence[tuple[int, int] | None]) -> bool:
    """Whether a call needs the build that allows for overlapping arguments.

    Args:
        extents: first byte address and length in bytes of each run-time argument; None for integers.

    Returns:
        Whether some written argument shares bytes with another one, other than fields declared
        ``interleaved_with`` each other.
    """
    spans = [
        (arg, extent[0], extent[0] + extent[1])
        for arg, extent in zip(kernel.args, extents, strict=True)
        if extent is not None and extent[1] > 0
    ]
    for i, (a, a_start, a_end) in enumerate(spans):
        for b, b_start, b_end in spans[i + 1 :]:
            if a.direction == "in" and b.direction == "in":
                continue
            if a_start < b_end and b_start < a_end and _record(a) != _record(b):
                return True
    return False


def _record(arg: Arg) -> str:
    """The argument whose memory this one's fields are part of."""
    return arg.interleaved_with or arg.name


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def _word(kernel: TritonKernel, arg: Arg, value: torch.Tensor | int) -> int:
    name = f"{kernel.name}: {arg.name}"
    if arg.is_pointer:
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(name, value, "must be a tensor", "Pass a tensor.")
        if value.dtype != arg.dtype or value.device.type != "cpu":
            rule = f"must be {arg.dtype} on the CPU"
            raise ArgumentError(name, f"{value.dtype} on {value.device}", rule, "Convert it first.")
        return value.data_ptr()
    bits = int(arg.type[1:])
    if isinstance(value, torch.Tensor) or not -(1 << (bits - 1)) <= value < 1 << (bits - 1):
        raise ArgumentError(name, value, f"must be an integer of {bits} bits", "Pass a smaller integer.")
    return value & 0xFFFFFFFFFFFFFFFF


def prepare(
    kernel: TritonKernel,
    arguments: Sequence[torch.Tensor | int],
    programs: int = 1,
    *,
    streams: bool = False,
) -> Callable[[], None]:
    """A call that can be repeated at little cost: arguments checked, code loaded, words laid out."""
    if len(arguments) != len(kernel.args):
        rule = f"must be {len(kernel.args)}, one per argument of {kernel.name}"
        raise ArgumentError("number of arguments", len(arguments), rule, "See kernel.args.")
    if programs < 1:
        raise ArgumentError("programs", programs, "must be at least 1", "Pass 1 to run on one core.")
    values = [_word(kernel, arg, value) for arg, value in zip(kernel.args, arguments, strict=True)]
    extents = [_extent(value) if isinstance(value, torch.Tensor) else None for value in arguments]
    function = load(kernel, noalias=not overlaps(kernel, extents), streams=streams).function
    words = (ctypes.c_uint64 * len(values))(*values)
    address = ctypes.addressof(words)
    keep_alive = (words, tuple(arguments))

    def run(_keep_alive: object = keep_alive) -> None:
        for program in range(programs):
            function(address, programs, program)

    return run


def launch(
    kernel: TritonKernel,
    arguments: Sequence[torch.Tensor | int],
    programs: int = 1,
    *,
    streams: bool = False,
) -> None:
    """Run a kernel once, its programs one after another.

    Args:
        arguments: tensors and integers in the order of ``kernel.args``.
        programs: size of the grid.
        streams: see `moe_triton.backends.cpu.triton.load`.
    """
    prepare(kernel, arguments, programs, streams=streams)()


def launch_fallback(kernel: TritonKernel, arguments: Sequence[torch.Tensor | int], programs: int = 1) -> None:
    """Run a kernel's torch fallback: same arguments, same results, no toolchain."""
    named = {
        arg.name: _flat(value) if isinstance(value, torch.Tensor) else value
        for arg, value in zip(kernel.args, arguments, strict=True)
    }
    kernel.fallback(programs, **named, **kernel.constants)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that a tensor spans, from its first element on."""
    return tensor.as_strided((_extent(tensor)[1] // tensor.element_size(),), (1,), tensor.storage_offset())
