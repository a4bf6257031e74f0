"""``moe-triton tune show``: the tables of a machine, and the rows that one asks for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from autotune import kinds, results
from autotune.cli import options
from autotune.cli.options import again
from autotune.kernels.scope import Scope
from moe_triton import tables
from moe_triton.core.errors import ArgumentError
from moe_triton.core.tables import Row, Table
from moe_triton.tools.text_table import Column, TextTable, names, numbers, print_parts, texts

ALL = "--all"
NANOSECONDS = {"ns": "us", "default_ns": "default us"}
"""Columns that are shown in microseconds."""
SHOWN_SIZES = "hidden", "topk", "ranks", "tokens"
ROWS_HELP = "all rows, of all tables"


@dataclass(frozen=True)
class Asked:
    """Which rows.

    Attributes:
        keys: by the name of a column of names, any of these; a row of any dtype is of each.
        sizes: by the name of a size, any of these; a row of all sizes is of each.
    """

    keys: Mapping[str, Collection[str]]
    sizes: Mapping[str, Collection[int]]

    def has(self, table: Table, row: Row) -> bool:
        """Whether a row is asked for."""
        keys = dict(zip(table.keys, row.keys, strict=True))
        sizes = dict(zip(table.sizes, row.sizes, strict=True))
        has_keys = all(
            keys.get(column) in wanted or (column, keys.get(column)) == ("dtype", tables.ANY_DTYPE)
            for column, wanted in self.keys.items()
        )
        return has_keys and all(
            sizes.get(column) in wanted or results.is_of_all(table, column, sizes.get(column))
            for column, wanted in self.sizes.items()
        )


def show(
    soc: options.Soc = "A3",
    kernel: options.Kernel = [],
    hidden: options.Hidden = [],
    topk: options.Topk = [],
    ranks: options.Ranks = [],
    tokens: options.Tokens = [],
    dtype: options.Dtype = [],
    everything: Annotated[bool, typer.Option(ALL, help=ROWS_HELP)] = False,
) -> None:
    """Print the tables that buffers on a machine go by, those first that win; or the rows that are named."""
    keys = {"kernel": kernel, "dtype": dtype}
    sizes = dict(zip(SHOWN_SIZES, (hidden, topk, ranks, tokens), strict=True))
    asked = Asked(
        {column: wanted for column, wanted in keys.items() if wanted},
        {column: wanted for column, wanted in sizes.items() if wanted},
    )
    scope = Scope(soc)
    shown = [kind for kind in kinds.KINDS if kind.name == kinds.KERNELS or not asked.keys]
    tables_by_kind = {kind: kind.used(scope.machine) for kind in shown}
    if not any(tables_by_kind.values()):
        places = ", ".join(str(kind.shipped(scope.machine)) for kind in shown)
        rule = f"of {scope.machine} there is one in the user's folder, or {places}"
        raise ArgumentError("tables", "none", rule, f"Write one: {again(shown[0], scope)}.")
    if asked.keys or asked.sizes or everything:
        print_parts(_rows(tables_by_kind, asked), Console())
    else:
        print_parts(_summary(tables_by_kind, scope), Console())


def _summary(
    tables_by_kind: Mapping[kinds.Kind, Mapping[Path, Table]], scope: Scope
) -> Iterator[TextTable | str]:
    """What tables there are, and how to see their rows."""
    columns = names("table"), numbers("rows"), texts("of"), texts("sizes"), texts("source"), texts("written")
    lines = [
        (table.name, len(table.rows), _tunables(table), _ranges(table), table.source, _written(path))
        for of_kind in tables_by_kind.values()
        for path, table in of_kind.items()
    ]
    yield TextTable(columns, lines, f"Tables of {scope.machine}, those first that win")
    for kind, of_kind in tables_by_kind.items():
        if not of_kind:
            yield f"no table of {kind.name} for {scope.machine}; what writes one: {again(kind, scope)}"
    some = "--kernel, --dtype, " + ", ".join(f"--{name}" for name in SHOWN_SIZES)
    yield f"Rows, with their times: {some}, or {ALL}."


def _tunables(table: Table) -> str:
    """What its rows are of: the values of its first column."""
    return f"{table.keys[0]}: {', '.join(dict.fromkeys(row.keys[0] for row in table.rows))}"


def _ranges(table: Table) -> str:
    """The sizes of its rows: "hidden 2048 to 8192, ranks 16"."""
    said = []
    for column, values in zip(table.sizes, zip(*(row.sizes for row in table.rows), strict=True), strict=True):
        if of := {value for value in values if not results.is_of_all(table, column, value)}:
            low, high = min(of), max(of)
            said.append(f"{column} {low}" if low == high else f"{column} {low} to {high}")
    return ", ".join(said)


def _written(path: Path) -> str:
    """When a table was written, and where it lies."""
    if path.parent == tables.FOLDER:
        return "comes with moe_triton"
    return f"{datetime.fromtimestamp(path.stat().st_mtime):%Y-%m-%d %H:%M}, in {path.parent}"


def _rows(
    tables_by_kind: Mapping[kinds.Kind, Mapping[Path, Table]], asked: Asked
) -> Iterator[TextTable | str]:
    """The rows that are asked for, a table for each file.

    Raises:
        ArgumentError: there is none.
    """
    every = [(path, table) for of_kind in tables_by_kind.values() for path, table in of_kind.items()]
    chosen = [
        (path, replace(table, rows=tuple(row for row in table.rows if asked.has(table, row))))
        for path, table in every
    ]
    if not any(table.rows for _, table in chosen):
        raise _none_of(asked, [table for _, table in every])
    for path, table in chosen:
        if table.rows:
            yield f"{path}\n{table.source}"
            yield _table_of(table)


def _none_of(asked: Asked, every: Sequence[Table]) -> ArgumentError:
    """The error of rows that are in no table, about the first option that no row fits."""
    for column, wanted in (*asked.keys.items(), *asked.sizes.items()):
        known = sorted({value for table in every for value in _values(table, column)})
        if not any(value in known for value in wanted):
            rule = f"the tables have {', '.join(map(str, known))}"
            return ArgumentError(column, ", ".join(map(str, wanted)), rule, "Name one of them.")
    given = {**asked.keys, **asked.sizes}
    said = ", ".join(f"{column} {each}" for column, wanted in given.items() for each in wanted)
    return ArgumentError("options", said, "no row is of all of them", "Leave one out.")


def _values(table: Table, column: str) -> Iterable[int | str]:
    for columns, of in ((table.keys, "keys"), (table.sizes, "sizes")):
        if column in columns:
            place = columns.index(column)
            return {getattr(row, of)[place] for row in table.rows}
    return ()


def _table_of(table: Table) -> TextTable:
    """The rows of one file: times in microseconds, and "any" for sizes that do not matter."""
    columns = (*map(names, table.keys), *map(numbers, table.sizes), *map(_value_column, table.values))
    return TextTable(columns, [tuple(_cells(table, row)) for row in table.rows])


def _value_column(heading: str) -> Column:
    if heading in NANOSECONDS:
        return numbers(NANOSECONDS[heading], spare=int(heading != "ns"))
    return texts(heading) if heading == "settings" else names(heading)


def _cells(table: Table, row: Row) -> Iterator[object]:
    yield from row.keys
    for column, size in zip(table.sizes, row.sizes, strict=True):
        yield "any" if results.is_of_all(table, column, size) else size
    for column, value in zip(table.values, row.values, strict=True):
        yield f"{int(value) / 1e3:.2f}" if column in NANOSECONDS else value
