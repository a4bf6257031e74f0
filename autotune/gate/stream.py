"""The instruction stream of a final module: the instructions of each pipe of an AI vector core, with their
loops.

An AI vector core has four queues that work in parallel: MTE2 copies tiles from global memory into the unified
buffer, V computes on them, MTE3 copies them back, and S runs scalars and all control flow. In
``module.hivm.opt.mlir`` an instruction of MTE2, V or MTE3 is a call of a library function, or, on 950, of a
vector function; those of S that matter here are loads and stores of single elements.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from moe_triton.core.errors import ToolchainError

Pipe = Literal["MTE2", "MTE3", "V", "S"]

ELEMENT_BITS = {"bf16": 16, "f16": 16, "f32": 32, "i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64}
# Operations whose result is a view of their operand.
_VIEWS = (
    "memref.cast",
    "memref.collapse_shape",
    "memref.expand_shape",
    "memref.subview",
    "memref.reinterpret_cast",
    "memref.extract_strided_metadata",
    "builtin.unrealized_conversion_cast",
)
# Library functions by the prefix of their names.
_FUNCTIONS: dict[str, Pipe] = {
    "load_gm_to_ubuf": "MTE2",
    "store_ubuf_to_gm": "MTE3",
    "copy_ubuf_to_ubuf": "V",
    "arange_": "V",
    "broadcast_": "V",
    "enablevc_": "V",
    "reduce_": "V",
    "v": "V",
}
_TYPE = re.compile(
    r"memref<((?:(?:\d+|\?)x)*)(bf16|f16|f32|i\d+)\b[^<>]*(?:<[^<>]*>[^<>]*)*#hivm.address_space<(\w+)>"
)


@dataclass(frozen=True)
class Buffer:
    """A tile in the unified buffer.

    Attributes:
        tile: its type, as ``"7168xbf16"``; ``"?"`` if it is unknown.
        double_buffered: two tiles are used in turn.
        part: type of the part in use, if that is smaller and its size is known: a row, say.
    """

    tile: str
    double_buffered: bool = False
    part: str = ""

    @property
    def is_element(self) -> bool:
        """Whether it holds a single element."""
        return set(self.tile.split("x")[:-1]) <= {"1"}

    @property
    def num_bytes(self) -> int:
        """Bytes of the part of one tile that is used; 0 if its size or element is not known."""
        *dims, element = (self.part or self.tile).split("x")
        if element not in ELEMENT_BITS or "?" in dims:
            return 0
        bits = ELEMENT_BITS[element]
        for dim in dims:
            bits *= int(dim)
        return -(-bits // 8)


@dataclass(frozen=True)
class Instruction:
    """An instruction of a pipe.

    Attributes:
        pipe: that executes it.
        name: of the library function, or of the operation.
        buffers: tiles in the unified buffer that it works on, in the order of its operands.
        is_global: S: the element lies in global memory.
    """

    pipe: Pipe
    name: str
    buffers: tuple[Buffer, ...] = ()
    is_global: bool = False


@dataclass(frozen=True)
class Sync:
    """A synchronisation: of a flag, or a barrier of a pipe with itself.

    Attributes:
        kind: a flag is set or waited for, or a barrier.
        pipe: that executes it.
    """

    kind: Literal["set", "wait", "barrier"]
    pipe: str


@dataclass
class Loop:
    """Attributes: ``trips`` is the number of iterations, None if that is only known at run time."""

    trips: int | None
    body: list[Node] = field(default_factory=list)


@dataclass
class Branch:
    """Attributes: ``is_unlikely`` says that the compiler marks the condition as unlikely."""

    then: list[Node] = field(default_factory=list)
    otherwise: list[Node] = field(default_factory=list)
    is_unlikely: bool = False


Node = Instruction | Sync | Loop | Branch


def walk(nodes: list[Node]) -> Iterator[Node]:
    """Every node, each before the nodes inside it."""
    for node in nodes:
        yield node
        if isinstance(node, Loop):
            yield from walk(node.body)
        elif isinstance(node, Branch):
            yield from walk(node.then)
            yield from walk(node.otherwise)


def parse(module: str) -> list[Node]:
    """The stream of a module's kernel."""
    reader = _Reader()
    for line in _kernel_lines(module):
        reader.read(line)
    return reader.root


def _kernel_lines(module: str) -> list[str]:
    lines = module.splitlines()
    starts = [i for i, line in enumerate(lines) if "func.func" in line and "hacc.entry" in line]
    if not starts:
        return []
    start = starts[0]
    indent = len(lines[start]) - len(lines[start].lstrip())
    stop = next(i for i in range(start + 1, len(lines)) if lines[i] == " " * indent + "}")
    return [line.strip() for line in lines[start + 1 : stop]]


