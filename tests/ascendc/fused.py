"""A dispatch as a plan on an NPU launches it: one kernel that sends, waits, and finds where every row is.

Its phases look their zone up in one cell, which a later launch turns.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moe_triton.core.ascendc import REPORT_TIMEOUT, REPORT_WORDS
from moe_triton.core.records import TRAILER, TRAILER_MARK
from moe_triton.layout import SLOT_ALIGN, TRAILER_WORDS

from .case import Case, WrongResultError, check_reports, draw_routing
from .driver import FLAG_WORD, World
from .library import Library, Phase
from .memory import Guarded

MISSING, HALF_SENT = 1, 2


@dataclass(frozen=True)
class FusedCase(Case):
    """Dispatches of one launch each; combines are like any other."""


@dataclass(frozen=True)
class MissingRowsCase(FusedCase):
    """Rank 0's dispatch: one rank does not come, another one has sent entries without their rows."""


class _Recorder:
    """Takes a launch down as a phase instead of running it."""

    phase: Phase

    def launch(self, name: str, blocks: int, **arguments: object) -> np.ndarray:
        self.phase = name, arguments
        return np.zeros((blocks, REPORT_WORDS), np.int32)


class Outputs:
    """All that a rank's dispatch writes outside of its window.

    Args:
        experts: of this rank.
        ranks: that send.
        capacity: rows that there is room for.
    """

    def __init__(self, experts: int, ranks: int, capacity: int) -> None:
        shape = (experts, ranks)
        self.recv_counts, self.all_counts = (Guarded(shape, np.int32) for _ in range(2))
        self.recv_offsets = Guarded((experts * ranks,), np.int32)
        self.tokens_per_expert = Guarded((experts,), np.int64)
        self.recv_stats = Guarded((experts,), np.int32)
        self.recv_stats.array[:] = 0
        self.trailer = Guarded((TRAILER_WORDS,), np.int32)
        self.row_slots = Guarded((capacity,), np.int32)
        self.has_table = True

    def check_guards(self) -> None:
        for output in vars(self).values():
            if isinstance(output, Guarded):
                output.check_guards()


