"""How a placement of one layer gets better, change by change: the search behind `refine_placement`.

Loads are integers here (`Units`), so that sums have no order and every rank of a group finds the same. Of
two that are equal the one with the lower index is taken.

Symbols: E experts of the model, P slots, N ranks that hold routed experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moe_triton.balance.arguments import Ints
from moe_triton.balance.loads import most_senders, senders_of

UNIT_BITS = 40
"""The largest load of an expert in units: rounding is far below a row, and sums of 2**22 fit 64 bits."""

# What a change is worth by the copies that it costs, of -2 to 2 (at index 0 to 4): one that takes back an
# earlier one is free, and still no reason to make a change that gains nothing.
_DIVISORS = np.array([0.5, 0.5, 0.5, 1.0, 2.0])
_MOST_STEPS = 4  # for each slot: far more than are ever taken

# Found by trial, on loads by Zipf's law with exponents of 0.8 to 1.2, on 16 to 64 ranks: many small steps end
# where few ranks have room left, while experts with much to do lack replicas.
_WORTHWHILE = 1 / 4
"""A step relieves the most loaded rank of so much of what it has above the mean, for a copy; or replicas are
evened out first."""
_MOST_EVENED_OUT = 32
"""Steps of that kind in a layer: each may undo another kind's."""


class Units(NamedTuple):
    """Loads as integers.

    Attributes:
        loads: (L, E).
        exponent: a load of 1 is ``2**exponent`` units.
    """

    loads: Ints
    exponent: int

    @staticmethod
    def of(loads: npt.NDArray[np.float64]) -> Units:
        """The same scale for all layers, a power of two: counts of rows stay exact."""
        exponent = UNIT_BITS - int(np.frexp(loads.max())[1])
        return Units(np.rint(np.ldexp(loads, exponent)).astype(np.int64), exponent)


@dataclass(frozen=True)
class State:
    """A layer after some steps.

    Attributes:
        changes: slots and their new experts, of the last step; none in the first state.
        worst: load of the most loaded rank, in units.
        moved: how many copies of experts are on ranks that did not hold them in the old placement.
        received: how many of these one rank has at most.
    """

    changes: tuple[tuple[int, int], ...]
    worst: int
    moved: int
    received: int


