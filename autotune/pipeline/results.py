"""Tables of schemes and of pipelines: made of results, and written row by row as they are found."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from autotune.kinds import kind_named
from autotune.pipeline.candidate import Candidate, Sizes
from autotune.pipeline.race import Result
from autotune.writing import writing
from moe_triton.core.space import text_of
from moe_triton.core.tables import Row, Table
from moe_triton.tables import pipelines, schemes

AND = " && "
"""Between the commands that make a table again."""


class Target(NamedTuple):
    """What tables are of, and where they go.

    Attributes:
        machine: see `moe_triton.tables.machine_of`.
        cores: that ranks share, or that each has.
        source: where figures come from.
        folder: of the tables.
        command: that makes them again.
    """

    machine: str
    cores: int
    source: str
    folder: Path
    command: str = pipelines.COMMAND


def scheme_rows(sizes: Sizes, results: Iterable[Result], better: Iterable[Result]) -> list[Row]:
    """A row for each place of outputs: the best of those that may leave outputs there.

    Args:
        sizes: of the group.
        results: of every scheme, the product's own first.
        better: those of them that are better than it.
    """
    default, *_ = results
    rows = []
    ordered = sorted(better, key=lambda each: each.ratio.median)
    for outputs in schemes.OUTPUTS:
        is_free = outputs == "window"
        fitting = (r for r in ordered if is_free or not sizes.lies_in_window(r.candidate.scheme, "rows"))
        best = next(fitting, default)
        ns = round(best.ratio.median * default.ns)  # not its own median: ratios are what was compared
        values = best.candidate.scheme, max(1, ns), max(1, default.ns)
        rows.append(Row((outputs,), (sizes.hidden, sizes.topk, sizes.ranks, sizes.tokens), values))
    return rows


def pipeline_row(target: Target, sizes: Sizes, best: Candidate, ns: int, default_ns: int) -> Row:
    """The row of a scheme's settings."""
    columns = pipelines.columns_of(sizes.config(best.scheme), target.cores)
    return Row((best.scheme,), columns, (text_of(best.settings), max(1, ns), max(1, default_ns)))


def kept(kind: str, target: Target) -> Table | None:
    """The table that is there, if it is of the same source.

    Raises:
        ArgumentError: it is damaged or of another kind.
    """
    path = path_of(kind, target)
    if not os.path.lexists(path):
        return None
    table = kind_named(kind).check(path)
    return table if table.source == target.source else None


def path_of(kind: str, target: Target) -> Path:
    """The file of a machine's table."""
    return target.folder / kind_named(kind).file(target.machine)


def drop_without_decision(target: Target, own: str) -> None:
    """Removes a table of schemes of which every row names the product's own scheme."""
    table = kept(schemes.KIND, target)
    if table is not None and all(row.values[0] == own for row in table.rows):
        path_of(schemes.KIND, target).unlink()


def write(kind: str, target: Target, rows: list[Row]) -> Path:
    """Adds rows to a table, in the place of those of the same keys and sizes; a reader sees all or nothing.

    Raises:
        ArgumentError: the one that is there is damaged or of another kind.
    """
    path = path_of(kind, target)
    with writing(path) as put:
        before = kept(kind, target)
        left = {(row.keys, row.sizes): row for row in (before.rows if before else ())}
        new = {(row.keys, row.sizes): row for row in rows}
        # A command makes what it has made; while rows of another one are left, it takes both.
        earlier = before.command.split(AND) if before and not left.keys() <= new.keys() else []
        command = AND.join(dict.fromkeys((*earlier, target.command)))
        all_rows = left | new
        module = schemes if kind == schemes.KIND else pipelines
        ordered = tuple(all_rows[key] for key in sorted(all_rows))
        columns = module.KEYS, module.SIZES, module.VALUES
        put(Table(path.stem, command, target.source, *columns, ordered).to_json())
    return path
