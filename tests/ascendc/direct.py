"""Ranks as threads that dispatch and combine by the direct scheme, and check every byte."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moe_triton.core.reach import KNOWN_WORD, SET_WORD, number_of
from moe_triton.core.region import Dim, Region
from moe_triton.layout import NUM_ZONES, SlotLayout
from moe_triton.schemes.direct.layout import DirectLayout

from .call_words import NOT_POSTING, CallWords, expecting, posting
from .case import Case, Routing, Sent, WrongResultError, check_reports, draw_routing, results_of, sent_to
from .direct_tables import Places, Tables, counts_of, offsets_of, places_of
from .library import Library, Phase, address
from .memory import GARBAGE, Guarded, across_lines, changes_behind, word_behind
from .ranks import Ranks

NO_HEADERS = Region("exchange_headers", 0, 0, (Dim("zone", 0, 0), Dim("word", 0, 0)))
Mistake = Literal["", "rows before counts", "reads before rows", "pulls before results"]


@dataclass(frozen=True)
class DirectCase(Case):
    """Rows with scales are of 8 bits an element, others of 16.

    Attributes:
        in_place: chance that results are written where peers read them, and not copied there.
        zones: how many are used in turn. One is not enough.
        mistake: what the ranks do too early; then a run should fail.
    """

    in_place: float = 0.5
    zones: int = NUM_ZONES
    mistake: Mistake = ""

    @property
    def slot(self) -> SlotLayout:
        return SlotLayout(self.hidden, 1 if self.scaled else 2, self.num_scales * self.scaled)

    @property
    def stamps_scales(self) -> bool:
        return self.scaled and self.num_scales == 1

    @property
    def result_bytes(self) -> int:
        """Bytes of a result."""
        return 2 * self.hidden


class DirectWorld:
    """All ranks of one case."""

    def __init__(self, library: Library, case: DirectCase, seed: int = 0) -> None:
        self.library, self.case, self.seed = library, case, seed
        self.config = case.config
        self.layout = DirectLayout(self.config)
        self.rows = self.layout.rows(case.slot.itemsize)
        self.memory = [Guarded((self.layout.window_bytes,), align=512) for _ in case.tokens]
        self.windows = [memory.array for memory in self.memory]
        for window in self.windows:
            window[: self.layout.state_bytes] = 0
        # Of each rank: what it knows of masks is its own.
        self.tables_of_peers = [
            across_lines([address(window) for window in self.windows]) for _ in case.tokens
        ]
        for table in self.tables_of_peers:
            word_behind(table, SET_WORD)[:] = number_of(())
        # Rows that any dispatch has delivered, and results that any combine has offered, by rank and zone.
        self.most_rows = np.zeros((len(case.tokens), NUM_ZONES), dtype=np.int64)
        self.most_results = np.zeros((len(case.tokens), NUM_ZONES), dtype=np.int64)
        self.calls = CallWords(len(case.tokens))
        # What the last dispatch of each rank left for later steps.
        self.tables = [Tables(self.config, rank, case.tokens[rank]) for rank in range(len(case.tokens))]
        self._ranks = Ranks(library, seed, len(case.tokens))

    def run(self) -> None:
        """Every rank's rounds, each rank on a thread. Raises the first failure of any of them."""
        self._ranks.run(self._rounds)
        self.calls.check()
        for rank, window in enumerate(self.windows):
            self.memory[rank].check_guards()
            for name in ("counts_status", "rows_status", "results_status", "barrier_status"):
                if any(self._piece(rank, self.layout.region(name), zone).any() for zone in range(NUM_ZONES)):
                    raise WrongResultError(f"a flag of {name} was left behind")
            for zone in range(NUM_ZONES):
                self._check_untouched(window, zone, self.most_rows[rank, zone], self.most_results[rank, zone])

    def masks(self, rank: int) -> dict[str, object]:
        """Arguments of a kernel that goes by who is masked."""
        return {"peers": self.tables_of_peers[rank], "changes": changes_behind(self.tables_of_peers[rank])}

    def known(self, rank: int) -> np.ndarray:
        """Where it stands what a rank's call knows of masks."""
        return word_behind(self.tables_of_peers[rank], KNOWN_WORD)

    def agreed(self, rank: int) -> np.ndarray:
        """Where it stands which ranks have to have the same masked."""
        return word_behind(self.tables_of_peers[rank], SET_WORD)

    def _check_untouched(self, window: np.ndarray, zone: int, rows: int, results: int) -> None:
        for region, used in ((self.rows, rows), (self.layout.stamps, rows), (self.layout.results, results)):
            first = region.offset(zone=zone)
            stride = region.stride("index")
            if (window[first + used * stride : first + self.layout.capacity * stride] != GARBAGE).any():
                raise WrongResultError(f"{region.name} past the last one were written")

    def _rounds(self, rank: int) -> None:
        rng = np.random.default_rng((self.seed, rank))
        numbers = {"D": 0, "C": 0}
        for operator in self.case.schedule * self.case.rounds:
            if self._ranks.have_failed:
                return
            number = numbers[operator]
            numbers[operator] += 1
            straggle = rng.random() < self.case.straggle
            if operator == "D":
                self.dispatch(rank, number, straggle)
            else:
                self.combine(rank, number, numbers["D"] - 1, rng.random() < self.case.in_place, straggle)

    def _piece(self, rank: int, region: Region, zone: int) -> np.ndarray:
        first = region.offset(zone=zone)
        last = region.offset(zone=zone, source=self.config.num_ranks - 1)
        return self.windows[rank][first : last + region.item_bytes]

    def _pause(self, straggle: bool) -> None:
        if straggle:
            time.sleep(0.002)

    def _in_order(self, first: Callable[[], None], second: Callable[[], None], mistake: Mistake) -> None:
        if self.case.mistake == mistake:
            first, second = second, first
        first()
        second()

    # Dispatch.

    def dispatch(self, rank: int, number: int, straggle: bool = False) -> None:
        """Sends, waits, and checks what came. Outputs live until the dispatch after the next begins."""
        zone, routing = number % self.case.zones, draw_routing(self.case, self.seed, number, rank)
        self._pause(straggle)
        self.check_earlier_rows(rank, number, 2)
        phases = self.phases(rank, routing, zone, number)
        if self.case.mistake or number % 2:
            self._dispatch_in_steps(phases, lambda: self.check_rows(rank, number))
        else:
            self._run(phases)
            self.check_rows(rank, number)
        self.check_counts(rank, number, zone)
        self.check_tables(rank, number)
        self._pause(straggle)
        self.check_earlier_rows(rank, number, 1)

    def phases(self, rank: int, routing: Routing, zone: int, number: int) -> list[Phase]:
        """Those of a whole dispatch."""
        counts, rows = self.layout.counts_status, self.layout.rows_status
        call = self.calls.in_one_launch(rank, number)
        return [
            self.counts_phase(rank, routing, zone, **call),
            self.wait_phase(rank, counts, zone, **call, dispatch_word=0),
            self.rows_phase(rank, routing, zone),
            self.post_phase(rank, rows, zone, **posting("D", number)),
            self.wait_phase(rank, rows, zone, **expecting("D", number)),
        ]

    def _run(self, phases: list[Phase]) -> None:
        for report in self.library.launch_phases(self.case.blocks, phases):
            check_reports(report)

    def _dispatch_in_steps(self, phases: list[Phase], read: Callable[[], None]) -> None:
        """One launch after the other, perhaps two of them in the wrong order."""

        def run(number: int) -> None:
            check_reports(self.library.launch(phases[number][0], self.case.blocks, **phases[number][1]))

        run(0)
        self._in_order(lambda: run(1), lambda: run(2), "rows before counts")
        run(3)
        self._in_order(lambda: run(4), read, "reads before rows")

    def check_earlier_rows(self, rank: int, number: int, how_many: int) -> None:
        """That the rows of an earlier dispatch are still there."""
        for earlier in range(max(0, number - how_many), number):
            self.check_rows(rank, earlier)

    def counts(self, number: int) -> np.ndarray:
        """(W, R + M) rows of each source for each entry."""
        routings = [draw_routing(self.case, self.seed, number, rank) for rank in range(len(self.case.tokens))]
        return np.array([[*r.shared_counts, *r.counts] for r in routings], dtype=np.int32)

    def places(self, rank: int, number: int) -> Places:
        routing = draw_routing(self.case, self.seed, number, rank)
        return places_of(self.config, self.counts(number), routing, rank)

    def counts_phase(self, rank: int, routing: Routing, zone: int, **call: object) -> Phase:
        c = self.config
        return "counts_send", {
            "counts": routing.counts,
            "shared_counts": routing.shared_counts if c.num_shared_ranks else 0,
            "num_experts": c.num_experts,
            "num_shared_ranks": c.num_shared_ranks,
            "peers": self.tables_of_peers[rank],
            "num_ranks": c.num_ranks,
            "rank": rank,
            "agreed": self.agreed(rank),
            "zone": zone,
            **(call or self.calls.in_one_launch(rank, 0)),
            "slots": self.layout.counts,
            "status": self.layout.counts_status,
        }

    def send_counts(self, rank: int, routing: Routing, zone: int, **call: object) -> np.ndarray:
        name, arguments = self.counts_phase(rank, routing, zone, **call)
        return self.library.launch(name, self.case.blocks, **arguments)

    def rows_phase(self, rank: int, routing: Routing, zone: int, **changes: object) -> Phase:
        c, case = self.config, self.case
        at, has_shared = case.slot.scale_offset, c.num_shared_experts > 0
        arguments: dict[str, object] = {
            "rows": routing.rows,
            "row_stride": case.sent_bytes,
            "row_bytes": case.slot.row_bytes,
            "scales": np.ascontiguousarray(routing.rows[:, at : at + 4]) if case.stamps_scales else 0,
            "scale_offset": at,
            "scale_bytes": 0 if case.stamps_scales else case.slot.scale_stride * case.scaled,
            "rows_per_token": c.num_results_per_token if case.row_per_result else 1,
            "topk_idx": routing.sent_ids,
            "topk_weights": routing.weights if case.weighted else 0,
            "expand_idx": routing.expand_idx,
            "shared_ranks": routing.shared_ranks if has_shared else 0,
            "shared_slots": routing.shared_slots if has_shared else 0,
            "peers": self.tables_of_peers[rank],
            "known": self.known(rank),
            "first_token": 0,
            "num_tokens": case.tokens[rank],
            "topk": c.num_topk,
            "num_experts": c.num_experts,
            "num_local_experts": c.num_local_experts,
            "num_shared_experts": c.num_shared_experts,
            "num_shared_ranks": c.num_shared_ranks,
            "num_ranks": c.num_ranks,
            "rank": rank,
            "window": self.windows[rank],
            "counts": self.layout.counts,
            "max_count": c.num_max_tokens_per_rank,
            "recv_counts": self.tables[rank].recv_counts,
            "result_offsets": self.tables[rank].result_offsets,
            "result_bytes": case.result_bytes,
            "zone": zone,
            "slots": self.rows,
            "scale_slots": self.layout.scales(case.slot),
            "stamps": self.layout.stamps,
        }
        return "direct_send", {**arguments, **changes}

    def send_rows(self, rank: int, routing: Routing, zone: int, **changes: object) -> np.ndarray:
        name, arguments = self.rows_phase(rank, routing, zone, **changes)
        return self.library.launch(name, self.case.blocks, **arguments)

    def post_phase(self, rank: int, status: Region, zone: int, **call: object) -> Phase:
        return "post_status", {
            "peers": self.tables_of_peers[rank],
            "num_ranks": self.config.num_ranks,
            "count": self.agreed(rank) if status == self.layout.rows_status else 0,
            "rank": rank,
            "zone": zone,
            "status": status,
            **NOT_POSTING,
            **(call or posting("D", 0)),
        }

    def post(self, rank: int, status: Region, zone: int, **call: object) -> np.ndarray:
        name, arguments = self.post_phase(rank, status, zone, **call)
        return self.library.launch(name, 1, **arguments)

    def wait_phase(self, rank: int, status: Region, zone: int, **call: object) -> Phase:
        return "dispatch_wait", {
            "window": self.windows[rank],
            **self.masks(rank),
            "known": self.known(rank) if status == self.layout.counts_status else 0,
            "agreed": self.agreed(rank)
            if status in (self.layout.counts_status, self.layout.rows_status)
            else 0,
            "recv_counts": np.empty((1, self.config.num_ranks), np.int32),
            "all_counts": 0,
            "waited_us": 0,
            "num_local_experts": 1,
            "zone": zone,
            "timeout_us": self.case.timeout_us,
            "status": status,
            **(call or expecting("D", 0)),
        }

    def wait(self, rank: int, status: Region, zone: int, **call: object) -> tuple[list[int], np.ndarray]:
        """What came with the flags, -1 for those that did not come, and the report.

        0 stands for what this rank itself says of masks.
        """
        name, arguments = self.wait_phase(rank, status, zone, **call)
        counts = Guarded((1, self.config.num_ranks), np.int32)
        report = self.library.launch(name, 1, **{**arguments, "recv_counts": counts.array})
        counts.check_guards()
        own = int(self.agreed(rank)[0])
        return [0 if count == own else count for count in counts.array[0].tolist()], report

    def check_counts(self, rank: int, number: int, zone: int) -> None:
        first, stride = self.layout.counts.offset(zone=zone), self.layout.counts.stride("source")
        table = self.windows[rank][first : first + self.config.num_ranks * stride].copy()
        got = table.reshape(-1, stride).view(np.int32)[:, : self.layout.num_entries]
        if not np.array_equal(got, self.counts(number)):
            raise WrongResultError(f"counts {got.tolist()} instead of {self.counts(number).tolist()}")

    def check_tables(self, rank: int, number: int) -> None:
        """What later steps of this rank read."""
        addresses = np.array([address(window) for window in self.windows])
        c, windows = self.config, addresses - addresses[rank]
        routing = draw_routing(self.case, self.seed, number, rank)
        offsets = offsets_of(c, routing, self.places(rank, number), windows, self.case.result_bytes)
        self.tables[rank].check(counts_of(c, self.counts(number), rank), offsets)

    def received(self, rank: int, number: int) -> list[tuple[int, Sent]]:
        """What a rank receives, in order, each with its source."""
        pairs = np.ndindex(self.config.experts_on(rank), self.config.num_ranks)
        return [
            (source, row)
            for expert, source in pairs
            for row in sent_to(self.case, self.seed, number, source, rank, expert)
        ]

    def check_rows(self, rank: int, number: int) -> None:
        """Rows and stamps, in the order of the output."""
        zone, want = number % self.case.zones, self.received(rank, number)
        self.most_rows[rank, zone] = max(self.most_rows[rank, zone], len(want))
        # At once, and looked at later: what has not come by now has come too late.
        rows = self._first(rank, self.rows, zone, len(want))
        stamps = self._first(rank, self.layout.stamps, zone, len(want)).view(np.int32)
        scales = self._first(rank, self.layout.scales(self.case.slot), zone, len(want))
        row_bytes, scale_at = self.case.slot.row_bytes, self.case.slot.scale_offset
        scale_end = scale_at + self.case.slot.scale_bytes
        for n, (source, row) in enumerate(want):
            is_stamped = self.case.stamps_scales
            scale = row.row[scale_at : scale_at + 4].view(np.int32)[0] if is_stamped else 0
            if not is_stamped and not np.array_equal(
                scales[n][: scale_end - scale_at], row.row[scale_at:scale_end]
            ):
                raise WrongResultError(f"scales of row {n} of dispatch {number} on rank {rank} differ")
            weight = np.float32(row.weight).view(np.int32)
            if not np.array_equal(rows[n], row.row[:row_bytes]):
                raise WrongResultError(f"row {n} of dispatch {number} on rank {rank} differs")
            if stamps[n].tolist() != [source, row.token, row.k, int(weight), int(scale), 0, 0, 0]:
                raise WrongResultError(f"stamp {stamps[n].tolist()} of row {n}, dispatch {number}")

    def _first(self, rank: int, region: Region, zone: int, number: int) -> np.ndarray:
        first, stride = region.offset(zone=zone), region.stride("index")
        return self.windows[rank][first : first + number * stride].reshape(number, stride).copy()

    # Combine.

    def combine(
        self, rank: int, number: int, dispatch_number: int, in_place: bool, straggle: bool = False
    ) -> None:
        """Offers a result for each received row, waits, and checks those of its own tokens."""
        zone, results = number % self.case.zones, self.layout.results
        stamps = [(source, row.token, row.k) for source, row in self.received(rank, dispatch_number)]
        rows = results_of(self.case, np.array(stamps, dtype=np.int32).reshape(-1, 3), number)
        self.most_results[rank, zone] = max(self.most_results[rank, zone], len(rows))
        self._pause(straggle)
        phases = []
        if in_place:
            first = results.offset(zone=zone)
            self.windows[rank][first : first + rows.size] = rows.reshape(-1)
        else:
            phases.append(self.copy_phase(rank, rows, zone))
        call = {**posting("C", number), **self.calls.combining(rank, number)}
        phases.append(self.post_phase(rank, self.layout.results_status, zone, **call))
        wait = self.wait_phase(rank, self.layout.results_status, zone, **expecting("C", number))

        def pull() -> None:
            self._pause(straggle)
            self.check_results(rank, number, dispatch_number)

        if self.case.mistake:
            self._run(phases)
            self._in_order(lambda: self._run([wait]), pull, "pulls before results")
        else:
            self._run([*phases, wait])
            pull()

    def copy_phase(self, rank: int, rows: np.ndarray, zone: int) -> Phase:
        absent = "scales", "scale_offset", "scale_bytes", "first_row", "header", "header_words"
        return "exchange_send", {
            **dict.fromkeys(absent, 0),
            "rows": rows,
            "row_bytes": self.case.result_bytes,
            "num_rows": np.array([len(rows)], dtype=np.int32),
            "capacity": len(rows),
            "peers": self.tables_of_peers[rank],
            "peer": rank,
            "zone": zone,
            "slots": self.layout.results,
            "headers": NO_HEADERS,
        }

    def copy_results(self, rank: int, rows: np.ndarray, zone: int) -> np.ndarray:
        name, arguments = self.copy_phase(rank, rows, zone)
        return self.library.launch(name, self.case.blocks, **arguments)

    def check_results(self, rank: int, number: int, dispatch_number: int) -> None:
        """Results of this rank's tokens, read where they are: in all ranks' windows."""
        c, routing = self.config, draw_routing(self.case, self.seed, dispatch_number, rank)
        places, zone = self.places(rank, dispatch_number), number % self.case.zones
        for token, k in np.ndindex(self.case.tokens[rank], c.num_results_per_token):
            if not routing.is_expected(token, k, c):
                continue
            if k < c.num_topk:
                owner, place = c.rank_of_expert(int(routing.ids[token, k])), places.routed[token, k]
            else:
                owner = int(routing.shared_ranks[token, k - c.num_topk])
                place = places.shared[token, k - c.num_topk]
            at = self.layout.results.offset(zone=zone, index=int(place))
            got = self.windows[owner][at : at + self.case.result_bytes].copy()
            want = results_of(self.case, np.array([[rank, token, k]], dtype=np.int32), number)[0]
            if not np.array_equal(got, want):
                raise WrongResultError(f"result {k} of token {token} of rank {rank} differs")
