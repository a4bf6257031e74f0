"""Ranks as threads, of servers with rails between them, that dispatch and combine and check all."""

from __future__ import annotations

import time

import numpy as np

from moe_triton.backends.cpu.nic import NicSettings
from moe_triton.core.reach import Queues
from moe_triton.core.records import POSITION_SHIFT, STAMP, TRAFFIC, TRAILER
from moe_triton.core.region import MAX_INT32
from moe_triton.layout import NUM_ZONES, UB_ALIGN
from moe_triton.schemes.hierarchy.dispatch import relay_timeout_us

from .call_words import expecting, posting, word_of
from .case import WrongResultError, check_reports, draw_routing, results_of, sent_to
from .hierarchy_case import HierarchyCase, Received, check, in_order, outer_table, rows_of
from .hierarchy_traffic import check_combined, check_dispatched
from .library import Library, Phase, address
from .memory import Guarded, across_lines, changes_behind
from .nics import Nics
from .ranks import Ranks


class HierarchyWorld:
    """All ranks of one case."""

    def __init__(self, library: Library, case: HierarchyCase, seed: int = 0) -> None:
        self.library, self.case, self.seed = library, case, seed
        self.layout, self.config = case.layout, case.config
        ranks = range(self.config.num_ranks)
        self.memory = [Guarded((self.layout.window_bytes,), align=512) for _ in ranks]
        self.windows = [memory.array for memory in self.memory]
        for window in self.windows:
            window[: self.layout.state_bytes] = 0
        self.nics = self.make_nics()
        self.tables = [across_lines(words) for words in self.nics.words]
        self.traffic = [Guarded((case.blocks, TRAFFIC.num_words), np.int64, align=64) for _ in ranks]
        first = np.array([case.first_number - 1] * NUM_ZONES, np.int32)
        self.numbers = [{operator: first.copy() for operator in "DC"} for _ in ranks]
        for window in self.windows:  # heads of rounds that have not been
            for server in range(self.layout.num_servers):
                for zone in range(NUM_ZONES):
                    rows = rows_of(window, self.layout.rail_slots, zone, server)
                    rows[:, :UB_ALIGN] = 0
        self._ranks = Ranks(library, seed, self.config.num_ranks)

    def make_nics(self) -> Nics:
        case, topology = self.case, self.config.topology
        ranks = range(self.config.num_ranks)
        queued = [frozenset(ranks) - frozenset(topology.neighbours(rank)) for rank in ranks]
        queues = [Queues(peers, topology.servers, self.layout.in_bytes) for peers in queued]
        if case.post_us:
            settings = [NicSettings(post_us=case.post_us, ring_items=case.ring_items) for _ in ranks]
        else:
            seeds = [1 + self.seed * len(ranks) + rank for rank in ranks]
            settings = [
                NicSettings(seed=seed, keeps_order=case.keeps_order, ring_items=case.ring_items)
                for seed in seeds
            ]
        windows = [address(window) for window in self.windows]
        return Nics(self.library, windows, self.layout.window_bytes, queues, settings)

    def run(self) -> None:
        """Every rank's rounds, each rank on a thread. Raises the first failure of any of them."""
        try:
            self._ranks.run(self._rounds)
        finally:
            self.nics.close()
        for memory in (*self.memory, *self.traffic):
            memory.check_guards()

    def _rounds(self, rank: int) -> None:
        self.nics.use(rank)
        rng = np.random.default_rng((self.seed, rank))
        calls = {"D": 0, "C": 0}
        received = None
        for operator in self.case.schedule * self.case.rounds:
            if self._ranks.have_failed:
                return
            number = calls[operator]
            zone = number % self.case.zones
            calls[operator] += 1
            straggle = rng.random() < self.case.straggle
            if operator == "D":
                received = self.dispatch(rank, number, zone, straggle)
            else:
                assert received is not None
                self.combine(rank, number, zone, received, straggle)
            want = (self.case.first_number + number - 1) % MAX_INT32 + 1
            if self.numbers[rank][operator][1 - zone] != want:
                raise WrongResultError(f"{operator} {number} left {self.numbers[rank][operator].tolist()}")

    def _pause(self, straggle: bool) -> None:
        if straggle:
            time.sleep(0.002)

    def _run(self, phases: list[Phase], first_half: int) -> None:
        """As one launch, or as two."""
        for part in (phases[:first_half], phases[first_half:]) if first_half else (phases,):
            if len(part) == 1:
                check_reports(self.library.launch(part[0][0], self.case.blocks, **part[0][1]))
            else:
                for report in self.library.launch_phases(self.case.blocks, part):
                    check_reports(report)

    # Arguments that kernels share.

    def _rail(self, rank: int) -> dict[str, object]:
        servers, ranks = self.layout.num_servers, self.layout.ranks_per_server
        return {"num_servers": servers, "ranks_per_server": ranks, "rank": rank}

    def _peers(self, rank: int) -> dict[str, object]:
        return {"peers": self.tables[rank], **self._rail(rank)}

    def _masks(self, rank: int, first: int = 0) -> dict[str, object]:
        """Of a wait for entries of ranks from the first one on."""
        return {"peers": self.tables[rank][first:], "changes": changes_behind(self.tables[rank])}

    def _round(self, rank: int, operator: str, number: int, zone: int) -> dict[str, object]:
        return {
            "numbers": self.numbers[rank][operator],
            "zone": zone,
            "call": word_of(operator, number),
        }

    def _posting(self, rank: int) -> dict[str, object]:
        """A case's short deadline is for what never comes. A full queue is emptied, if not at once."""
        return {
            "window": self.windows[rank],
            "out_offset": self.layout.in_bytes,
            "timeout_us": HierarchyCase.timeout_us,
            "traffic": self.traffic[rank].array,
        }

    def _in_slot(self) -> dict[str, object]:
        slot = self.case.rail_slot
        names = "topk row_bytes words_offset weights_offset scale_offset slot_bytes"
        return {name: getattr(slot, name) for name in names.split()}

    @property
    def _messages(self) -> dict[str, object]:
        return {"message_tokens": self.case.message_tokens or self.config.num_max_tokens_per_rank}

    # Dispatch.

    def dispatch(self, rank: int, number: int, zone: int, straggle: bool = False) -> Received:
        """Sends, relays, waits, and checks what came."""
        self._pause(straggle)
        capacity = self.config.receive_capacity(rank)
        received = Received.of(self.config, self.layout.num_servers, number, capacity)
        for part in range(self.case.parts - 1):
            for phase in self.dispatch_phases(rank, number, zone, received, part)[:2]:
                self._run([phase], 0)
        tokens, *phases = self.dispatch_phases(rank, number, zone, received)
        self._run([tokens], 0)
        self._run(phases, number % 2)
        received.check_guards()
        check_dispatched(self.case, self.seed, rank, number, self.traffic[rank].array)
        self._pause(straggle)
        self.check_received(rank, zone, received)
        return received

    def dispatch_phases(
        self, rank: int, number: int, zone: int, received: Received, part: int | None = None
    ) -> list[Phase]:
        """Those of a whole dispatch, with one part of its tokens, the last one unless another is named."""
        c, case, layout = self.config, self.case, self.layout
        part = case.parts - 1 if part is None else part
        first, end = (case.tokens[rank] * each // case.parts for each in (part, part + 1))
        of_part = {"first_token": first, "num_tokens": end - first}
        routing = draw_routing(case, self.seed, number, rank)
        outer = outer_table(case, routing)
        slot = case.slot
        tokens = {
            "window": self.windows[rank],
            "out_offset": layout.in_bytes,
            "rows": routing.rows,
            "row_stride": case.sent_bytes,
            "row_scale": slot.scale_offset if case.scaled else 0,
            "topk_weights": routing.weights,
            "outer_ids": outer.ids,
            "outer_rows": outer.rows,
            "route_words": outer.words,
            **of_part,
            **self._messages,
            **self._rail(rank),
            **self._round(rank, "D", number, zone),
            **self._in_slot(),
            "slots": layout.rail_slots,
        }
        send = {
            "outer_rows": outer.rows,
            "outer_counts": outer.counts,
            **of_part,
            "is_last": int(part == case.parts - 1),
            "adds_traffic": int(part > 0),
            **self._messages,
            "row_bytes": case.rail_slot.row_bytes,
            "slot_bytes": case.rail_slot.slot_bytes,
            **self._peers(rank),
            **self._round(rank, "D", number, zone),
            **self._posting(rank),
            "slots": layout.rail_slots,
            "ends": layout.rail_flags,
        }
        relay = {
            "window": self.windows[rank],
            "rail_counts": received.rail_counts.array,
            "num_local_experts": c.num_local_experts,
            "slot_scale": slot.scale_offset if case.scaled else 0,
            "stamp_offset": slot.stamp_offset,
            "timeout_us": relay_timeout_us(case.timeout_us),
            "in_series": int(not case.message_tokens),
            **self._peers(rank),
            **self._masks(rank),
            **self._round(rank, "D", number, zone),
            **self._in_slot(),
            "traffic": self.traffic[rank].array,
            "rails": layout.rail_slots,
            "ends": layout.rail_flags,
            "slots": layout.forward_slots,
            "status": layout.token_counts,
        }
        wait = {
            "window": self.windows[rank],
            **self._masks(rank),
            "recv_counts": received.recv_counts.array,
            "waited_us": 0,
            "num_local_experts": c.num_local_experts,
            "zone": zone,
            "timeout_us": case.timeout_us,
            "count_end": c.num_max_tokens_per_rank + 1,
            "is_relayed": 1,
            **expecting("D", number),
            "status": layout.token_counts,
        }
        offsets = {
            "recv_counts": received.recv_counts.array,
            "recv_offsets": received.recv_offsets.array,
            "tokens_per_expert": received.tokens_per_expert.array,
            "recv_stats": 0,
            "trailer": received.trailer.array,
            "row_slots": received.row_slots.array,
            "num_local_experts": c.num_local_experts,
            "num_ranks": c.num_ranks,
            "max_count": c.num_max_tokens_per_rank,
            "capacity": len(received.row_slots.array),
            "cumulative": 0,
            "kept_rank": -1,
            "by_source": 0,
            "zone": zone,
            "slots": layout.forward_slots.in_units(UB_ALIGN),
        }
        return [
            ("rail_tokens", tokens),
            ("rail_send", send),
            ("rail_relay", relay),
            ("dispatch_wait", wait),
            ("dispatch_offsets", offsets),
        ]

    def _sent(self, rank: int, number: int) -> np.ndarray:
        """(S,) tokens of a rank that go to each server."""
        return outer_table(self.case, draw_routing(self.case, self.seed, number, rank)).counts

    def check_received(self, rank: int, zone: int, received: Received) -> None:
        case, c, layout = self.case, self.config, self.layout
        rows = [
            (expert, source, index, row)
            for expert in range(c.num_local_experts)
            for source in range(c.num_ranks)
            for index, row in enumerate(sent_to(case, self.seed, received.number, source, rank, expert))
        ]
        received.origins = np.array([(s, row.token, row.k) for _, s, _, row in rows], np.int32).reshape(-1, 3)
        counts = np.zeros((c.num_local_experts, c.num_ranks), np.int32)
        for expert, source, _, _ in rows:
            counts[expert, source] += 1
        self._check_tables(received, counts, len(rows))
        relayed = [self._sent(source, received.number) for source in c.topology.rail(rank)]
        own = rank // layout.ranks_per_server
        by_place = [relayed[(own + place) % layout.num_servers] for place in range(layout.num_servers)]
        check("rail_counts", received.rail_counts.array, [sent[own] for sent in by_place])
        window, slot = self.windows[rank], case.slot
        if case.slots_read_from is not None:
            zone = case.slots_read_from
        for i, (expert, source, index, row) in enumerate(rows):
            at = layout.forward_slots.offset(zone=zone, source=source, expert=expert, index=index)
            check("row_slots", received.row_slots.array[i], at // UB_ALIGN)
            found = window[at : at + slot.packed_bytes]
            check("row", found[: slot.row_bytes], row.row[: slot.row_bytes])
            if case.scaled:
                scale = slice(slot.scale_offset, slot.scale_offset + slot.scale_bytes)
                check("scale", found[scale], row.row[scale])
            stamp = found[slot.stamp_offset :].view(np.int32)
            check("stamp", stamp[:3], received.origins[i])
            check("weight", stamp[STAMP.word("weight")], np.float32(row.weight).view(np.int32))

    def _check_tables(self, received: Received, counts: np.ndarray, num_rows: int) -> None:
        check("recv_counts", received.recv_counts.array, counts)
        check("recv_offsets", received.recv_offsets.array, counts.reshape(-1).cumsum())
        check("tokens_per_expert", received.tokens_per_expert.array, counts.sum(1))
        check("trailer", received.trailer.array[TRAILER.word("num_rows")], num_rows)

    # Combine.

    def combine(self, rank: int, number: int, zone: int, received: Received, straggle: bool = False) -> None:
        """Returns results, sums them, sends partial rows, and checks the sums."""
        self._pause(straggle)
        returned = Guarded((self.layout.num_servers, self.layout.ranks_per_server), np.int32)
        seen, left_out = (Guarded((self.layout.num_servers,), np.int32) for _ in range(2))
        sent: list[Phase] = []  # of the piece before, which goes on with the next one's
        for piece, places in enumerate(self.pieces):
            self._run([*sent, *self.return_phases(rank, number, zone, received, returned, piece)], 0)
            self._pause(straggle)
            sums = self.server_sums(rank, zone, received, places)
            place, *sent, wait = self.partial_phases(
                rank, number, zone, received, returned, sums, seen, piece, left_out.array
            )
            self._run([place], 0)
        self._run([*sent, wait], number % 2)
        for table in (returned, seen, left_out):
            table.check_guards()
        self._pause(not straggle)
        check_combined(self.case, rank, received, self.traffic[rank].array)
        sent = self._sent(rank, received.number)
        check("rail_seen", seen.array, sent)
        check("rail_left_out", left_out.array, self.left_out_of(rank))
        self.check_sums(rank, number, zone, received.number)

    @property
    def pieces(self) -> list[range]:
        """Places of servers whose results are returned together, the own one's last."""
        others, pieces = self.layout.num_servers - 1, min(self.case.pieces - 1, self.layout.num_servers - 1)
        if not pieces:
            return [range(others + 1)]
        ends = [1 + others * piece // pieces for piece in range(pieces + 1)]
        return [*(range(*ends[piece : piece + 2]) for piece in range(pieces)), range(1)]

    def _returned(self, returned: Guarded, piece: int) -> dict[str, object]:
        returns = self.layout.return_status_of(piece)
        return {"returned": returned.array[piece : piece + 1], "returns": returns}

    def return_phases(
        self, rank: int, number: int, zone: int, received: Received, returned: Guarded, piece: int = 0
    ) -> list[Phase]:
        """Up to the wait for this rank's server."""
        c, layout, places = self.config, self.layout, self.pieces[piece]
        status = layout.return_status_of(piece)
        rows = results_of(self.case, received.origins, number)
        send = {
            "rows": rows,
            "row_bytes": self.case.result_bytes,
            "recv_offsets": received.recv_offsets.array,
            "num_entries": c.num_local_experts * c.num_ranks,
            "capacity": len(rows),
            "first_place": places.start,
            "num_places": len(places),
            **self._peers(rank),
            "zone": zone,
            "traffic": self.traffic[rank].array,
            "adds_traffic": int(piece > 0),
            "slots": layout.result_slots,
        }
        ranks, own = layout.ranks_per_server, rank % layout.ranks_per_server
        flag = {
            "peers": self.tables[rank][rank - own :],
            "num_ranks": ranks,
            "count": 0,
            "rank": own,
            "zone": zone,
            "window": 0,
            "out_offset": 0,
            "timeout_us": 0,
            "traffic": 0,
            "status": status,
            **posting("C", number),
        }
        wait = {
            "window": self.windows[rank],
            **self._masks(rank, rank - own),
            "recv_counts": returned.array[piece : piece + 1],
            "waited_us": 0,
            "num_local_experts": 1,
            "zone": zone,
            "timeout_us": relay_timeout_us(self.case.timeout_us),
            "count_end": 1,
            "status": status,
            **expecting("C", number),
        }
        lost = {
            **self._returned(returned, piece),
            "first_place": places.start,
            "num_places": layout.num_servers - places.start if places.start else len(places),
            **self._peers(rank),
            **self._round(rank, "C", number, zone),
            **self._posting(rank),
            "ends": layout.partial_flags,
        }
        return [
            ("server_return", send),
            ("post_status", flag),
            ("dispatch_wait", wait),
            ("returns_lost", lost),
        ]

    def server_sums(
        self, rank: int, zone: int, received: Received, places: range | None = None
    ) -> np.ndarray:
        """(S, tokens, bytes): of each token that came by the rail, by what the rail says of it.

        Of some places of servers; of all, if none are given.
        """
        layout, window, slot = self.layout, self.windows[rank], self.case.rail_slot
        first = rank // layout.ranks_per_server * layout.server_experts
        shape = layout.num_servers, self.config.num_max_tokens_per_rank, self.case.result_bytes
        sums = np.full(shape, 0xEE, np.uint8)
        for place in places or range(layout.num_servers):
            tokens = rows_of(window, layout.rail_slots, received.number % self.case.zones, place)
            for number in range(int(received.rail_counts.array[place])):
                words = tokens[number, slot.words_offset :][: 4 * slot.topk].copy().view(np.int32)
                chosen = sorted(
                    ((word & (1 << POSITION_SHIFT) - 1) - first, word >> POSITION_SHIFT)
                    for word in words.tolist()
                    if word >= 0 and first <= word & (1 << POSITION_SHIFT) - 1 < first + layout.server_experts
                )
                slots = [
                    layout.result_slots.offset(zone=zone, source=place, expert=expert, index=position)
                    for expert, position in chosen
                ]
                rows = (window[at : at + self.case.result_bytes] for at in slots)
                sums[place, number] = in_order(rows, self.case.result_bytes)
        return sums

    def partial_phases(
        self,
        rank: int,
        number: int,
        zone: int,
        received: Received,
        returned: Guarded,
        sums: np.ndarray,
        seen: Guarded,
        piece: int = 0,
        left_out: np.ndarray | None = None,
    ) -> list[Phase]:
        """Up to the wait for the rail, which writes how many rows there are, and who is left out of them."""
        layout, size, places = self.layout, self.case.result_bytes, self.pieces[piece]
        left_out = np.zeros(layout.num_servers, np.int32) if left_out is None else left_out
        rows = {
            "row_bytes": size,
            "rail_counts": received.rail_counts.array,
            "first_place": places.start,
            "num_places": len(places),
            "first_row": 0,
            "last_row": layout.config.num_max_tokens_per_rank,
        }
        place = {
            "window": self.windows[rank],
            "out_offset": layout.in_bytes,
            "rows": sums,
            **rows,
            **self._rail(rank),
            "zone": zone,
            "slots": layout.partials_of(size),
        }
        send = {
            **rows,
            "payload_bytes": size,
            **self._returned(returned, piece),
            "left_out": self.left_out(rank),
            **self._messages,
            **self._peers(rank),
            **self._round(rank, "C", number, zone),
            **self._posting(rank),
            "slots": layout.partials_of(size),
            "ends": layout.partial_flags,
        }
        wait = {
            "window": self.windows[rank],
            "outer_counts": self._sent(rank, received.number),
            "rail_seen": seen.array,
            "rail_left_out": left_out,
            "timeout_us": self.case.timeout_us,
            **self._rail(rank),
            **self._masks(rank),
            **self._round(rank, "C", number, zone),
            "ends": layout.partial_flags,
        }
        return [("partials_place", place), ("partials_send", send), ("rail_wait", wait)]

    def left_out(self, rank: int) -> np.ndarray:
        """(S,) by place what a rank says of its server's ranks: something else of each, and to each."""
        places = np.arange(self.layout.num_servers, dtype=np.int32)
        return 1 + 100 * rank + 10 * places

    def left_out_of(self, rank: int) -> np.ndarray:
        """(S,) what a rank hears of them."""
        servers, own = self.layout.num_servers, rank // self.layout.ranks_per_server
        rail = self.config.topology.rail(rank)
        return np.array([self.left_out(peer)[(own - at) % servers] for at, peer in enumerate(rail)], np.int32)

    def check_sums(self, rank: int, number: int, zone: int, dispatch_number: int) -> None:
        """Each token's: its servers' sums ascending, of results as their experts made them, ascending."""
        layout, window, size = self.layout, self.windows[rank], self.case.result_bytes
        routing = draw_routing(self.case, self.seed, dispatch_number, rank)
        outer = outer_table(self.case, routing)
        for token, ids in enumerate(routing.sent_ids.tolist()):
            for server in range(layout.num_servers):
                if outer.ids[token, server] < 0:
                    continue
                ks = sorted(
                    (expert, k)
                    for k, expert in enumerate(ids)
                    if 0 <= expert < self.config.num_experts and expert // layout.server_experts == server
                )
                origins = np.array([(rank, token, k) for _, k in ks], np.int32)
                want = in_order(results_of(self.case, origins, number), size)
                at = layout.partial_rows.offset(
                    zone=zone, server=server, index=int(outer.rows[token, server])
                )
                check(f"partial row of token {token}", window[at : at + size], want)
