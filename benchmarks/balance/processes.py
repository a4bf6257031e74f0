"""Dispatch, experts and combine on this machine, ranks as processes, with and without replicas.

Experts are three matrix products and SwiGLU in fp32, large enough to take most of a step. Ids are skewed: the
experts of the first rank are the most popular. Three variants run in every round, in random order: without
replicas; with them, by ``eplb_table`` of a placement for these loads; and rows that are dealt evenly without
replicas, which is the most that balance can bring. A time is the last rank out minus the first rank in.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from benchmarks import harness
from benchmarks.balance.costs import even_slots
from benchmarks.balance.loads import physical, rows_of_ranks, skew_of
from benchmarks.balance.policies import NONE, fixed, num_slots, rebalanced
from benchmarks.balance.routing import Day, Ints
from moe_triton import EPBuffer
from moe_triton.balance import Placement
from moe_triton.processes import RankGroup
from moe_triton.starting_line import StartingLine

REPLICAS, EVEN = "replicas", "even rows"
VARIANTS = NONE, REPLICAS, EVEN
WARM_UP = 2
TOLERANCE = 2e-2  # of sums of bf16 rows whose products were added in another order, against their largest


@dataclass(frozen=True)
class Setting:
    """What runs.

    Attributes:
        ranks: W.
        tokens: T.
        experts, topk: E and K.
        hidden, intermediate: sizes of an expert's matrices: two of (H, I), one of (I, H).
        skew: most rows over mean without replicas, about.
        rounds: that are timed.
    """

    ranks: int = 2
    tokens: int = 512
    experts: int = 8
    topk: int = 4
    hidden: int = 1024
    intermediate: int = 1024
    skew: float = 1.6
    rounds: int = 12

    @property
    def flops_per_row(self) -> int:
        """Operations of an expert for one row."""
        return 6 * self.hidden * self.intermediate


@dataclass(frozen=True)
class Measured:
    """What the ranks of a setting took.

    Attributes:
        setting: which.
        rows: (W,) of each rank, by variant.
        seconds: of each round, by variant: last rank out minus first rank in.
        experts_core_s: of each round, by variant: what experts took of the core, on the rank with most.
        share_of_experts: of the busiest rank's time in a step, without replicas.
        is_shared: whether ranks waited for a core in most rounds, which others or the other ranks had.
    """

    setting: Setting
    rows: dict[str, list[int]]
    seconds: dict[str, list[float]]
    experts_core_s: dict[str, list[float]]
    share_of_experts: float
    is_shared: bool

    def skew(self, variant: str) -> float:
        """Most rows over mean."""
        return skew_of(np.array(self.rows[variant]))

    def figures(self, variant: str) -> dict[str, float]:
        """Milliseconds, and how many times as long a step takes without replicas."""
        figures = {"ms": 1e3 * statistics.median(self.seconds[variant]), "skew": self.skew(variant)}
        for metric, of in (("speed_up", self.seconds), ("experts_speed_up", self.experts_core_s)):
            ratios = [a / b for a, b in zip(of[NONE], of[variant], strict=True)]
            figures |= harness.with_interval(metric, ratios)
        return figures


def skewed_ids(setting: Setting) -> Ints:
    """(W, T, K) distinct experts of each token, whose rows have about the wanted skew without replicas.

    Popularity falls with the expert's number by Zipf's law, whose exponent is sought.
    """
    low, high = 0.0, 8.0
    base = Day(steps=1, experts=setting.experts, topk=setting.topk, travel=0.0, bursts=(), exponent=0.0)
    placement = fixed(NONE, base, setting.ranks)
    ids = _in_order(base, setting)
    for _ in range(20):
        middle = (low + high) / 2
        ids = _in_order(replace(base, exponent=middle), setting)
        rows = rows_of_ranks(placement, physical(placement, ids, "token"))
        low, high = (middle, high) if skew_of(rows) < setting.skew else (low, middle)
    return ids


def _in_order(day: Day, setting: Setting) -> Ints:
    """Draws, with experts numbered from the most popular one on."""
    ids = day.draw(0, setting.ranks, setting.tokens)
    number = np.empty(day.experts, dtype=np.int64)
    number[np.argsort(-day.popularity(0), kind="stable")] = np.arange(day.experts)
    return number[ids]


def placement_for(setting: Setting, ids: Ints) -> Placement:
    """Of `rebalance_experts`, for the loads of these ids."""
    counts = np.bincount(ids.ravel(), minlength=setting.experts)
    return rebalanced(counts, num_slots(setting.experts, setting.ranks), setting.ranks)


class Step(NamedTuple):
    """When a rank began and ended, and what of that was no time of its own, in seconds."""

    begin: float
    dispatched: float
    computed: float
    combined: float
    experts_core_s: float
    waited_s: float

    @property
    def is_shared(self) -> bool:
        """Whether others had the core for a good part."""
        return self.waited_s > harness.SHARED_FROM * (self.combined - self.begin)


class Layer:
    """A rank's slots with experts' weights, and a buffer that sends to them.

    Args:
        setting: of the ranks.
        held: the expert in each slot of this rank, whose number is the seed of its weights.
        num_slots: of all ranks.
    """

    def __init__(self, setting: Setting, held: list[int], num_slots: int) -> None:
        self.buffer = EPBuffer(
            num_max_tokens_per_rank=setting.tokens,
            hidden=setting.hidden,
            num_topk=setting.topk,
            num_experts=num_slots,
        )
        self._weights = [_weights_of(expert, setting) for expert in held]
        self._results: torch.Tensor | None = None

    def run(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, table: torch.Tensor | None
    ) -> tuple[Step, torch.Tensor, int]:
        """A step, its output, and the rows of this rank."""
        waited = harness.waited_s()
        times = [time.perf_counter()]
        received = self.buffer.dispatch(x, ids, eplb_table=table)
        times.append(time.perf_counter())
        core = time.thread_time()
        counts = received.tokens_per_expert.tolist()
        if self._results is None:
            self._results = torch.zeros_like(received.tokens)
        begin = 0
        for count, (gate, up, down) in zip(counts, self._weights, strict=True):
            rows = received.tokens[begin : begin + count].float()
            hidden = torch.nn.functional.silu(rows @ gate) * (rows @ up)
            self._results[begin : begin + count] = (hidden @ down).bfloat16()
            begin += count
        core = time.thread_time() - core
        times.append(time.perf_counter())
        out = self.buffer.combine(self._results, received.handle, weights)
        times.append(time.perf_counter())
        begun, dispatched, computed, combined = times
        step = Step(begun, dispatched, computed, combined, core, harness.waited_s() - waited)
        return step, out, begin


def _weights_of(expert: int, setting: Setting) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(H, I), (H, I) and (I, H) fp32."""
    generator = torch.Generator().manual_seed(expert)
    wide = (setting.hidden, setting.intermediate)
    gate, up, down = (torch.randn(size, generator=generator) for size in (wide, wide, wide[::-1]))
    return gate / wide[0] ** 0.5, up / wide[0] ** 0.5, down / wide[1] ** 0.5


