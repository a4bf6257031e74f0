"""Ranks as threads that dispatch and combine through windows of plain memory, and check every byte.

Symbols: W ranks, T tokens of a rank, K experts per token, S shared experts, M routed experts.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from dataclasses import dataclass, field

import numpy as np

from moe_triton.ascendc import REPORT_TIMEOUT
from moe_triton.config import Config
from moe_triton.layout import NUM_ZONES, STATE_BYTES, SlotLayout, WindowLayout

from .library import Library, address

GUARD_BYTES = 4096
COUNT_GUARDS = 16
GARBAGE = 0xA5
THREAD_SECONDS = 60


class WrongResultError(AssertionError):
    """A rank received something else than what was sent."""


@dataclass(frozen=True)
class Case:
    """What the ranks do.

    Attributes:
        tokens: T of each rank.
        experts_per_rank: routed experts of each rank that holds any.
        shared: (S, ranks that hold shared experts).
        absent: chance of an id of -1.
        skewed: every token goes to the first K experts.
        schedule: operators of one round, "D" and "C"; only orders that two zones are enough for.
        straggle: chance that a rank sleeps between waiting and reading.
        launches: launches that a dispatch's tokens are split over.
        row_per_result: whether every (token, k) has a source row of its own.
        weighted: whether routing weights travel along.
        timeout_us: deadline of each wait.
        slots_read_from: zone to look for slots in, where it is not the one that was asked for.
    """

    tokens: tuple[int, ...] = (3, 2)
    blocks: int = 2
    topk: int = 2
    experts_per_rank: int = 2
    hidden: int = 64
    shared: tuple[int, int] = (0, 0)
    absent: float = 0.0
    skewed: bool = False
    rounds: int = 2
    schedule: str = "DC"
    straggle: float = 0.0
    launches: int = 1
    row_per_result: bool = False
    weighted: bool = True
    timeout_us: int = 5_000_000
    slots_read_from: int | None = None

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


class Window:
    """One rank's memory, between guards that nobody may touch."""

    def __init__(self, num_bytes: int) -> None:
        raw = np.full(num_bytes + 2 * GUARD_BYTES + 512, GARBAGE, dtype=np.uint8)
        start = -address(raw) % 512
        self._all = raw[start : start + num_bytes + 2 * GUARD_BYTES]
        self.bytes = self._all[GUARD_BYTES:-GUARD_BYTES]
        self.bytes[:STATE_BYTES] = 0

    def check_guards(self) -> None:
        guards = (self._all[:GUARD_BYTES], self._all[-GUARD_BYTES:])
        if any((guard != GARBAGE).any() for guard in guards):
            raise WrongResultError("bytes outside the window were written")


@dataclass
class Routing:
    """One dispatch of one rank, drawn from the case's seed: every rank can tell what it must receive."""

    ids: np.ndarray
    weights: np.ndarray
    rows: np.ndarray
    expand_idx: np.ndarray = field(init=False)
    counts: np.ndarray = field(init=False)

    def finish(self, num_experts: int) -> None:
        self.expand_idx = np.zeros_like(self.ids)
        self.counts = np.zeros(num_experts, dtype=np.int32)
        for i, expert in enumerate(self.ids.flat):
            if expert >= 0:
                self.expand_idx.flat[i] = self.counts[expert]
                self.counts[expert] += 1


@functools.lru_cache(maxsize=256)
def draw_routing(case: Case, seed: int, number: int, rank: int) -> Routing:
    c = case.config
    rng = np.random.default_rng((seed, number, rank))
    tokens = case.tokens[rank]
    ids = np.argsort(rng.random((tokens, c.num_experts)), axis=1)[:, : case.topk].astype(np.int32)
    if case.skewed:
        ids = np.tile(np.arange(case.topk, dtype=np.int32), (tokens, 1))
    ids[rng.random(ids.shape) < case.absent] = -1
    per_token = c.num_results_per_token if case.row_per_result else 1
    routing = Routing(
        ids=np.ascontiguousarray(ids),
        weights=rng.random(ids.shape, dtype=np.float32),
        rows=rng.integers(0, 256, (tokens * per_token, case.hidden * 2), dtype=np.uint8),
    )
    routing.finish(c.num_experts)
    return routing


