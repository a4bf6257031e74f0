"""Rows of each rank, of the very ids of a step: as they are dispatched, and the least that there can be."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from benchmarks.balance.routing import Ints
from moe_triton.balance import Placement


def physical(placement: Placement, ids: Ints, mode: str) -> Ints:
    """Slots that entries go to, as ``dispatch(eplb_table=placement.table(0), eplb_mode=mode)`` maps them.

    Args:
        placement: of one layer.
        ids: (W, T, K) logical experts of the tokens of each rank.
        mode: "token": replica ``(t + rank + e) % count``. "rank": replica ``rank // ceil(W / count)``.

    Returns:
        (W, T, K) int64.
    """
    num_ranks, num_tokens, _ = ids.shape
    counts = placement.logcnt[0].numpy()[ids]
    if mode == "token":
        turn = np.arange(num_tokens)[None, :, None] + np.arange(num_ranks)[:, None, None] + ids
        replica = turn % counts
    else:
        replica = np.arange(num_ranks)[:, None, None] // -(-num_ranks // counts)
    slots: Ints = placement.log2phy[0].numpy()[ids, replica]
    return slots


def rows_of_ranks(placement: Placement, slots: Ints) -> Ints:
    """(W,) int64, rows that each rank receives."""
    ranks = slots.ravel() // placement.slots_per_rank
    return np.bincount(ranks, minlength=placement.num_ranks)


def skew_of(rows: Ints) -> float:
    """Rows of the busiest rank over the mean."""
    return float(rows.max() / rows.mean())


class Bounded(NamedTuple):
    """A step that MoonEP's plan balances as far as replica slots reach.

    Attributes:
        rows: (W,) int64, of each rank.
        copies: replicas whose weights have to be pushed before the step.
        most_copies: to one rank.
    """

    rows: Ints
    copies: int
    most_copies: int


def bounded(counts: Ints, num_ranks: int, num_slots: int) -> Bounded:
    """The busiest rank gives rows of its largest expert to the least busy rank with a slot, again and again.

    That is MoonEP's way (rows at home, and some replica slots on each rank, with a plan made anew for each
    step), with a plan of our own: each replica takes rows of one home, as many as its rank lacks of the mean.

    Args:
        counts: (E,) rows of each expert; E / W neighbours are at home on a rank.
        num_ranks: W.
        num_slots: of each rank, for replicas.
    """
    left = counts.astype(np.int64).reshape(num_ranks, -1).copy()  # at home
    rows = left.sum(axis=1)
    mean = -(-int(rows.sum()) // num_ranks)
    free = np.full(num_ranks, num_slots)
    while free.any():
        source = int(rows.argmax())
        target = int(np.where(free > 0, rows, np.iinfo(np.int64).max).argmin())
        expert = int(left[source].argmax())
        given = int(min(rows[source] - mean, mean - rows[target], left[source, expert]))
        if given <= 0:
            break
        left[source, expert] -= given
        rows[source] -= given
        rows[target] += given
        free[target] -= 1
    used = num_slots - free
    return Bounded(rows, int(used.sum()), int(used.max()))
