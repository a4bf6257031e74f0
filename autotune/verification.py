"""Whether a table still holds: its rows, priced again.

Tables of kernels are priced again by what priced them; of schemes what the model priced is. What was measured
between processes is not: that takes as long as tuning.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autotune import results
from autotune.kernels import occasions
from autotune.kernels.measured import MeasuredTask
from autotune.kernels.modelled import ModelledTask
from autotune.kernels.scope import Scope
from autotune.kernels.versions import code_of
from autotune.kinds import KERNELS, Kind
from autotune.model.constants import source_of
from autotune.pipeline.tune import priced_schemes, sizes_of
from autotune.search import Task
from autotune.tuning import tasks_of
from moe_triton import tables
from moe_triton.core.errors import ArgumentError
from moe_triton.core.space import settings_of
from moe_triton.core.tables import Row, Table
from moe_triton.tables import schemes

SAME = 0.001
"""The relative difference up to which two modelled times are the same, but for rounding."""
NOT_SLOWER = 1.03
"""The highest upper end of a measured ratio's interval that counts as no slower."""


def why_not(kind: Kind, table: Table) -> str:
    """Why a table of a kind cannot be verified; empty if it can."""
    if kind.name == KERNELS or (kind.name == schemes.KIND and not _is_of_cpu(table)):
        return ""
    if not _is_of_cpu(table):
        return "settings of ranks are priced by tune pipeline only"
    return "measured between processes, which takes as long as tuning: only tune pipeline runs that"


def _is_of_cpu(table: Table) -> bool:
    return table.name.partition("-")[2].startswith("cpu-")


def schemes_verified(table: Table, scope: Scope, most: int, seed: int) -> Iterator[str]:
    """Lines that tell what of a modelled table of schemes does not hold any more.

    Args:
        table: of the scope's machine.
        scope: the machine.
        most: rows that are priced again, drawn at random; 0 for all.
        seed: of the draw.
    """
    if (source := source_of(scope.priced_on())) != table.source:
        yield f"source: {table.source} -> {source}"
    for row in drawn(table.rows, most, seed):
        hidden, topk, ranks, tokens = row.sizes
        (sizes,) = sizes_of(scope.chip, [ranks], [hidden], [topk], [tokens])
        (now,) = (each for each in priced_schemes(sizes, scope.chip) if each.keys == row.keys)
        same = (_is_same(one, other) for one, other in zip(row.values[1:], now.values[1:], strict=True))
        if row.values[0] != now.values[0] or not all(same):
            before, after = (
                f"{scheme}, {ns} ns of {default}" for scheme, ns, default in (row.values, now.values)
            )
            yield f"{table.said(row)}: {before} -> {after}"


def drawn(rows: Sequence[Row], most: int, seed: int) -> list[Row]:
    """Rows that are priced again: as many as there may be, drawn at random; all if ``most`` is 0."""
    chosen = random.Random(seed).sample(rows, min(most or len(rows), len(rows)))
    return sorted(chosen, key=lambda row: (row.keys, row.sizes))


def _is_same(one: int | str, other: int | str) -> bool:
    return abs(int(one) - int(other)) <= SAME * int(other) + 1


def verified(table: Table, scope: Scope, kernels: Sequence[str], most: int, seed: int) -> Iterator[str]:
    """Lines that tell what does not hold any more.

    Args:
        table: of the scope's machine.
        scope: the machine. Sizes are the rows'; where a row is of all, the scope's, or those of shipped
            tables.
        kernels: only these; all if none.
        most: rows that are priced again, drawn at random; 0 for all.
        seed: of the draw.
    """
    source = results.source_of(scope)
    of_table = next(occasions.shipped(scope)) if results.ALL_SHIPPED in table.command else scope
    if source != table.source:
        yield f"source: {table.source} -> {source}"
    for row in drawn([row for row in table.rows if not kernels or row.keys[0] in kernels], most, seed):
        if why := _differs(row, table, of_table):
            yield f"{table.said(row)}: {why}"


def _differs(row: Row, table: Table, scope: Scope) -> str:
    try:
        task = _task_of(row, scope)
        settings = {**task.own, **settings_of(str(row.values[0]))}
        task.space.check(row.keys[0], settings)
    except ArgumentError as error:
        return str(error)
    kept = table.code.get(row.keys[0], "unknown")
    if isinstance(task, ModelledTask) and (code := code_of(task.tunable.kernel)) != kept:
        return f"code {kept} -> {code}"
    outcome = task.evaluate(settings, None)
    if outcome.value is None:
        return f"{row.values[0]} cannot be had: {outcome.reason}"
    if isinstance(task, MeasuredTask):
        high = outcome.value
        return "" if high <= NOT_SLOWER else f"{row.values[0]} takes up to {high:.3f} times the default"
    ns = round(float(outcome.facts["ns"]))
    return "" if _is_same(row.values[1], ns) else f"{row.values[1]} -> {ns} ns"


def _task_of(row: Row, scope: Scope) -> Task:
    """The task of a row.

    Raises:
        ArgumentError: plans of its sizes do not launch such a kernel.
    """
    hidden, topk, ranks, tokens = row.sizes
    asked = replace(
        scope,
        hidden=(hidden,) if hidden > 1 else scope.hidden,
        topk=(topk,) if topk > 1 else scope.topk,
        ranks=(ranks,),
        tokens=(tokens,),
        kernels=(row.keys[0],),
    )
    for task in tasks_of(asked):
        assert isinstance(task, ModelledTask | MeasuredTask)
        *named, dtype = task.tunable.keys
        is_same = named == list(row.keys[:2]) and row.keys[2] in (dtype, tables.ANY_DTYPE)
        if is_same and task.tunable.sizes == row.sizes:
            return task
    raise ArgumentError("row", " ".join(row.keys), "plans launch no such kernel", "Tune again.")
