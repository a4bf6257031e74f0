"""A call as data: checks on its arguments, the plan that they select, its outputs, the contents of
placeholders.

A back end's native code runs it in place of Python (kernels_ascendc/calls/call_program.h, which lists the
operations) and knows no operator by name. Everything is a number in a register: sizes, addresses, dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

# Initial values of registers; a tensor stands for its address.
Constant = int | torch.dtype | torch.Tensor
# As in call_program.h: most registers that a handle keeps, and the operands of a step.
MAX_KEPT, NUM_OPERANDS = 32, 8


class Step(NamedTuple):
    """One operation.

    Attributes:
        operation: its name.
        target: first register that it writes.
        operands: registers, or numbers where the operation says so.
    """

    operation: str
    target: int
    operands: tuple[int, ...]


class TensorAt(NamedTuple):
    """A tensor in memory that a step has allocated.

    Attributes:
        address: register.
        sizes: registers.
        dtype: of its elements.
        hold: number of the allocation.
    """

    address: int
    sizes: tuple[int, ...]
    dtype: torch.dtype
    hold: int = 0


class ArgumentAt(NamedTuple):
    """One of the call's arguments, as it was passed.

    Attributes:
        slot: its number.
    """

    slot: int


@dataclass(frozen=True)
class Argument:
    """A tensor argument of an operator.

    Attributes:
        name: of the argument.
        shape: its sizes; the same string stands for the same size in all arguments of a call.
        dtypes: the one or two that it may have.
        optional: whether it may be None.
    """

    name: str
    shape: tuple[int | str, ...]
    dtypes: tuple[torch.dtype, ...]
    optional: bool = False


@dataclass(frozen=True)
class Output:
    """A tensor that a call makes, with its sizes as in `Argument`."""

    name: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype


class Size(str):
    """A size that only a call knows, by its name. A multiple of it is "T * 8"."""

    __slots__ = ()

    def __mul__(self, factor: Any) -> Size:
        return Size(f"{self} * {factor}")


class Registers:
    """Steps, and the registers that they work on.

    Args:
        before: steps that run before these, or None.

    Attributes:
        values: initial values of this part's registers.
        steps: in order.
        symbols: registers of known sizes, by their names.
    """

    def __init__(self, before: Registers | None = None) -> None:
        self._before = before
        self._first = before.count if before else 0
        self.values: list[Constant] = []
        self.steps: list[Step] = []
        self.symbols: dict[str, int] = dict(before.symbols) if before else {}
        self._constants: dict[object, int] = dict(before._constants) if before else {}

    @property
    def count(self) -> int:
        """Number of registers, including those before."""
        return self._first + len(self.values)

    def new(self, *values: Constant) -> int:
        """New consecutive registers with these initial values. Returns the first."""
        first = self.count
        self.values += values
        return first

    def constant(self, value: int | torch.dtype) -> int:
        """A register with this value."""
        if value not in self._constants:
            self._constants[value] = self.new(value)
        return self._constants[value]

    def do(self, operation: str, *operands: int, size: int = 1) -> int:
        """Appends a step that writes ``size`` registers. Returns the first."""
        target = self.new(*[0] * size)
        self.steps.append(Step(operation, target, operands))
        return target

    def check(self, operation: str, *operands: int) -> None:
        """Appends a step that writes no registers."""
        self.steps.append(Step(operation, 0, operands))

    def size(self, size: int | str) -> int:
        """The register of a size."""
        if not isinstance(size, str):
            return self.constant(size)
        if size not in self.symbols:
            name, factor = size.split(" * ")
            multiple = self.symbols[name], self.constant(int(factor)), self.constant(0)
            self.symbols[size] = self.do("MULTIPLY_ADD", *multiple)
        return self.symbols[size]

    def plus(self, one: int, other: int) -> int:
        """The sum of two registers."""
        return self.do("MULTIPLY_ADD", one, self.constant(1), other)

    def elements(self, shape: Sequence[int | str]) -> int:
        """The register of a shape's number of elements."""
        register = self.constant(math.prod(size for size in shape if isinstance(size, int)))
        for size in shape:
            if isinstance(size, str):
                register = self.do("MULTIPLY_ADD", register, self.size(size), self.constant(0))
        return register

    def choice(self, slot: int, first: int, count: int) -> int:
        """The register of an argument's index among ``count`` of the program's objects, from ``first`` on."""
        return self.do("CHOICE", slot, first, count)

    def tensor(self, slot: int, argument: Argument) -> Seen:
        """Checks an argument, and binds the sizes that its shape is the first to name."""
        given, before = self.constant(1), len(self.steps)
        if argument.optional:
            given = self.do("GIVEN", slot, 0)
        first = self.do("TENSOR", slot, len(argument.shape), size=2 + len(argument.shape))
        for position, size in enumerate(argument.shape, start=first + 2):
            if isinstance(size, str) and size not in self.symbols:
                self.symbols[size] = position
            else:
                self.check("EQUAL", position, self.size(size))
        allowed = [self.constant(dtype) for dtype in argument.dtypes]
        self.check("EQUAL" if len(allowed) == 1 else "EITHER", first + 1, *allowed)
        if argument.optional:
            self.steps[before] = Step("GIVEN", given, (slot, len(self.steps) - before - 1))
        return Seen(given, first, first + 1)

    def allocate(self, outputs: Sequence[Output], hold: int) -> dict[str, TensorAt]:
        """Allocates outputs in one block."""
        offsets = [
            self.do("RESERVE", self.elements(output.shape), self.constant(output.dtype.itemsize))
            for output in outputs
        ]
        block = self.do("ALLOCATE", hold)
        return {
            output.name: TensorAt(
                self.plus(offset, block), tuple(map(self.size, output.shape)), output.dtype, hold
            )
            for output, offset in zip(outputs, offsets, strict=True)
        }


