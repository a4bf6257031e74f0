"""A dispatch in one split launch: its first blocks receive while the others send."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_triton.core.ascendc import MAX_BLOCKS, REPORT_TIMEOUT
from moe_triton.core.records import STATUS_ENTRY
from moe_triton.layout import BLOCK_BYTES, BLOCK_DATA_BYTES

from .case import WrongResultError, check_reports, draw_routing
from .driver import FLAG_WORD
from .fused import HALF_SENT, MISSING, FusedCase, FusedWorld, Outputs
from .inband import check_outputs
from .library import Library
from .memory import Guarded, inband_blocks


@dataclass(frozen=True)
class ReceivingCase(FusedCase):
    """Dispatches of one split launch each; combines are like any other.

    Attributes:
        first_blocks: of all blocks, those that receive.
    """

    first_blocks: int = 1


@dataclass(frozen=True)
class MissingCase(ReceivingCase):
    """Rank 0's dispatch: one rank does not come, or another one has sent entries without all of their rows.

    Attributes:
        is_away: whether a rank does not come.
    """

    is_away: bool = True


class ReceivingWorld(FusedWorld):
    """All ranks of one case, each with a flag of each block, all zero between launches."""

    def __init__(self, library: Library, case: ReceivingCase, seed: int = 0) -> None:
        super().__init__(library, case, seed)
        self.first_blocks = case.first_blocks
        self.begun = [Guarded((MAX_BLOCKS, STATUS_ENTRY.num_words), np.float32) for _ in case.tokens]
        for begun in self.begun:
            begun.array[:] = 0

    def dispatch(self, rank: int, number: int, zone: int, straggle: bool = False) -> dict[str, np.ndarray]:
        """Runs the launch, and checks what came and everything that it wrote."""
        waited = self.times(self.config.experts_on(rank) * self.config.num_ranks)
        outputs, rows, reports = self.receive(rank, number, zone, waited)
        for report in reports:
            check_reports(report)
        self.check_left(rank, zone)
        if straggle:
            time.sleep(0.002)
        counts = outputs.recv_counts.array
        self.check_counts(rank, number, counts)
        if (outputs.all_counts.array != counts).any():
            raise WrongResultError(f"every block has seen {outputs.all_counts.array}, not {counts}")
        self.check_flags(rank, zone, counts)
        self.check_times(waited)
        self.check_outputs(rank, number, zone, outputs)
        check_outputs(self, rank, number, rows)
        # Where rows are cut into blocks, what was taken out of them says what was in them.
        inband = self.case.inband
        return self.expected_rows(rank, number) if inband else self.check_slots(rank, number, zone)

    def receive(
        self, rank: int, number: int, zone: int, waited: Guarded | None = None, **changes: object
    ) -> tuple[Outputs, dict[str, Guarded], Sequence[np.ndarray]]:
        """Sums and counts, what came, and a report of each phase: send, wait, offsets, receive."""
        capacity = changes.get("capacity", int(self.expected_rows(rank, number)["offsets"][-1]))
        assert isinstance(capacity, int)
        rows = self.room_for(capacity)
        outputs, (send, wait, offsets) = self.phases(rank, number, zone, waited)
        outputs.has_table = False
        counts = outputs.recv_counts.array, outputs.all_counts.array
        arguments = self.receiving(rank, zone, waited, counts, rows)
        sending = {**send[1], "begun": self.begun[rank].array}
        phases = [
            (send[0], sending),
            wait,
            (offsets[0], {**offsets[1], "row_slots": 0}),
            ("inband_collect" if self.case.inband else "dispatch_receive", {**arguments, **changes}),
        ]
        reports = self.library.launch_phases(self.case.blocks, phases, self.first_blocks)
        outputs.check_guards()
        for each in (*rows.values(), self.begun[rank]):
            each.check_guards()
        return outputs, rows, reports

    def receiving(
        self,
        rank: int,
        zone: int,
        waited: Guarded | None,
        counts: tuple[np.ndarray, np.ndarray],
        rows: dict[str, Guarded],
    ) -> dict[str, object]:
        """Arguments of the phase that receives, given the counts that blocks have stored, and all of them."""
        slot, arrays = self.case.slot, {name: output.array for name, output in rows.items()}
        return {
            **self.rows_awaited(rank, zone, waited, counts[0]),
            "all_counts": counts[1],
            "max_count": self.config.num_max_tokens_per_rank,
            "begun": self.begun[rank].array,
            "turned": self._zones[rank],
            "status": self.layout.dispatch_status_on(rank),
            "capacity": len(arrays["out_rows"]),
            "row_bytes": slot.row_bytes,
            "scale_offset": slot.scale_offset,
            "scale_bytes": slot.scale_bytes,
            **arrays,
            "out_scales": arrays["out_scales"] if self.case.scaled else 0,
            "out_weights": arrays["out_weights"] if self.case.weighted else 0,
        }

    def room_for(self, capacity: int) -> dict[str, Guarded]:
        case = self.case
        return {
            "out_rows": Guarded((capacity, case.slot.row_bytes)),
            "out_scales": Guarded((capacity, case.num_scales), np.float32),
            "out_origins": Guarded((capacity, 3), np.int32),
            "out_weights": Guarded((capacity,), np.float32),
        }

    def flags(self, rank: int, **index: int) -> np.ndarray:
        """(words,) or (blocks, words): all flags of a row in a rank's window."""
        if not self.case.inband:
            return self.stamp(rank, **index)[FLAG_WORD:][:1]
        first, blocks = self.slots.on(rank).offset(**index), inband_blocks(self.case)
        slot = self.windows[rank].bytes[first : first + blocks * BLOCK_BYTES].reshape(blocks, -1)
        words: np.ndarray = slot[:, BLOCK_DATA_BYTES:].view(np.int32)
        return words

    def check_flags(self, rank: int, zone: int, counts: np.ndarray, kept_rank: object = None) -> None:
        """None is left of a row that has come."""
        for expert, source in np.ndindex(counts.shape):
            for index in range(int(counts[expert, source])):
                if self.flags(rank, zone=zone, source=source, expert=expert, index=index).any():
                    raise WrongResultError(f"row {index} of expert {expert} from {source} still has a flag")

    def check_left(self, rank: int, zone: int) -> None:
        """No flag of a block or of a status entry; the other zone."""
        if self.begun[rank].array.any():
            raise WrongResultError("a block's flag is left")
        first = self.layout.dispatch_status_on(rank).offset(zone=zone)
        last = first + self.config.experts_on(rank) * self.config.num_ranks * STATUS_ENTRY.num_bytes
        if self.windows[rank].bytes[first:last].any():
            raise WrongResultError("a status entry is left")
        if self._zones[rank][0] != 1 - zone:
            raise WrongResultError("the zone is not turned")


