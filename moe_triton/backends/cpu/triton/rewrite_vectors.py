"""Vectors across the short rows of a tile, such as the blocks that share a scale.

LLVM takes the innermost loop alone: over a tile of rows of 8 it works on 8 numbers at a time, and it
reduces a row in its scalar unit. Here an elementwise operation takes several whole rows, whose numbers
lie one behind the other. What a row has one of is repeated across it, and the
largest of a row is found by exchanging lanes. Nothing is added in another order than before.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from moe_triton.backends.cpu.triton.ir import Operation

_ROW_ELEMENTS = (8, 16, 32)
_FEWEST_ELEMENTS = 32  # what every hidden size is a multiple of

_ORDERLESS = frozenset({"arith.maxsi", "arith.minsi", "arith.maxui", "arith.minui"})


@dataclass(frozen=True)
class _Operand:
    """What a generic reads or writes: ``kind`` is tile, row (one number a row), column or number."""

    name: str
    type: str
    element: str
    kind: str
    indices: list[str]

    def load(self, result: str, count: int) -> str:
        types = [self.type] + ["index"] * len(self.indices)
        return _line(result, "vector.load", [self.name, *self.indices], types, _vector(self.element, count))

    def store(self, value: str, count: int) -> str:
        types = [_vector(self.element, count), self.type] + ["index"] * len(self.indices)
        return _line("", "vector.store", [value, self.name, *self.indices], types)


def vectorize_rows(module: Operation, most_elements: int) -> None:
    """Replace generics over tiles of short rows by loops over vectors.

    Args:
        module: on buffers.
        most_elements: of a vector; more would not stay in registers.
    """
    for number, generic in enumerate(module.walk("linalg.generic")):
        lines = _loop(generic, f"%rows{number}_", most_elements)
        if lines is not None:
            generic.replace("\n".join(lines))


def narrow_by_shuffles(module: Operation) -> None:
    """Store the upper halves of 32-bit numbers, as narrowing to bf16 does, by one shuffle of their words.

    AVX-512 has it as an instruction for two vectors, where it shifts and truncates each of them alone.
    """
    makers = module.makers()
    for number, store in enumerate(module.walk("vector.store")):
        value = _upper_halves(store.operands[0], makers)
        if value is None:
            continue
        (type_,), words = value.result_types, f"%words{number}"
        count = int(type_.removeprefix("vector<").partition("x")[0])
        many, few = _vector("i16", 2 * count), _vector("i16", count)
        lanes = list(range(1, 2 * count, 2))
        store.insert_before(_line(words, "vector.bitcast", value.results, [type_], many))
        store.insert_before(_shuffle(f"{words}_upper", words, lanes, many, few))
        store.operands[0] = f"{words}_upper"


def _upper_halves(value: str, makers: dict[str, Operation]) -> Operation | None:
    """What makes the vector of 32-bit numbers that another one holds the upper halves of."""
    narrow = makers.get(value)
    if narrow is None or narrow.name != "arith.trunci" or not narrow.result_types[0].endswith("xi16>"):
        return None
    shift = makers.get(narrow.operands[0])
    if shift is None or shift.name != "arith.shrui" or not shift.result_types[0].endswith("xi32>"):
        return None
    amount = makers.get(shift.operands[1])
    number = makers.get(amount.operands[0]) if amount and amount.name == "vector.broadcast" else None
    return makers.get(shift.operands[0]) if number and number.attributes.get("value") == "16 : i32" else None


def _line(result: str, name: str, operands: list[str], types: list[str], to: str = "", **given: str) -> str:
    return str(Operation(name, [result] * bool(to), operands, types, [to] * bool(to), given)).rstrip()


def _shuffle(result: str, value: str, lanes: list[int], type_: str, to: str) -> str:
    return _line(result, "vector.shuffle", [value, value], [type_, type_], to, mask=str(lanes))


def _vector(element: str, count: int) -> str:
    return f"vector<{count}x{element}>"


def _rows_per_turn(rows: int, row_elements: int, most_elements: int) -> int:
    """How many rows a vector takes; 0 if their number does not allow for vectors."""
    for elements in (most_elements, _FEWEST_ELEMENTS):
        per_turn = elements // row_elements
        # a row of many elements goes on its own, so that columns can be carried from row to row
        if rows % per_turn == 0 and (row_elements < _FEWEST_ELEMENTS or per_turn == 1):
            return per_turn
    return 0


def _loop(generic: Operation, prefix: str, most_elements: int) -> list[str] | None:
    """The loop that stands for a generic, or None where it is not over short rows."""
    iterators = re.findall(r"<(\w+)>", generic.attributes["iterator_types"])
    results = re.findall(r"-> \((.*?)\)>", generic.attributes["indexing_maps"])
    placed = list(zip(generic.operands, generic.operand_types, results, strict=True))
    rows, row_elements = _tile_shape(len(iterators), placed)
    per_turn = _rows_per_turn(rows, row_elements, most_elements) if rows else 0
    operands = [_operand(*each, len(iterators), row_elements, prefix) for each in placed]
    known = [operand for operand in operands if operand is not None]
    if len(known) < len(operands) or not per_turn:
        return None
    if per_turn > 1 and any(operand.kind == "column" for operand in known):  # one row of it is all there is
        return None
    body = _Body(prefix, known, list(generic.body.arguments), per_turn, row_elements)
    tail = {
        ("parallel", "parallel", "tile"): body.store_tile,
        ("parallel", "reduction", "row"): body.reduce_rows,
        ("reduction", "parallel", "column"): body.carry_columns,
    }.get((iterators[0], iterators[-1], known[-1].kind))
    if tail is None or not body.add_operations(generic.body.operations) or not tail():
        return None
    bounds = {"zero": 0, "end": rows, "step": per_turn}
    constants = [
        _line(prefix + name, "arith.constant", [], [], "index", value=f"{value} : index")
        for name, value in bounds.items()
    ]
    return [*constants, *body.before, *body.loop([prefix + name for name in bounds]), *body.after]


_MEMREF = re.compile(r"memref<((?:\d+x)+)(\w+)(?:, strided<\[([\d, ]+)\](?:, offset: \S+)?>)?>")


def _shape(type_: str) -> list[int]:
    match = _MEMREF.fullmatch(type_)
    return [int(extent) for extent in match[1].split("x")[:-1]] if match else []


def _tile_shape(num_dims: int, placed: list[tuple[str, str, str]]) -> tuple[int, int]:
    """Rows, and elements of each: the first and the last dimension, others being of one turn; 0 if not so."""
    pairs = [zip(result.split(", "), _shape(type_), strict=False) for _, type_, result in placed]
    extents = dict(itertools.chain(*pairs))
    sizes = [extents.get(f"d{i}", 0) for i in range(num_dims)]
    if num_dims < 2 or any(size != 1 for size in sizes[1:-1]) or sizes[-1] not in _ROW_ELEMENTS:
        return 0, 0
    return sizes[0], sizes[-1]


def _operand(
    name: str, type_: str, result: str, num_dims: int, row_elements: int, prefix: str
) -> _Operand | None:
    """What an operand is to the tile, if its numbers lie as the loop takes them."""
    if not type_.startswith("memref<"):
        return _Operand(name, type_, type_, "number", []) if result == "" else None
    layout, dims, first, last = _MEMREF.fullmatch(type_), result.split(", "), "d0", f"d{num_dims - 1}"
    kinds = {(True, True): "tile", (True, False): "row", (False, True): "column"}
    kind = kinds.get((first in dims, last in dims))
    if layout is None or kind is None or len(dims) != len(_shape(type_)):
        return None
    if layout[2] == "i1":  # a byte each in memory, a bit each in what a vector of them is loaded from
        return None
    expected = {first: row_elements if kind == "tile" else 1, last: 1}
    strides = layout[3].split(", ") if layout[3] else []
    if any(int(stride) != expected.get(dim, int(stride)) for dim, stride in zip(dims, strides, strict=False)):
        return None
    indices = [f"{prefix}i" if dim == first else f"{prefix}zero" for dim in dims]
    return _Operand(name, type_, layout[2], kind, indices)


class _Body:
    """The lines of one turn, and of what comes before and after all of them.

    What is known of a row alone is computed once a row, and repeated across it where it meets its numbers.
    """

    def __init__(
        self, prefix: str, operands: list[_Operand], arguments: list[str], rows: int, row_elements: int
    ) -> None:
        self.before: list[str] = []
        self.lines: list[str] = []
        self.after: list[str] = []
        self._prefix = prefix
        self._rows, self._row_elements, self._elements = rows, row_elements, rows * row_elements
        self._output, self._old = operands[-1], arguments[-1]
        self._last: Operation | None = None
        self._result, self._carried = "", ""
        self._numbers: dict[str, str] = {}  # from outside, by name in the generic's body
        self._counts: dict[str, int] = {}  # elements in a turn of what is no number, likewise
        self._vectors: dict[tuple[str, int], str] = {}  # by that name and elements
        for operand, argument in zip(operands[:-1], arguments[:-1], strict=True):
            if operand.kind == "number":
                self._numbers[argument] = operand.name
                continue
            name, count = self._new_name(argument), rows if operand.kind == "row" else self._elements
            self.lines.append(operand.load(name, count))
            self._know(argument, count, name)

    def _new_name(self, value: str) -> str:
        return self._prefix + value.removeprefix("%")

    def _know(self, value: str, count: int, name: str) -> None:
        self._counts[value], self._vectors[value, count] = count, name

    def _as_vector(self, value: str, type_: str, count: int) -> str:
        """A value as a vector, of the tile's elements or of one a row."""
        many = _vector(type_, count)
        if (value, count) in self._vectors:
            return self._vectors[value, count]
        if value in self._counts:
            few, lanes = self._vectors[value, self._rows], range(self._rows)
            each = [row for row in lanes for _ in range(self._row_elements)]
            self._know(value, count, f"{few}_each")
            self.lines.append(_shuffle(f"{few}_each", few, each, _vector(type_, self._rows), many))
        else:
            name = self._vectors[value, count] = f"{self._prefix}all{len(self.before)}"
            outside = self._numbers.get(value, value)
            self.before.append(_line(name, "vector.broadcast", [outside], [type_], many))
        return self._vectors[value, count]

    def add_operations(self, operations: list[Operation]) -> bool:
        """Take over the body. The operation that meets the output's old value, if any, is the last."""
        *operations, end = operations
        for operation in operations:
            types = operation.operand_types + operation.result_types
            is_known = operation.name.startswith("arith.") and operation.operands and "index" not in types
            if not is_known or self._last is not None:
                return False
            if self._old in operation.operands:
                self._last = operation
            else:
                self._add(operation)
        if self._last is not None:
            return self._last.results == end.operands
        self._result = self._as_vector(end.operands[0], self._output.element, self._elements)
        return True

    def _add(self, operation: Operation) -> None:
        most = max((self._counts.get(value, 0) for value in operation.operands), default=0)
        count = self._elements if self._rows == 1 else max(most, self._rows)
        name, values, types = self._new_name(operation.result), [], []
        for i, (value, type_) in enumerate(zip(operation.operands, operation.operand_types, strict=True)):
            if operation.name == "arith.select" and i == 0 and value not in self._counts:
                values.append(self._numbers.get(value, value))  # one condition for all
                types.append(type_)
            else:
                values.append(self._as_vector(value, type_, count))
                types.append(_vector(type_, count))
        to = _vector(operation.result_types[0], count)
        self.lines.append(_line(name, operation.name, values, types, to, **operation.attributes))
        self._know(operation.result, count, name)

    def _new(self) -> str | None:
        """What the last operation joins to the output's old value."""
        others = [value for value in self._last.operands if value != self._old] if self._last else []
        return self._as_vector(others[0], self._output.element, self._elements) if len(others) == 1 else None

    def _join(self, result: str, left: str, right: str, count: int) -> str:
        """The last operation, on vectors."""
        assert self._last is not None
        type_ = _vector(self._output.element, count)
        return _line(result, self._last.name, [left, right], [type_, type_], type_, **self._last.attributes)

    def loop(self, bounds: list[str]) -> list[str]:
        """The turns, each of which hands on what is carried."""
        p, many = self._prefix, self._carried
        total, first, old, new = (
            (f"{p}total = ", f", {p}first", f", {p}old: {many}", f"{p}new") if many else ("", "", "", "")
        )
        return [
            f'{total}"scf.for"({", ".join(bounds)}{first}) ({{',
            f"^turn({p}i: index{old}):",
            *self.lines,
            f'"scf.yield"({new}) : ({many}) -> ()',
            f"}}) : (index, index, index{', ' if many else ''}{many}) -> ({many})",
        ]

    def store_tile(self) -> bool:
        """Every number of the tile on its own."""
        if self._last is not None:
            return False
        self.lines.append(self._output.store(self._result, self._elements))
        return True

    def reduce_rows(self) -> bool:
        """Each row into one number, where the order of its numbers does not matter."""
        value = self._new()
        if value is None or self._last is None or self._last.name not in _ORDERLESS:
            return False
        many, few = (_vector(self._output.element, count) for count in (self._elements, self._rows))
        distance = self._row_elements // 2
        while distance:
            lanes = [lane ^ distance for lane in range(self._elements)]
            other, joined = f"{self._prefix}other{distance}", f"{self._prefix}joined{distance}"
            self.lines.append(_shuffle(other, value, lanes, many, many))
            self.lines.append(self._join(joined, value, other, self._elements))
            value, distance = joined, distance // 2
        # every lane of a row has it; were it the first's, LLVM would see a scalar that is asked for
        lasts = list(range(self._row_elements - 1, self._elements, self._row_elements))
        of_rows, old, new = (f"{self._prefix}{name}" for name in ("of_rows", "old", "new"))
        self.lines += [
            _shuffle(of_rows, value, lasts, many, few),
            self._output.load(old, self._rows),
            self._join(new, of_rows, old, self._rows),
            self._output.store(new, self._rows),
        ]
        return True

    def carry_columns(self) -> bool:
        """Row after row into one number of each column, in registers and in the order of the rows."""
        value = self._new()
        if value is None or self._last is None or self._rows != 1:
            return False
        self._carried = _vector(self._output.element, self._elements)
        first, old, new, total = (f"{self._prefix}{name}" for name in ("first", "old", "new", "total"))
        left, right = (old if operand == self._old else value for operand in self._last.operands)
        self.before.append(self._output.load(first, self._elements))
        self.lines.append(self._join(new, left, right, self._elements))
        self.after.append(self._output.store(total, self._elements))
        return True
