"""Runs a kernel's control flow for one program, on the arguments of one launch.

Integers and tables of integers are those of the launch. Whatever else a kernel reads (rows, flags, what
vector instructions leave in the unified buffer) is unknown; a kernel whose control flow depends on that is
refused.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from autotune.model.bodies.replay.instructions import Instruction, Stream
from autotune.model.bodies.replay.translate import (
    GENERATED,
    GRID_ARGUMENTS,
    SYSTEM_ARGUMENTS,
    Translation,
    translated,
)
from autotune.model.bodies.replay.unknown import UNKNOWN, Number, UndecidedError
from autotune.model.cost import Table
from autotune.npu_compiler.generic import kernel_function
from autotune.npu_compiler.socs import soc_named
from moe_triton.core.errors import MoeTritonError, ToolchainError
from moe_triton.core.kernel import Arg, TritonKernel


class ReplayError(MoeTritonError):
    """A kernel cannot be replayed: the message names it and its operation."""


@contextmanager
def named(kernel: str) -> Iterator[None]:
    """Has errors say which kernel they are about."""
    try:
        yield
    except ToolchainError as error:
        raise ToolchainError(f"{kernel} cannot be replayed: {error}") from None


@functools.cache
def translation_of(kernel: TritonKernel, soc: str) -> Translation:
    """A kernel as the NPU compiler made it, as Python.

    Args:
        kernel: built for the NPU.
        soc: name of the chip.

    Raises:
        ToolchainError: the compiler rejects it, or the model does not know something that is in it.
        ReplayError: the compiled function takes other arguments.
    """
    function = kernel_function(kernel, soc_named(soc))
    with named(kernel.name):
        found = translated(function)
    if found.num_arguments != len(kernel.args):
        raise ReplayError(
            f"the NPU's {kernel.name} takes {found.num_arguments} arguments beside the system's, not "
            f"{len(kernel.args)}"
        )
    return found


Argument = int | Table
_INTEGERS = {f"*i{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)}


def streams_of(
    kernel: TritonKernel, soc: str, arguments: Mapping[str, Argument], programs: int
) -> list[Stream]:
    """What each program of a launch issues.

    Args:
        kernel: built for the NPU.
        soc: name of the chip.
        arguments: by name: numbers, and tables for pointers.
        programs: number of programs, in x.

    Raises:
        ToolchainError: see `translation_of`.
        ReplayError: control flow depends on data, or a table ends before what is read of it.
    """
    return recorded(kernel, translation_of(kernel, soc), arguments, programs)


def recorded(
    kernel: TritonKernel, translation: Translation, arguments: Mapping[str, Argument], programs: int
) -> list[Stream]:
    """`streams_of` of a translated kernel."""
    values = [_value(arg, arguments[arg.name]) for arg in kernel.args]
    recorder = _Recorder(kernel, translation, values)
    grid = (programs, 1, 1)
    return [recorder.stream(program, grid) for program in range(programs)]


def _value(arg: Arg, given: Argument) -> int | np.ndarray | None:
    if not isinstance(given, Table):
        return int(given)
    element = _INTEGERS.get(arg.type)
    if given.values is None or element is None:
        return None
    flat = np.ascontiguousarray(given.values).reshape(-1).view(np.uint8)
    whole = flat[: flat.size // element.itemsize * element.itemsize]
    return whole.view(element)


@dataclass
class _Recorder:
    """Records what programs of one launch issue.

    Attributes:
        values: the user's arguments: a number, the integers behind a pointer, or None if they are not known.
    """

    kernel: TritonKernel
    translation: Translation
    values: list[int | np.ndarray | None]

    def __post_init__(self) -> None:
        self._instructions = list(self.translation.instructions)
        self._sized: dict[tuple[int, int], int] = {}

    def stream(self, program: int, grid: tuple[int, int, int]) -> Stream:
        """What one program issues."""
        codes = array("L")
        numbers = [value if isinstance(value, int) else 0 for value in self.values]
        arguments = [*[0] * SYSTEM_ARGUMENTS, *numbers, *grid]
        assert len(grid) == GRID_ARGUMENTS
        try:
            self.translation.run(codes.append, self._code_of, self._element, program, *arguments)
        except (UndecidedError, ZeroDivisionError) as error:
            why = "divides by 0" if isinstance(error, ZeroDivisionError) else "depends on data"
            raise ReplayError(
                f"the control flow of {self.kernel.name} cannot be replayed: it {why}, in "
                f"{self._where(error)}"
            ) from None
        return Stream(codes, self._instructions, self.translation.innermost)

    def _where(self, error: Exception) -> str:
        """The operation that the innermost line of generated code came from."""
        found, frame = "its arguments", error.__traceback__
        while frame is not None:
            if frame.tb_frame.f_code.co_filename == GENERATED:
                found = self.translation.operations.get(frame.tb_lineno, found)
            frame = frame.tb_next
        return found

    def _code_of(self, template: int, number: int) -> int:
        """The code of an instruction whose bytes, or event, are only known now."""
        key = template, number
        code = self._sized.get(key)
        if code is None:
            code = self._sized[key] = len(self._instructions)
            self._instructions.append(self._filled(self.translation.instructions[template], number))
        return code

    def _filled(self, template: Instruction, number: Number) -> Instruction:
        known = int(number)  # or it is undecided
        if template.kind in ("set", "wait"):
            return replace(template, event=known)
        return replace(template, num_bytes=known)

    def _element(self, argument: int, place: Number) -> Number:
        """A scalar load from an argument."""
        index = argument - SYSTEM_ARGUMENTS
        values = self.values[index] if 0 <= index < len(self.values) else None
        if values is None or isinstance(values, int) or place is UNKNOWN:
            return UNKNOWN
        if not 0 <= cast(int, place) < values.size:
            name = self.kernel.args[index].name
            raise ReplayError(
                f"{self.kernel.name} reads element {place} of {name}, of which {values.size} are known"
            )
        return int(values.item(cast(int, place)))
