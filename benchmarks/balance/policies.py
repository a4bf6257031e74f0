"""Policies: which placement there is at each step of a day, and what has moved for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.balance.routing import Day, Ints
from moe_triton.balance import Placement, rebalance_experts, refine_placement

NONE, INITIAL, REBALANCE, REFINE, ORACLE = "none", "initial", "rebalance", "refine", "known loads"
BOUNDED, PERFECT = "MoonEP, its slots", "MoonEP, perfect"
PERIODIC = REBALANCE, REFINE
SPARE = 1.25
"""Slots of all ranks over experts, at least."""


def num_slots(experts: int, ranks: int) -> int:
    """R: a quarter more than there are experts, and then the next multiple of the ranks."""
    return -(-round(SPARE * experts) // ranks) * ranks


def rebalanced(weight: Ints, slots: int, ranks: int) -> Placement:
    """By `rebalance_experts`, of one server.

    Args:
        weight: (E,) loads.
        slots: R.
        ranks: W.
    """
    made = rebalance_experts(weight[None], slots, 1, 1, ranks)
    return Placement(made.phy2log, len(weight), ranks)


def copies(old: Placement, new: Placement) -> Ints:
    """(W,) int64, experts that each rank has to receive since it did not hold them."""
    held = [each.phy2log[0].numpy().reshape(each.num_ranks, -1) for each in (old, new)]
    return np.array([len(set(after) - set(before)) for before, after in zip(*held, strict=True)])


@dataclass(frozen=True)
class Moved:
    """What a change of placement copies.

    Attributes:
        copies: of an expert's weights, to all ranks.
        most: to one rank.
    """

    copies: int
    most: int


class Periodic:
    """A placement that is made anew every period, from the loads of the period before.

    It is asked for steps in ascending order. The one of step 0 is made by `rebalance_experts` of what was
    counted before the day, whatever the policy; changes are counted from there on.

    Args:
        policy: one of `PERIODIC`. "refine" copies one expert a rank at most, on average.
        day: what tokens want.
        period: steps, from one change to the next.
        ranks: W.
        tokens: T.

    Attributes:
        moved: each change that was looked at.
    """

    def __init__(self, policy: str, day: Day, period: int, ranks: int, tokens: int) -> None:
        self._policy, self._day, self._period, self._ranks, self._tokens = policy, day, period, ranks, tokens
        self._slots = num_slots(day.experts, ranks)
        self._number = 0
        self._placement = self._anew(0)
        self.moved: list[Moved] = []

    def at(self, step: int) -> Placement:
        """The placement that is in use at a step."""
        number = step // self._period
        if self._policy == REBALANCE and number > self._number + 1:
            # Those between were made from loads alone: only the last change before this one is looked at.
            self._number, self._placement = number - 1, self._anew(number - 1)
        while self._number < number:
            self._number += 1
            new = self._next(self._number)
            received = copies(self._placement, new)
            self.moved.append(Moved(int(received.sum()), int(received.max())))
            self._placement = new
        return self._placement

    def _counted(self, number: int) -> Ints:
        return self._day.counted(number * self._period, self._period, self._ranks * self._tokens)

    def _anew(self, number: int) -> Placement:
        return rebalanced(self._counted(number), self._slots, self._ranks)

    def _next(self, number: int) -> Placement:
        if self._policy == REBALANCE:
            return self._anew(number)
        weight = self._counted(number)[None]
        return refine_placement(self._placement, weight, max_moved_bytes=self._ranks).placement


def fixed(policy: str, day: Day, ranks: int) -> Placement:
    """A placement that stays all day: without replicas, or as vLLM and sglang begin."""
    slots = day.experts if policy == NONE else num_slots(day.experts, ranks)
    return Placement.initial(1, day.experts, slots, ranks)


def known(counts: Ints, ranks: int, mode: str) -> Placement:
    """The placement for the loads of a step, by who chooses replicas.

    Args:
        counts: (E,) rows of each expert.
        ranks: W.
        mode: "token", or "rank", for which `refine_placement` goes on from `rebalance_experts`.
    """
    made = rebalanced(counts, num_slots(len(counts), ranks), ranks)
    return made if mode == "token" else refine_placement(made, counts[None], mode=mode).placement
