from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.backends.cpu.triton import launch
from moe_triton.kernels.arrange import arrange_kernel
from tests.kernels.calls import arrange
from tests.kernels.routes import LAUNCHES, Launch, assert_same_bits, kernel_settings


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize(("row_words", "has_scale"), [(8, True), (16, False), (1792, True)])
@kernel_settings
@given(
    data=st.data(),
    ranks=st.integers(1, 5),
    experts=st.integers(1, 4),
    has_weight=st.booleans(),
    rows_per_block=st.integers(1, 4),
    programs=st.integers(1, 7),
)
def test_arrange(
    launch: Launch,
    row_words: int,
    has_scale: bool,
    has_weight: bool,
    data: st.DataObject,
    ranks: int,
    experts: int,
    rows_per_block: int,
    programs: int,
) -> None:
    slot_words = -(-(row_words + 12) // 128) * 128
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    shape = (ranks, experts, rows_per_block, slot_words)
    slots = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int32)
    entries = ranks * experts
    counts = data.draw(st.lists(st.integers(0, rows_per_block), min_size=entries, max_size=entries))
    recv_offsets = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rows, scales, origins, weights = arrange(
        slots,
        recv_offsets,
        launch,
        row_words=row_words,
        scale_word=row_words,
        stamp_word=row_words + 8,
        has_scale=has_scale,
        has_weight=has_weight,
        programs=programs,
    )
    order = [
        (source, expert, i)
        for expert in range(experts)
        for source in range(ranks)
        for i in range(counts[expert * ranks + source])
    ]
    want = torch.stack([slots[at] for at in order]) if order else slots.new_empty((0, slot_words))
    assert_same_bits(rows, want[:, :row_words])
    assert_same_bits(origins, want[:, row_words + 8 : row_words + 11])
    for present, floats, at in ((has_scale, scales, row_words), (has_weight, weights, row_words + 11)):
        if present:
            assert_same_bits(floats.view(torch.int32), want[:, at])
        else:
            assert floats.numel() == 0


@pytest.mark.parametrize("launch", LAUNCHES)
def test_without_scale_and_weight_they_are_not_written(launch: Launch) -> None:
    slots = torch.arange(128, dtype=torch.int32)
    out_scales, out_weights = torch.full((1,), 7.0), torch.full((1,), 8.0)
    rows, origins = torch.empty(8, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
    ends = torch.tensor([1], dtype=torch.int32)
    views = [slots, slots.view(torch.float32), ends, rows, out_scales, origins, out_weights]
    launch(arrange_kernel(8, 8, 16, 0), [*views, 1, 1, -1, 128, 128, 128], 1)
    assert out_scales.tolist() == [7.0]
    assert out_weights.tolist() == [8.0]
    assert origins.tolist() == [16, 17, 18]


def test_offsets_beyond_32_bits_of_words_are_reached() -> None:
    """The second source's block lies 8.6 GB away; only the pages touched exist."""
    words = (1 << 31) + 256
    slots = torch.empty(words + 128, dtype=torch.int32)
    slots[:128] = torch.arange(128, dtype=torch.int32)
    slots[words : words + 128] = torch.arange(1000, 1128, dtype=torch.int32)
    ends = torch.tensor([1, 2], dtype=torch.int32)
    rows, scales = torch.empty(16, dtype=torch.int32), torch.empty(2)
    origins = torch.empty(6, dtype=torch.int32)
    views = [slots, slots.view(torch.float32), ends, rows, scales, origins, torch.empty(0)]
    launch(arrange_kernel(8, 8, 16, 1), [*views, 2, 2, -1, words, 128, 128], 1)
    assert rows.tolist() == [*range(8), *range(1000, 1008)]
    assert origins.tolist() == [16, 17, 18, 1016, 1017, 1018]
