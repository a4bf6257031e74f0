"""IR as a tree: the generic form that MLIR's programs print, read and written.

In that form every operation of every dialect is spelled alike, one to a line. Types and attributes stay
text, which rewrites compare and hand on. Values are their printed names, unique across a module. A line that
is not of the form is an error.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from moe_triton.core.errors import ToolchainError

# What makes a program print what is read here.
AS_READ = ("--mlir-print-op-generic", "--mlir-print-unique-ssa-ids")

_HEAD = re.compile(
    r'(?:(?P<results>%\w+)(?::(?P<count>\d+))? = )?"(?P<name>[\w.]+)"\((?P<operands>[^)]*)\)'
    r"(?:\[(?P<successors>[^\]]*)\])?(?: <\{(?P<properties>.*?)\}>)?(?= \(\{$| \{| : \()"
)
_TAIL = re.compile(
    r"(?: \{(?P<attributes>.*)\})? : \((?P<operands>.*?)\) -> (?:\((?P<many>.*)\)|(?P<one>.*))"
)
_LABEL = re.compile(r"(?P<label>\^\w+)(?:\((?P<arguments>.*)\))?:.*")
_BRACKET = re.compile(r"[<(\[{]")
_ALIAS = re.compile(r"^(#\w+) = (.*)\n", flags=re.M)


@dataclass(eq=False)
class Operation:
    """One operation, with all that stands in its regions.

    Attributes:
        results: names; of several, ``%7#0``, ``%7#1`` and so on.
        attributes: text by name, empty where the name says all. MLIR's properties are among them.
        regions: the blocks of each.
        block: where it stands.
    """

    name: str
    results: list[str] = field(default_factory=list)
    operands: list[str] = field(default_factory=list)
    operand_types: list[str] = field(default_factory=list)
    result_types: list[str] = field(default_factory=list)
    attributes: dict[str, str] = field(default_factory=dict)
    successors: list[str] = field(default_factory=list)
    regions: list[list[Block]] = field(default_factory=list)
    block: Block = field(init=False, repr=False)

    @property
    def result(self) -> str:
        """Its only result."""
        (result,) = self.results
        return result

    @property
    def body(self) -> Block:
        """The first block of the first region."""
        return self.regions[0][0]

    def walk(self, *names: str) -> list[Operation]:
        """The operations in it, in the order of the text: all, or those of some names."""
        inside: list[Operation] = []
        for block in itertools.chain(*self.regions):
            for child in block.operations:
                inside.append(child)
                if child.regions:
                    inside += child.walk()
        return [each for each in inside if each.name in names] if names else inside

    def makers(self) -> dict[str, Operation]:
        """By value the operation in it that makes it."""
        return {result: each for each in self.walk() for result in each.results}

    def users(self, value: str) -> list[Operation]:
        """The operations in it that take a value, each as often as it does."""
        return [each for each in self.walk() for operand in each.operands if operand == value]

    def erase(self) -> None:
        """Takes it out of its block."""
        self.block.operations.remove(self)

    def insert_before(self, text: str) -> None:
        """Puts operations before it."""
        self.block.insert(self.block.operations.index(self), *read_blocks(text)[0].operations)

    def replace(self, text: str) -> None:
        """Puts operations in its place."""
        self.insert_before(text)
        self.erase()

    def __str__(self) -> str:
        count = f":{len(self.results)}" if len(self.results) > 1 else ""
        results = f"{self.results[0].partition('#')[0]}{count} = " if self.results else ""
        successors = f"[{', '.join(self.successors)}]" if self.successors else ""
        regions = "}, {\n".join("".join(map(str, region)) for region in self.regions)
        attributes = ", ".join(
            f"{name} = {value}" if value else name for name, value in self.attributes.items()
        )
        return (
            f'{results}"{self.name}"({", ".join(self.operands)}){successors}'
            + (f" ({{\n{regions}}})" if self.regions else "")
            + (f" {{{attributes}}}" if attributes else "")
            + f" : ({', '.join(self.operand_types)}) -> ({', '.join(self.result_types)})\n"
        )


@dataclass(eq=False)
class Block:
    """Operations one after the other; ``arguments`` are types by name."""

    label: str = ""
    arguments: dict[str, str] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)

    def insert(self, index: int, *operations: Operation) -> None:
        """Puts operations that stand nowhere before the one at an index."""
        self.operations[index:index] = operations
        for operation in operations:
            operation.block = self

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}: {type_}" for name, type_ in self.arguments.items())
        label = f"{self.label}({arguments}):\n" if self.label else ""
        return label + "".join(map(str, self.operations))


def read(text: str) -> Operation:
    """The module that a program printed.

    Raises:
        ToolchainError: a line is not of the generic form.
    """
    aliases = dict(_ALIAS.findall(text))
    text = re.sub(r"#\w+(?![\w.])", lambda match: aliases.get(match[0], match[0]), _ALIAS.sub("", text))
    return read_blocks(text)[0].operations[0]


def read_blocks(text: str) -> list[Block]:
    """Blocks, or operations without a label: what a region holds."""
    return _region(line.strip() for line in text.splitlines() if line.strip())[0]


def _region(lines: Iterator[str]) -> tuple[list[Block], str]:
    """The blocks up to the end of a region, and the line that ends it."""
    blocks: list[Block] = []
    for line in lines:
        if line.startswith("}"):
            return blocks, line
        if label := _LABEL.fullmatch(line):
            arguments = (argument.split(": ", 1) for argument in _split(label["arguments"]))
            blocks.append(Block(label["label"], dict(arguments)))
            continue
        blocks = blocks or [Block()]
        blocks[-1].insert(len(blocks[-1].operations), _operation(line, lines))
    return blocks, ""


def _operation(line: str, lines: Iterator[str]) -> Operation:
    head = _HEAD.match(line)
    regions, rest = [], line[head.end() :] if head else ""
    if rest == " ({":
        rest = "}, {"
        while rest == "}, {":
            blocks, rest = _region(lines)
            regions.append(blocks)
        rest = rest.removeprefix("})")
    tail = _TAIL.fullmatch(rest)
    if head is None or tail is None:
        raise ToolchainError(f"the compiler's IR has a line that is not of the generic form: {line}")
    results = [head["results"]] if head["results"] else []
    attributes = (each.partition(" = ") for each in _split(head["properties"]) + _split(tail["attributes"]))
    return Operation(
        head["name"],
        [f"{results[0]}#{i}" for i in range(int(head["count"]))] if head["count"] else results,
        _split(head["operands"]),
        _split(tail["operands"]),
        _split(tail["one"] or tail["many"]),
        {name: value for name, _, value in attributes},
        _split(head["successors"]),
        regions,
    )


def _split(text: str | None) -> list[str]:
    """The parts between commas that stand in no brackets."""
    if not text or not _BRACKET.search(text):
        return text.split(", ") if text else []
    parts: list[str] = []
    depth = 0
    for piece in text.split(", "):
        if depth:
            parts[-1] += f", {piece}"
        else:
            parts.append(piece)
        brackets = piece.replace("->", "")
        depth += sum(map(brackets.count, "<([{")) - sum(map(brackets.count, ">)]}"))
    return parts