class LayerSearch:
    """One layer: repairs first, then steps each of which relieves the most loaded rank.

    Where no step relieves it of much, the expert whose replicas have most to do gets one more, after which
    some may.

    Args:
        old: (P,), the expert in each slot.
        num_ranks: N.
        loads: (E,), in units.
        enough_skew: a layer is left alone once its most loaded rank has at most so much of the mean.
        senders: 0 where every rank's rows go to all replicas alike; otherwise how many ranks there are, each
            of which sends to one replica. Then the search goes by the most that a replica may get.

    Attributes:
        states: from the first placement, one for each step.
        num_repairs: how many of the steps took an expert off a rank that had it twice.
    """

    def __init__(self, old: Ints, num_ranks: int, loads: Ints, enough_skew: float, senders: int = 0) -> None:
        self._old = old
        self._slots = old.copy()
        self._ranks = np.arange(len(old)) // (len(old) // num_ranks)
        self._loads_of_experts = loads
        self._experts = np.arange(len(loads))
        self._senders = senders
        self._copies = np.zeros((len(loads), num_ranks), dtype=np.int64)
        np.add.at(self._copies, (old, self._ranks), 1)
        self._is_new = (self._copies == 0).astype(np.int64)  # what it costs to have an expert on a rank
        self._count = self._copies.sum(axis=1)
        self._share = self._share_of(self._experts, self._count)
        self._loads = np.zeros(num_ranks, dtype=np.int64)
        self._received = np.zeros(num_ranks, dtype=np.int64)
        self._add(self._experts, 1)
        # What each rank gets of each expert, where that is not simply its share.
        self._sent = np.stack([self._sent_of(expert) for expert in self._experts]) if senders else None
        self.states: list[State] = []
        self._note(())
        self._repair()
        self.num_repairs = len(self.states) - 1
        self._search(float(loads.sum()) / num_ranks, enough_skew)

    def slots_at(self, state: int) -> Ints:
        """(P,), the expert in each slot in one of the states."""
        slots: Ints = self._old.copy()
        for each in self.states[: state + 1]:
            for slot, expert in each.changes:
                slots[slot] = expert
        return slots

    def _search(self, mean: float, enough_skew: float) -> None:
        evened_out = 0
        for _ in range(_MOST_STEPS * len(self._slots)):
            if self.states[-1].worst <= enough_skew * mean:
                return
            if self._step((float(self._loads.max()) - mean) * _WORTHWHILE):
                continue
            if evened_out < _MOST_EVENED_OUT and self._even_out():
                evened_out += 1
            elif not self._step(0.0):
                return

    def _change(self, *changes: tuple[int, int]) -> None:
        """Puts experts into slots, and notes what that comes to."""
        touched = np.unique([expert for slot, new in changes for expert in (int(self._slots[slot]), new)])
        self._add(touched, -1)
        for slot, new in changes:
            rank = self._ranks[slot]
            self._copies[self._slots[slot], rank] -= 1
            self._copies[new, rank] += 1
            self._slots[slot] = new
        self._count[touched] = self._copies[touched].sum(axis=1)
        self._share[touched] = self._share_of(touched, self._count[touched])
        self._add(touched, 1)
        if self._sent is not None:
            self._sent[touched] = [self._sent_of(expert) for expert in touched]
        self._note(changes)

    def _note(self, changes: tuple[tuple[int, int], ...]) -> None:
        loads = self._loads if self._sent is None else self._sent.sum(axis=0)
        moved, received = self._received.sum(), self._received.max()
        self.states.append(State(changes, int(loads.max()), int(moved), int(received)))

    def _share_of(self, experts: int | Ints, counts: Ints) -> Ints:
        """The most that one of so many replicas gets."""
        loads = self._loads_of_experts[experts]
        if not self._senders:
            return loads // counts
        return loads * most_senders(counts, self._senders) // self._senders

    def _sent_of(self, expert: np.int64) -> Ints:
        """(N,), what each rank gets where each that sends has one replica; see `senders_of`."""
        slots = np.flatnonzero(self._slots == expert)
        rows = senders_of(np.arange(len(slots)), np.int64(len(slots)), self._senders)
        sent = np.zeros_like(self._loads)
        np.add.at(sent, self._ranks[slots], self._loads_of_experts[expert] * rows // self._senders)
        return sent

    def _add(self, experts: Ints, sign: int) -> None:
        copies = self._copies[experts]
        self._loads += sign * (copies * self._share[experts, None]).sum(axis=0)
        self._received += sign * ((copies > 0) * self._is_new[experts]).sum(axis=0)

    # Repairs.

    def _repair(self) -> None:
        """Gives slots whose rank holds their expert in a lower slot too to experts that the rank lacks."""
        size = len(self._slots) // self._copies.shape[1]
        for slot in range(len(self._slots)):
            first = slot - slot % size
            if self._slots[slot] in self._slots[first:slot]:
                self._change((slot, self._best_for(slot)))

    def _best_for(self, slot: int) -> int:
        """The expert with which the most loaded rank has least, and of these the one with most to share."""
        expert, rank = self._slots[slot], self._ranks[slot]
        less = self._copies[expert].copy()
        less[rank] -= 1
        share = self._share_of(expert, less.sum())
        before = self._loads - self._copies[expert] * self._share[expert] + less * share
        shares = self._share_of(self._experts, self._count + 1)
        loads = before - self._copies * (self._share - shares)[:, None]
        loads[:, rank] += shares
        worst = loads.max(axis=1)
        worst[self._copies[:, rank] > 0] = np.iinfo(np.int64).max
        best = np.flatnonzero(worst == worst.min())
        return int(best[self._share[best].argmax()])

    # Steps.

    def _step(self, least: float) -> bool:
        """The change that relieves the most loaded rank most for what it costs; False if none does."""
        rank = int(self._loads.argmax())
        own = np.flatnonzero(self._ranks == rank)
        replica, value = self._best_replica(own, rank)
        exchange, other = self._best_exchange(own, rank)
        if max(value, other) <= least:
            return False
        self._change(*(replica if value >= other else exchange))
        return True

    def _even_out(self) -> bool:
        """One replica more of the expert whose replicas have most to do, in the place of one whose expert's
        others have less to do without it; False if there is no such pair.
        """
        fewer = self._share_of(self._experts, np.maximum(self._count - 1, 1))
        after_loss = np.where(self._count > 1, fewer, -1)
        for expert in np.argsort(-self._share, kind="stable"):
            lacks = self._copies[expert, self._ranks] == 0
            fit = lacks & (after_loss[self._slots] >= 0) & (after_loss[self._slots] < self._share[expert])
            if fit.any():
                break
        else:
            return False
        least = after_loss[self._slots][fit].min()
        slots = np.flatnonzero(fit & (after_loss[self._slots] == least))
        loads = self._loads[self._ranks[slots]] - self._share[self._slots[slots]]
        self._change((int(slots[loads.argmin()]), int(expert)))
        return True

    def _best_exchange(self, own: Ints, rank: int) -> tuple[tuple[tuple[int, int], ...], float]:
        """One of the rank's experts for one of another rank: the change, and what it is worth."""
        experts, others, ranks = self._slots[own], self._slots, self._ranks
        less = self._share[experts][:, None] - self._share[others]
        relief = np.minimum(less, (self._loads[rank] - self._loads)[ranks] - less)
        relief[self._copies[experts][:, ranks] > 0] = 0
        relief[:, self._copies[others, rank] > 0] = 0
        given = self._is_new[experts][:, ranks] - self._is_new[experts, rank][:, None]
        taken = self._is_new[others, rank] - self._is_new[others, ranks]
        (i, j), value = _best(relief, given + taken)
        return ((int(own[i]), int(others[j])), (j, int(experts[i]))), value

    def _best_replica(self, own: Ints, rank: int) -> tuple[tuple[tuple[int, int], ...], float]:
        """One of the rank's experts in the place of another's replica: the change, and what it is worth.

        What others gain that hold the first one as well is not counted.
        """
        slots = np.flatnonzero((self._count[self._slots] > 1) & (self._ranks != rank))
        if not len(slots):
            return (), 0.0
        experts, others, ranks = self._slots[own], self._slots[slots], self._ranks[slots]
        shares = self._share_of(experts, self._count[experts] + 1)
        more = self._share_of(others, self._count[others] - 1) - self._share[others]
        # Ranks that keep a replica of the one that loses one: its load goes to them.
        keep = self._copies[others] > 0
        takes_part = keep[:, rank].copy()
        keep[np.arange(len(slots)), ranks] = keep[:, rank] = False
        elsewhere = np.where(keep, self._loads + more[:, None], 0).max(axis=1)
        here = self._loads[rank] - (self._share[experts] - shares)[:, None] + more * takes_part
        there = (self._loads[ranks] - self._share[others]) + shares[:, None]
        relief = self._loads[rank] - np.maximum(np.maximum(here, there), elsewhere)
        relief[self._copies[experts][:, ranks] > 0] = 0
        cost = self._is_new[experts][:, ranks] - self._is_new[others, ranks]
        (i, j), value = _best(relief, cost)
        return ((int(slots[j]), int(experts[i])),), value


def _best(relief: Ints, cost: Ints) -> tuple[tuple[int, int], float]:
    """Where relief for its cost is most, and how much that is."""
    values = relief / _DIVISORS[cost + 2]
    place = int(values.argmax())
    i, j = divmod(place, values.shape[1])
    return (i, j), float(values[i, j])
