"""Prefix sums of counts and the table of slots, by the kernel and one by one in Python."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moe_triton.core.records import TRAILER, TRAILER_MARK
from moe_triton.core.region import Region, region_of
from moe_triton.layout import NUM_ZONES, SLOT_ALIGN, TRAILER_WORDS

from .case import WrongResultError, check_reports
from .library import Library
from .memory import GARBAGE, Guarded

UNTOUCHED = np.frombuffer(bytes([GARBAGE] * 4), np.int32)[0]


@dataclass(frozen=True)
class OffsetsCase:
    """The counts that one rank received, and what is asked for.

    Attributes:
        ranks, experts: there is an entry for each rank and each local expert.
        tokens: the most rows that a rank has for an expert.
        hostile: chance of a count that no rank may send.
        room: rows that there is room for, as a part of all that could come.
        cumulative: whether `tokens_per_expert` is.
        stats: whether rows are added to those of earlier calls.
        tabled: whether there is a table of slots.
        kept: whether this rank, the one in the middle, keeps its own rows.
    """

    ranks: int = 4
    experts: int = 3
    tokens: int = 5
    blocks: int = 2
    hostile: float = 0.0
    room: float = 1.0
    cumulative: bool = False
    stats: bool = False
    tabled: bool = True
    kept: bool = False

    @property
    def entries(self) -> int:
        return self.ranks * self.experts

    @property
    def capacity(self) -> int:
        """Rows of the output."""
        return max(1, int(self.room * self.entries * self.tokens))

    @property
    def rank(self) -> int:
        """This rank."""
        return self.ranks // 2

    @cached_property
    def slots(self) -> Region:
        """Of this rank's window, whose slots begin behind something else."""
        stride = 3 * SLOT_ALIGN
        source, expert = self.tokens * stride, self.ranks * self.tokens * stride
        zone = self.experts * expert + 5 * SLOT_ALIGN
        dims = (NUM_ZONES, zone), (self.ranks, source), (self.experts, expert), (self.tokens, stride)
        return region_of("dispatch_slots", 7 * SLOT_ALIGN, stride, *dims, rotation=1).on(self.rank)


@dataclass(frozen=True)
class Received:
    """What is drawn for a case.

    Attributes:
        counts: (experts, ranks) as they came.
        stats: (experts,) before the call.
    """

    counts: np.ndarray
    stats: np.ndarray


def draw(case: OffsetsCase, seed: int = 0) -> Received:
    """Counts of all ranks; some of them may be hostile."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, case.tokens + 1, (case.experts, case.ranks), dtype=np.int32)
    wrong = rng.integers(-(2**31), 2**31, counts.shape).astype(np.int32)
    wrong = np.where(rng.random(counts.shape) < 0.5, wrong, rng.choice([-1, case.tokens + 1], counts.shape))
    counts = np.where(rng.random(counts.shape) < case.hostile, wrong, counts).astype(np.int32)
    return Received(counts, rng.integers(0, 100, case.experts, dtype=np.int32))


def launch(
    library: Library, case: OffsetsCase, received: Received, zone: int, **changes: object
) -> dict[str, np.ndarray]:
    """The outputs by name, those that are not asked for too."""
    outputs = {
        "recv_offsets": Guarded((case.entries,), np.int32),
        "tokens_per_expert": Guarded((case.experts,), np.int64),
        "recv_stats": Guarded((case.experts,), np.int32),
        "trailer": Guarded((TRAILER_WORDS,), np.int32),
        "row_slots": Guarded((case.capacity if case.tabled else 0,), np.int32),
    }
    outputs["recv_stats"].array[:] = received.stats
    wanted = {"recv_stats": case.stats, "row_slots": case.tabled}
    arguments: dict[str, object] = {
        **{name: output.array if wanted.get(name, True) else 0 for name, output in outputs.items()},
        "recv_counts": received.counts,
        "num_local_experts": case.experts,
        "num_ranks": case.ranks,
        "max_count": case.tokens,
        "capacity": case.capacity,
        "cumulative": int(case.cumulative),
        "zone": zone,
        "kept_rank": case.rank if case.kept else -1,
        "slots": case.slots.in_units(SLOT_ALIGN),
    }
    check_reports(library.launch("dispatch_offsets", case.blocks, **{**arguments, **changes}))
    for output in outputs.values():
        output.check_guards()
    return {name: output.array for name, output in outputs.items()}


def expected(case: OffsetsCase, received: Received, zone: int) -> dict[str, np.ndarray]:
    """The sums, each count clamped to what a rank can send and each end to the room, and every row's slot."""
    counts = received.counts.astype(np.int64).clip(0, case.tokens).reshape(-1)
    ends = counts.cumsum().clip(max=case.capacity)
    totals = ends[case.ranks - 1 :: case.ranks]
    per_expert = np.diff(totals, prepend=0)
    trailer = np.zeros(TRAILER_WORDS, np.int32)
    trailer[[TRAILER.word("mark"), TRAILER.word("num_rows")]] = TRAILER_MARK, ends[-1]
    return {
        "recv_offsets": ends.astype(np.int32),
        "tokens_per_expert": totals if case.cumulative else per_expert,
        "recv_stats": (received.stats + per_expert * case.stats).astype(np.int32),
        "trailer": trailer,
        "row_slots": _slots(case, ends, zone),
    }


def _slots(case: OffsetsCase, ends: np.ndarray, zone: int) -> np.ndarray:
    if not case.tabled:
        return np.zeros(0, np.int32)
    slots = np.full(case.capacity, UNTOUCHED, np.int32)
    starts = np.r_[0, ends[:-1]]
    for entry, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        expert, source = divmod(entry, case.ranks)
        for index in range(end - start):
            offset = case.slots.offset(zone=zone, source=source, expert=expert, index=index)
            slots[start + index] = -1 if case.kept and source == case.rank else offset // SLOT_ALIGN
    return slots


def check_offsets(library: Library, case: OffsetsCase, seed: int = 0) -> None:
    """Raises unless every output is as it should be, in both zones, and nothing else was written."""
    library.seed(seed)
    for zone in range(NUM_ZONES):
        received = draw(case, NUM_ZONES * seed + zone)
        found, want = launch(library, case, received, zone), expected(case, received, zone)
        for name, array in want.items():
            if not np.array_equal(found[name], array):
                at = np.flatnonzero(found[name] != array)[0]
                raise WrongResultError(f"{name}[{at}] is {found[name][at]}, not {array[at]}")
