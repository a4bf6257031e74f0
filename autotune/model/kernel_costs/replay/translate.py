"""From the compiler's last module to a Python function that lists the instructions of one program.

The function is the kernel's own control flow and scalar arithmetic, on real integers; instead of
executing an instruction of another pipe it records it. What it records is in `Instruction`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.model.kernel_costs.replay.instructions import Instruction, Kind, function_named
from autotune.model.kernel_costs.replay.operations import (
    FREE,
    GLOBALS,
    Value,
    View,
    attribute,
    event_of,
    expression,
    is_float,
    is_view,
    memref_of,
    pipe_of,
    view_of,
    whole,
)
from moe_triton.backends.cpu.triton.ir import Block, Operation
from moe_triton.core.errors import ToolchainError

GENERATED = "<kernel>"
"""The file name of generated code, in tracebacks."""

LOOP_TURN = 2
"""Scalar instructions of a turn of a loop beside its body: next index; compare and jump."""

SYSTEM_ARGUMENTS, GRID_ARGUMENTS = 3, 3
"""Before the user's arguments: addresses of system, lock and workspace. After them: programs in x, y, z."""


@dataclass(frozen=True)
class Translation:
    """A kernel as Python.

    Attributes:
        run: takes `record` (an instruction's code), `sized` (a template's code and a number: a code),
            `element` (an argument's index and a place in it: a number), the program's index, and the
            function's arguments; memory among them is not looked at.
        instructions: by code; those with a number to fill in have it 0.
        operations: by line of the Python text, what it came from.
        num_arguments: of the user's.
        innermost: loops of run-time length without another such loop in them.
    """

    run: Callable[..., None]
    instructions: tuple[Instruction, ...]
    operations: dict[int, str]
    num_arguments: int
    innermost: frozenset[int] = frozenset()


def translated(function: Operation) -> Translation:
    """The Python function of an entry function.

    Raises:
        ToolchainError: it has an operation, a library function or a pipe that the model does not know.
    """
    writer = _Writer()
    names = writer.arguments(function.body)
    writer.block(function.body)
    text = "\n".join(
        [f"def run({', '.join(('record', 'sized', 'element', 'program', *names))}):", *writer.lines]
    )
    scope: dict[str, Any] = dict(GLOBALS)
    exec(compile(text, GENERATED, "exec"), scope)  # of `writer`'s own text
    return Translation(
        scope["run"],
        tuple(writer.instructions),
        writer.operations,
        len(names) - SYSTEM_ARGUMENTS - GRID_ARGUMENTS,
        frozenset(writer.innermost),
    )