def measure(rank: int, num_ranks: int, setting: Setting) -> tuple[dict[str, list[Step]], dict[str, int]]:
    """Every variant on this rank: its steps, and rows.

    Raises:
        RuntimeError: outputs with replicas are not those without.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    harness.keep_freed_memory()
    skewed = skewed_ids(setting)
    placement = placement_for(setting, skewed)
    own = setting.experts // num_ranks
    at_home = list(range(rank * own, (rank + 1) * own))
    held = placement.phy2log[0].view(num_ranks, -1)[rank].tolist()
    even = even_slots(num_ranks, setting.tokens, setting.topk, setting.experts)
    ids = {name: torch.from_numpy(of[rank]).int() for name, of in ((NONE, skewed), (EVEN, even))}
    ids[REPLICAS] = ids[NONE]
    tables = {NONE: None, REPLICAS: placement.table(0), EVEN: None}
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(setting.tokens, setting.hidden, generator=generator).bfloat16()
    weights = torch.rand(setting.tokens, setting.topk, generator=generator)
    line, shuffle = StartingLine(), random.Random(0)  # the same on every rank
    steps: dict[str, list[Step]] = {variant: [] for variant in VARIANTS}
    rows, outputs = {}, {}
    with ExitStack() as stack:
        layers = {NONE: Layer(setting, at_home, setting.experts)}
        layers[REPLICAS] = Layer(setting, held, placement.num_replicas)
        layers[EVEN] = Layer(setting, at_home, setting.experts)
        for layer in layers.values():
            stack.enter_context(layer.buffer)
        for round_number in range(WARM_UP + setting.rounds):
            for variant in shuffle.sample(VARIANTS, len(VARIANTS)):
                line.wait()
                took, out, rows[variant] = layers[variant].run(x, ids[variant], weights, tables[variant])
                if round_number == 0:
                    outputs[variant] = out.float().clone()
                elif round_number >= WARM_UP:
                    steps[variant].append(took)
    os.sched_setaffinity(0, cores)
    apart = (outputs[REPLICAS] - outputs[NONE]).abs().max() / outputs[NONE].abs().max()
    if not apart <= TOLERANCE:
        raise RuntimeError(f"outputs with replicas differ by {float(apart):.3f} of the largest")
    return steps, rows


def run(setting: Setting) -> Measured:
    """Starts the ranks and measures."""
    with RankGroup(setting.ranks) as group:
        per_rank = group.run(measure, setting, timeout_s=600)
    seconds, core_s, rows = {}, {}, {}
    for variant in VARIANTS:
        steps = [of[variant] for of, _ in per_rank]
        seconds[variant] = harness.elapsed([[(s.begin, s.combined) for s in each] for each in steps])
        core_s[variant] = [max(s.experts_core_s for s in each) for each in zip(*steps, strict=True)]
        rows[variant] = [of[variant] for _, of in per_rank]
    busiest = per_rank[int(np.argmax(rows[NONE]))][0][NONE]
    share = statistics.median((s.computed - s.dispatched) / (s.combined - s.begin) for s in busiest)
    every = [zip(*(of[variant] for of, _ in per_rank), strict=True) for variant in VARIANTS]
    shared = [any(step.is_shared for step in ranks) for rounds in every for ranks in rounds]
    return Measured(setting, rows, seconds, core_s, share, 2 * sum(shared) > len(shared))