class _Reader:
    """Reads a function line by line. Names are reused between scopes: the latest definition counts."""

    def __init__(self) -> None:
        self.root: list[Node] = []
        self._open: list[tuple[list[Node], Node | None]] = []
        self._body = self.root
        self._definitions: dict[str, str] = {}
        self._labels: dict[str, int] = {}

    def read(self, line: str) -> None:
        if line.startswith("}"):
            self._close(line)
            return
        if defined := re.match(r"(%[^=]+?) = (.*)", line):
            for name in re.findall(r"%\w+", defined[1]):
                self._definitions[name] = defined[2]
        if line.endswith("{"):
            self._enter(line)
        elif label := re.match(r"(\^bb\d+)", line):
            self._labels[label[1]] = len(self._body)
        elif node := self._leaf(line):
            self._body.append(node)
        for target in re.findall(r"\^bb\d+", line) if "cf." in line else ():
            self._turn_back(target)

    def _turn_back(self, label: str) -> None:
        """A jump to an earlier block ends a loop (modules for 950 have no loops any more, only jumps)."""
        start = self._labels.get(label)
        if start is not None:
            self._body[start:] = [Loop(None, self._body[start:])]

    def _enter(self, line: str) -> None:
        node: Node | None = None
        inside = self._body
        if "scf.for" in line:
            node = Loop(self._trips(line))
            inside = node.body
            for name, start in re.findall(r"(%\w+) = (%[\w#]+)[,)]", line.partition("iter_args")[2]):
                self._definitions[name] = f"memref.cast {start}"
        elif "scf.while" in line:
            node = Loop(None)
            inside = node.body
        elif "scf.if" in line:
            node = Branch()
            inside = node.then
        if node is not None:
            self._body.append(node)
        self._open.append((self._body, node))
        self._body = inside

    def _close(self, line: str) -> None:
        outer, node = self._open[-1]
        if line.endswith("{"):  # else, or a while's second half
            self._body = node.otherwise if isinstance(node, Branch) else self._body
            return
        if isinstance(node, Branch):
            node.is_unlikely = "unlikely" in line
        self._open.pop()
        self._body = outer

    def _trips(self, line: str) -> int | None:
        bounds = re.search(r"= (%\w+) to (%\w+) step (%\w+)", line)
        numbers = [self._constant(bound) for bound in bounds.groups()] if bounds else [None]
        if None in numbers:
            return None
        low, high, step = (number for number in numbers if number is not None)
        return max(0, -(-(high - low) // step))

    def _constant(self, value: str) -> int | None:
        number = re.match(r"\w+\.constant\(?\s*(-?\d+) :", self._definitions.get(value, ""))
        return int(number[1]) if number else None

    def _leaf(self, line: str) -> Node | None:
        if called := re.search(r"\bcall @(\w+)\(([^)]*)\)", line):
            buffers = [self._buffer(v) for v in re.findall(r"%[\w#]+", called[2])]
            return Instruction(_pipe_of(called[1]), called[1], tuple(b for b in buffers if b is not None))
        if access := re.search(r"\bmemref\.(load|store) .*#hivm\.address_space<(gm|ub)>", line):
            return Instruction("S", access[1], is_global=access[2] == "gm")
        if flag := re.search(r"hivm\.hir\.(set|wait)_flag\[<PIPE_(\w+)>, <PIPE_(\w+)>", line):
            return Sync("set", flag[2]) if flag[1] == "set" else Sync("wait", flag[3])
        if barrier := re.search(r"hivm\.hir\.pipe_barrier\[<PIPE_(\w+)>", line):
            return Sync("barrier", barrier[1])
        return None

    def _buffer(self, value: str) -> Buffer | None:
        """The tile behind a value; None for scalars and for global memory."""
        part, tile, twice = "", "", False
        for _ in range(32):
            definition = self._definitions.get(value.partition("#")[0], "")
            types = _TYPE.findall(definition)
            if types:
                dims, element, space = types[-1]
                if space != "ub":
                    return None
                tile = dims + element
                part = part or (tile if "?" not in tile else "")
            view = re.match(r"(\S+) (%[\w#]+)", definition)
            if view is None or view[1] not in _VIEWS:
                twice = definition.startswith(("arith.select", "llvm.select"))
                break
            value = view[2]
        if not tile:
            return None
        whole = Buffer(tile, twice)
        return replace(whole, part=part) if 0 < Buffer(part).num_bytes < whole.num_bytes else whole


def _pipe_of(function: str) -> Pipe:
    for prefix, pipe in _FUNCTIONS.items():
        if function.startswith(prefix):
            return pipe
    if "_vf_" in function:  # 950: outlined by the compiler, for its register-based vector cores
        return "V"
    raise ToolchainError(f"the gate does not know which pipe runs {function}: add it to autotune.gate.stream")
