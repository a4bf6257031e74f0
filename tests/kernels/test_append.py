from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.kernels.append import append_kernel, gather_counts_kernel
from tests.kernels.calls import append, gather_counts
from tests.kernels.routes import FORMS, LAUNCHES, Guarded, Launch, assert_same_bits, kernel_settings

I32 = torch.int32
ANY = st.integers(-(2**31), 2**31 - 1)


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize(("row_words", "has_scale"), [(8, True), (16, False), (1792, True)])
@kernel_settings
@given(
    capacity=st.integers(1, 9),
    counts=st.tuples(st.integers(0, 9) | ANY, st.integers(0, 9) | ANY),
    tp_rank=st.integers(0, 1),
    seed=st.integers(0, 2**31),
    programs=st.integers(1, 5),
)
def test_the_peer_s_rows_follow_this_rank_s_own(
    launch: Launch,
    row_words: int,
    has_scale: bool,
    capacity: int,
    counts: tuple[int, int],
    tp_rank: int,
    seed: int,
    programs: int,
) -> None:
    slot_words = -(-(row_words + 8) // 128) * 128
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randint(-(2**31), 2**31, (capacity, slot_words), generator=generator, dtype=I32)
    rows, scales = Guarded((2 * capacity, row_words), I32), Guarded((2 * capacity,), torch.float32)
    kernel = append_kernel(row_words, row_words, int(has_scale))
    views = [slots, slots.view(torch.float32), torch.tensor(counts, dtype=I32), rows.tensor, scales.tensor]
    launch(kernel, [*views, tp_rank, capacity, slot_words], programs)

    own, others = (min(max(counts[r], 0), capacity) for r in (tp_rank, 1 - tp_rank))
    want_rows, want_scales = rows.untouched().clone(), scales.untouched().clone()
    want_rows[own : own + others] = slots[:others, :row_words]
    if has_scale:
        want_scales[own : own + others] = slots.view(torch.float32)[:others, row_words]
    assert_same_bits(rows.check(), want_rows)
    assert_same_bits(scales.check().view(I32), want_scales.view(I32))


@pytest.mark.parametrize("launch", LAUNCHES)
def test_append(launch: Launch) -> None:
    slots = torch.arange(3 * 16, dtype=I32).view(3, 16)
    rows, scales = torch.zeros((6, 8), dtype=I32), torch.zeros(6)
    counts = torch.tensor([2, 1], dtype=I32)
    append(slots, counts, rows, scales, launch, tp_rank=1, scale_word=9, programs=2)
    assert rows[1:3].tolist() == [list(range(8)), list(range(16, 24))]
    assert not rows[0].any()
    assert not rows[3:].any()
    assert scales.view(I32).tolist() == [0, 9, 25, 0, 0, 0]
    append(slots, counts, rows, None, launch, tp_rank=0)
    assert rows[2].tolist() == list(range(8))


@pytest.mark.parametrize(("launch", "target"), FORMS)
@kernel_settings
@given(
    ranks=st.integers(1, 10) | st.sampled_from([63, 64, 65, 130]),
    capacity=st.integers(1, 2**20),
    counts=st.tuples(st.integers(0, 9) | ANY, st.integers(0, 9) | ANY),
    tp_rank=st.integers(0, 1),
    own=st.integers(0, 2**40),
    seed=st.integers(0, 2**31),
    programs=st.integers(1, 4),
)
def test_the_peer_s_counts_are_clamped(
    launch: Launch,
    target: str,
    ranks: int,
    capacity: int,
    counts: tuple[int, int],
    tp_rank: int,
    own: int,
    seed: int,
    programs: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    header = torch.randint(-(2**31), 2**31, (ranks,), generator=generator, dtype=I32)
    header[::2] %= 2 * capacity
    ends, tokens = Guarded((ranks,), I32), Guarded((1,), torch.int64)
    tokens.tensor.fill_(own)
    views = [header, torch.tensor(counts, dtype=I32), ends.tensor, tokens.tensor]
    launch(gather_counts_kernel(target), [*views, ranks, tp_rank, capacity], programs)
    assert ends.check().tolist() == [min(max(end, 0), capacity) for end in header.tolist()]
    assert tokens.check().tolist() == [own + min(max(counts[1 - tp_rank], 0), capacity)]


@pytest.mark.parametrize("launch", LAUNCHES)
def test_gather_counts(launch: Launch) -> None:
    tokens = torch.tensor([7])
    counts = torch.tensor([7, 5], dtype=I32)
    header = torch.tensor([2, 5, 9], dtype=I32)
    ends = gather_counts(header, counts, tokens, launch, tp_rank=0, capacity=8)
    assert ends.tolist() == [2, 5, 8]
    assert tokens.tolist() == [12]
