"""The window of the block schemes: what a block holds, and who may write where."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.core.config import Config
from moe_triton.core.region import MAX_INT32
from moe_triton.core.row_formats import ROW_FORMATS
from moe_triton.layout import SLOT_ALIGN, STAMP_BYTES, UB_ALIGN, WORD_BYTES, SlotLayout
from moe_triton.schemes.a2_fullmesh.layout import BlockRow, BlocksLayout, end_flag
from moe_triton.schemes.buffer_size import needed_buffer_bytes
from moe_triton.schemes.common.waits import next_number
from moe_triton.schemes.rules import check_config

configs = st.builds(
    lambda ranks, tokens, hidden, topk, local, generation: Config(
        num_ranks=ranks,
        num_max_tokens_per_rank=tokens,
        hidden=32 * hidden,
        num_topk=min(topk, ranks * local),
        num_experts=ranks * local,
        product="A2",
        scheme="fullmesh",
        relaxed=True,
        generation=generation,
    ),
    ranks=st.integers(2, 8),
    tokens=st.integers(1, 6),
    hidden=st.integers(1, 8),
    topk=st.integers(1, 4),
    local=st.integers(1, 24),
    generation=st.sampled_from([None, "v3", "v4"]),
)


@given(config=configs)
def test_blocks_and_entries_share_no_byte(config: Config) -> None:
    layout = BlocksLayout(config)
    zones, ranks = range(layout.num_zones), range(config.num_ranks)
    starts = [
        (region.offset(zone=zone, **{region.dims[-1].name: rank}), region.item_bytes)
        for region in layout.regions
        for zone, rank in itertools.product(zones, ranks)
    ]
    spans = sorted((start, start + size) for start, size in starts)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= layout.window_bytes
    assert all(
        layout.blocks.offset(zone=z, rank=r) % SLOT_ALIGN == 0 for z, r in itertools.product(zones, ranks)
    )


@given(config=configs)
def test_a_block_holds_all_rows_of_any_format_and_both_flags(config: Config) -> None:
    layout = BlocksLayout(config)
    words = {*range(config.num_local_experts), layout.flag_word, layout.call_word}
    assert len(words) == config.num_local_experts + 2
    assert max(words) < layout.header_words
    # The flag is in the last unit, whatever comes before it: it is written by itself.
    assert layout.flag_word // 8 == (layout.header_words - 1) // 8 == layout.call_word // 8
    assert WORD_BYTES * layout.header_words <= layout.rows_offset
    steps = [BlockRow.of(config.hidden, each, torch.bfloat16).packed_bytes for each in ROW_FORMATS.values()]
    for step in (*steps, 2 * config.hidden):
        assert step % UB_ALIGN == 0
        assert layout.rows_offset + layout.max_rows * step + UB_ALIGN <= layout.block_bytes


@given(config=configs)
def test_rows_are_where_the_kernels_put_them(config: Config) -> None:
    layout, step = BlocksLayout(config), 96
    rows = layout.rows(step)
    for zone, rank, place in itertools.product(range(2), range(config.num_ranks), range(layout.max_rows)):
        expected = layout.blocks.offset(zone=zone, rank=rank) + layout.rows_offset + place * step
        assert rows.offset(zone=zone, source=rank, index=place) == expected


def test_a_header_by_the_limits_of_v3_is_the_published_one() -> None:
    config = Config(8, 16, 7168, 8, 192, product="A2", scheme="fullmesh", relaxed=True, generation="v3")
    layout = BlocksLayout(config)
    assert (layout.header_words, layout.flag_word, layout.rows_offset) == (32, 24, 512)
    later = BlocksLayout(replace(config, generation="v4"))
    assert (later.header_words, later.flag_word) == (32, 31)
    assert BlocksLayout(replace(config, num_experts=8, generation="v4")).header_words == 8


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_a_row_takes_no_more_than_its_stamp_and_scales(name: str | None) -> None:
    row_format = ROW_FORMATS[name]
    row, slot = (kind.of(7168, row_format, torch.bfloat16) for kind in (BlockRow, SlotLayout))
    assert row.scale_offset == slot.scale_offset
    assert row.packed_bytes == slot.row_bytes + STAMP_BYTES + (slot.scale_stride if slot.num_scales else 0)


@pytest.mark.parametrize(("tokens", "topk", "experts"), [(256, 8, 256), (256, 16, 1024), (16, 8, 64)])
def test_the_published_window_holds_the_blocks_of_a_server(tokens: int, topk: int, experts: int) -> None:
    config = Config(8, tokens, 7168, topk, experts, product="A2", scheme="fullmesh", generation="v4")
    check_config(config)
    assert BlocksLayout(config).data_bytes <= needed_buffer_bytes(config)


def test_numbers_of_rounds_come_round_without_zero() -> None:
    assert [next_number(n) for n in (0, 1, MAX_INT32 - 1, MAX_INT32)] == [1, 2, MAX_INT32, 1]


@given(st.integers(1, MAX_INT32), st.integers(1, MAX_INT32))
def test_the_flags_of_two_rounds_differ_in_every_word(one: int, other: int) -> None:
    pairs = zip(end_flag(one), end_flag(other), strict=True)
    assert one == other or all(a != b for a, b in pairs)