@dataclass
class _Writer:
    """Writes Python, operation by operation.

    Attributes:
        lines: of the function's body.
        pending: scalar instructions since the last recorded one.
        around: loops of run-time length around the current operation.
        innermost: such loops without another one in them.
        conditions: numbers that a condition was extended to.
    """

    lines: list[str] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    operations: dict[int, str] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    depth: int = 1
    pending: int = 0
    num_loops: int = 0
    around: list[int] = field(default_factory=list)
    innermost: set[int] = field(default_factory=set)
    conditions: set[str] = field(default_factory=set)
    _codes: dict[Instruction, int] = field(default_factory=dict)
    _current: str = ""

    def arguments(self, body: Block) -> list[str]:
        """Declares the function's arguments."""
        for index, (name, type_) in enumerate(body.arguments.items()):
            is_memory = type_.startswith("memref")
            self.values[name] = whole(type_, argument=index) if is_memory else f"a{index}"
        return [f"a{index}" for index in range(len(body.arguments))]

    def write(self, line: str) -> None:
        """A line of Python, of the current operation."""
        self.lines.append("    " * self.depth + line)
        self.operations[len(self.lines) + 1] = self._current  # after the line of `def`

    def code(self, instruction: Instruction) -> int:
        """The number of an instruction."""
        if instruction not in self._codes:
            self._codes[instruction] = len(self.instructions)
            self.instructions.append(instruction)
        return self._codes[instruction]

    def record(self, instruction: Instruction, number: str = "") -> None:
        """Records an instruction, after the scalar ones before it.

        Args:
            number: Python text of its bytes or of its event, if that is only known at run time.
        """
        self.flush()
        code = self.code(instruction)
        self.write(f"record(sized({code}, {number}))" if number else f"record({code})")

    def flush(self) -> None:
        """Records the scalar instructions since the last recorded one."""
        if self.pending:
            self.write(f"record({self.code(Instruction('scalar', 'S', count=self.pending))})")
            self.pending = 0

    def block(self, block: Block) -> None:
        """Every operation but the last one, which ends the block."""
        *operations, last = block.operations
        for operation in operations:
            self._current = str(operation).partition("\n")[0]
            self.operation(operation)
        if last.name not in ("func.return", "scf.yield"):
            raise ToolchainError(f"the model does not know the operation {last}")
        self.flush()
        if last.name == "func.return":
            self.write("return")

    def operation(self, operation: Operation) -> None:
        """One operation."""
        if operation.name in _OPERATIONS:
            _OPERATIONS[operation.name](self, operation)
        elif is_view(operation):
            first, *others = operation.results
            self.values[first] = view_of(operation, self.of(operation.operands))
            self.values.update(dict.fromkeys(others, "UNKNOWN"))  # its place, which no size depends on
        elif operation.name == "arith.select" and operation.result_types[0].startswith("memref"):
            self.values[operation.result] = whole(operation.result_types[0])  # of two of the same type
            self.pending += 1
        else:
            self.values[operation.result] = self.assigned(operation)
            self.pending += operation.name not in FREE
            if operation.name == "arith.extui":
                self.conditions.add(operation.result)

    def assigned(self, operation: Operation) -> str:
        """The Python text for a result: a literal, or a variable that is assigned."""
        text = expression(operation, [self.number(operand) for operand in operation.operands])
        if text == "UNKNOWN" or text.lstrip("-").isdigit() or text.isidentifier():
            return text
        name = _variable(operation.result)
        self.write(f"{name} = {text}")
        return name

    def of(self, operands: Sequence[str]) -> list[Value]:
        """What operands stand for."""
        return [self.values[operand] for operand in operands]

    def number(self, operand: str) -> str:
        """An operand that is no memory."""
        value = self.values[operand]
        if isinstance(value, View):
            raise ToolchainError(f"the model takes no memory for a number: {self._current}")
        return value

    def memory(self, operand: str) -> View:
        """An operand that is memory."""
        value = self.values[operand]
        if not isinstance(value, View):
            raise ToolchainError(f"the model takes no number for memory: {self._current}")
        return value

    def named(self, names: Sequence[str], types: Sequence[str]) -> list[str]:
        """Declares values that are assigned elsewhere.

        Returns:
            The variables of those that are numbers; memory has to have a size known from its type.
        """
        variables = []
        for name, type_ in zip(names, types, strict=True):
            if type_.startswith("memref"):
                self.values[name] = whole(type_)
            else:
                self.values[name] = _variable(name)
                variables.append(_variable(name))
        return variables

    def assign(self, variables: Sequence[str], operands: Sequence[str]) -> None:
        """Assigns all at once; memory among the operands needs nothing."""
        numbers = [value for value in self.of(operands) if isinstance(value, str)]
        if variables:
            self.write(f"{', '.join(variables)} = {', '.join(numbers)}")


def _variable(name: str) -> str:
    return "v_" + name.lstrip("%").replace("#", "_")


