from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.kernels.arrange import SLOT_WORDS, OwnRows, arrange_kernel
from moe_triton.layout import SLOT_ALIGN, UB_ALIGN, SlotLayout, align
from tests.kernels.calls import call
from tests.kernels.routes import LAUNCHES, Guarded, Launch, assert_same_bits, kernel_settings

I32, F32 = torch.int32, torch.float32
TOPK, SHARED, RANK, EXPERTS = 2, 1, 1, 4  # experts of this rank, from FIRST on
FIRST = RANK * EXPERTS
INT8, BF16, BLOCKS = SlotLayout(32, 1, 1), SlotLayout(32, 2), SlotLayout(256, 1, 2)
LONG = SlotLayout(7168, 1, 1)
NUM_ENTRIES = 5  # to clear
Row: TypeAlias = dict[str, list[int]]
IN_WINDOW, ONE_ROW, SMOOTH = None, OwnRows(TOPK), OwnRows(TOPK, TOPK + SHARED)


@dataclass
class Call:
    """One rank's memory: what peers and it itself have sent, and where each received row is.

    Attributes:
        window: (slots, words), slots where the table has them.
        rows: (T * R, words), this rank's own.
        ids, index, weights: (T, K), index being a result's number within its expert.
        ends: where the entries of this rank's experts end, expert by expert and source by source.
        table: a slot in units of 32 bytes for each row, or -1.
    """

    slot: SlotLayout
    own: OwnRows | None
    num_ranks: int
    window: np.ndarray
    rows: np.ndarray
    ids: np.ndarray
    index: np.ndarray
    weights: np.ndarray
    ends: np.ndarray
    table: np.ndarray

    def want(self) -> dict[int, Row]:
        """What belongs in each row of the output; rows that come from nowhere are not there."""
        s = self.slot
        row, scale, stamp = (n // 4 for n in (s.row_bytes, s.scale_offset, s.stamp_offset))

        def parts(words: np.ndarray, origin: list[int], weight: int) -> Row:
            return {
                "rows": words[:row].tolist(),
                "scales": words[scale : scale + s.num_scales].tolist(),
                "origins": origin,
                "weights": [weight],
            }

        found = {}
        for number, entry in enumerate(self.table.tolist()):
            if entry >= 0:
                words = self.window.reshape(-1)[entry * SLOT_WORDS :]
                found[number] = parts(words, words[stamp : stamp + 3].tolist(), int(words[stamp + 3]))
        for token, k in np.ndindex(self.ids.shape) if self.own else ():
            number = self.own_row(int(self.ids[token, k]), int(self.index[token, k]))
            if number is not None and self.own:
                at = token * self.own.rows_per_token + k if self.own.rows_per_token > 1 else token
                weight = int(self.weights.view(np.int32)[token, k])
                found[number] = parts(self.rows[at], [RANK, token, k], weight)
        return found

    def own_row(self, expert: int, index: int) -> int | None:
        """After what earlier experts and sources sent, if it is among what this source did."""
        if not FIRST <= expert < FIRST + EXPERTS:
            return None
        entry = (expert - FIRST) * self.num_ranks + RANK
        number = (int(self.ends[entry - 1]) if entry else 0) + index
        return number if number < self.ends[entry] else None

    def check(
        self,
        launch: Launch,
        programs: int,
        *,
        weighted: bool = True,
        num_rows: int | None = None,
        capacity: int | None = None,
        taken: torch.Tensor | None = None,
    ) -> None:
        """Every row is there, and nothing else is written.

        Args:
            launch: how.
            programs: on how many.
            weighted: rows have weights.
            num_rows, capacity: all rows if not given.
            taken: (P + 1, W, E) how many rows of each entry are taken before each of P parts, and at the end.
        """
        num_rows = len(self.table) if num_rows is None else num_rows
        capacity = len(self.table) if capacity is None else capacity
        sizes = {"rows": self.slot.row_bytes // 4, "origins": 3}
        sizes |= {"scales": self.slot.num_scales, "weights": int(weighted)}
        room = {
            name: Guarded((len(self.table), size), F32 if name in ("scales", "weights") else I32)
            for name, size in sizes.items()
        }
        window, rows = (torch.from_numpy(memory.reshape(-1).copy()) for memory in (self.window, self.rows))
        tables = {"topk_idx": self.ids, "expand_idx": self.index, "topk_weights": self.weights}
        tables |= {"recv_offsets": self.ends, "row_slots": self.table}
        entries = torch.ones(NUM_ENTRIES + 1, 8, dtype=I32)
        values = {
            "slots": window,
            "slot_scales": window.view(F32),
            "num_rows": torch.tensor([num_rows], dtype=I32),
            "entries": entries,
            "rows": rows,
            "scales": rows.view(F32)[self.slot.scale_offset // 4 :],
            **{name: torch.from_numpy(table.reshape(-1).copy()) for name, table in tables.items()},
            **{f"out_{name}": output.tensor for name, output in room.items()},
            "capacity": capacity,
            "row_stride": self.rows.shape[1],
            "first_expert": FIRST,
            "num_local_experts": EXPERTS,
            "num_ranks": self.num_ranks,
            "rank": RANK,
            "num_tokens": len(self.ids),
        }
        parts = 1 if taken is None else len(taken) - 1
        own_parts = max(1, parts - 1)
        for part in range(parts):
            own = self.own if part < own_parts else None
            of_part: dict[str, torch.Tensor | int] = {"num_entries": 0 if part else NUM_ENTRIES}
            if taken is not None:
                before, end = (len(self.ids) * (part + i) // own_parts for i in (0, 1))
                of_part |= {"first_token": before, "num_tokens": end - before}
                of_part |= {"rows_before": taken[part].flatten(), "rows_taken": taken[part + 1].flatten()}
            kernel = arrange_kernel(self.slot, weighted, own, parted=taken is not None)
            call(launch, kernel, programs, **{**values, **of_part})
        assert entries.any(1).tolist() == [False] * NUM_ENTRIES + [True]
        want = {name: output.untouched().clone().view(I32) for name, output in room.items()}
        for number, row in self.want().items():
            for name, size in sizes.items() if number < min(num_rows, capacity) else ():
                want[name][number] = torch.tensor(row[name][:size], dtype=I32)
        for name, output in room.items():
            assert_same_bits(output.check().view(I32), want[name])


def routed(slot: SlotLayout, own: OwnRows | None, seed: int, ranks: int, tokens: int) -> Call:
    """Every rank chooses experts for its tokens; slots are anywhere in the window, in any order."""
    rng = np.random.default_rng(seed)

    def words(*shape: int) -> np.ndarray:
        return rng.integers(-(2**31), 2**31, shape, dtype=np.int32)

    ids = rng.random((ranks, tokens, ranks * EXPERTS)).argsort(-1)[..., :TOPK].astype(np.int32)
    ids[rng.random(ids.shape) < 0.2] = -1
    index, seen = np.zeros_like(ids[RANK]), np.zeros(ranks * EXPERTS, np.int32)
    for at, expert in np.ndenumerate(ids[RANK]):
        if expert >= 0:
            index[at] = seen[expert]
            seen[expert] += 1
    slots = ranks * tokens * TOPK + 1
    places = iter(rng.permutation(slots).tolist())
    units = align(slot.packed_bytes, SLOT_ALIGN) // UB_ALIGN
    experts = range(FIRST, FIRST + EXPERTS)
    counts = [int((ids[source] == expert).sum()) for expert in experts for source in range(ranks)]
    table = [
        -1 if own and entry % ranks == RANK else next(places) * units
        for entry, count in enumerate(counts)
        for _ in range(count)
    ]
    return Call(
        slot,
        own,
        ranks,
        words(slots, units * SLOT_WORDS),
        words(tokens * (own.rows_per_token if own else 1) + 1, slot.packed_bytes // 4 + 1),
        ids[RANK],
        index,
        rng.random((tokens, TOPK), dtype=np.float32),
        np.cumsum(counts).astype(np.int32),
        np.array(table, np.int32),
    )


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("own", [IN_WINDOW, ONE_ROW, SMOOTH])
@pytest.mark.parametrize("slot", [INT8, BF16, BLOCKS])
@kernel_settings
@given(
    seed=st.integers(0, 2**31),
    ranks=st.integers(2, 4),
    tokens=st.integers(0, 9),
    weighted=st.booleans(),
    programs=st.integers(1, 7),
)
def test_rows_come_from_where_the_table_says(
    launch: Launch,
    slot: SlotLayout,
    own: OwnRows | None,
    seed: int,
    ranks: int,
    tokens: int,
    weighted: bool,
    programs: int,
) -> None:
    routed(slot, own, seed, ranks, tokens).check(launch, programs, weighted=weighted)


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("own", [IN_WINDOW, ONE_ROW])
@kernel_settings
@given(
    seed=st.integers(0, 2**31),
    ranks=st.integers(2, 4),
    tokens=st.integers(0, 9),
    weighted=st.booleans(),
    programs=st.integers(1, 7),
    parts=st.integers(1, 4),
)
def test_parts_have_the_rows_of_all(
    launch: Launch,
    own: OwnRows | None,
    seed: int,
    ranks: int,
    tokens: int,
    weighted: bool,
    programs: int,
    parts: int,
) -> None:
    made = routed(BF16, own, seed, ranks, tokens)
    counts = np.diff(made.ends, prepend=0).reshape(EXPERTS, ranks).T.copy()
    if own:
        counts[RANK] = 0  # no part takes them out of the window
    shares = np.sort(np.random.default_rng(seed).random((parts - 1, *counts.shape)), axis=0)
    cuts = [np.zeros_like(counts), *(shares * (counts + 1)).astype(np.int32), counts]
    made.check(launch, programs, weighted=weighted, taken=torch.from_numpy(np.stack(cuts)).int())


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("own", [IN_WINDOW, ONE_ROW])
def test_long_rows(launch: Launch, own: OwnRows | None) -> None:
    made = routed(LONG, own, 1, 3, 9)
    assert (made.table < 0).any() == (own is not None)
    made.check(launch, 2)


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("own", [IN_WINDOW, ONE_ROW])
@kernel_settings
@given(num_rows=st.sampled_from([-(2**31), -3, -1, 0, 5, 20, 2**31 - 1]), programs=st.integers(1, 5))
def test_more_rows_than_there_is_room_for_are_left_out(
    launch: Launch, own: OwnRows | None, num_rows: int, programs: int
) -> None:
    made = routed(INT8, own, 7, 3, 9)
    assert max(made.want()) > 12
    made.check(launch, programs, num_rows=num_rows, capacity=12)


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("own", [ONE_ROW, SMOOTH])
@kernel_settings
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 9),
    programs=st.integers(1, 4),
    claimed=st.lists(st.integers(0, 4), min_size=EXPERTS, max_size=EXPERTS),
)
def test_own_rows_that_have_no_place_are_left_out(
    launch: Launch, own: OwnRows, seed: int, tokens: int, programs: int, claimed: list[int]
) -> None:
    """A peer may have written how many rows this rank has for itself."""
    made = routed(INT8, own, seed, 3, tokens)
    counts, table = [], iter(made.table[made.table >= 0].tolist())
    for entry, count in enumerate(np.diff(made.ends, prepend=0).tolist()):
        counts.append(claimed[entry // 3] if entry % 3 == RANK else count)
    made.ends = np.cumsum(counts).astype(np.int32)
    made.table = np.array(
        [-1 if e % 3 == RANK else next(table) for e, n in enumerate(counts) for _ in range(n)], np.int32
    )
    made.check(launch, programs)


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("num_rows", [0, 1, 4])
def test_the_zone_is_turned_once(launch: Launch, programs: int, num_rows: int) -> None:
    window, table = torch.arange(16 * SLOT_WORDS, dtype=I32), torch.arange(4, dtype=I32)
    entries = torch.ones(2, NUM_ENTRIES, 8, dtype=I32)
    cells = torch.tensor([7, 7, 7, 7], dtype=I32)
    for kept in (0, 1, 0, 0):
        cells[3], cells[1] = kept, 9  # what is there does not matter
        origins, rows = torch.zeros(4, 3, dtype=I32), torch.zeros(4, 16, dtype=I32)
        call(
            launch,
            arrange_kernel(BF16, False, zoned=True),
            programs,
            slots=window,
            slot_scales=window.view(F32),
            row_slots=table,
            num_rows=torch.tensor([num_rows], dtype=I32),
            out_rows=rows,
            out_origins=origins,
            kept_zone=cells[3:],
            zone=cells[1:2],
            capacity=4,
            entries=entries,
            num_entries=NUM_ENTRIES,
            zone_stride=NUM_ENTRIES * 8,
        )
        assert entries.any(2).tolist() == [[zone != kept] * NUM_ENTRIES for zone in (0, 1)]
        entries[:] = 1
        assert cells.tolist() == [7, 1 - kept, 7, kept]
        assert rows[:, 1].tolist() == [SLOT_WORDS * i + 1 if i < num_rows else 0 for i in range(4)]


def test_slots_beyond_32_bits_of_words_are_reached() -> None:
    """The second slot lies 8.6 GB away; only the pages touched exist."""
    from moe_triton.backends.cpu.triton import launch

    far = (1 << 31) // SLOT_WORDS + 2
    window = torch.empty((far + 8) * SLOT_WORDS, dtype=I32)
    words = torch.arange(4 * SLOT_WORDS, dtype=I32)
    window[: len(words)] = words
    window[far * SLOT_WORDS : far * SLOT_WORDS + len(words)] = 1000 + words
    rows, origins = torch.empty(2, 8, dtype=I32), torch.empty(2, 3, dtype=I32)
    call(
        launch,
        arrange_kernel(INT8, False),
        slots=window,
        slot_scales=window.view(F32),
        row_slots=torch.tensor([0, far], dtype=I32),
        num_rows=torch.tensor([2], dtype=I32),
        out_rows=rows,
        out_scales=torch.empty(2),
        out_origins=origins,
        capacity=2,
        entries=torch.empty(0, dtype=I32),
        num_entries=0,
    )
    assert rows.tolist() == [[*range(8)], [*range(1000, 1008)]]
    assert origins.tolist() == [[16, 17, 18], [1016, 1017, 1018]]
