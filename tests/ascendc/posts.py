"""Ranks as threads, of servers with queues between them, that dispatch and combine, and check every byte."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from moe_triton.backends.cpu.nic import NicSettings
from moe_triton.core.config import Config
from moe_triton.core.reach import Queues
from moe_triton.core.records import TRAFFIC
from moe_triton.layout import STAMP_BYTES, STATUS_ENTRY_BYTES
from moe_triton.schemes.fullmesh.ascendc import COMBINE_POST

from .call_words import expecting, posting
from .case import WrongResultError, check_reports, draw_routing, results_of, sent_to
from .driver import UNTOUCHED
from .fused import FusedCase, FusedWorld
from .library import Library, Phase, address
from .memory import Guarded, across_lines
from .nics import Nics

Counters = dict[str, int]
"""What was posted, by the names of `TRAFFIC`."""


@dataclass(frozen=True)
class PostingCase(FusedCase):
    """Dispatches and combines of one launch each, or of two.

    Attributes:
        servers: ranks of each.
        keeps_order: whether queues keep order inside messages.
        ring_items: posts that a queue holds.
        apart: each row is posted by itself, and its stamp.
    """

    servers: tuple[int, ...] = (1, 1)
    keeps_order: bool = False
    ring_items: int = 3
    apart: bool = False

    @property
    def config(self) -> Config:
        return replace(super().config, ranks_per_server=self.servers)


class PostingWorld(FusedWorld):
    """All ranks of one case, each with a NIC that delivers in any order that a queue may have."""

    def __init__(self, library: Library, case: PostingCase, seed: int = 0) -> None:
        super().__init__(library, case, seed)
        self.case: PostingCase = case
        self.nics = self.make_nics()
        self.tables = [across_lines(words) for words in self.nics.words]
        self.traffic = [Guarded((case.blocks, TRAFFIC.num_words), np.int64, align=64) for _ in case.tokens]

    def make_nics(self) -> Nics:
        """A NIC for each rank."""
        case, seed = self.case, self.seed
        topology, ranks = self.config.topology, range(len(case.tokens))
        queued = [frozenset(ranks) - frozenset(topology.neighbours(rank)) for rank in ranks]
        self.queues = [Queues(peers, topology.servers, self.layout.in_bytes) for peers in queued]
        settings = [
            NicSettings(
                seed=1 + seed * len(ranks) + rank, keeps_order=case.keeps_order, ring_items=case.ring_items
            )
            for rank in ranks
        ]
        windows = [address(window.bytes) for window in self.windows]
        return Nics(self.library, windows, self.layout.window_bytes, self.queues, settings)

    def run(self) -> None:
        """See `World`. What was posted is delivered before anything is looked at."""
        try:
            self._ranks.run(self._rounds)
        finally:
            self.nics.close()
        self.check_what_is_left()
        for traffic in self.traffic:
            traffic.check_guards()

    def _rounds(self, rank: int) -> None:
        self.nics.use(rank)
        super()._rounds(rank)

    def run_phases(self, rank: int, phases: list[Phase], first_half: int, in_halves: bool) -> None:
        """As one launch, or as two."""
        for part in (phases[:first_half], phases[first_half:]) if in_halves else (phases,):
            if len(part) == 1:
                check_reports(self.library.launch(part[0][0], self.case.blocks, **part[0][1]))
            else:
                for report in self.library.launch_phases(self.case.blocks, part):
                    check_reports(report)

    def posting(self, rank: int) -> dict[str, object]:
        """Arguments of a kernel that posts."""
        return {**self.leaving(rank), "timeout_us": self.case.timeout_us, "traffic": self.traffic[rank].array}

    def leaving(self, rank: int) -> dict[str, object]:
        """Of one that leaves things to post."""
        own = {"window": self.windows[rank].bytes, "out_offset": self.layout.in_bytes}
        return {"peers": self.tables[rank], **own}

    def check_traffic(self, rank: int, expected: Counters) -> None:
        """Every block has said what it posted, and together it is this."""
        words = self.traffic[rank].array
        found = {name: int(words[:, i].sum()) for i, (name, _) in enumerate(TRAFFIC.fields)}
        if found != {f"{name}_inside": 0 for name in expected} | {
            f"{name}_between": number for name, number in expected.items()
        }:
            raise WrongResultError(f"traffic {found} instead of {expected}")
        words[:] = UNTOUCHED

    # Dispatch.

    def dispatch(self, rank: int, number: int, zone: int, straggle: bool = False) -> dict[str, np.ndarray]:
        """Runs all phases, and checks what came and everything that they wrote."""
        waited = self.times(self.config.experts_on(rank) * self.config.num_ranks)
        outputs, phases = self.phases(rank, number, zone, waited)
        phases.insert(1, self.dispatch_post(rank, number, zone))
        phases.append(("dispatch_rows", self.rows_awaited(rank, zone, waited, outputs.recv_counts.array)))
        self.run_phases(rank, phases, 2, in_halves=number % 3 == 1)
        outputs.check_guards()
        self.check_traffic(rank, self.dispatched(rank, number))
        if straggle:
            time.sleep(0.002)
        counts = outputs.recv_counts.array
        self.check_counts(rank, number, counts)
        self.check_flags(rank, zone, counts)
        self.check_times(waited)
        self.check_outputs(rank, number, zone, outputs)
        self.clear_status(rank, zone)
        return self.check_slots(rank, number, zone)

    def _sending(self, rank: int, number: int, zone: int) -> Phase:
        name, arguments = super()._sending(rank, number, zone)
        return name, {**arguments, **self.leaving(rank)}

    def dispatch_post(self, rank: int, number: int, zone: int, **changes: object) -> Phase:
        """The phase behind the one that sends."""
        c, routing = self.config, draw_routing(self.case, self.seed, number, rank)
        arguments: dict[str, object] = {
            "counts": routing.counts,
            "shared_counts": routing.shared_counts if c.num_shared_experts else 0,
            "num_shared_ranks": c.num_shared_ranks,
            "rank": rank,
            "zone": zone,
            "zone_at": self._zones[rank],
            "row_bytes": self.case.slot.row_bytes,
            "slot_bytes": self.case.slot.stamp_offset + STAMP_BYTES,
            "front_bytes": self._front_bytes if self.case.apart else 0,
            **self.calls.in_one_launch(rank, number),
            **self.posting(rank),
            "slots": self.slots.on(rank),
            "status": self.layout.dispatch_status,
        }
        return "dispatch_post", {**arguments, **changes}

    @property
    def _front_bytes(self) -> int:
        slot = self.case.slot
        return slot.scaled_bytes if self.case.scaled else slot.row_bytes

    def dispatched(self, rank: int, number: int) -> Counters:
        """What a dispatch posts: messages for each expert that gets rows, and one with the entries."""
        posts = payload = framing = 0
        slot, stride = self.case.slot, self.layout.slot_stride
        for peer in self.queues[rank].peers:
            experts = self.config.experts_on(peer)
            posts, framing = posts + 1, framing + experts * STATUS_ENTRY_BYTES
            for expert in range(experts):
                rows = len(sent_to(self.case, self.seed, number, rank, peer, expert))
                if rows:
                    posts, payload = (
                        posts + (2 * rows if self.case.apart else 1),
                        payload + rows * slot.row_bytes,
                    )
                    sent = (rows - 1) * stride + slot.stamp_offset + STAMP_BYTES
                    if self.case.apart:
                        sent = rows * (self._front_bytes + STAMP_BYTES)
                    framing += sent - rows * slot.row_bytes
        return {"posts": posts, "payload": payload, "framing": framing}

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
        """Runs all phases, and checks what came."""
        routing = draw_routing(self.case, self.seed, dispatch_number, rank)
        phases = self.sending_phases(rank, number, zone, received)
        waited, counts = self.times(routing.ids.shape[0] * self.config.num_results_per_token), None
        if self.case.full_wait:
            counts = Guarded((1, self.config.num_ranks), np.int32)
            phases.append(("dispatch_wait", self._ranks_awaited(rank, zone, number, counts)))
        else:
            phases.append(self.recorded(lambda world: world.wait_for_results(rank, routing, zone, waited)))
        self.run_phases(rank, phases, len(phases) - 1, in_halves=number % 3 == 1)
        self.check_traffic(rank, self.returned(rank, received["origins"]))
        if counts and counts.array.tolist() != [[number * 100 + s for s in range(self.config.num_ranks)]]:
            raise WrongResultError(f"numbers {counts.array.tolist()} came with the flags")
        if straggle:
            time.sleep(0.002)
        self.check_results(rank, number, zone, routing)

    def sending_phases(
        self, rank: int, number: int, zone: int, received: dict[str, np.ndarray]
    ) -> list[Phase]:
        """Those of a combine that write results and post them, with their flags."""
        rows = results_of(self.case, received["origins"], number)
        kept = self.calls.combining(rank, number) | {"peers": self.tables[rank]}
        kept["window"] = self.windows[rank].bytes
        sends = self.recorded(lambda world: world.send_results(rank, rows, received, zone, **kept))
        phases = [sends, self.combine_post(rank, sends, zone)]
        if self.case.full_wait:
            count = np.array([number * 100 + rank], dtype=np.int32)
            call = {**posting("C", number), **self.posting(rank)}
            phases.append(self.recorded(lambda world: world.post_status(rank, zone, count, **call)))
        return phases

    def combine_post(self, rank: int, sends: Phase, zone: int) -> Phase:
        """The phase behind the one that sends."""
        told = {arg.name for arg in COMBINE_POST.args}
        arguments: dict[str, object] = {
            **{name: value for name, value in sends[1].items() if name in told},
            "zone": zone,
            "payload_bytes": self.case.hidden,
            **self.posting(rank),
            "out_flags": self.layout.out_flags,
        }
        return "combine_post", arguments

    def returned(self, rank: int, origins: np.ndarray) -> Counters:
        """What a combine posts: each row for another server and its flag, or a flag for each of its ranks."""
        rows = sum(int(source) in self.queues[rank].peers for source in origins[:, 0])
        flags = len(self.queues[rank].peers) if self.case.full_wait else rows
        payload = rows * self.case.hidden
        framing = rows * self.case.result_bytes - payload + flags * STATUS_ENTRY_BYTES
        return {"posts": rows + flags, "payload": payload, "framing": framing}

    def _ranks_awaited(self, rank: int, zone: int, number: int, counts: Guarded) -> dict[str, object]:
        return {
            "window": self.windows[rank].bytes,
            "recv_counts": counts.array,
            "all_counts": 0,
            "waited_us": 0,
            "num_local_experts": 1,
            "zone": zone,
            "timeout_us": self.case.timeout_us,
            "status": self.peer_status,
            **expecting("C", number),
        }
