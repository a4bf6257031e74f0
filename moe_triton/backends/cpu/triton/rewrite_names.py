"""What edits ask of the printed text: which names mean the same, who uses them, where blocks end."""

from __future__ import annotations

import re


def unique_names(text: str) -> str:
    """Give every result a name of its own.

    ``--mlir-print-unique-ssa-ids`` does so for numbers; blocks beside each other, such as two branches, may
    still use one word each for a result of their own. Edits that follow a name would take them for the same.
    """
    results = re.compile(r"^(?P<indent> *)(?P<name>%[A-Za-z][\w-]*) = ", flags=re.M)
    seen: set[str] = set()
    repeated = []
    for match in results.finditer(text):
        if match["name"] in seen:
            repeated.append(match)
        seen.add(match["name"])
    for number, match in reversed(list(enumerate(repeated))):
        end = re.compile(rf"^ {{0,{len(match['indent']) - 1}}}[^ \n^]", flags=re.M).search(
            text, match.start("name")
        )
        assert end is not None
        block = re.sub(
            re.escape(match["name"]) + r"(?![\w-])",
            f"%again{number}_{match['name'][1:]}",
            text[match.start() : end.start()],
        )
        text = text[: match.start()] + block + text[end.start() :]
    return text


def uses(text: str, value: str) -> int:
    """How often a value is named, its definition included."""
    return len(re.findall(re.escape(value) + r"(?![\w-])", text))


def same_block(text: str, first: re.Match[str], second: re.Match[str]) -> bool:
    """Whether two operations, matched with their indent, stand in one block of the printed module."""
    indent = len(first["indent"])
    between = text[first.start() : second.start()].splitlines()
    return len(second["indent"]) == indent and all(
        len(line) - len(line.lstrip()) >= indent or line.lstrip().startswith("^") for line in between
    )
