"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(headings: Iterable[str], rows: Iterable[Iterable[object]], right: Sequence[bool] = ()) -> str:
    """A table, without a line break at its end.

    Args:
        headings: of its columns.
        rows: their cells.
        right: of each column whether it stands to the right; none does if empty.
    """
    headings = tuple(headings)
    rule = tuple("---:" if to_right else "---" for to_right in right) or ("---",) * len(headings)
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in [headings, rule, *rows])


def cell(value: object) -> str:
    """Text that stays in one cell."""
    return str(value).replace("|", "\\|").replace("\n", " ")
