"""Tables of kernels' settings: made of what a search found, written, and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autotune.kernels.measured import MeasuredTask
from autotune.kernels.measured import source as source_of_measurements
from autotune.kernels.modelled import ModelledTask, version_of
from autotune.kernels.scope import Scope
from autotune.search import Found
from moe_triton import tables
from moe_triton.core.errors import ArgumentError
from moe_triton.core.space import text_of
from moe_triton.core.tables import Row, Table


def source_of(scope: Scope) -> str:
    """What a scope's settings come from, with its version."""
    return source_of_measurements() if scope.is_cpu else version_of(scope.priced_on())


def row_of(found: Found) -> Row | None:
    """A kernel's row; None if not even its own settings could be priced."""
    task, best, default = found.task, found.best, found.default
    assert isinstance(task, ModelledTask | MeasuredTask)
    if best is None or default is None:
        return None
    chosen, own = (max(1, round(float(each.outcome.facts.get("ns", 1)))) for each in (best, default))
    settings = {} if best is default else best.settings
    return Row(task.subject.keys, task.subject.sizes, (text_of(settings), chosen, own))


def table_of(scope: Scope, found: Sequence[Found]) -> Table:
    """The best settings of each kernel.

    Raises:
        ArgumentError: there is none.
    """
    rows = tuple(row for each in found if (row := row_of(each)))
    if not rows:
        remedy = "See why: moe-triton tune explain KERNEL."
        raise ArgumentError("kernels", len(found), "none of them could be priced", remedy)
    name = tables.name_of(scope.machine)
    return Table(name, tables.COMMAND, source_of(scope), tables.KEYS, tables.SIZES, tables.VALUES, rows)


def merged(new: Table, old: Table | None) -> Table:
    """A table with the rows of an older one that it does not have itself, if both are of one source."""
    if old is None or (old.name, old.source) != (new.name, new.source):
        return new
    known = {(row.keys, row.sizes) for row in new.rows}
    kept = [row for row in old.rows if (row.keys, row.sizes) not in known]
    return replace(new, rows=tuple(sorted((*new.rows, *kept), key=lambda row: (row.keys, row.sizes))))


def read(path: Path) -> Table | None:
    """A table of kernels' settings; None if there is no file.

    Raises:
        ArgumentError: it is damaged or of another kind.
    """
    return tables.checked_table(path) if path.is_file() else None


def write(table: Table, folder: Path) -> Path:
    """Writes a table where it is looked up, with the rows of the one there; a reader sees all or nothing.

    Raises:
        ArgumentError: the one there is damaged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{table.name}.json"
    draft = path.with_suffix(".new")
    draft.write_text(merged(table, read(path)).to_json(), encoding="utf-8")
    draft.replace(path)
    return path


def differences(one: Table, other: Table) -> list[str]:
    """Lines that tell what the second table has other than the first."""
    lines = []
    if one.source != other.source:
        lines.append(f"source: {one.source} -> {other.source}")
    before, after = ({(row.keys, row.sizes): row.values for row in table.rows} for table in (one, other))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            said = [_values(rows.get(key)) for rows in (before, after)]
            lines.append(f"{' '.join(key[0])} {_sizes(key[1])}: {said[0]} -> {said[1]}")
    return lines


def _sizes(sizes: Sequence[int]) -> str:
    return " ".join(f"{name}={size}" for name, size in zip(tables.SIZES, sizes, strict=True) if size > 1)


def _values(values: Sequence[int | str] | None) -> str:
    return f"{values[0]} ({values[1]} ns)" if values else "no row"