class FusedWorld(World):
    """All ranks of one case, with a cell for the zone of each."""

    def __init__(self, library: Library, case: FusedCase, seed: int = 0) -> None:
        super().__init__(library, case, seed)
        self._zones = [np.zeros(1, np.int32) for _ in case.tokens]

    def dispatch(self, rank: int, number: int, zone: int, straggle: bool = False) -> dict[str, np.ndarray]:
        """Runs the launch, and checks what came and everything that it wrote."""
        waited = self.times(self.config.experts_on(rank) * self.config.num_ranks)
        outputs, reports = self.launch(rank, number, zone, waited)
        for report in reports:
            check_reports(report)
        if straggle:
            time.sleep(0.002)
        counts = outputs.recv_counts.array
        self.check_counts(rank, number, counts)
        if (outputs.all_counts.array != counts).any():
            raise WrongResultError(f"every block has seen {outputs.all_counts.array}, not {counts}")
        self.check_flags(rank, zone, counts)
        self.check_times(waited)
        self.check_outputs(rank, number, zone, outputs)
        self.clear_status(rank, zone)
        return self.check_slots(rank, number, zone)

    def launch(
        self, rank: int, number: int, zone: int, waited: Guarded | None = None
    ) -> tuple[Outputs, Sequence[np.ndarray]]:
        """The outputs, and a report of each phase: send, wait, offsets, rows."""
        outputs, phases = self.phases(rank, number, zone, waited)
        phases.append(("dispatch_rows", self.rows_awaited(rank, zone, waited, outputs.recv_counts.array)))
        reports = self.library.launch_phases(self.case.blocks, phases)
        outputs.check_guards()
        return outputs, reports

    def phases(
        self, rank: int, number: int, zone: int, waited: Guarded | None
    ) -> tuple[Outputs, list[Phase]]:
        """The outputs, and what comes before rows are waited for: send, wait, offsets."""
        c = self.config
        experts, most = c.experts_on(rank), c.num_max_tokens_per_rank
        outputs = Outputs(experts, c.num_ranks, experts * c.num_ranks * most)
        self._zones[rank][0] = zone  # as the launch after the one before left it
        wait = {
            **self._waiting(rank, zone, waited, outputs.recv_counts.array),
            **self.calls.in_one_launch(rank, number),
            "dispatch_word": 0,
            "all_counts": outputs.all_counts.array,
            "turned": 0,
            "status": self.layout.dispatch_status_on(rank),
        }
        offsets = {
            "zone": zone,
            "zone_at": self._zones[rank],
            "recv_counts": outputs.all_counts.array,
            "recv_offsets": outputs.recv_offsets.array,
            "tokens_per_expert": outputs.tokens_per_expert.array,
            "recv_stats": outputs.recv_stats.array,
            "trailer": outputs.trailer.array,
            "row_slots": outputs.row_slots.array,
            "num_local_experts": experts,
            "num_ranks": c.num_ranks,
            "max_count": most,
            "capacity": len(outputs.row_slots.array),
            "cumulative": 0,
            "kept_rank": -1,
            "slots": self.slots.on(rank).in_units(SLOT_ALIGN),
        }
        sends = self._sending(rank, number, zone)
        return outputs, [sends, ("dispatch_wait", wait), ("dispatch_offsets", offsets)]

    def rows_awaited(
        self, rank: int, zone: int, waited: Guarded | None, counts: np.ndarray
    ) -> dict[str, object]:
        """Arguments of a phase that waits for rows."""
        return {
            **self._waiting(rank, zone, waited, counts),
            "num_ranks": self.config.num_ranks,
            "kept_rank": -1,
            "stamp_offset": self.case.slot.stamp_offset,
            "slots": self.slots.on(rank),
        }

    def _waiting(self, rank: int, zone: int, waited: Guarded | None, counts: np.ndarray) -> dict[str, object]:
        return {
            "zone": zone,
            "zone_at": self._zones[rank],
            "window": self.windows[rank].bytes,
            **self.masks,
            "recv_counts": counts,
            "waited_us": waited.array if waited else 0,
            "num_local_experts": self.config.experts_on(rank),
            "timeout_us": self.case.timeout_us,
        }

    def _sending(self, rank: int, number: int, zone: int) -> Phase:
        routing = draw_routing(self.case, self.seed, number, rank)
        changes = {**self.calls.sending(rank, number), "zone_at": self._zones[rank]}
        return self.recorded(lambda world: world.send_rows(rank, routing, zone, **changes))

    def recorded(self, launch: Callable[[World], object]) -> Phase:
        """What would be launched, to be a phase instead."""
        recording, recorder = copy.copy(self), _Recorder()
        recording.library = recorder  # type: ignore[assignment]
        launch(recording)
        return recorder.phase

    def check_outputs(self, rank: int, number: int, zone: int, outputs: Outputs) -> None:
        """Sums of the counts, and the table of slots."""
        c, counts = self.config, outputs.recv_counts.array
        ends = self.expected_rows(rank, number)["offsets"]
        trailer = np.zeros(TRAILER_WORDS, np.int32)
        trailer[[TRAILER.word("mark"), TRAILER.word("num_rows")]] = TRAILER_MARK, ends[-1]
        slots = [
            self.slots.on(rank).offset(zone=zone, source=source, expert=expert, index=index) // SLOT_ALIGN
            for expert, source in np.ndindex(c.experts_on(rank), c.num_ranks)
            for index in range(counts[expert, source])
        ]
        expected = {
            "recv_offsets": ends,
            "tokens_per_expert": counts.sum(1),
            "recv_stats": counts.sum(1),
            "trailer": trailer,
        }
        if outputs.has_table:
            expected["row_slots"] = np.array(slots, np.int32)
        for name, want in expected.items():
            got = getattr(outputs, name).array[: len(want)]
            if not np.array_equal(got, want):
                raise WrongResultError(f"{name} {got.tolist()} instead of {want.tolist()}")


def check_missing_rows(library: Library, case: MissingRowsCase, seed: int = 0) -> None:
    """Raises unless rank 0 reports the missing rank once, and does not wait again for the rows of another."""
    library.seed(seed)
    world = FusedWorld(library, case, seed)
    zone, experts = 0, world.config.experts_on(0)
    check_reports(
        world.send_rows(
            HALF_SENT, draw_routing(case, seed, 0, HALF_SENT), zone, **world.calls.sending(HALF_SENT, 0)
        )
    )
    for expert, index in np.ndindex(experts, case.tokens[HALF_SENT]):
        world.stamp(0, zone=zone, source=HALF_SENT, expert=expert, index=index)[FLAG_WORD] = 0
    outputs, (send, wait, offsets, rows) = world.launch(0, 0, zone)
    for report in (send, offsets, rows):
        check_reports(report)
    # Every block gave up; those without an entry of the missing rank name its first one.
    if (wait[:, 0] != REPORT_TIMEOUT).any() or wait[:, 2].sum() < experts:
        raise WrongResultError(f"reported {wait[:, :3].tolist()}")
    counts = outputs.recv_counts.array
    if (counts[:, MISSING] != -1).any() or (counts[:, HALF_SENT] != case.tokens[HALF_SENT]).any():
        raise WrongResultError(f"counts {counts.tolist()}")
