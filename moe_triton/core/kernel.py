"""What a kernel is: a name, an argument list declared once, and the bytes it moves.

A kernel knows nothing of schemes, windows or back ends. Triton kernels are declared beside their
source in ``moe_triton.kernels``; Ascend C kernels in the schemes' ``ascendc.py``, from which the C++
argument structs are generated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from moe_triton.core.space import MULTIBUFFER, PROGRAMS, Settings, Space

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
        """The dtype of a number, or of what a pointer points to."""
        from moe_triton.core.dtypes import DTYPES

        return DTYPES[self.type.removeprefix("*")]


def alike(type_name: str, names: str, direction: Direction) -> tuple[Arg, ...]:
    """Arguments of one type that are used alike: their names with spaces between them."""
    return tuple(Arg(name, type_name, direction) for name in names.split())


numbers = partial(alike, direction="value")
"""Arguments that are numbers of one type: see `alike`."""


def chosen_args(
    *arguments: tuple[bool, Arg | tuple[Arg, ...]],
) -> tuple[tuple[Arg, ...], dict[str, int | None]]:
    """The arguments of a variant of a kernel, and constants in place of its other arguments.

    Args:
        arguments: all arguments of the function, in order, each or some together with whether this variant
            has them.
    """
    table = [(has, arg) for has, args in arguments for arg in (args if isinstance(args, tuple) else (args,))]
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
        space: settings that change its speed and no result; None if there is nothing to choose.
        multibuffer: whether an NPU's compiler double-buffers what its loops load and store.
        programs: most programs of a launch; 0 for as many as there are blocks.
        streamed_bytes: how much of what it writes comes together before anybody reads it; 0 where readers
            follow each launch. A CPU whose caches hold no more writes its rows past them.
    """

    name: str
    fn: Any
    args: tuple[Arg, ...]
    constants: Mapping[str, Any] = field(hash=False)
    fallback: Callable[..., None] = field(hash=False)
    bytes_moved: Callable[..., int] | None = field(default=None, hash=False)
    space: Space | None = field(default=None, hash=False, compare=False)
    multibuffer: bool = True
    programs: int = 0
    streamed_bytes: int = 0

    @property
    def settings(self) -> dict[str, int]:
        """Its values of what its space lets one choose."""
        others = {PROGRAMS: self.programs, MULTIBUFFER: int(self.multibuffer)}
        return self.space.own({**self.constants, **others}) if self.space else {}

    def with_settings(self, values: Settings) -> TritonKernel:
        """The same kernel with other settings.

        Args:
            values: of all of them or some, by name.

        Raises:
            ArgumentError: it has no such setting, or they do not go together.
        """
        whole, space = {**self.settings, **values}, self.space or Space({})
        space.check(self.name, whole)
        if whole == self.settings:
            return self
        constants = {name: value for name, value in whole.items() if name in self.constants}
        constants |= space.derived(whole)
        return replace(
            self,
            constants={**self.constants, **constants},
            multibuffer=bool(whole.get(MULTIBUFFER, self.multibuffer)),
            programs=whole.get(PROGRAMS, self.programs),
        )


@dataclass(frozen=True)
class AscendCKernel:
    """An Ascend C function: ``int moe_<name>(uint32_t blocks, void* stream, const Args* args)``.

    The argument struct is a sequence of 64-bit words, one per entry of ``args``.

    Attributes:
        name: of the function.
        args: its arguments.
        only_waits: whether it writes to no peer: in a table of peers it reads who is masked.
    """

    name: str
    args: tuple[Arg, ...]
    only_waits: bool = False

    @property
    def symbol(self) -> str:
        """Name of its launcher in the library."""
        return f"moe_{self.name}"


MAX_PHASES = 6
"""The most phases that one launch can have."""


@dataclass(frozen=True)
class FusedKernel:
    """Ascend C functions that one launch runs one after the other, each of them or not.

    Its argument struct is that of `HEAD`, followed by the structs of all phases.

    Attributes:
        name: its launcher is ``moe_<name>``, with the same signature as an `AscendCKernel`'s.
        phases: in the order in which they run.
        synced: numbers of the phases that read what other blocks wrote in the phases before: they begin when
            every block has ended those.
        guarded: numbers of the phases that are left out if a block reported something in the phase before,
            or where one before was left out. The first of them is synced.
        continuing: numbers of the phases that a block leaves out whose own waits gave up before.
        on_first: numbers of the phases that a split launch has its first blocks run, beside the others on the
            blocks behind those. None of the phases is synced or guarded where there are any.
    """

    name: str
    phases: tuple[AscendCKernel, ...]
    synced: frozenset[int] = frozenset()
    guarded: frozenset[int] = frozenset()
    continuing: frozenset[int] = frozenset()
    on_first: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if len(self.phases) > MAX_PHASES:
            raise ValueError(f"{self.name} has {len(self.phases)} phases: a launch has {MAX_PHASES} at most")

    HEAD: ClassVar[AscendCKernel] = AscendCKernel(
        "fused_head",
        (
            Arg("phases", "i64", "value"),  # a bit for each phase that runs, from the lowest on
            Arg("times", "*i64", "out"),  # cycles at the begin and after each phase that ran; or null
            Arg("first_blocks", "i64", "value"),  # that run what is `on_first`; 0: all run all
        ),
    )

    @property
    def symbol(self) -> str:
        """Name of its launcher in the library."""
        return f"moe_{self.name}"

    def mask_of(self, phases: Sequence[AscendCKernel]) -> int | None:
        """The bits of these phases, in this order; None if they are not among its own."""
        mask = number = 0
        for phase in phases:
            while number < len(self.phases) and self.phases[number] is not phase:
                number += 1
            if number == len(self.phases):
                return None
            mask |= 1 << number
            number += 1
        return mask


def fused_kernel(kernels: Sequence[FusedKernel], phases: Sequence[AscendCKernel]) -> tuple[FusedKernel, int]:
    """The first of some kernels that runs these phases in one launch, and their bits in it.

    Raises:
        ValueError: none does.
    """
    for kernel in kernels:
        if (mask := kernel.mask_of(phases)) is not None:
            return kernel, mask
    raise ValueError(f"no kernel runs these in one launch: {[phase.name for phase in phases]}")