class Seen(NamedTuple):
    """Registers of a tensor argument: whether it was given, its address and its dtype."""

    given: int
    address: int
    dtype: int


@dataclass(frozen=True)
class CallProgram:
    """What calls of an operator have in common.

    Attributes:
        operator_id: its number in the record of rounds.
        name: of the operator.
        num_arguments: of a call.
        registers: of the checks on the arguments.
        key: registers that select the plan.
        objects: that arguments are chosen from.
        label: distinguishes programs of one operator; "" if there is only one.
        handle_type: of the handles that it makes or takes, where these are not the back end's usual ones.
    """

    operator_id: int
    name: str
    num_arguments: int
    registers: Registers
    key: tuple[int, ...]
    objects: tuple[object, ...] = ()
    label: str = ""
    handle_type: type | None = None


@dataclass(frozen=True)
class Kept:
    """What a run keeps for later ones: a handle, the last of its outputs.

    Attributes:
        registers: passed to later runs, in this order.
        attributes: of the handle that are made on first access: tensors over ``registers``, and numbers, by
            their positions there.
        fields: attributes that are set from the start; arguments by `ArgumentAt`.
    """

    registers: tuple[int, ...]
    attributes: Mapping[str, TensorAt | int]
    fields: Mapping[str, object]


@dataclass(frozen=True)
class PlanProgram:
    """How a call runs one plan.

    Attributes:
        name: of the operator, or the label of its program.
        key: contents of the program's key registers for this plan.
        registers: following the program's.
        placeholders: the register of each of the plan's placeholders.
        outputs: tensors, arguments, and other objects unchanged.
        output_type: type of the tuple of outputs; None for a single output.
        bindings: what the error of a failed run needs: tensors, and registers of numbers.
        kept: for later runs, or None.
        mark: which of the outputs is marked, and the register of its mark (`moe_triton.core.marks`); or
            nothing.
        next: how it goes on with a second plan, without a key. Where a check of that fails, the call returns
            what ``outputs`` says, and the run of the operator is not over.
    """

    name: str
    key: tuple[int | torch.dtype, ...]
    registers: Registers
    placeholders: Mapping[str, int]
    outputs: tuple[Any, ...]
    output_type: type | None = None
    bindings: Mapping[str, TensorAt | int] = field(default_factory=dict)
    kept: Kept | None = None
    mark: tuple[int, int] | tuple[()] = ()
    next: PlanProgram | None = None
