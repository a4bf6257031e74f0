"""Edits in the LLVM dialect that ask for memory before it is needed.

A processor's own prefetchers stop at the end of a page and ask for no line to write, so that rows of some
kilobytes, which no cache has, arrive at two thirds of the pace that a core could take. These do for what
Triton kernels copy and read what kernels_ascendc/emulation/memory.h does for Ascend C's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass

COPY_SYMBOL = "moe_triton_copy_ahead"

# As in kernels_ascendc/emulation/memory.h.
PIECE_BYTES, AHEAD_BYTES, LINE_BYTES = 256, 1024, 64
_HINT_L1, _HINT_L2 = 3, 2  # LLVM's "locality"

_OF_PTR = "(!llvm.ptr, i64) -> !llvm.ptr"

# Iterations of a loop between which lines are asked for: fewer, and the loop inside has too little to do.
STRIP_ITERATIONS, FEWEST_ITERATIONS = 128, 32
# Shorter rows end before asking ahead has gained anything.
LONG_BYTES = 2048
_BYTES = {"i8": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8, "f64": 8}


def copy_ahead(text: str) -> str:
    """Copies long rows in pieces, and asks ahead of each for the next lines of both sides.

    The size of most copies is a constant, and then nothing is left of the loop in short ones. The function is
    written in the IR: nothing but libc is linked to kernels.
    """
    text, count = re.subn(
        r'"llvm\.intr\.memcpy"\((?P<values>%[\w-]+, %[\w-]+, %[\w-]+)\).*',
        rf"llvm.call @{COPY_SYMBOL}(\g<values>) : (!llvm.ptr, !llvm.ptr, i64) -> ()",
        text,
    )
    if not count:
        return text
    lines = [
        f"  llvm.func internal @{COPY_SYMBOL}(%to: !llvm.ptr, %from: !llvm.ptr, %bytes: i64)"
        ' attributes {passthrough = ["alwaysinline"]} {',
        "    %zero = llvm.mlir.constant(0 : i64) : i64",
        f"    %piece = llvm.mlir.constant({PIECE_BYTES} : i64) : i64",
        f"    %reach = llvm.mlir.constant({AHEAD_BYTES + PIECE_BYTES} : i64) : i64",
        '    %is_long = llvm.icmp "ule" %reach, %bytes : i64',
        "    llvm.cond_br %is_long, ^first, ^head(%zero : i64)",
        "  ^first:",
        *_ask_both("", range(0, AHEAD_BYTES, LINE_BYTES)),
        "    llvm.br ^head(%zero : i64)",
        "  ^head(%at: i64):",
        "    %end = llvm.add %at, %reach : i64",
        '    %more = llvm.icmp "ule" %end, %bytes : i64',
        "    llvm.cond_br %more, ^body, ^tail",
        "  ^body:",
        *[_byte(f"%{side}_piece", f"%{side}", "%at") for side in ("to", "from")],
    ]
    lines += _ask_both("_piece", range(AHEAD_BYTES, AHEAD_BYTES + PIECE_BYTES, LINE_BYTES))
    copy = '    "llvm.intr.memcpy"({}) <{{isVolatile = false}}> : (!llvm.ptr, !llvm.ptr, i64) -> ()'
    lines += [
        copy.format("%to_piece, %from_piece, %piece"),
        "    %next = llvm.add %at, %piece : i64",
        "    llvm.br ^head(%next : i64)",
        "  ^tail:",
        *[_byte(f"%{side}_rest", f"%{side}", "%at") for side in ("to", "from")],
        "    %rest = llvm.sub %bytes, %at : i64",
        copy.format("%to_rest, %from_rest, %rest"),
        "    llvm.return",
        "  }",
    ]
    end = text.rstrip().rindex("}")
    return text[:end] + "\n".join(lines) + "\n}\n"


def _byte(name: str, base: str, index: str) -> str:
    return f"    {name} = llvm.getelementptr {base}[{index}] : {_OF_PTR}, i8"


def _ask_both(start: str, offsets: range) -> list[str]:
    """Asks for lines that are so many bytes after the starts of both sides of a copy."""
    lines = []
    for offset in offsets:
        lines += _ask(f"%from{start}_{offset}", f"%from{start}", offset, writes=False, hint=_HINT_L2)
        lines += _ask(f"%to{start}_{offset}", f"%to{start}", offset, writes=True, hint=_HINT_L1)
    return lines


def _ask(name: str, address: str, offset: int, *, writes: bool, hint: int) -> list[str]:
    """Asks for the line that is so many bytes after an address."""
    options = f"<{{cache = 1 : i32, hint = {hint} : i32, rw = {int(writes)} : i32}}>"
    return [
        f"    {name} = llvm.getelementptr {address}[{offset}] : (!llvm.ptr) -> !llvm.ptr, i8",
        f'    "llvm.intr.prefetch"({name}) {options} : (!llvm.ptr) -> ()',
    ]


# A loop of one block, its index counted from an initial value that the jump to its label has.
_LOOP = re.compile(
    r"""
    ^[ ]*(?P<label>\^\w+)\((?P<index>%[\w-]+):[ ]i64\):.*\n
    [ ]*(?P<test>%[\w-]+)[ ]=[ ]llvm\.icmp[ ]"slt"[ ](?P=index),[ ](?P<stop>%[\w-]+)[ ]:[ ]i64\n
    [ ]*llvm\.cond_br[ ](?P=test),[ ](?P<body>\^\w+),[ ](?P<exit>\^\w+)\n
    [ ]*(?P=body):.*\n
    (?P<code>(?:[ ]{4}(?!llvm\.(?:cond_)?br[ ]).*\n)*)
    [ ]*llvm\.br[ ](?P=label)\((?P<next>%[\w-]+)[ ]:[ ]i64\).*\n
    """,
    flags=re.M | re.X,
)
_CONSTANT = re.compile(r"^ *(%[\w-]+) = llvm\.mlir\.constant\((-?\d+) : (?:index|i64)\) : i64", flags=re.M)
_VALUE = re.compile(r"%[\w-]+")


def read_ahead(text: str) -> str:
    """Asks, between strips of a loop over rows, for what the next strip reads and writes of each row.

    The old loop goes through one strip, in a new one over strips: LLVM vectorises it as before, which it
    would not with anything in it that is no arithmetic.
    """
    constants = {match[1]: int(match[2]) for match in _CONSTANT.finditer(text)}
    stacked = set(re.findall(r"(%[\w-]+) = llvm\.alloca ", text))

    def replace(loop: re.Match[str]) -> str:
        entries = re.findall(rf"llvm\.br {re.escape(loop['label'])}\((%[\w-]+) : i64\)", text)
        starts = {constants.get(entry) for entry in entries if entry != loop["next"]}
        stop = constants.get(loop["stop"], 0)
        step = re.search(rf"{loop['next']} = llvm\.add {loop['index']}, (%[\w-]+) ", loop["code"])
        strip = math.gcd(stop, STRIP_ITERATIONS)
        if starts != {0} or step is None or strip < FEWEST_ITERATIONS:
            return loop[0]
        if strip % constants.get(step[1], strip + 1):
            return loop[0]
        rows = [row for row in _rows(loop, stacked) if stop * _BYTES[row.element] >= LONG_BYTES]
        asks = [line for row in rows for line in row.ask(_name("strip", loop["index"]), strip)]
        return _in_strips(loop, strip, asks) if asks else loop[0]

    return _LOOP.sub(replace, text)


def _in_strips(loop: re.Match[str], strip: int, asks: Sequence[str]) -> str:
    index, test, label = _name("strip", loop["index"]), _name("strip", loop["test"]), loop["label"]
    return "\n".join(
        [
            f"  {label}({index}: i64):",
            f'    {test} = llvm.icmp "slt" {index}, {loop["stop"]} : i64',
            f"    llvm.cond_br {test}, {label}_ask, {loop['exit']}",
            f"  {label}_ask:",
            f"    {index}_size = llvm.mlir.constant({strip} : i64) : i64",
            f"    {index}_end = llvm.add {index}, {index}_size : i64",
            *asks,
            f"    llvm.br {label}_in({index} : i64)",
            f"  {label}_in({loop['index']}: i64):",
            f'    {loop["test"]} = llvm.icmp "slt" {loop["index"]}, {index}_end : i64',
            f"    llvm.cond_br {loop['test']}, {loop['body']}, {label}_out",
            f"  {loop['body']}:",
            f"{loop['code']}    llvm.br {label}_in({loop['next']} : i64)",
            f"  {label}_out:",
            f"    llvm.br {label}({index}_end : i64)",
            "",
        ]
    )


def _name(prefix: str, value: str) -> str:
    """Another name for what is made from a value."""
    return f"%{prefix}_{value[1:].replace('-', '_')}"


@dataclass(frozen=True)
class _Row:
    """A row that a loop goes through, element by element.

    Attributes:
        address: value that points to element 0.
        definition: the line that makes it, if that stands in the loop.
        element: type of an element.
        writes: whether the loop writes it.
    """

    address: str
    definition: str
    element: str
    writes: bool

    def ask(self, index: str, strip: int) -> list[str]:
        """Asks for the strip after the one at an index."""
        name, size = _name("ahead", self.address), _BYTES[self.element]
        lines = [self.definition.replace(self.address, name, 1)] if self.definition else []
        base = name if self.definition else self.address
        lines.append(f"    {name}_at = llvm.getelementptr {base}[{index}] : {_OF_PTR}, {self.element}")
        for offset in range(strip * size, 2 * strip * size, LINE_BYTES):
            lines += _ask(f"{name}_{offset}", f"{name}_at", offset, writes=self.writes, hint=_HINT_L1)
        return lines


def _rows(loop: re.Match[str], stacked: Set[str]) -> list[_Row]:
    """The rows in memory whose address does not depend on the index."""
    code = loop["code"]
    made = {match[1]: match[0] for match in re.finditer(r"^ *(%[\w-]+) = .*", code, flags=re.M)}
    element_of = re.compile(
        rf"(%[\w-]+) = llvm\.getelementptr (%[\w-]+)\[{loop['index']}\] : {re.escape(_OF_PTR)}, (\w+)"
    )
    rows: dict[str, _Row] = {}
    for pointer, address, element in element_of.findall(code):
        definition = made.get(address, "")
        operands = _VALUE.findall(definition)[1:]
        is_fixed = not any(value in made or value == loop["index"] for value in operands)
        is_on_stack = not stacked.isdisjoint([address, *operands])
        writes = re.search(rf"llvm\.store %[\w-]+, {pointer} ", code) is not None
        is_used = writes or f"llvm.load {pointer} " in code
        if element in _BYTES and is_used and is_fixed and not is_on_stack and address not in rows:
            rows[address] = _Row(address, definition, element, writes)
    return list(rows.values())
