"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable


def table(headings: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table, without a line break at its end."""
    headings = tuple(headings)
    lines = [headings, ("---",) * len(headings), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)


def cell(value: object) -> str:
    """Text that stays in one cell."""
    return str(value).replace("|", "\\|").replace("\n", " ")
