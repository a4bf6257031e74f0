"""Whether a table still holds: its rows, priced again."""

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
from autotune.search import Task
from autotune.tuning import tasks_of
from moe_triton import tables
from moe_triton.core.errors import ArgumentError
from moe_triton.core.space import settings_of
from moe_triton.core.tables import Row, Table

SAME = 0.001
"""Of a modelled time: as near is the same, but for rounding."""
NOT_SLOWER = 1.03
"""Of a measured ratio: up to here the high end of its interval counts as no slower."""


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
    rows = [row for row in table.rows if not kernels or row.keys[0] in kernels]
    drawn = random.Random(seed).sample(rows, min(most or len(rows), len(rows)))
    for row in sorted(drawn, key=lambda row: (row.keys, row.sizes)):
        if why := _differs(row, table, of_table):
            yield f"{table.said(row)}: {why}"


def _differs(row: Row, table: Table, scope: Scope) -> str:
    try:
        task = _task_of(row, scope)
        settings = {**task.own, **settings_of(str(row.values[0]))}
        task.space.check(row.keys[0], settings)
    except ArgumentError as error:
        return str(error)
    if isinstance(task, ModelledTask) and (code := code_of(task.subject.kernel)) != table.code.get(
        row.keys[0]
    ):
        return f"code {table.code.get(row.keys[0], 'unknown')} -> {code}"
    outcome = task.evaluate(settings, None)
    if outcome.value is None:
        return f"{row.values[0]} cannot be had: {outcome.reason}"
    if isinstance(task, MeasuredTask):
        high = outcome.value
        return "" if high <= NOT_SLOWER else f"{row.values[0]} takes up to {high:.3f} times the default"
    ns = float(outcome.facts["ns"])
    return "" if abs(ns - int(row.values[1])) <= SAME * ns + 1 else f"{row.values[1]} -> {ns:.0f} ns"


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
        *named, dtype = task.subject.keys
        is_same = named == list(row.keys[:2]) and row.keys[2] in (dtype, tables.ANY_DTYPE)
        if is_same and task.subject.sizes == row.sizes:
            return task
    raise ArgumentError("row", " ".join(row.keys), "plans launch no such kernel", "Tune again.")