class World:
    """All ranks of one case."""

    def __init__(self, library: Library, case: Case, seed: int = 0) -> None:
        self.library, self.case, self.seed = library, case, seed
        self.config = case.config
        self.layout = WindowLayout(self.config)
        self.slot = SlotLayout(case.hidden, 2)
        self.windows = [Window(self.layout.window_bytes) for _ in case.tokens]
        self.peers = np.array([address(w.bytes) for w in self.windows], dtype=np.int64)
        self._failures: list[BaseException] = []

    def run(self) -> None:
        """Every rank's rounds, each rank on a thread. Raises the first failure of any of them."""
        threads = [
            threading.Thread(target=self._guarded, args=(rank,), daemon=True)
            for rank in range(len(self.windows))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(THREAD_SECONDS)
            assert not thread.is_alive(), "a rank hangs past its deadline"
        if self._failures:
            raise self._failures[0]
        for window in self.windows:
            window.check_guards()
            if window.bytes[:STATE_BYTES].any():
                raise WrongResultError("a flag was left behind")

    def _guarded(self, rank: int) -> None:
        try:
            self.library.seed(self.seed * len(self.windows) + rank)
            self._rounds(rank)
        except BaseException as failure:
            self._failures.append(failure)

    def _rounds(self, rank: int) -> None:
        rng = np.random.default_rng((self.seed, rank))
        numbers = {"D": 0, "C": 0}
        received: dict[str, np.ndarray] = {}
        for operator in self.case.schedule * self.case.rounds:
            if self._failures:
                return
            number = numbers[operator]
            numbers[operator] += 1
            zone = number % NUM_ZONES
            straggle = rng.random() < self.case.straggle
            if operator == "D":
                received = self.dispatch(rank, number, zone, straggle)
            else:
                self.combine(rank, number, zone, received, numbers["D"] - 1, straggle)

    # Dispatch.

    def dispatch(self, rank: int, number: int, zone: int, straggle: bool = False) -> dict[str, np.ndarray]:
        """Sends, waits, and checks what came. Returns triples and offsets for combine."""
        routing = draw_routing(self.case, self.seed, number, rank)
        check_reports(self.send_rows(rank, routing, zone))
        counts, report = self.wait_for_status(rank, zone)
        check_reports(report)
        if straggle:
            time.sleep(0.002)
        return self.check_received(rank, number, zone, counts)

    def send_rows(self, rank: int, routing: Routing, zone: int, **changes: object) -> np.ndarray:
        c, case = self.config, self.case
        tokens = case.tokens[rank]
        bounds = [tokens * i // case.launches for i in range(case.launches + 1)]
        for first, last in itertools.pairwise(bounds):
            arguments: dict[str, object] = {
                "rows": routing.rows,
                "row_stride": self.slot.row_bytes,
                "row_bytes": self.slot.row_bytes,
                "stamp_offset": self.slot.stamp_offset,
                "rows_per_token": c.num_results_per_token if case.row_per_result else 1,
                "topk_idx": routing.ids,
                "topk_weights": routing.weights if case.weighted else 0,
                "expand_idx": routing.expand_idx,
                "counts": routing.counts,
                "peers": self.peers,
                "first_token": first,
                "num_tokens": last - first,
                "total_tokens": tokens,
                "topk": c.num_topk,
                "num_shared_experts": c.num_shared_experts,
                "num_shared_ranks": c.num_shared_ranks,
                "rank": rank,
                "zone": zone,
                "post_status": int(last == tokens),
                "slots": self.layout.dispatch_slots,
                "status": self.layout.dispatch_status,
            }
            report = self.library.launch("dispatch_send", case.blocks, **{**arguments, **changes})
            if last == tokens:
                break
            check_reports(report)
        return report

    def wait_for_status(self, rank: int, zone: int) -> tuple[np.ndarray, np.ndarray]:
        c = self.config
        experts = c.experts_on(rank)
        total = experts * c.num_ranks
        counts = np.full(total + 2 * COUNT_GUARDS, -7, dtype=np.int32)
        ours = counts[COUNT_GUARDS:-COUNT_GUARDS]
        report = self.library.launch(
            "dispatch_wait",
            self.case.blocks,
            window=self.windows[rank].bytes,
            recv_counts=ours,
            num_local_experts=experts,
            zone=zone,
            timeout_us=self.case.timeout_us,
            status=self.layout.dispatch_status,
        )
        if (counts[:COUNT_GUARDS] != -7).any() or (counts[-COUNT_GUARDS:] != -7).any():
            raise WrongResultError("words beside the counts were written")
        return ours.reshape(experts, c.num_ranks), report

    def check_received(self, rank: int, number: int, zone: int, counts: np.ndarray) -> dict[str, np.ndarray]:
        c = self.config
        zone = zone if self.case.slots_read_from is None else self.case.slots_read_from
        # At once, and looked at later: what has not come by now has come too late.
        first = self.layout.dispatch_slots.offset(zone=zone)
        slots = self.windows[rank].bytes[first : first + self.layout.dispatch_zone_bytes].copy()
        triples: list[tuple[int, int, int]] = []
        sums: list[int] = []
        for expert in range(c.experts_on(rank)):
            for source in range(c.num_ranks):
                want = self._sent_to(rank, expert, source, number)
                if counts[expert, source] != len(want):
                    raise WrongResultError(f"count {counts[expert, source]} instead of {len(want)}")
                for index, (token, k, weight, row) in enumerate(want):
                    at = self.layout.dispatch_slots.offset(
                        zone=zone, source=source, expert=expert, index=index
                    )
                    slot = slots[at - first : at - first + self.slot.packed_bytes]
                    if not np.array_equal(slot[: self.slot.row_bytes], row):
                        raise WrongResultError(f"row {index} of expert {expert} from rank {source} differs")
                    stamp = slot[self.slot.stamp_offset :].view(np.int32)
                    want_stamp = [source, token, k, int(np.float32(weight).view(np.int32)), 0, 0, 0, 0]
                    if stamp.tolist() != want_stamp:
                        raise WrongResultError(f"stamp {stamp.tolist()} instead of {want_stamp}")
                    triples.append((source, token, k))
                sums.append(len(triples))
        return {
            "triples": np.array(triples, dtype=np.int32).reshape(-1, 3),
            "offsets": np.array(sums, dtype=np.int32),
        }

    def _sent_to(
        self, rank: int, expert: int, source: int, number: int
    ) -> list[tuple[int, int, float, np.ndarray]]:
        c, case = self.config, self.case
        routing = draw_routing(case, self.seed, number, source)
        step = c.num_results_per_token if case.row_per_result else 1
        offset = (lambda k: k) if case.row_per_result else (lambda k: 0)
        if c.is_shared_rank(rank):
            s = rank // (c.num_shared_ranks // c.num_shared_experts)
            if c.rank_of_shared_expert(s, source) != rank:
                return []
            k = c.num_topk + s
            return [(t, k, 0.0, routing.rows[t * step + offset(k)]) for t in range(case.tokens[source])]
        wanted = (rank - c.num_shared_ranks) * c.num_local_experts + expert
        return [
            (
                int(t),
                int(k),
                float(routing.weights[t, k]) if case.weighted else 0.0,
                routing.rows[t * step + offset(k)],
            )
            for t, k in np.argwhere(routing.ids == wanted)
        ]

    # Combine.

    def combine(
        self,
        rank: int,
        number: int,
        zone: int,
        received: dict[str, np.ndarray],
        dispatch_number: int,
        straggle: bool = False,
    ) -> None:
        """Sends one row back per received one, waits, and checks what came."""
        rows = self._results(received["triples"], number)
        check_reports(self.send_results(rank, rows, received, zone))
        routing = draw_routing(self.case, self.seed, dispatch_number, rank)
        check_reports(self.wait_for_results(rank, routing, zone))
        if straggle:
            time.sleep(0.002)
        self.check_results(rank, number, zone, routing)

    def _results(self, triples: np.ndarray, number: int) -> np.ndarray:
        """What an expert makes of each received row: bytes that only depend on its triple."""
        columns = np.arange(self.case.hidden * 2)
        key = triples.astype(np.int64) @ np.array([7919, 104729, 1299709]) + number * 15485863
        return ((key[:, None] + columns * columns) % 251).astype(np.uint8)

    def send_results(
        self, rank: int, rows: np.ndarray, received: dict[str, np.ndarray], zone: int, **changes: object
    ) -> np.ndarray:
        c = self.config
        arguments: dict[str, object] = {
            "rows": rows,
            "row_bytes": self.case.hidden * 2,
            "triples": received["triples"],
            "recv_offsets": received["offsets"],
            "num_entries": c.experts_on(rank) * c.num_ranks,
            "capacity": len(rows),
            "peers": self.peers,
            "num_ranks": c.num_ranks,
            "zone": zone,
            "slots": self.layout.combine_slots,
            "status": self.layout.combine_status,
        }
        return self.library.launch("combine_send", self.case.blocks, **{**arguments, **changes})

    def wait_for_results(self, rank: int, routing: Routing, zone: int) -> np.ndarray:
        c, case = self.config, self.case
        return self.library.launch(
            "combine_wait",
            case.blocks,
            window=self.windows[rank].bytes,
            topk_idx=routing.ids,
            first_token=0,
            num_tokens=case.tokens[rank],
            topk=c.num_topk,
            num_shared_experts=c.num_shared_experts,
            zone=zone,
            timeout_us=case.timeout_us,
            status=self.layout.combine_status,
        )

    def check_results(self, rank: int, number: int, zone: int, routing: Routing) -> None:
        c = self.config
        zone = zone if self.case.slots_read_from is None else self.case.slots_read_from
        first = self.layout.combine_slots.offset(zone=zone)
        slots = self.windows[rank].bytes[first : first + self.layout.combine_zone_bytes].copy()
        for token in range(self.case.tokens[rank]):
            for k in range(c.num_results_per_token):
                if k < c.num_topk and routing.ids[token, k] < 0:
                    continue
                at = self.layout.combine_slots.offset(zone=zone, token=token, k=k)
                got = slots[at - first : at - first + self.case.hidden * 2]
                want = self._results(np.array([[rank, token, k]], dtype=np.int32), number)[0]
                if not np.array_equal(got, want):
                    raise WrongResultError(f"result {k} of token {token} differs")


class TimedOutError(AssertionError):
    """A kernel reported that its deadline passed."""


def check_reports(report: np.ndarray) -> None:
    """Raises on anything reported."""
    for block, words in enumerate(report.tolist()):
        if words[0] == REPORT_TIMEOUT:
            raise TimedOutError(f"block {block}: {words[2]} missing from {words[1]} on")
        if any(words):
            raise WrongResultError(f"block {block} reports {words[:3]}")