def _call(writer: _Writer, operation: Operation) -> None:
    name = attribute(operation.attributes, "callee").lstrip("@")
    function = function_named(name)
    views = [writer.memory(operation.operands[index]) for index in function.tiles]
    kind: Kind = "vector" if function.pipe == "V" else "copy"
    if all(view.count.isdigit() for view in views):
        size = max(-(-int(view.count) * view.type.element_bits // 8) for view in views)
        writer.record(Instruction(kind, function.pipe, name, size, function.factor))
        return
    sizes = [f"-(-{view.count} * {view.type.element_bits} // 8)" for view in views]
    number = sizes[0] if len(sizes) == 1 else f"largest({', '.join(sizes)})"
    writer.record(Instruction(kind, function.pipe, name, 0, function.factor), number)


def _flag(writer: _Writer, operation: Operation) -> None:
    source, target = (pipe_of(attribute(operation.attributes, name)) for name in ("set_pipe", "wait_pipe"))
    is_set = operation.name == "hivm.hir.set_flag"
    pipe, other = (source, target) if is_set else (target, source)
    static = operation.attributes.get("static_event_id", "")
    instruction = Instruction(
        "set" if is_set else "wait",
        pipe,  # type: ignore[arg-type]
        operation.name,
        other=other,
        event=event_of(static) if static else 0,
    )
    writer.record(instruction, "" if static else writer.number(operation.operands[0]))


def _barrier(writer: _Writer, operation: Operation) -> None:
    pipe = pipe_of(attribute(operation.attributes, "pipe"))
    writer.record(Instruction("barrier", pipe, operation.name))  # type: ignore[arg-type]


def _access(writer: _Writer, operation: Operation) -> None:
    """A scalar load or store. What a unified buffer holds is not known."""
    is_load = operation.name == "memref.load"
    source, *indices = operation.operands if is_load else operation.operands[1:]
    view = writer.memory(source)
    is_global, size = view.type.space == "gm", -(-view.type.element_bits // 8)
    if is_global and not is_load:
        raise ToolchainError(f"the model does not know a scalar store to global memory: {operation}")
    writer.record(Instruction("element", "S", operation.name, size, is_global=is_global))
    if not is_load:
        return
    if not is_global or is_float(operation.result_types[0]):
        writer.values[operation.result] = "UNKNOWN"
        return
    terms = [view.offset]
    for index, stride in zip(map(writer.number, indices), view.type.strides, strict=True):
        if index != "0":
            terms.append(f"{index} * {'UNKNOWN' if stride is None else stride}")
    name = _variable(operation.result)
    writer.write(f"{name} = element({view.argument}, {' + '.join(terms)})")
    writer.values[operation.result] = name


def _for(writer: _Writer, operation: Operation) -> None:
    """A loop. Kernels write some branches as loops up to a condition: one that is not known is taken to hold,
    which is the longer of the two ways."""
    low, high, step, *starts = operation.operands
    bounds = [writer.number(bound) for bound in (low, high, step)]
    if high in writer.conditions:
        bounds[1] = f"turns_if({bounds[1]})"
    (index, _), *carried = operation.body.arguments.items()
    variables = writer.named([name for name, _ in carried], [type_ for _, type_ in carried])
    writer.assign(variables, starts)
    number, writer.num_loops = writer.num_loops, writer.num_loops + 1
    is_known = all(bound.lstrip("-").isdigit() for bound in bounds)
    writer.flush()
    writer.values[index] = _variable(index)
    writer.write(f"for {_variable(index)} in range({', '.join(bounds)}):")
    writer.depth += 1
    if not is_known:
        writer.innermost = writer.innermost.difference(writer.around) | {number}
        writer.around.append(number)
        writer.record(Instruction("turn", "S", count=number))
    writer.pending = LOOP_TURN
    writer.block(operation.body)
    writer.assign(variables, operation.body.operations[-1].operands)
    writer.depth -= 1
    if not is_known:
        writer.around.remove(number)
        writer.record(Instruction("end", "S", count=number))
    writer.assign(writer.named(operation.results, operation.result_types), _names(carried))


def _names(carried: Sequence[tuple[str, str]]) -> list[str]:
    return [name for name, _ in carried]


def _if(writer: _Writer, operation: Operation) -> None:
    condition = writer.number(operation.operands[0])
    variables = writer.named(operation.results, operation.result_types)
    writer.pending += 1
    writer.flush()
    current = writer._current
    for keyword, region in zip((f"if {condition}:", "else:"), operation.regions, strict=True):
        if not region:
            continue
        writer._current = current
        writer.write(keyword)
        writer.depth += 1
        writer.write("pass")
        writer.block(region[0])
        writer.assign(variables, region[0].operations[-1].operands)
        writer.depth -= 1


def _block_index(writer: _Writer, operation: Operation) -> None:
    writer.values[operation.result] = "program"
    writer.pending += 1


def _pointer(writer: _Writer, operation: Operation) -> None:
    writer.values[operation.result] = whole(operation.result_types[0])
    if memref_of(operation.result_types[0]).space != "ub":
        raise ToolchainError(f"the model does not know the operation {operation}")


def _mask(writer: _Writer, _operation: Operation) -> None:
    writer.pending += 1


_OPERATIONS: dict[str, Callable[[_Writer, Operation], None]] = {
    "func.call": _call,
    "hivm.hir.get_block_idx": _block_index,
    "hivm.hir.pipe_barrier": _barrier,
    "hivm.hir.pointer_cast": _pointer,
    "hivm.hir.set_flag": _flag,
    "hivm.hir.set_mask_norm": _mask,
    "hivm.hir.wait_flag": _flag,
    "memref.load": _access,
    "memref.store": _access,
    "scf.for": _for,
    "scf.if": _if,
}
