"""Tables of kernels' settings: made of what a search found, written, and compared."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from autotune.kernels.measured import MeasuredTask
from autotune.kernels.measured import source as source_of_measurements
from autotune.kernels.modelled import ModelledTask
from autotune.kernels.npu import device_of
from autotune.kernels.scope import Scope
from autotune.kernels.versions import code_of, version_of
from autotune.search import Found
from autotune.writing import writing
from moe_triton import tables
from moe_triton.core.errors import ArgumentError
from moe_triton.core.space import text_of
from moe_triton.core.tables import Row, Table

_ANY = "hidden", "topk"  # sizes that are 1 where a row is of all
ALL_SHIPPED = "--all-shipped"
"""In the command of a table: rows of code that does not depend on K are of all K of `occasions.shipped`."""


def source_of(scope: Scope) -> str:
    """What a scope's settings come from, with its version.

    Raises:
        ArgumentError: see `autotune.kernels.npu.device_of`.
    """
    if scope.is_cpu:
        return source_of_measurements()
    return device_of(scope.chip).source if scope.measure else version_of(scope.priced_on())


def row_of(search: Found) -> Row | None:
    """A kernel's row; None if not even its own settings could be priced."""
    task, best, default = search.task, search.best, search.default
    assert isinstance(task, ModelledTask | MeasuredTask)
    if best is None or default is None:
        return None
    facts = best.outcome.facts
    # what was measured beside it: the default by itself ran at another time
    beside = facts.get("default_ns", default.outcome.facts.get("ns", 1))
    chosen, own = (max(1, round(float(ns))) for ns in (facts.get("ns", 1), beside))
    settings = {} if best is default else best.settings
    return Row(task.tunable.keys, task.tunable.sizes, (text_of(settings), chosen, own))


def table_of(scope: Scope, searches: Sequence[Found]) -> Table:
    """The best settings of each kernel.

    Raises:
        ArgumentError: there is none.
    """
    rows = tuple(folded(row for each in searches if (row := row_of(each))))
    if not rows:
        remedy = "See why: moe-triton tune explain KERNEL."
        raise ArgumentError("kernels", len(searches), "none of them could be priced", remedy)
    name, columns = tables.name_of(scope.machine), (tables.KEYS, tables.SIZES, tables.VALUES)
    return Table(name, tables.COMMAND, source_of(scope), *columns, rows, codes_of(searches))


def codes_of(searches: Iterable[Found]) -> dict[str, str]:
    """Digests of the code of modelled kernels, by their names."""
    kernels = (each.task.tunable.kernel for each in searches if isinstance(each.task, ModelledTask))
    return {kernel.name: code_of(kernel) for kernel in sorted(kernels, key=lambda kernel: kernel.name)}


def folded(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows, those of all dtypes as one where their values are the same."""
    groups: dict[tuple[str, str, tuple[int, ...]], list[Row]] = {}
    for row in rows:
        kernel, variant, _ = row.keys
        groups.setdefault((kernel, variant, row.sizes), []).append(row)
    for (kernel, variant, _), same in sorted(groups.items()):
        if len(same) > 1 and len({row.values for row in same}) == 1:
            yield replace(same[0], keys=(kernel, variant, tables.ANY_DTYPE))
        else:
            yield from same


def merged(new: Table, old: Table | None) -> Table:
    """A table with the rows of an older one that it does not have itself, if both are of one source.

    Rows of kernels whose code has changed since are left out.
    """
    if old is None or (old.name, old.source) != (new.name, new.source):
        return new
    code = {**old.code, **new.code}
    known = {(row.keys, row.sizes) for row in new.rows}
    any_dtype = {(row.keys[:2], row.sizes) for row in new.rows if row.keys[2] == tables.ANY_DTYPE}
    kept = [
        row
        for row in old.rows
        if (row.keys, row.sizes) not in known
        and (row.keys[:2], row.sizes) not in any_dtype
        and old.code.get(row.keys[0]) == code.get(row.keys[0])
    ]
    rows = tuple(sorted((*new.rows, *kept), key=lambda row: (row.keys, row.sizes)))
    return replace(new, rows=rows, code=dict(sorted(code.items())))


def write(table: Table, folder: Path) -> Path:
    """Writes a table where it is looked up, with the rows of the one there.

    A reader sees all or nothing, and of processes that write at the same time none loses the other's rows.

    Raises:
        ArgumentError: the one there is damaged.
    """
    path = folder / f"{table.name}.json"
    with writing(path) as put:
        there = tables.checked_table(path) if os.path.lexists(path) else None
        put(merged(table, there).to_json())
    return path


def differences(one: Table, other: Table) -> list[str]:
    """Lines that tell what the second table has other than the first.

    Raises:
        ArgumentError: they have other columns.
    """
    if (one.keys, one.sizes, one.values) != (other.keys, other.sizes, other.values):
        rule = f"it must be of the kind of {one.name}: only then are there rows to compare"
        raise ArgumentError("other table", other.name, rule, "Name two tables of one kind.")
    lines = []
    if one.source != other.source:
        lines.append(f"source: {one.source} -> {other.source}")
    for kernel in sorted(one.code.keys() & other.code.keys()):
        if one.code[kernel] != other.code[kernel]:
            lines.append(f"code of {kernel}: {one.code[kernel]} -> {other.code[kernel]}")
    before, after = ({(row.keys, row.sizes): row.values for row in table.rows} for table in (one, other))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            said = [_values(rows.get(key)) for rows in (before, after)]
            lines.append(f"{_named(one, *key)}: {said[0]} -> {said[1]}")
    return lines


def is_of_all(table: Table, column: str, size: int | None) -> bool:
    """Whether a row with this size is of all sizes: its kernel's code does not depend on them."""
    return table.keys == tables.KEYS and column in _ANY and size == 1


def _named(table: Table, keys: Sequence[str], sizes: Sequence[int]) -> str:
    pairs = zip(table.sizes, sizes, strict=True)
    return " ".join([*keys, *(f"{name}={size}" for name, size in pairs if not is_of_all(table, name, size))])


def _values(values: Sequence[int | str] | None) -> str:
    return f"{values[0]} ({values[1]} ns)" if values else "no row"
