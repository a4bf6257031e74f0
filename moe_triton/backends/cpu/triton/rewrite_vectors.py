"""Vectors across the short rows of a tile, such as the blocks that share a scale.

LLVM takes the innermost loop alone: over a tile of rows of 8 it works on 8 numbers at a time, and it
reduces a row in its scalar unit. Here an elementwise operation takes several whole rows, whose numbers
lie one behind the other. What a row has one of is repeated across it, and the
largest of a row is found by exchanging lanes. Nothing is added in another order than before.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ROW_ELEMENTS = (8, 16, 32)
_MOST_ELEMENTS = 64  # four vectors of fp32 at 512 bits; more would not stay in registers
_FEWEST_ELEMENTS = 32  # what every hidden size is a multiple of

_GENERIC = re.compile(
    r"^(?P<indent> *)linalg\.generic \{indexing_maps = \[(?P<maps>[^\]]*)\], "
    r"iterator_types = \[(?P<iterators>[^\]]*)\]\} (?:ins\((?P<inputs>.*?)\) )?outs\((?P<output>.*?)\) \{\n"
    r" *\^bb0\((?P<arguments>.*)\):\n(?P<body>(?: *%.*\n)*) *linalg\.yield (?P<yield>%[\w-]+) : .*\n"
    r"(?P=indent)\}\n",
    flags=re.M,
)
_OPERATION = re.compile(
    r"^ *(?P<result>%[\w-]+) = (?P<name>arith\.\w+) (?P<predicate>\w+, )?(?P<operands>%[\w%, -]+?) : "
    r"(?P<type>[a-z]+\d+)(?: to (?P<to>[a-z]+\d+))?$"
)
_ORDERLESS = frozenset({"arith.maxsi", "arith.minsi", "arith.maxui", "arith.minui"})


@dataclass(frozen=True)
class _Operand:
    """What a generic reads or writes: ``kind`` is tile, row (one number a row), column or number."""

    name: str
    type: str
    element: str
    kind: str
    index: str

    def load(self, result: str, count: int) -> str:
        return (
            f"{result} = vector.load {self.name}[{self.index}] : {self.type}, {_vector(self.element, count)}"
        )

    def store(self, value: str, count: int) -> str:
        return (
            f"vector.store {value}, {self.name}[{self.index}] : {self.type}, {_vector(self.element, count)}"
        )


def vectorize_rows(text: str) -> str:
    """Replace generics over tiles of short rows by loops over vectors. Works on bufferized text."""
    maps = dict(re.findall(r"^(#map\d*) = affine_map<\(.*?\) -> \((.*?)\)>$", text, flags=re.M))
    number = iter(range(1 << 30))

    def replace(match: re.Match[str]) -> str:
        lines = _loop(match, maps, f"%rows{next(number)}_")
        if lines is None:
            return match[0]
        return "".join(f"{match['indent']}{line}\n" for line in lines)

    return _GENERIC.sub(replace, text)


def _vector(element: str, count: int) -> str:
    return f"vector<{count}x{element}>"


def _rows_per_turn(rows: int, row_elements: int) -> int:
    """How many rows a vector takes; 0 if their number does not allow for vectors."""
    for elements in (_MOST_ELEMENTS, _FEWEST_ELEMENTS):
        per_turn = elements // row_elements
        # a row of many elements goes on its own, so that columns can be carried from row to row
        if rows % per_turn == 0 and (row_elements < _FEWEST_ELEMENTS or per_turn == 1):
            return per_turn
    return 0


def _loop(generic: re.Match[str], maps: dict[str, str], prefix: str) -> list[str] | None:
    """The loop that stands for a generic, or None where it is not over short rows."""
    iterators = re.findall(r'"(\w+)"', generic["iterators"])
    named = [*_typed(generic["inputs"] or ""), *_typed(generic["output"])]
    results = [maps.get(name) for name in generic["maps"].split(", ")]
    shape = _tile_shape(len(iterators), named, results)
    if shape is None:
        return None
    rows, row_elements = shape
    operands = [
        _operand(name, type_, result or "", len(iterators), row_elements, prefix)
        for (name, type_), result in zip(named, results, strict=True)
    ]
    per_turn = _rows_per_turn(rows, row_elements)
    known = [operand for operand in operands if operand is not None]
    if len(known) < len(operands) or not per_turn:
        return None
    arguments = re.findall(r"(%[\w-]+): ", generic["arguments"])
    body = _Body(prefix, known, arguments, per_turn, row_elements)
    if not body.add_operations(generic["body"].splitlines(), generic["yield"]):
        return None
    outer, inner = iterators[0], iterators[-1]
    tail = {
        ("parallel", "parallel", "tile"): body.store_tile,
        ("parallel", "reduction", "row"): body.reduce_rows,
        ("reduction", "parallel", "column"): body.carry_columns,
    }.get((outer, inner, known[-1].kind))
    if tail is None or not tail():
        return None
    bounds = [
        f"{prefix}{name} = arith.constant {value} : index"
        for name, value in (("zero", 0), ("end", rows), ("step", per_turn))
    ]
    head = f"scf.for {prefix}i = {prefix}zero to {prefix}end step {prefix}step"
    inside = [f"  {line}" for line in body.lines]
    return [*bounds, *body.before, f"{body.carried_as}{head}{body.carries} {{", *inside, "}", *body.after]


def _typed(operands: str) -> list[tuple[str, str]]:
    """Names and types of ``%a, %b : type, type``."""
    names, _, types = operands.partition(" : ")
    split = re.findall(r"memref<[^<>]*(?:<[^<>]*>)?[^<>]*>|\w+", types)
    return list(zip(names.split(", "), split, strict=True)) if split else []


def _shape(type_: str) -> list[int] | None:
    found = re.match(r"memref<((?:\d+x)+)[a-z]", type_)
    return [int(extent) for extent in found[1].split("x")[:-1]] if found else None


def _tile_shape(
    num_dims: int, operands: list[tuple[str, str]], results: list[str | None]
) -> tuple[int, int] | None:
    """Rows, and elements of each: the first and the last dimension, others being of one turn."""
    extents: dict[str, int] = {}
    for (_, type_), result in zip(operands, results, strict=True):
        dims = result.split(", ") if result else []
        for dim, extent in zip(dims, _shape(type_) or [], strict=False):
            extents[dim] = extent
    sizes = [extents.get(f"d{i}", 0) for i in range(num_dims)]
    if num_dims < 2 or any(size != 1 for size in sizes[1:-1]) or sizes[-1] not in _ROW_ELEMENTS:
        return None
    return sizes[0], sizes[-1]


def _operand(
    name: str, type_: str, result: str, num_dims: int, row_elements: int, prefix: str
) -> _Operand | None:
    """What an operand is to the tile, if its numbers lie as the loop takes them."""
    if not type_.startswith("memref<"):
        return _Operand(name, type_, type_, "number", "") if result == "" else None
    layout = re.fullmatch(r"memref<(?:\d+x)+(\w+)(?:, strided<\[([\d, ]+)\](?:, offset: \S+)?>)?>", type_)
    shape, dims = _shape(type_), result.split(", ")
    if layout is None or shape is None or len(dims) != len(shape):
        return None
    strides = [int(stride) for stride in layout[2].split(", ")] if layout[2] else None
    first, last = "d0", f"d{num_dims - 1}"
    kind = {(True, True): "tile", (True, False): "row", (False, True): "column"}.get(
        (first in dims, last in dims)
    )
    if kind is None:
        return None
    for position, dim in enumerate(dims):
        expected = {first: row_elements if kind == "tile" else 1, last: 1}.get(dim)
        if strides is not None and expected is not None and strides[position] != expected:
            return None
    index = ", ".join(f"{prefix}i" if dim == first else f"{prefix}zero" for dim in dims)
    return _Operand(name, type_, layout[1], kind, index)


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
        self.carries = self.carried_as = ""
        self._prefix = prefix
        self._rows, self._row_elements, self._elements = rows, row_elements, rows * row_elements
        self._numbers: dict[str, str] = {}  # by name in the generic's body, as are the next two
        self._of_rows: dict[str, str] = {}
        self._of_tile: dict[str, str] = {}
        self._broadcasts: dict[tuple[str, int], str] = {}
        self._output, self._old = operands[-1], arguments[-1]
        self._last: re.Match[str] | None = None
        self._result = ""
        for operand, argument in zip(operands[:-1], arguments[:-1], strict=True):
            name = prefix + argument.removeprefix("%")
            if operand.kind == "number":
                self._numbers[argument] = operand.name
            elif operand.kind == "row":
                self.lines.append(operand.load(name, rows))
                self._of_rows[argument] = name
            else:
                self.lines.append(operand.load(name, self._elements))
                self._of_tile[argument] = name

    def _is_number(self, value: str) -> bool:
        return value not in self._of_tile and value not in self._of_rows

    def _as_vector(self, value: str, type_: str, count: int) -> str:
        """A value as a vector, of the tile's elements or of one a row."""
        if self._is_number(value):
            if (value, count) not in self._broadcasts:
                name = f"{self._prefix}all{len(self._broadcasts)}"
                outside = self._numbers.get(value, value)
                self.before.append(
                    f"{name} = vector.broadcast {outside} : {type_} to {_vector(type_, count)}"
                )
                self._broadcasts[value, count] = name
            return self._broadcasts[value, count]
        if count == self._rows and value in self._of_rows:
            return self._of_rows[value]
        if value not in self._of_tile:
            few = self._of_rows[value]
            lanes = [row for row in range(self._rows) for _ in range(self._row_elements)]
            types = f"{_vector(type_, self._rows)}, {_vector(type_, self._rows)}"
            self.lines.append(f"{few}_each = vector.shuffle {few}, {few} {lanes} : {types}")
            self._of_tile[value] = f"{few}_each"
        return self._of_tile[value]

    def add_operations(self, lines: list[str], result: str) -> bool:
        """Take over the body. The operation that meets the output's old value, if any, is the last."""
        for line in lines:
            operation = _OPERATION.match(line)
            if operation is None or self._last is not None:
                return False
            if self._old in operation["operands"].split(", "):
                self._last = operation
            else:
                self._add(operation)
        if self._last is not None:
            return self._last["result"] == result
        self._result = self._as_vector(result, self._output.element, self._elements)
        return True

    def _add(self, operation: re.Match[str]) -> None:
        operands = operation["operands"].split(", ")
        of_rows = not any(value in self._of_tile for value in operands) and self._rows > 1
        count = self._rows if of_rows else self._elements
        name = self._prefix + operation["result"].removeprefix("%")
        type_, conditions, values = _vector(operation["type"], count), "", []
        if operation["name"] == "arith.select":
            condition = operands.pop(0)
            if self._is_number(condition):
                values.append(self._numbers.get(condition, condition))
            else:
                values.append(self._as_vector(condition, "i1", count))
                conditions = f"{_vector('i1', count)}, "
        values += [self._as_vector(value, operation["type"], count) for value in operands]
        to = f" to {_vector(operation['to'], count)}" if operation["to"] else ""
        head = f"{name} = {operation['name']} {operation['predicate'] or ''}"
        self.lines.append(f"{head}{', '.join(values)} : {conditions}{type_}{to}")
        (self._of_rows if of_rows else self._of_tile)[operation["result"]] = name

    def _new(self) -> str | None:
        """What the last operation joins to the output's old value."""
        if self._last is None:
            return None
        others = [value for value in self._last["operands"].split(", ") if value != self._old]
        return self._as_vector(others[0], self._last["type"], self._elements) if len(others) == 1 else None

    def store_tile(self) -> bool:
        """Every number of the tile on its own."""
        if self._last is not None:
            return False
        self.lines.append(self._output.store(self._result, self._elements))
        return True

    def reduce_rows(self) -> bool:
        """Each row into one number, where the order of its numbers does not matter."""
        value = self._new()
        if value is None or self._last is None or self._last["name"] not in _ORDERLESS:
            return False
        many, few = (_vector(self._output.element, count) for count in (self._elements, self._rows))
        distance = self._row_elements // 2
        while distance:
            lanes = [lane ^ distance for lane in range(self._elements)]
            other, joined = f"{self._prefix}other{distance}", f"{self._prefix}joined{distance}"
            self.lines.append(f"{other} = vector.shuffle {value}, {value} {lanes} : {many}, {many}")
            self.lines.append(f"{joined} = {self._last['name']} {value}, {other} : {many}")
            value, distance = joined, distance // 2
        # every lane of a row has it; were it the first's, LLVM would see a scalar that is asked for
        lasts = list(range(self._row_elements - 1, self._elements, self._row_elements))
        of_rows, old, new = (f"{self._prefix}{name}" for name in ("of_rows", "old", "new"))
        self.lines += [
            f"{of_rows} = vector.shuffle {value}, {value} {lasts} : {many}, {many}",
            self._output.load(old, self._rows),
            f"{new} = {self._last['name']} {of_rows}, {old} : {few}",
            self._output.store(new, self._rows),
        ]
        return True

    def carry_columns(self) -> bool:
        """Row after row into one number of each column, in registers and in the order of the rows."""
        value = self._new()
        if value is None or self._last is None or self._rows != 1:
            return False
        many = _vector(self._output.element, self._elements)
        first, old, new, total = (f"{self._prefix}{name}" for name in ("first", "old", "new", "total"))
        operands = [old if operand == self._old else value for operand in self._last["operands"].split(", ")]
        self.before.append(self._output.load(first, self._elements))
        self.carried_as, self.carries = f"{total} = ", f" iter_args({old} = {first}) -> ({many})"
        self.lines.append(f"{new} = {self._last['name']} {', '.join(operands)} : {many}")
        self.lines.append(f"scf.yield {new} : {many}")
        self.after.append(self._output.store(total, self._elements))
        return True
