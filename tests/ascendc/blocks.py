"""Ranks as threads that dispatch and combine by blocks, and check every byte."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from moe_triton.backends.cpu.nic import NicSettings
from moe_triton.core.reach import Queues
from moe_triton.core.records import TRAFFIC, TRAILER
from moe_triton.core.region import MAX_INT32
from moe_triton.layout import NUM_ZONES, UB_ALIGN
from moe_triton.schemes.a2_fullmesh.layout import UNIT_WORDS, end_flag

from .blocks_case import BlocksCase, Outputs
from .call_words import CallWords, word_of
from .case import Routing, Sent, WrongResultError, check_reports, draw_routing, results_of, sent_to
from .library import Library, Phase, address
from .memory import Guarded, across_lines, changes_behind
from .nics import Nics
from .ranks import Ranks

SENDING = "blocks_send", "blocks_return", "blocks_end"
"""Kernels of the half that sends."""


class BlocksWorld:
    """All ranks of one case."""

    def __init__(self, library: Library, case: BlocksCase, seed: int = 0) -> None:
        self.library, self.case, self.seed = library, case, seed
        self.layout, self.config = case.layout, case.config
        self.memory = [Guarded((self.layout.window_bytes,), align=512) for _ in case.tokens]
        self.windows = [memory.array for memory in self.memory]
        self.nics = self.make_nics() if case.servers else None
        mapped = [address(window) for window in self.windows]
        words = self.nics.words if self.nics else [mapped] * len(mapped)
        self.tables = [across_lines(table) for table in words]
        self.traffic = [Guarded((case.blocks, TRAFFIC.num_words), np.int64, align=64) for _ in mapped]
        self.calls = CallWords(len(case.tokens))
        first = np.array([case.first_number - 1] * NUM_ZONES, np.int32)
        self.numbers = [first.copy() for _ in case.tokens]
        self.part_lines = [Guarded((case.blocks, UNIT_WORDS), np.int32, align=64) for _ in mapped]
        for lines in self.part_lines:
            lines.array[:] = 0
        self.rows_to = [Guarded((len(case.tokens),), np.int32) for _ in case.tokens]
        self._ranks = Ranks(library, seed, len(case.tokens))

    def make_nics(self) -> Nics:
        """A NIC for each rank."""
        case, servers = self.case, self.config.topology.servers
        ranks = range(len(servers))
        queues = [Queues(frozenset(ranks) - {rank}, servers, self.layout.in_bytes) for rank in ranks]
        order = {"keeps_order": case.keeps_order, "ring_items": case.ring_items}
        settings = [NicSettings(seed=1 + self.seed * len(ranks) + rank, **order) for rank in ranks]
        windows = [address(window) for window in self.windows]
        return Nics(self.library, windows, self.layout.window_bytes, queues, settings)

    def run(self) -> None:
        """Every rank's rounds, each rank on a thread. Raises the first failure of any of them."""
        try:
            self._ranks.run(self._rounds)
        finally:
            if self.nics:
                self.nics.close()
        for memory in (*self.memory, *self.rows_to, *self.traffic, *self.part_lines):
            memory.check_guards()

    def _rounds(self, rank: int) -> None:
        if self.nics:
            self.nics.use(rank)
        rng = np.random.default_rng((self.seed, rank))
        numbers = {"D": 0, "C": 0}
        for turn, operator in enumerate(self.case.schedule * self.case.rounds):
            if self._ranks.have_failed:
                return
            zone, call = turn % self.case.zones, numbers[operator]
            numbers[operator] += 1
            straggle = rng.random() < self.case.straggle
            if operator == "D":
                self.dispatch(rank, call, zone, turn % 3 > 0, straggle)
            else:
                self.combine(rank, call, numbers["D"] - 1, zone, turn % 3 > 0, straggle)
            number = (self.case.first_number + turn - 1) % MAX_INT32 + 1
            if self.numbers[rank][1 - zone] != number:
                raise WrongResultError(f"round {turn} left the numbers {self.numbers[rank].tolist()}")

    def _pause(self, straggle: bool) -> None:
        if straggle:
            time.sleep(0.002)

    def _run(self, phases: list[Phase], in_halves: bool) -> None:
        """As one launch, or one that sends and one that waits."""
        for part in (self.sending(phases), self.waiting(phases)) if in_halves else (phases,):
            if len(part) == 1:
                check_reports(self.library.launch(part[0][0], self.case.blocks, **part[0][1]))
            else:
                for report in self.library.launch_phases(self.case.blocks, part):
                    check_reports(report)

    @staticmethod
    def sending(phases: list[Phase]) -> list[Phase]:
        """Those of an operator up to its flags and posts."""
        return [phase for phase in phases if phase[0] in SENDING]

    @staticmethod
    def waiting(phases: list[Phase]) -> list[Phase]:
        """Those from the wait on."""
        return [phase for phase in phases if phase[0] not in SENDING]

    def _of_block(self, rank: int, zone: int, row_step: int) -> dict[str, object]:
        layout = self.layout
        return {
            "numbers": self.numbers[rank],
            "zone": zone,
            "header_words": layout.header_words,
            "flag_word": layout.flag_word,
            "call_word": layout.call_word,
            "rows_offset": layout.rows_offset,
            "row_step": row_step,
            "max_rows": layout.max_rows,
            "end_offset": layout.end_offset if self.nics and not self.case.keeps_order else 0,
            "peer_blocks": layout.blocks,
        }

    def _of_peers(self, rank: int) -> dict[str, object]:
        peers = {"peers": self.tables[rank], "num_ranks": self.config.num_ranks, "rank": rank}
        return {**peers, "window": self.windows[rank], "out_offset": self.layout.in_bytes if self.nics else 0}

    def _masks(self, rank: int) -> dict[str, object]:
        return {"peers": self.tables[rank], "changes": changes_behind(self.tables[rank])}

    def _posts(self, rank: int, payload_bytes: int) -> dict[str, object]:
        """What posts ask for; `payload_bytes` of each row."""
        if not self.nics:
            return {"payload_bytes": 0, "num_parts": 1, "part_lines": 0, "timeout_us": 0, "traffic": 0}
        return {
            "payload_bytes": payload_bytes,
            "num_parts": min(self.case.post_parts, self.config.num_ranks),
            "part_lines": self.part_lines[rank].array,
            "timeout_us": BlocksCase.timeout_us,  # a full queue is emptied, if not at once
            "traffic": self.traffic[rank].array,
        }

    def _ends(self, rank: int, block: dict[str, object]) -> list[Phase]:
        """What ends blocks that are not posted."""
        if self.nics:
            return []
        return [
            ("blocks_end", {"rows_to": self.rows_to[rank].array, "call": 0, **self._of_peers(rank), **block})
        ]

    def check_traffic(self, rank: int, rows_to: Sequence[int], row_step: int, payload_bytes: int) -> None:
        """That the blocks of a launch have posted this together: so many rows to each rank."""
        if not self.nics:
            return
        servers, found = self.config.topology.servers, self.traffic[rank].array.sum(0).tolist()
        want = [0] * TRAFFIC.num_words
        for peer, rows in enumerate(rows_to):
            if peer not in (rank, self.case.lost):
                first = TRAFFIC.word("posts_inside" if servers[peer] == servers[rank] else "posts_between")
                framing = self.layout.rows_offset + rows * (row_step - payload_bytes) + UB_ALIGN
                posts = 1 if self.case.keeps_order else 2
                for i, number in enumerate((posts, rows * payload_bytes, framing)):
                    want[first + i] += number
        if found != want:
            raise WrongResultError(f"traffic {found} instead of {want}")

    # Dispatch.

    def dispatch(self, rank: int, number: int, zone: int, in_halves: bool, straggle: bool = False) -> None:
        """Sends, waits, and checks what came."""
        routing = draw_routing(self.case, self.seed, number, rank)
        self._pause(straggle)
        c = self.config
        outputs = Outputs.of(c.num_local_experts, c.num_ranks, c.receive_capacity(rank))
        self._run(self.phases(rank, routing, number, zone, outputs), in_halves)
        outputs.check_guards()
        rows_to = routing.counts.reshape(c.num_ranks, -1).sum(1).tolist()
        self.check_traffic(rank, rows_to, self.case.row.packed_bytes, self.case.row.row_bytes)
        self._pause(straggle)
        self.check_outputs(rank, number, zone, outputs)

    def phases(
        self, rank: int, routing: Routing, number: int, zone: int, outputs: Outputs, **changes: object
    ) -> list[Phase]:
        """Those of a whole dispatch."""
        c, case, row = self.config, self.case, self.case.row
        block = self._of_block(rank, zone, row.packed_bytes)
        rows = routing.rows
        if case.mimicked:
            rows = np.resize(
                np.array(end_flag(case.first_number + 2 * number), np.int32).view(np.uint8), rows.shape
            )
        send = {
            "rows": rows,
            "row_stride": case.sent_bytes,
            "row_bytes": case.sent_bytes,
            "stamp_offset": row.stamp_offset,
            "rows_per_token": c.num_topk if case.row_per_result else 1,
            "topk_idx": routing.sent_ids,
            "topk_weights": routing.weights if case.weighted else 0,
            "expand_idx": routing.expand_idx,
            "counts": routing.counts,
            "first_token": 0,
            "num_tokens": case.tokens[rank],
            "topk": c.num_topk,
            "num_experts": c.num_experts,
            "num_local_experts": c.num_local_experts,
            "rows_to": self.rows_to[rank].array,
            **self.calls.sending(rank, number),
            **self._of_peers(rank),
            **self._posts(rank, row.row_bytes),
            **block,
        }
        wait = {
            "window": self.windows[rank],
            "recv_counts": outputs.recv_counts.array,
            "waited_us": outputs.waited_us.array if case.timed else 0,
            "expected_rows": 0,
            "num_local_experts": c.num_local_experts,
            "max_count": c.num_max_tokens_per_rank,
            **self._masks(rank),
            "num_ranks": c.num_ranks,
            "timeout_us": case.timeout_us,
            **self._expected_word(rank, number),
            **block,
        }
        offsets = {
            "recv_counts": outputs.recv_counts.array,
            "recv_offsets": outputs.recv_offsets.array,
            "tokens_per_expert": outputs.tokens_per_expert.array,
            "recv_stats": 0,
            "trailer": outputs.trailer.array,
            "row_slots": outputs.row_slots.array,
            "num_local_experts": c.num_local_experts,
            "num_ranks": c.num_ranks,
            "max_count": c.num_max_tokens_per_rank,
            "capacity": len(outputs.row_slots.array),
            "cumulative": 0,
            "kept_rank": -1,
            "by_source": 1,
            "zone": zone,
            "slots": self.layout.rows(row.packed_bytes).in_units(UB_ALIGN),
        }
        return [
            ("blocks_send", send | changes),
            *self._ends(rank, block),
            ("blocks_wait", wait),
            ("dispatch_offsets", offsets),
        ]

    def _expected_word(self, rank: int, number: int) -> dict[str, object]:
        """The word itself, or where it stands."""
        expected = self.calls.waiting(rank, number)
        kinds = expected.pop("combine_kind")
        if isinstance(kinds, np.ndarray):
            expected["call"] = word_of("D", number) | int(kinds[0])
        return expected

    def received(self, rank: int, number: int) -> list[tuple[int, Sent]]:
        """What a rank receives, in order, each with its source."""
        pairs = np.ndindex(self.config.num_local_experts, self.config.num_ranks)
        return [
            (source, row)
            for expert, source in pairs
            for row in sent_to(self.case, self.seed, number, source, rank, expert)
        ]

    def counts(self, rank: int, number: int) -> np.ndarray:
        """(E, W) rows from each rank for each expert of one."""
        experts = self.config.num_local_experts
        routings = [draw_routing(self.case, self.seed, number, source) for source in range(len(self.windows))]
        return np.array([r.counts[rank * experts : (rank + 1) * experts] for r in routings], np.int32).T

    def check_outputs(self, rank: int, number: int, zone: int, outputs: Outputs) -> None:
        want, counts = self.received(rank, number), self.counts(rank, number)
        expected = {
            "recv_counts": counts,
            "recv_offsets": counts.reshape(-1).cumsum(),
            "tokens_per_expert": counts.sum(1),
        }
        for name, value in expected.items():
            got = getattr(outputs, name).array
            if not np.array_equal(got, value):
                raise WrongResultError(f"{name} {got.tolist()} instead of {value.tolist()}")
        if outputs.trailer.array[TRAILER.word("num_rows")] != len(want):
            raise WrongResultError(f"trailer {outputs.trailer.array.tolist()} of {len(want)} rows")
        if self.case.timed and (outputs.waited_us.array < 0).any():
            raise WrongResultError(f"waited {outputs.waited_us.array.tolist()}")
        self._check_rows(rank, number, outputs.row_slots.array, want)

    def _check_rows(self, rank: int, number: int, slots: np.ndarray, want: list[tuple[int, Sent]]) -> None:
        row, blocks = self.case.row, self.layout.blocks
        own = self.windows[rank]
        for n, (source, sent) in enumerate(want):
            at = int(slots[n]) * UB_ALIGN
            zones = [blocks.offset(zone=zone, rank=source) for zone in range(NUM_ZONES)]
            if not any(first <= at < first + self.layout.block_bytes for first in zones):
                raise WrongResultError(f"row {n} is looked for at {at}, which is no block of rank {source}")
            got = own[at : at + row.packed_bytes].copy()
            if not self.case.mimicked and not np.array_equal(got[: row.stamp_offset], sent.row):
                raise WrongResultError(f"row {n} of dispatch {number} on rank {rank} differs")
            weight = int(np.float32(sent.weight).view(np.int32))
            stamp = got[row.stamp_offset :].view(np.int32).tolist()
            if stamp != [source, sent.token, sent.k, weight, 0, 0, 0, 0]:
                raise WrongResultError(f"stamp {stamp} of row {n}, dispatch {number} on rank {rank}")

    # Combine.

    def combine(
        self, rank: int, number: int, dispatch_number: int, zone: int, in_halves: bool, straggle: bool = False
    ) -> None:
        """Returns a result for each received row, waits, and checks those of its own tokens."""
        self._pause(straggle)
        counts = Guarded((1, self.config.num_ranks), np.int32)
        self._run(self.return_phases(rank, number, dispatch_number, zone, counts.array), in_halves)
        counts.check_guards()
        size = self.case.result_bytes
        self.check_traffic(rank, self.counts(rank, dispatch_number).sum(0).tolist(), size, size)
        self._pause(straggle)
        self.check_results(rank, number, dispatch_number, zone)
        expected = self.places(rank, dispatch_number)[1]
        if counts.array[0].tolist() != expected:
            raise WrongResultError(f"rows {counts.array.tolist()} instead of {expected}")

    def places(self, rank: int, number: int) -> tuple[dict[tuple[int, int], tuple[int, int]], list[int]]:
        """Where each result of a rank's tokens is: block and place; and how many rows each block has."""
        ids, experts = (
            draw_routing(self.case, self.seed, number, rank).sent_ids,
            self.config.num_local_experts,
        )
        routed = [(int(e), int(t), int(k)) for (t, k), e in np.ndenumerate(ids)]
        routed = sorted(each for each in routed if 0 <= each[0] < self.config.num_experts)
        sizes, found = [0] * self.config.num_ranks, {}
        for expert, token, k in routed:
            owner = expert // experts
            found[token, k] = owner, sizes[owner]
            sizes[owner] += 1
        return found, sizes

    def return_phases(
        self, rank: int, number: int, dispatch_number: int, zone: int, counts: np.ndarray, **changes: object
    ) -> list[Phase]:
        """Those of a whole combine."""
        origins = [(source, row.token, row.k) for source, row in self.received(rank, dispatch_number)]
        rows = results_of(self.case, np.array(origins, np.int32).reshape(-1, 3), number)
        block, case = self._of_block(rank, zone, self.case.result_bytes), self.case
        send = {
            "rows": rows,
            "recv_offsets": self.counts(rank, dispatch_number).reshape(-1).cumsum(dtype=np.int32),
            "num_entries": self.config.num_local_experts * self.config.num_ranks,
            "capacity": len(rows),
            "rows_to": self.rows_to[rank].array,
            "call": word_of("C", number),
            **self.calls.combining(rank, number),
            **self._of_peers(rank),
            **self._posts(rank, case.result_bytes),
            **block,
        }
        wait = {
            "window": self.windows[rank],
            "recv_counts": counts,
            "waited_us": 0,
            "expected_rows": np.array(self.places(rank, dispatch_number)[1], np.int32),
            "num_local_experts": 1,
            "max_count": self.layout.max_rows,
            **self._masks(rank),
            "num_ranks": self.config.num_ranks,
            "timeout_us": case.timeout_us,
            "call": word_of("C", number),
            "dispatch_word": 0,
            **block,
        }
        return [("blocks_return", send | changes), *self._ends(rank, block), ("blocks_wait", wait)]

    def check_results(self, rank: int, number: int, dispatch_number: int, zone: int) -> None:
        found, _ = self.places(rank, dispatch_number)
        for (token, k), (owner, place) in found.items():
            at = self.layout.blocks.offset(zone=zone, rank=owner) + self.layout.rows_offset
            at += place * self.case.result_bytes
            got = self.windows[rank][at : at + self.case.result_bytes]
            want = results_of(self.case, np.array([[rank, token, k]], np.int32), number)[0]
            if not np.array_equal(got, want):
                raise WrongResultError(f"result {k} of token {token} of rank {rank} differs")