def check_missing(library: Library, case: MissingCase, seed: int = 0) -> None:
    """Raises unless rank 0 reports what is missing, once, and leaves the launch."""
    library.seed(seed)
    world = ReceivingWorld(library, case, seed)
    zone, experts = 0, world.config.experts_on(0)
    senders = [HALF_SENT] if case.is_away else [MISSING, HALF_SENT]
    for rank in senders:
        routing = draw_routing(case, seed, 0, rank)
        check_reports(world.send_rows(rank, routing, zone, **world.calls.sending(rank, 0)))
    for expert in range(experts):
        world.flags(0, zone=zone, source=HALF_SENT, expert=expert, index=0)[-1] = 0
    outputs, _, (send, wait, offsets, receive) = world.receive(0, 0, zone)
    for report in (send, offsets, receive if case.is_away else wait):
        check_reports(report)
    world.check_left(0, zone)
    counts = outputs.recv_counts.array
    first = wait[: case.first_blocks] if case.is_away else receive[: case.first_blocks]
    if (first[:, 0] == REPORT_TIMEOUT).sum() < (case.first_blocks if case.is_away else 1):
        raise WrongResultError(f"reported {first[:, :3].tolist()}")
    late = MISSING if case.is_away else HALF_SENT
    if (counts[:, late] != -1).any() or (np.delete(counts, late, 1) < 0).any():
        raise WrongResultError(f"counts {counts.tolist()}")
