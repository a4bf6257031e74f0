"""What a test does, what every rank sends in it, and what must therefore come.

Symbols: W ranks, T tokens of a rank, K experts per token, S shared experts, M routed experts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from moe_triton.core.ascendc import REPORT_MISMATCH, REPORT_TIMEOUT
from moe_triton.core.config import Config
from moe_triton.layout import UB_ALIGN, SlotLayout, align
from moe_triton.runtime.masks import Paths
from moe_triton.schemes.fullmesh.layout import InbandSlot
from tests.patience import seconds

PATIENT_US = round(seconds(30) * 1e6)  # true kernels never wait so long
BRIEF_US = round(seconds(0.1) * 1e6)  # for what never comes; what does come has to within it


class WrongResultError(AssertionError):
    """A rank received something else than what was sent."""


class TimedOutError(AssertionError):
    """A kernel reported that its deadline passed."""


class MismatchError(WrongResultError):
    """A kernel reported entries with another call word."""


def check_reports(report: np.ndarray) -> None:
    """Raises on anything reported."""
    for block, words in enumerate(report.tolist()):
        if words[0] == REPORT_TIMEOUT:
            raise TimedOutError(f"block {block}: {words[2]} missing from {words[1]} on")
        if words[0] == REPORT_MISMATCH:
            raise MismatchError(f"block {block}: {words[2]} of another call from {words[1]} on")
        if any(words):
            raise WrongResultError(f"block {block} reports {words[:3]}")


@dataclass(frozen=True)
class Case:
    """What the ranks do.

    Attributes:
        tokens: T of each rank.
        experts_per_rank: routed experts of each rank that holds any.
        shared: (S, ranks that hold shared experts).
        absent: chance of an id of -1.
        special: chance of an id of M or more.
        inactive: chance of a token that is masked.
        skewed: every token goes to the first K experts.
        schedule: operators of one round, "D" and "C"; only orders that two zones are enough for.
        straggle: chance that a rank sleeps between waiting and reading.
        launches: launches that a dispatch's tokens are split over.
        row_per_result: whether every (token, k) has a source row of its own.
        weighted: whether routing weights travel along.
        scaled: whether each row has scales.
        num_scales: how many; rows with several are of bytes, so that there is room for them.
        inband: whether rows travel in blocks that carry their flags.
        full_wait: whether combine waits for whole ranks instead of single results.
        timed: whether waits keep the times of arrival.
        part_tokens: tokens of a part of a combine; 0 where it is in one part.
        placed: whether rows with flags in band go to places, some of them nowhere, and results lie at places.
        timeout_us: deadline of each wait.
        slots_read_from: zone to look for slots in, where it is not the one that was asked for.
        lost: a masked rank; ids of experts that nothing gets to without it are marked, as by the host; or -1.
        relays: whether ranks pass on what goes to another server.
    """

    tokens: tuple[int, ...] = (3, 2)
    blocks: int = 2
    topk: int = 2
    experts_per_rank: int = 2
    hidden: int = 64
    shared: tuple[int, int] = (0, 0)
    absent: float = 0.0
    special: float = 0.0
    inactive: float = 0.0
    skewed: bool = False
    rounds: int = 2
    schedule: str = "DC"
    straggle: float = 0.0
    launches: int = 1
    takes: int = 1
    row_per_result: bool = False
    weighted: bool = True
    scaled: bool = False
    num_scales: int = 1
    inband: bool = False
    full_wait: bool = False
    timed: bool = False
    part_tokens: int = 0
    placed: bool = False
    timeout_us: int = PATIENT_US
    slots_read_from: int | None = None
    lost: int = -1
    relays: bool = False

    @property
    def config(self) -> Config:
        ranks = len(self.tokens)
        return Config(
            num_ranks=ranks,
            num_max_tokens_per_rank=max(*self.tokens, 1),
            hidden=self.hidden,
            num_topk=self.topk,
            num_experts=self.experts_per_rank * (ranks - self.shared[1]),
            num_shared_experts=self.shared[0],
            num_shared_ranks=self.shared[1],
            relaxed=True,
        )

    @property
    def slot(self) -> SlotLayout:
        itemsize, scales = 1 if self.num_scales > 1 else 2, self.num_scales * self.scaled
        if self.inband:
            return InbandSlot(self.hidden, itemsize, scales)
        return SlotLayout(self.hidden, itemsize, scales, is_flagged=True)

    @property
    def sent_bytes(self) -> int:
        """Bytes of a row on its way: whole 32-byte units, and its scales where it has any."""
        return self.slot.scaled_bytes if self.scaled else align(self.slot.row_bytes, UB_ALIGN)

    @property
    def result_bytes(self) -> int:
        """Bytes of a result on its way back: whole 32-byte units."""
        return align(self.slot.row_bytes, UB_ALIGN)


class Sent(NamedTuple):
    """One row that a rank must receive."""

    token: int
    k: int
    weight: float
    row: np.ndarray


@dataclass
class Routing:
    """One dispatch of one rank, drawn from the case's seed: every rank can tell what it must receive.

    Attributes:
        ids: (T, K) as the model chose them; combine gets these.
        active: (T,) negative for a masked token.
        weights: (T, K)
        rows: (T or T * (K + S), bytes) as they start a slot.
        sent_ids: (T, K) those of masked tokens made -1; dispatch gets these.
        expand_idx: (T, K) number of a row among those for its expert.
        counts: (M,)
        shared_ranks: (T, S)
        shared_slots: (T,)
        shared_counts: (ranks of shared experts,)
    """

    ids: np.ndarray
    active_index: np.ndarray
    weights: np.ndarray
    rows: np.ndarray
    sent_ids: np.ndarray = field(init=False)
    expand_idx: np.ndarray = field(init=False)
    counts: np.ndarray = field(init=False)
    shared_ranks: np.ndarray = field(init=False)
    shared_slots: np.ndarray = field(init=False)
    shared_counts: np.ndarray = field(init=False)

    def finish(self, config: Config, rank: int) -> None:
        """Makes the tables that follow from the ids and the mask."""
        is_active = self.active_index >= 0
        self.sent_ids = np.where(is_active[:, None], self.ids, np.int32(-1))
        self.expand_idx = np.zeros_like(self.ids)
        self.counts = np.zeros(config.num_experts, dtype=np.int32)
        for i, expert in enumerate(self.sent_ids.flat):
            if 0 <= expert < config.num_experts:
                self.expand_idx.flat[i] = self.counts[expert]
                self.counts[expert] += 1
        self._finish_shared(config, rank, is_active)

    def _finish_shared(self, config: Config, rank: int, is_active: np.ndarray) -> None:
        """V2's rule: the replica of a shared expert is chosen by the source rank."""
        experts = config.num_shared_experts
        replicas = config.num_shared_ranks // experts if experts else 1
        ours = np.arange(experts, dtype=np.int32) * replicas + rank % replicas
        self.shared_ranks = np.where(is_active[:, None], ours[None, :], np.int32(-1)).astype(np.int32)
        self.shared_slots = (np.cumsum(is_active) - is_active).astype(np.int32)
        self.shared_counts = np.zeros(config.num_shared_ranks, dtype=np.int32)
        self.shared_counts[ours] = is_active.sum()

    def is_expected(self, token: int, k: int, config: Config) -> bool:
        """Whether result ``k`` of a token comes back."""
        if self.active_index[token] < 0:
            return False
        return k >= config.num_topk or 0 <= self.ids[token, k] < config.num_experts


