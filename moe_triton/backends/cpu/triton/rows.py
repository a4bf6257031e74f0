"""Rows that loops go through, in the LLVM dialect: where they lie, and where the next ones do."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from moe_triton.backends.cpu.triton.ir import Block, Operation

Constants = dict[str, int]
"""Numbers that are known, by value."""

_INTEGERS = (": index", ": i64", ": i32")
_BYTES = {"i8": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8, "f64": 8}


@dataclass(frozen=True, eq=False)
class Loop:
    """Two blocks that count from 0 by ``step`` up to ``stop``: one tests, the other one works."""

    head: Block
    body: Block
    step: int
    stop: int

    @property
    def index(self) -> str:
        """What it counts."""
        return next(iter(self.head.arguments))

    @property
    def reduces(self) -> bool:
        """Whether a turn hands on a value, or reads from where the one before it has stored."""
        stored = {each.operands[1] for each in self.body.operations if each.name == "llvm.store"}
        loads = [each for each in self.body.operations if each.name == "llvm.load"]
        return len(self.head.arguments) > 1 or any(load.operands[0] in stored for load in loads)


@dataclass(frozen=True, eq=False)
class Row:
    """Memory that a loop goes through, element by element or vector by vector.

    Attributes:
        access: the first load or store of it in the loop's body.
        pointer: what makes that one's address.
        start: what makes the row's address in the loop's body, if anything does there.
        element: the type that ``pointer`` counts in.
        turn_bytes: what a turn takes.
        bytes: what all turns take.
    """

    access: Operation
    pointer: Operation
    start: Operation | None
    element: str
    turn_bytes: int
    bytes: int

    @property
    def address(self) -> str:
        """Where it begins."""
        return self.pointer.operands[0]

    @property
    def is_vectors(self) -> bool:
        """Whether a turn takes a vector of it."""
        return "vector<" in f"{self.access.operand_types} {self.access.result_types}"

    @property
    def writes(self) -> bool:
        """Whether the loop begins with a store to it."""
        return self.access.name == "llvm.store"

    @property
    def place(self) -> str:
        """The same for rows that are in the same place."""
        return str(self.start).partition(" = ")[2] if self.start else self.address

    def next_row(self, grown: dict[str, int]) -> int:
        """How many bytes further on it is one turn of the loop around later; 0 if that is not known."""
        if self.start is None or self.start.name != "llvm.getelementptr" or len(self.start.operands) != 2:
            return 0
        return grown.get(self.start.operands[1], 0) * _BYTES.get(self.start.attributes["elem_type"], 0)


def read_constants(module: Operation) -> Constants:
    """The integers of a module."""
    values = {each.result: each.attributes["value"] for each in module.walk("llvm.mlir.constant")}
    return {name: int(value.split()[0]) for name, value in values.items() if value.endswith(_INTEGERS)}


def find_loop(function: Operation, head: Block, body: Block, constants: Constants) -> Loop | None:
    """The loop that two blocks are, if they are one with known bounds that begins with 0."""
    if [each.name for each in head.operations] != ["llvm.icmp", "llvm.cond_br"] or not head.arguments:
        return None
    (test, choice), index, last = head.operations, next(iter(head.arguments)), body.operations[-1]
    jumps = [each for each in function.walk() if head.label in each.successors]
    starts = [constants.get(jump.operands[0]) for jump in jumps if jump is not last]
    count = next((each for each in body.operations if each.results == last.operands[:1]), None)
    if count is None or (count.name, count.operands[:1]) != ("llvm.add", [index]):
        return None
    if head.arguments[index] != "i64":  # what is put around it counts in 64 bits
        return None
    is_loop = (
        (test.operands[0], test.attributes["predicate"]) == (index, "2 : i64")
        and (choice.operands, choice.successors[0]) == (test.results, body.label)
        and (last.name, last in jumps) == ("llvm.br", True)
        and set(starts) == {0}
    )
    step, stop = (constants.get(value, 0) for value in (count.operands[1], test.operands[1]))
    return Loop(head, body, step, stop) if is_loop and step and stop else None


def rows_of(loop: Loop, constants: Constants, stacked: Set[str]) -> list[Row]:
    """The rows of a loop: their addresses do not depend on its index, and are not among those stacked."""
    made = {result: each for each in loop.body.operations for result in each.results}
    width = {loop.index: 1}  # elements from one turn to the next
    rows: dict[str, Row] = {}
    for each in loop.body.operations:
        if each.name in ("llvm.mul", "llvm.add") and each.operands[0] in width:
            number = constants.get(each.operands[1], 0)
            factor = number if each.name == "llvm.mul" else int(each.operands[1] in constants)
            width[each.result] = width[each.operands[0]] * factor
        if each.name not in ("llvm.load", "llvm.store"):
            continue
        pointer = made.get(each.operands[-1])
        if pointer is None or pointer.name != "llvm.getelementptr" or len(pointer.operands) != 2:
            continue
        start, element = made.get(pointer.operands[0]), pointer.attributes["elem_type"]
        address = [pointer.operands[0], *(start.operands if start else [])]
        is_fixed = {loop.index, *made}.isdisjoint(address[1:]) and stacked.isdisjoint(address)
        turn_bytes = width.get(pointer.operands[1], 0) * loop.step * _BYTES.get(element, 0)
        if is_fixed and turn_bytes:
            row = Row(each, pointer, start, element, turn_bytes, loop.stop // loop.step * turn_bytes)
            rows.setdefault(row.place, row)
    return list(rows.values())


def strides(blocks: Sequence[Block], loop: Loop, constants: Constants) -> dict[str, int]:
    """By how much numbers grow with each turn of the loop around a loop, where that is known."""
    at = blocks.index(loop.head)
    ends = [block.operations[-1] for block in blocks[at:]]
    around = next((b for b in reversed(blocks[:at]) if any(b.label in end.successors for end in ends)), None)
    if around is None:
        return {}
    makers = {result: each for block in blocks for each in block.operations for result in each.results}
    grown = _counts(around, [end for end in ends if around.label in end.successors], makers, constants)
    fixed = {value for block in blocks[: blocks.index(around)] for value in _values(block)}
    for each in makers.values():
        known = [value for value in each.operands if value in grown]
        if len(known) == 1 and fixed.issuperset({*each.operands} - {*known}):
            if each.name in ("llvm.add", "llvm.sext"):
                grown[each.result] = grown[known[0]]
            elif each.name == "llvm.mul":
                grown[each.result] = grown[known[0]] * constants.get(each.operands[1], 0)
    return {value: stride for value, stride in grown.items() if stride}


def _counts(
    head: Block, jumps: list[Operation], makers: dict[str, Operation], constants: Constants
) -> dict[str, int]:
    """The arguments of a loop's head that it counts, with the steps; ``jumps`` lead back to it."""
    counts: dict[str, int] = {}
    for argument, new in zip(head.arguments, jumps[0].operands, strict=False):
        count = makers.get(new)
        if len(jumps) == 1 and count and (count.name, count.operands[:1]) == ("llvm.add", [argument]):
            counts[argument] = constants.get(count.operands[1], 0)
    return counts


def _values(block: Block) -> list[str]:
    return [*block.arguments, *(result for each in block.operations for result in each.results)]


def is_always_before(blocks: Sequence[Block], first: str, second: Block) -> bool:
    """Whether all ways to a block lead through the one with a label."""
    by_label = {block.label: block for block in blocks}
    reached: set[Block] = set()
    ahead = [blocks[0]]
    while ahead:
        block = ahead.pop()
        if block not in reached and block.label != first:
            reached.add(block)
            ahead += [by_label[label] for label in block.operations[-1].successors]
    return second not in reached
