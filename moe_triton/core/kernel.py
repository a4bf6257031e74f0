"""What a kernel is: a name, an argument list declared once, and the bytes it moves.

A kernel knows nothing of schemes, windows or back ends. Triton kernels are declared beside their
source in ``moe_triton.kernels``; Ascend C kernels in ``moe_triton.core.ascendc``, from which the C++
argument structs are generated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # `moe_triton.tools.codegen` runs where torch is not installed
    import torch

Direction = Literal["in", "out", "inout", "value"]


@dataclass(frozen=True)
class Arg:
    """One run-time argument.

    Attributes:
        name: as in the kernel's source.
        type: Triton's spelling: ``"*bf16"``, ``"*fp32"``, ``"*i8"``, ``"*i32"``, ``"*i64"`` for pointers,
            ``"i32"``, ``"i64"`` for scalars.
        direction: how a pointer is used; ``"value"`` for scalars.
        interleaved_with: name of another pointer argument whose memory extent this one may span
            although the two never touch the same byte (fields of one slot). Such a pair is not an
            overlap.
    """

    name: str
    type: str
    direction: Direction
    interleaved_with: str | None = None

    @property
    def is_pointer(self) -> bool:
        """Whether it is an address."""
        return self.type.startswith("*")

    @property
    def dtype(self) -> torch.dtype:
        """Of a number, or of what a pointer points to."""
        from moe_triton.core.dtypes import DTYPES

        return DTYPES[self.type.removeprefix("*")]


def numbers(type_name: str, names: str) -> tuple[Arg, ...]:
    """Arguments that are numbers of one type: their names with spaces between them."""
    return tuple(Arg(name, type_name, "value") for name in names.split())


def chosen_args(
    arguments: Iterable[tuple[bool, Arg]],
) -> tuple[tuple[Arg, ...], dict[str, int | None]]:
    """The arguments of a variant of a kernel, and constants in place of its other arguments.

    Args:
        arguments: all arguments of the function, in order, each with whether this variant has it.
    """
    table = tuple(arguments)
    absent = {arg.name: None if arg.is_pointer else 0 for is_present, arg in table if not is_present}
    return tuple(arg for is_present, arg in table if is_present), absent


@dataclass(frozen=True)
class TritonKernel:
    """A Triton function with its constants bound: what a plan launches.

    Attributes:
        name: for traces and errors.
        fn: the ``triton.jit`` function.
        args: run-time arguments, in the order of the function's non-constexpr parameters.
        constants: values of the constexpr parameters.
        fallback: the same computation in plain torch. Called as ``fallback(programs, **arguments)``
            with each run-time argument by name (pointers as flat tensors of the declared type that
            start at the address), constants included.
        bytes_moved: bytes read and written, from the run-time integers by name (other keywords are ignored).
            None if it depends on data.
    """

    name: str
    fn: Any
    args: tuple[Arg, ...]
    constants: Mapping[str, Any] = field(hash=False)
    fallback: Callable[..., None] = field(hash=False)
    bytes_moved: Callable[..., int] | None = field(default=None, hash=False)


@dataclass(frozen=True)
class AscendCKernel:
    """An Ascend C function: ``int moe_<name>(uint32_t blocks, void* stream, const Args* args)``.

    The argument struct is a sequence of 64-bit words, one per entry of ``args``.
    """

    name: str
    args: tuple[Arg, ...]

    @property
    def symbol(self) -> str:
        """Name of its launcher in the library."""
        return f"moe_{self.name}"
