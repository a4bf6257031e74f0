"""Microseconds of a step of one layer on an A3: communication by the model, experts by a published figure.

A rank's experts take as long as reading the weights of all its slots from its memory, and then so much for
each row: what a published step leaves when dispatch, combine and weights are taken off. So replicas have
their price: more weights to read on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from autotune.model.clusters import cluster
from autotune.model.clusters.group import Group
from autotune.model.constants import machine_named
from autotune.model.kernel_costs.kernel_cost import kernel_cost_of
from autotune.model.kernel_costs.remembered import OfArguments
from benchmarks.balance.routing import Ints

MACHINE = machine_named("A3")
HIDDEN, INTERMEDIATE, TOPK = 7168, 2048, 8
EXPERT_BYTES = 3 * HIDDEN * INTERMEDIATE
"""Of an expert's three matrices as int8 (W8A8)."""

PUBLISHED_US = 1398.0
PUBLISHED_RANKS, PUBLISHED_TOKENS, PUBLISHED_EXPERTS = 16, 256, 256
PUBLISHED = (
    f"sgl-kernel-npu, pull request 400: dispatch, experts and combine take {PUBLISHED_US:.0f} us on A3, "
    f"EP {PUBLISHED_RANKS}, BS {PUBLISHED_TOKENS}, H {HIDDEN}, I {INTERMEDIATE}, K {TOPK}, "
    f"E {PUBLISHED_EXPERTS}, W8A8"
)
_FIRST = 1  # ranks that are walked, for each number that ranks differ in
_KERNEL_COSTS = OfArguments(kernel_cost_of)


@dataclass(frozen=True)
class Communication:
    """Dispatch of int8 rows and combine of bf16 ones, on the slowest rank.

    Attributes:
        dispatch_us, combine_us: what they take, by the model.
    """

    dispatch_us: float
    combine_us: float

    @property
    def us(self) -> float:
        """Both."""
        return self.dispatch_us + self.combine_us


def communication(slots: Ints, num_slots: int) -> Communication:
    """Both operators, where tokens go to these slots.

    Args:
        slots: (W, T, K), physical experts.
        num_slots: of all ranks.
    """
    ranks, tokens, topk = slots.shape
    group = Group(ranks, tokens, HIDDEN, topk, num_slots)
    ids = slots.astype(np.int32)
    walked = cluster.Load.of(group, ids, MACHINE).representatives(_FIRST)
    point = cluster.price(group, MACHINE, _KERNEL_COSTS, ids, walked)
    return Communication(point.operators["dispatch"].us, point.operators["combine"].us)


def even_slots(ranks: int, tokens: int, topk: int, num_slots: int) -> Ints:
    """(W, T, K) slots of which every rank, and each of its slots, gets as many rows as any."""
    entry = np.arange(tokens * topk)
    rank = (entry + np.arange(ranks)[:, None]) % ranks
    slot = rank * (num_slots // ranks) + entry // ranks % (num_slots // ranks)
    return slot.reshape(ranks, tokens, topk)


def weights_us() -> float:
    """What a rank takes to read the weights of one expert from its memory."""
    bytes_per_us = MACHINE.stream_bytes_per_cycle * MACHINE.cores * MACHINE.clock_ghz * 1e3
    return EXPERT_BYTES / bytes_per_us


@cache
def row_us() -> float:
    """What a row takes in a rank's experts, beside their weights: what is left of `PUBLISHED`."""
    ranks, tokens, experts = PUBLISHED_RANKS, PUBLISHED_TOKENS, PUBLISHED_EXPERTS
    both = communication(even_slots(ranks, tokens, TOPK, experts), experts).us
    return (PUBLISHED_US - both - experts // ranks * weights_us()) / (tokens * TOPK)


def experts_us(slots_per_rank: int, rows: float) -> float:
    """A rank's experts: their weights, and the rows that it has."""
    return slots_per_rank * weights_us() + rows * row_us()


def moves_us(most_copies: float) -> float:
    """Copies of experts' weights, of which the rank that receives most receives so many over its link."""
    return most_copies * EXPERT_BYTES / (MACHINE.remote_write_gb_per_s * 1e3)
