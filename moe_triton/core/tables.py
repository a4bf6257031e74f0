"""`Table`: settings that somebody measured or priced for some sizes, in a file that a command writes.

A row has keys, which a lookup must equal; sizes, of which it takes the nearest; and the settings.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError
from moe_triton.core.plain_files import read_text
from moe_triton.core.space import MOST

FORMAT, VERSION = "moe_triton.table", 1


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        keys: what it is for.
        sizes: for which sizes, each at least 1.
        values: the settings: texts, or integers from 1 on.
    """

    keys: tuple[str, ...]
    sizes: tuple[int, ...]
    values: tuple[int | str, ...]


@dataclass(frozen=True)
class Table:
    """Settings by keys and sizes.

    Attributes:
        name: of the table.
        command: that writes it.
        source: what its settings come from, with its version.
        keys, sizes, values: names of the columns.
        rows: its lines, no two of the same keys and sizes.
        code: digests of the code that rows are of, by their first key; empty where `source` says all.
    """

    name: str
    command: str
    source: str
    keys: tuple[str, ...]
    sizes: tuple[str, ...]
    values: tuple[str, ...]
    rows: tuple[Row, ...]
    code: Mapping[str, str] = field(default_factory=dict)

    def nearest(self, keys: Sequence[str], sizes: Sequence[int], *others: Sequence[str]) -> Row | None:
        """The row with these keys whose sizes are nearest; None if no row has them.

        Sizes are compared by their ratio, the first ones first; of two as near, the smaller, and the one with
        the first keys.

        Args:
            keys: one for each of `keys`.
            sizes: one for each of `sizes`, at least 1.
            others: keys that do as well.
        """
        wanted = [tuple(each) for each in (keys, *others)]

        def distance(row: Row) -> tuple[list[float], tuple[int, ...], int]:
            ratios = [max(a / b, b / a) for a, b in zip(row.sizes, sizes, strict=True)]
            return ratios, row.sizes, wanted.index(row.keys)

        return min((row for row in self.rows if row.keys in wanted), key=distance, default=None)

    def said(self, row: Row) -> str:
        """Where a row stands, for people."""
        names = zip((*self.keys, *self.sizes), (*row.keys, *row.sizes), strict=True)
        return f"table {self.name}, row of {', '.join(f'{name} {value}' for name, value in names)}"

    def to_json(self) -> str:
        """The table as a file: a row a line, for those who compare two of them."""
        head = {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "command": self.command,
            "source": self.source,
            **({"code": dict(self.code)} if self.code else {}),
            "keys": self.keys,
            "sizes": self.sizes,
            "values": self.values,
        }
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
        rows = ",\n".join(f"    {json.dumps([*row.keys, *row.sizes, *row.values])}" for row in self.rows)
        return "\n".join(["{", *lines, '  "rows": [', rows, "  ]", "}", ""])

    @staticmethod
    def from_json(text: str, name: str) -> Table:
        """The table that `to_json` wrote.

        Raises:
            ValueError: it is none of this name, or has lost something.
        """
        document = json.loads(text)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f'its "format" must be "{FORMAT}"')
        for key, expected in (("version", VERSION), ("name", name)):
            if document.get(key) != expected:
                raise ValueError(f'its "{key}" must be {expected!r}, not {reprlib.repr(document.get(key))}')
        try:
            keys, sizes, values = (_texts(document[key]) for key in ("keys", "sizes", "values"))
            command, source = _texts([document["command"], document["source"]])
            code = document.get("code", {})
            _texts([text for pair in code.items() for text in pair])
            ends = len(keys), len(keys) + len(sizes), len(keys) + len(sizes) + len(values)
            rows = tuple(_row(cells, ends) for cells in document["rows"])
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"it must be complete ({type(error).__name__}: {error})") from None
        if not rows or len({(row.keys, row.sizes) for row in rows}) < len(rows):
            raise ValueError("it must have rows, each of other keys and sizes")
        return Table(name, command, source, keys, sizes, values, rows, code)


def _texts(given: Any) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(map(_is_text, given)):
        raise TypeError(f"{reprlib.repr(given)} must be texts that can be printed")
    return tuple(given)


def _row(cells: Any, ends: tuple[int, int, int]) -> Row:
    if not isinstance(cells, list) or len(cells) != ends[2]:
        raise TypeError(f"row {reprlib.repr(cells)} must have {ends[2]} cells")
    sizes, values = cells[ends[0] : ends[1]], cells[ends[1] :]
    if not all(_is_number(cell) for cell in sizes):
        raise TypeError(f"row {reprlib.repr(cells)} must have integers from 1 on, up to {MOST}")
    if not all(_is_number(cell) or _is_text(cell) for cell in values):
        raise TypeError(f"row {reprlib.repr(cells)} must have integers from 1 on, up to {MOST}, or texts")
    return Row(_texts(cells[: ends[0]]), tuple(cells[ends[0] : ends[1]]), tuple(cells[ends[1] :]))


def _is_text(cell: Any) -> bool:
    return isinstance(cell, str) and cell != "" and cell.isprintable()


def _is_number(cell: Any) -> bool:
    return type(cell) is int and 1 <= cell <= MOST


def load_table(path: Path, command: str) -> Table:
    """The table in a file, named like it.

    Args:
        path: of the file.
        command: that writes it, for the error.

    Raises:
        ArgumentError: there is none, or it is damaged or of another kind.
    """
    try:
        return Table.from_json(read_text(path), path.stem)
    except OSError as error:
        raise damaged(path, command, error.strerror or str(error)) from None
    except ValueError as error:
        raise damaged(path, command, str(error)) from None
    except RecursionError:  # of the parser: brackets in brackets
        raise damaged(path, command, "it is nested too deeply") from None


def damaged(path: Path, command: str, why: str) -> ArgumentError:
    """The error of a table that cannot be used.

    Args:
        path: of the file.
        command: that writes it.
        why: what is wrong.
    """
    remedy = f"Install moe_triton again, or write the table again: {command}."
    rule = f"it must be a table that can be read ({why})"
    return ArgumentError(f"table {path.stem}", path, rule, remedy, code=INVALID_ARGUMENT)
