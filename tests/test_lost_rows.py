"""What is left of rows with places without those of some ranks."""

from __future__ import annotations

import pytest
import torch

from moe_triton.core.records import ORIGIN, TRAILER
from moe_triton.runtime.lost_rows import LostRows, Tables

EXPERTS, RANKS = 3, 4


def tables_of(counts: torch.Tensor, alignment: int, stride: int) -> Tables:
    """By what the call was laid out: nobody is lost."""
    offsets = counts.flatten().cumsum(0).int()
    zero = torch.zeros_like(offsets)
    return LostRows(Tables(offsets, zero, zero), counts.shape[1], ()).tables(alignment, stride)


@pytest.mark.parametrize(("alignment", "stride"), [(1, 0), (4, 0), (1, 50)])
@pytest.mark.parametrize("lost", [(), (1,), (0, 3), (0, 1, 2, 3)])
def test_rows_move_to_where_a_call_without_the_others_has_them(
    alignment: int, stride: int, lost: tuple[int, ...]
) -> None:
    counts = torch.randint(0, 6, (EXPERTS, RANKS), generator=torch.Generator().manual_seed(7))
    without = counts.clone()
    without[:, list(lost)] = 0
    before, expected = (tables_of(each, alignment, stride) for each in (counts, without))
    rows = LostRows(before, RANKS, lost)
    after = rows.tables(alignment, stride)
    assert all(map(torch.equal, after, expected))
    assert rows.rows_left == without.sum(1).tolist()
    assert rows.has_places is bool((counts != without).any())
    old, new = rows.moves(after)
    names = torch.full((int(before.limits.max()) + 1,), -1)
    for entry, (first, last) in enumerate(zip(before.first_starts, before.limits, strict=True)):
        names[first:last] = entry
    gone = names[rows.places()]
    assert sorted(set((gone % RANKS).tolist())) == [rank for rank in lost if counts[:, rank].any()]
    for entry, (first, last) in enumerate(zip(after.first_starts, after.limits, strict=True)):
        assert (names[old[(new >= first) & (new < last)]] == entry).all()
    assert len(old) + len(gone) == counts.sum()


def test_a_round_has_no_row_of_them_left() -> None:
    counts, capacity = torch.tensor([[2, 1, 0, 1], [0, 3, 1, 0], [1, 0, 0, 2]]), 20
    tables = tables_of(counts, 1, 0)
    rows, total = LostRows(tables, RANKS, (1,)), int(counts.sum())
    moved = torch.full((total,), -1, dtype=torch.int32)
    old, new = rows.moves(rows.tables(1, 0))
    moved[old] = new.int()
    offsets, places = tables.offsets.clone(), torch.arange(capacity, dtype=torch.int32)
    origins = torch.arange(ORIGIN.num_words * capacity + TRAILER.num_words, dtype=torch.int32)
    gone = rows.leave_round(offsets, origins, places, moved)
    assert gone.tolist() == [1, 3, 0]
    left = total - 4
    assert int(offsets[-1]) == left
    assert places[:left].tolist() == list(range(left))
    assert (
        origins[: ORIGIN.num_words * left : ORIGIN.num_words] // ORIGIN.num_words
    ).tolist() == old.tolist()
    assert int(origins[-TRAILER.num_words + TRAILER.word("num_rows")]) == left
    assert rows.leave_round(offsets, origins, places, None).tolist() == [0, 0, 0]