@functools.lru_cache(maxsize=256)
def draw_routing(case: Case, seed: int, number: int, rank: int) -> Routing:
    c = case.config
    rng = np.random.default_rng((seed, number, rank))
    tokens = case.tokens[rank]
    ids = np.argsort(rng.random((tokens, c.num_experts)), axis=1)[:, : case.topk].astype(np.int32)
    if case.skewed:
        ids = np.tile(np.arange(case.topk, dtype=np.int32), (tokens, 1))
    ids[rng.random(ids.shape) < case.absent] = -1
    is_special = rng.random(ids.shape) < case.special
    ids[is_special] = c.num_experts + rng.integers(0, 4, is_special.sum())
    if case.lost >= 0:
        paths, masked = Paths(c, rank, case.relays), frozenset({case.lost})
        is_lost = [paths.is_lost(c.rank_of_expert(expert), masked) for expert in range(c.num_experts)]
        is_lost += [False] * 5  # of special ids, and of -1
        ids = np.where(np.array(is_lost)[ids], -2 - ids, ids)
    per_token = c.num_results_per_token if case.row_per_result else 1
    routing = Routing(
        ids=np.ascontiguousarray(ids),
        active_index=np.where(rng.random(tokens) < case.inactive, -1, 0).astype(np.int32),
        weights=rng.random(ids.shape, dtype=np.float32),
        rows=rng.integers(0, 256, (tokens * per_token, case.sent_bytes), dtype=np.uint8),
    )
    routing.finish(c, rank)
    return routing


def sent_to(case: Case, seed: int, number: int, source: int, rank: int, expert: int) -> list[Sent]:
    """The rows from one rank for one local expert of another, in the order of their slots."""
    c = case.config
    routing = draw_routing(case, seed, number, source)
    if c.is_shared_rank(rank):
        pairs = [(t, c.num_topk + s) for t, s in np.argwhere(routing.shared_ranks == rank)]
    else:
        wanted = (rank - c.num_shared_ranks) * c.num_local_experts + expert
        pairs = [(t, k) for t, k in np.argwhere(routing.sent_ids == wanted)]
    rows = []
    for t, k in pairs:
        weight = float(routing.weights[t, k]) if case.weighted and k < c.num_topk else 0.0
        row = t * c.num_results_per_token + k if case.row_per_result else t
        rows.append(Sent(int(t), int(k), weight, routing.rows[row]))
    return rows


def results_of(case: Case, origins: np.ndarray, number: int) -> np.ndarray:
    """What an expert makes of each received row: bytes that only depend on its origin."""
    columns = np.arange(case.result_bytes)
    key = origins.astype(np.int64) @ np.array([7919, 104729, 1299709]) + number * 15485863
    return ((key[:, None] + columns * columns) % 251).astype(np.uint8)
