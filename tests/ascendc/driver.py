"""Ranks as threads that dispatch and combine through windows of plain memory, and check every byte."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np

from moe_triton.core.records import STAMP, STATUS_ENTRY
from moe_triton.layout import NUM_ZONES
from moe_triton.schemes.fullmesh.layout import STATE_BYTES, WindowLayout

from .call_words import NOT_POSTING, CallWords, expecting, posting
from .case import Case, Routing, WrongResultError, check_reports, draw_routing, results_of, sent_to
from .inband import check_outputs, receive_inband
from .library import Library, address
from .memory import (
    Guarded,
    Window,
    across_lines,
    changes_behind,
    inband_slots,
    peer_status,
    without_extents,
)
from .parts import CombineInParts
from .placed import at_places, draw_places
from .ranks import Ranks
from .takes import dispatch_in_parts

UNTOUCHED = -7
SEEN = -1
NOTHING_EXPECTED = -2
FLAG_WORD = STAMP.word("flag")


class World:
    """All ranks of one case."""

    def __init__(self, library: Library, case: Case, seed: int = 0) -> None:
        self.library, self.case, self.seed = library, case, seed
        self.config = case.config
        self.layout = WindowLayout(self.config)
        inband_base = -(-self.layout.window_bytes // 512) * 512
        inband = inband_slots(case, inband_base)
        self.slots = inband if case.inband else self.layout.dispatch_slots
        self.peer_status = peer_status(self.config)
        self.windows = [Window(inband.end if case.inband else inband_base, inband_base) for _ in case.tokens]
        self.peers = across_lines([address(w.bytes) for w in self.windows])
        self.changes = changes_behind(self.peers)
        self.calls = CallWords(len(case.tokens))
        self.numbers = [Guarded((NUM_ZONES,), np.int32) for _ in case.tokens]
        self._ranks = Ranks(library, seed, len(case.tokens))

    def run(self) -> None:
        """Every rank's rounds, each rank on a thread. Raises the first failure of any of them."""
        self._ranks.run(self._rounds)
        self.check_what_is_left()

    def check_what_is_left(self) -> None:
        """When all ranks have ended: cells and windows."""
        self.calls.check()
        for window in self.windows:
            window.check_guards()
            if self._other_state(window).any() or window.inband_flags.any():
                raise WrongResultError("a flag was left behind")
            if (self._result_flags(window) > 0).any():
                raise WrongResultError("a result has come that nobody looked at, or again")
        for numbers in self.numbers:
            numbers.check_guards()

    @property
    def masks(self) -> dict[str, object]:
        """Arguments of a kernel that waits: where it finds who is masked."""
        return {"peers": self.peers, "changes": self.changes}

    def _zones_of_results(self) -> list[slice]:
        status = self.layout.combine_status
        length = status.extent("token") * status.stride("token")
        return [
            slice(first, first + length) for first in (status.offset(zone=zone) for zone in range(NUM_ZONES))
        ]

    def _other_state(self, window: Window) -> np.ndarray:
        """Flags of results are numbers of rounds, and stay."""
        state = window.bytes[:STATE_BYTES].copy()
        for zone in self._zones_of_results():
            state[zone] = 0
        return state

    def _result_flags(self, window: Window) -> np.ndarray:
        """The first word of each entry: `SEEN` where it was looked at, 0 where none has come."""
        words = [window.bytes[zone].view(np.int32) for zone in self._zones_of_results()]
        return np.concatenate(words)[:: STATUS_ENTRY.num_words]

    def _rounds(self, rank: int) -> None:
        rng = np.random.default_rng((self.seed, rank))
        numbers = {"D": 0, "C": 0}
        received: dict[str, np.ndarray] = {}
        for operator in self.case.schedule * self.case.rounds:
            if self._ranks.have_failed:
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
        """Sends, waits, and checks what came. Returns origins and offsets for combine."""
        routing = draw_routing(self.case, self.seed, number, rank)
        if self.case.takes > 1:
            counts, waited = dispatch_in_parts(self, rank, number, routing, zone, straggle)
            self.check_counts(rank, number, counts)
            self.check_flags(rank, zone, counts)
            self.check_times(waited)
            return self.check_slots(rank, number, zone)
        check_reports(self.send_rows(rank, routing, zone, **self.calls.sending(rank, number)))
        waited = self.times(self.config.experts_on(rank) * self.config.num_ranks)
        calls = self.calls.waiting(rank, number)
        counts, report = self.wait_for_status(rank, zone, waited, sees_all=self.sees_all(number), **calls)
        check_reports(report)
        if straggle:
            time.sleep(0.002)
        self.check_counts(rank, number, counts)
        if self.case.inband:
            received = self.expected_rows(rank, number)
            outputs, report = receive_inband(self, rank, zone, received["offsets"], waited)
            check_reports(report)
            check_outputs(self, rank, number, outputs)
        else:
            check_reports(self.wait_for_rows(rank, zone, counts, waited))
            received = self.check_slots(rank, number, zone)
        self.check_times(waited)
        return received

    def send_rows(self, rank: int, routing: Routing, zone: int, **changes: object) -> np.ndarray:
        c, case, tokens = self.config, self.case, self.case.tokens[rank]
        has_shared = c.num_shared_experts > 0
        bounds = [tokens * i // case.launches for i in range(case.launches + 1)]
        for first, last in itertools.pairwise(bounds):
            arguments: dict[str, object] = {
                "rows": routing.rows,
                "row_stride": case.sent_bytes,
                "row_bytes": case.sent_bytes,
                "stamp_offset": case.slot.stamp_offset,
                "rows_per_token": c.num_results_per_token if case.row_per_result else 1,
                "topk_idx": routing.sent_ids,
                "topk_weights": routing.weights if case.weighted else 0,
                "expand_idx": routing.expand_idx,
                "counts": routing.counts,
                "shared_ranks": routing.shared_ranks if has_shared else 0,
                "shared_slots": routing.shared_slots if has_shared else 0,
                "shared_counts": routing.shared_counts if has_shared else 0,
                "peers": self.peers,
                "first_token": first,
                "num_tokens": last - first,
                "topk": c.num_topk,
                "num_experts": c.num_experts,
                "num_shared_experts": c.num_shared_experts,
                "num_shared_ranks": c.num_shared_ranks,
                "rank": rank,
                "zone": zone,
                "kept_rank": -1,
                "post_status": int(first == 0),
                **self.calls.sending(rank, 0),
                "window": 0,
                "out_offset": 0,
                "slots": self.slots.on(rank),
                "status": self.layout.dispatch_status,
            }
            kernel = "inband_send" if case.inband else "dispatch_send"
            report = self.library.launch(kernel, case.blocks, **{**arguments, **changes})
            if last == tokens:
                break
            check_reports(report)
        return report

    def times(self, number: int) -> Guarded | None:
        """Room for times of arrival, where the case asks for them."""
        if not self.case.timed:
            return None
        times = Guarded((number,), np.int32)
        times.array[:] = UNTOUCHED
        return times

    def check_times(self, times: Guarded | None, *, of_results: bool = False) -> None:
        """Of each entry one; of a result that nobody waits for, none."""
        if times is None:
            return
        times.check_guards()
        is_none = of_results & (times.array == NOTHING_EXPECTED)
        if ((times.array < 0) & ~is_none).any() or (times.array > self.case.timeout_us).any():
            raise WrongResultError(f"waited {times.array.tolist()} us")

    def sees_all(self, number: int) -> bool:
        """Whether every block waits for all entries in this dispatch: that which takes rows clears them."""
        return self.case.inband or number % 2 == 1

    def wait_for_status(
        self,
        rank: int,
        zone: int,
        waited: Guarded | None = None,
        *,
        sees_all: bool = False,
        **changes: object,
    ) -> tuple[np.ndarray, np.ndarray]:
        """(experts, W) counts and the report."""
        c = self.config
        arguments: dict[str, object] = {
            "window": self.windows[rank].bytes,
            **self.masks,
            "num_local_experts": c.experts_on(rank),
            "waited_us": waited.array if waited else 0,
            "zone": zone,
            "timeout_us": self.case.timeout_us,
            "status": self.layout.dispatch_status_on(rank),
            **self.calls.waiting(rank, 0),
            **changes,
        }
        experts = arguments["num_local_experts"]
        assert isinstance(experts, int)
        counts, seen = (Guarded((experts, c.num_ranks), np.int32) for _ in range(2))
        arguments |= {"recv_counts": counts.array, "all_counts": seen.array if sees_all else 0}
        report = self.library.launch("dispatch_wait", self.case.blocks, **arguments)
        counts.check_guards()
        seen.check_guards()
        if sees_all and not report.any():
            if (seen.array != counts.array).any():
                raise WrongResultError(f"every block has seen {seen.array}, not {counts.array}")
            if not self.case.inband:
                self.clear_status(rank, zone)
        return counts.array, report

    def wait_for_rows(
        self, rank: int, zone: int, counts: np.ndarray, waited: Guarded | None = None, **changes: object
    ) -> np.ndarray:
        """The report. No flag is left of what came."""
        c = self.config
        arguments: dict[str, object] = {
            "window": self.windows[rank].bytes,
            "recv_counts": counts,
            "waited_us": waited.array if waited else 0,
            **self.masks,
            "num_local_experts": c.experts_on(rank),
            "num_ranks": c.num_ranks,
            "kept_rank": -1,
            "stamp_offset": self.case.slot.stamp_offset,
            "zone": zone,
            "timeout_us": self.case.timeout_us,
            "slots": self.slots.on(rank),
        }
        report = self.library.launch("dispatch_rows", self.case.blocks, **{**arguments, **changes})
        if not report.any():
            self.check_flags(rank, zone, counts, changes.get("kept_rank"))
        return report

    def check_flags(self, rank: int, zone: int, counts: np.ndarray, kept_rank: object = None) -> None:
        """None is left of a row that has come."""
        for expert, source in np.ndindex(counts.shape):
            for index in range(int(counts[expert, source]) if source != kept_rank else 0):
                if self.stamp(rank, zone=zone, source=source, expert=expert, index=index)[FLAG_WORD]:
                    raise WrongResultError(f"row {index} of expert {expert} from {source} still has its flag")

    def stamp(self, rank: int, **index: int) -> np.ndarray:
        """(8,) words of a row's stamp in a rank's window."""
        first = self.slots.on(rank).offset(**index) + self.case.slot.stamp_offset
        words: np.ndarray = self.windows[rank].bytes[first : first + STAMP.num_bytes].view(np.int32)
        return words

    def clear_status(self, rank: int, zone: int) -> None:
        """What no kernel has cleared yet."""
        status, c = self.layout.dispatch_status_on(rank), self.config
        first = status.offset(zone=zone)
        last = first + c.experts_on(rank) * c.num_ranks * STATUS_ENTRY.num_bytes
        entries = self.windows[rank].bytes[first:last]
        if not entries.reshape(-1, STATUS_ENTRY.num_bytes).any(axis=1).all():
            raise WrongResultError("an entry is cleared before every block can have seen it")
        entries[:] = 0

    def check_counts(self, rank: int, number: int, counts: np.ndarray) -> None:
        for expert, source in np.ndindex(counts.shape):
            want = len(sent_to(self.case, self.seed, number, source, rank, expert))
            if counts[expert, source] != want:
                raise WrongResultError(f"count {counts[expert, source]} instead of {want}")

    def expected_rows(self, rank: int, number: int) -> dict[str, np.ndarray]:
        """Origins and offsets of what a rank receives."""
        origins: list[tuple[int, int, int]] = []
        sums: list[int] = []
        for expert, source in np.ndindex(self.config.experts_on(rank), self.config.num_ranks):
            rows = sent_to(self.case, self.seed, number, source, rank, expert)
            origins += [(source, row.token, row.k) for row in rows]
            sums.append(len(origins))
        offsets = np.array(sums, dtype=np.int32)
        return {"origins": np.array(origins, dtype=np.int32).reshape(-1, 3), "offsets": offsets}

    def check_slots(self, rank: int, number: int, zone: int) -> dict[str, np.ndarray]:
        """Rows and stamps where they were sent to."""
        c, slot = self.config, self.case.slot
        zone = zone if self.case.slots_read_from is None else self.case.slots_read_from
        # At once, and looked at later: what has not come by now has come too late.
        first = self.slots.offset(zone=zone)  # of the zone's slots
        slots = self.windows[rank].bytes[first : first + self.layout.dispatch_zone_bytes].copy()
        for expert, source in np.ndindex(c.experts_on(rank), c.num_ranks):
            want = sent_to(self.case, self.seed, number, source, rank, expert)
            for index, (token, k, weight, row) in enumerate(want):
                index_of = {"source": source, "expert": expert, "index": index}
                at = self.slots.on(rank).offset(zone=zone, **index_of) - first
                got = slots[at : at + slot.stamp_offset + STAMP.num_bytes]
                if not np.array_equal(got[: len(row)], row):
                    raise WrongResultError(f"row {index} of expert {expert} from rank {source} differs")
                stamp = got[slot.stamp_offset :].view(np.int32)
                want_stamp = [source, token, k, int(np.float32(weight).view(np.int32)), 0]
                if stamp[:FLAG_WORD].tolist() != want_stamp:
                    raise WrongResultError(f"stamp {stamp.tolist()} instead of {want_stamp}")
        return self.expected_rows(rank, number)

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
        rows = results_of(self.case, received["origins"], number)
        kept = self.calls.combining(rank, number)
        routing = self.awaited(rank, dispatch_number)
        if self.case.part_tokens:
            parts = CombineInParts(self, rank, number, zone)
            parts.run(rows, received, routing, straggle=straggle, **kept)
            return
        check_reports(self.send_results(rank, rows, received, zone, **kept))
        if self.case.full_wait:
            self.post_and_wait(rank, zone, number)
        else:
            waited = self.times(routing.ids.shape[0] * self.config.num_results_per_token)
            check_reports(self.wait_for_results(rank, routing, zone, waited))
            self.check_number(rank, number, zone)
            self.check_times(waited, of_results=True)
        if straggle:
            time.sleep(0.002)
        self.check_results(rank, number, zone, routing)

    def awaited(self, rank: int, dispatch_number: int) -> Routing:
        """What a combine goes by."""
        return draw_routing(self.case, self.seed, dispatch_number, rank)

    def check_number(self, rank: int, number: int, zone: int) -> None:
        """The next combine goes on from this one's number, of which the first is 1."""
        kept = int(self.numbers[rank].array[1 - zone])
        if kept != number + 1:
            raise WrongResultError(f"combine {number} has kept the number {kept}")

    def post_and_wait(self, rank: int, zone: int, number: int) -> None:
        """Tells every rank that all is sent, and waits for all of them."""
        count = np.array([number * 100 + rank], dtype=np.int32)
        check_reports(self.post_status(rank, zone, count, **posting("C", number)))
        waited = self.times(self.config.num_ranks)
        counts, report = self.wait_for_status(
            rank, zone, waited, num_local_experts=1, status=self.peer_status, **expecting("C", number)
        )
        check_reports(report)
        self.check_times(waited)
        if counts.tolist() != [[number * 100 + source for source in range(self.config.num_ranks)]]:
            raise WrongResultError(f"numbers {counts.tolist()} came with the flags")

    def post_status(self, rank: int, zone: int, count: np.ndarray | int, **call: object) -> np.ndarray:
        arguments: dict[str, object] = {
            "peers": self.peers,
            "num_ranks": self.config.num_ranks,
            "count": count,
            "rank": rank,
            "zone": zone,
            **NOT_POSTING,
            "status": self.peer_status,
        }
        return self.library.launch("post_status", self.case.blocks, **{**arguments, **call})

    def send_results(
        self, rank: int, rows: np.ndarray, received: dict[str, np.ndarray], zone: int, **changes: object
    ) -> np.ndarray:
        c, status = self.config, self.layout.combine_status
        arguments: dict[str, object] = {
            "rows": rows,
            "row_bytes": self.case.result_bytes,
            "origins": received["origins"],
            "recv_offsets": received["offsets"],
            "num_entries": c.experts_on(rank) * c.num_ranks,
            "capacity": len(rows),
            **self.placed(rank, rows),
            "peers": self.peers,
            "num_ranks": c.num_ranks,
            "zone": zone,
            "numbers": self.numbers[rank].array,
            "kept_rank": -1,
            "flag_rows": int(not self.case.full_wait),
            "part": 0,
            "num_parts": 1,
            "part_tokens": 0,
            "progress": 0,
            "kind": 0,
            "combine_kind": 0,
            "window": 0,
            "out_rows": self.layout.out_rows,
            "slots": self.layout.combine_slots,
            "status": without_extents(status) if self.case.full_wait else status,
        }
        return self.library.launch("combine_send", self.case.blocks, **{**arguments, **changes})

    def placed(self, rank: int, rows: np.ndarray) -> dict[str, object]:
        """Arguments that say where results lie; none where each lies at its own number."""
        if not self.case.placed:
            return {}
        places = draw_places(self.seed, rank, len(rows))
        placed = at_places(rows, places)
        return {"rows": placed, "places": places, "capacity": len(placed)}

    def wait_for_results(
        self, rank: int, routing: Routing, zone: int, waited: Guarded | None = None, **changes: object
    ) -> np.ndarray:
        c, case = self.config, self.case
        arguments: dict[str, object] = {
            "window": self.windows[rank].bytes,
            "topk_idx": routing.ids,
            "active_index": routing.active_index if case.inactive else 0,
            "waited_us": waited.array if waited else 0,
            **self.masks,
            "num_ranks": c.num_ranks,
            "num_shared_ranks": c.num_shared_ranks,
            "first_token": 0,
            "num_tokens": case.tokens[rank],
            "topk": c.num_topk,
            "num_experts": c.num_experts,
            "num_shared_experts": c.num_shared_experts,
            "zone": zone,
            "numbers": self.numbers[rank].array,
            "timeout_us": case.timeout_us,
            "status": self.layout.combine_status,
        }
        return self.library.launch("combine_wait", case.blocks, **{**arguments, **changes})

    def check_results(
        self, rank: int, number: int, zone: int, routing: Routing, tokens: Sequence[int] | None = None
    ) -> None:
        """Of these tokens, or of all. Flags that were looked at are none of any round from now on."""
        flagged, zone = zone, zone if self.case.slots_read_from is None else self.case.slots_read_from
        first = self.layout.combine_slots.offset(zone=zone)
        slots = self.windows[rank].bytes[first : first + self.layout.combine_zone_bytes].copy()
        tokens = range(self.case.tokens[rank]) if tokens is None else tokens
        for token, k in itertools.product(tokens, range(self.config.num_results_per_token)):
            if not routing.is_expected(token, k, self.config):
                continue
            at = self.layout.combine_slots.offset(zone=zone, token=token, k=k)
            got = slots[at - first : at - first + self.case.result_bytes]
            want = results_of(self.case, np.array([[rank, token, k]], dtype=np.int32), number)[0]
            if not np.array_equal(got, want):
                raise WrongResultError(f"result {k} of token {token} differs")
            flag = self.layout.combine_status.offset(zone=flagged, token=token, k=k)
            self.windows[rank].bytes[flag : flag + 4].view(np.int32)[0] = SEEN
