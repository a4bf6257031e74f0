from __future__ import annotations

import itertools
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.core import abi
from moe_triton.core.config import Config
from moe_triton.core.region import Region
from moe_triton.core.row_formats import QUANTIZED
from moe_triton.layout import (
    BLOCK_BYTES,
    BLOCK_DATA_BYTES,
    NUM_ZONES,
    PAGE_BYTES,
    SLOT_ALIGN,
    STAMP,
    UB_ALIGN,
    WORD_BYTES,
    Layout,
    SlotLayout,
    align,
)
from moe_triton.layout.exchange import ExchangeLayout
from moe_triton.schemes import layout_of
from moe_triton.schemes.ascendc import KERNELS, tables
from moe_triton.schemes.direct.layout import DirectLayout
from moe_triton.schemes.fullmesh.layout import (
    STATE_BYTES,
    ExpertSlotsLayout,
    InbandLayout,
    InbandSlot,
    WindowLayout,
)
from moe_triton.tools import codegen
from tests.ascendc.library import include_options
from tests.patience import seconds
from tests.surroundings import cxx

configs = st.builds(
    lambda moe_ranks, shared, replicas, tokens, hidden, topk, local, first: Config(
        num_ranks=moe_ranks + shared * replicas,
        num_max_tokens_per_rank=tokens,
        hidden=32 * hidden,
        num_topk=min(topk, moe_ranks * local),
        num_experts=moe_ranks * local,
        num_shared_experts=shared,
        num_shared_ranks=shared * replicas,
        relaxed=True,
        ranks_per_server=(first, moe_ranks + shared * replicas - first) if first else None,
    ),
    moe_ranks=st.integers(2, 6),
    shared=st.integers(0, 2),
    replicas=st.integers(1, 2),
    tokens=st.integers(1, 6),
    hidden=st.integers(1, 8),
    topk=st.integers(1, 4),
    local=st.integers(1, 3),
    first=st.integers(0, 1),  # ranks of a server by itself
)


def every_item(region: Region) -> list[tuple[int, int]]:
    """(first byte, one past the last) of each entry."""
    ranges = [range(dim.extent) for dim in region.dims]
    names = [dim.name for dim in region.dims]
    starts = [region.offset(**dict(zip(names, index, strict=True))) for index in itertools.product(*ranges)]
    return [(start, start + region.item_bytes) for start in starts]


@pytest.mark.parametrize("kind", [WindowLayout, DirectLayout])
@given(config=configs)
def test_no_two_entries_of_a_window_share_a_byte(kind: type[Layout], config: Config) -> None:
    layout = kind(config)
    spans = sorted(span for region in layout.regions for span in every_item(region))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[0][0] >= 0
    assert spans[-1][1] <= layout.window_bytes


@pytest.mark.parametrize(
    ("config", "grows"),
    [
        (Config(512, 512, 7168, 16, 1024, 4, 256), False),  # the most that torch_npu's functions take
        (Config(4, 512, 64, 32, 2048, 4, 3), True),
        (Config(768, 1, 64, 32, 2048, 1, 704), True),
        (Config(2, 512, 64, 32, 32), True),
        (Config(2, 256, 64, 32, 2048), False),
    ],
)
def test_the_state_has_room_for_whatever_entries_there_are(config: Config, grows: bool) -> None:
    layout = WindowLayout(config)
    shared, routed = layout.dispatch_status_on(0), layout.dispatch_status_on(config.num_ranks - 1)
    of_ranks = layout.barrier_status, layout.peer_status
    for first in (shared, routed):
        regions = first, layout.combine_status, *of_ranks
        zones = [(r.offset(zone=z), r) for z in range(NUM_ZONES) for r in regions]
        for (start, region), (following, _) in itertools.pairwise(zones):
            items = [dim.extent - 1 for dim in region.dims[1:]]
            names = [dim.name for dim in region.dims[1:]]
            last = region.offset(**dict(zip(names, items, strict=True))) - region.base
            assert start + last + region.item_bytes <= following
        assert zones[-1][0] + config.num_ranks * 32 <= layout.state_bytes
    assert (layout.state_bytes > STATE_BYTES) == grows
    assert layout.combine_slots.base == layout.state_bytes


@pytest.mark.parametrize("kind", [WindowLayout, InbandLayout, ExpertSlotsLayout])
@given(config=configs, data=st.data())
def test_a_rank_has_the_slots_of_another_one_in_another_order(
    kind: type[WindowLayout], config: Config, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, config.num_ranks - 1))
    slots = kind(config).dispatch_slots
    mine, zone = slots.on(rank), slots.stride("zone")
    assert sorted(every_item(mine)) == sorted(every_item(slots))
    for expert, source in itertools.product(range(config.num_local_experts), range(config.num_ranks)):
        block = mine.offset(zone=1, source=source, expert=expert) - slots.base - zone
        place = expert * config.num_ranks + (source + rank) % config.num_ranks
        assert block == place * config.num_max_tokens_per_rank * slots.stride("index")
    # What two ranks have for each other lies at the same place: so has the out part room for what is posted.
    source, expert = data.draw(st.integers(0, config.num_ranks - 1)), config.num_local_experts - 1
    assert mine.offset(source=source, expert=expert) == slots.on(source).offset(source=rank, expert=expert)


def test_no_other_region_is_rotated() -> None:
    schemes = (("A3", "fullmesh_v1"), ("A3", "fullmesh_v2"), ("A3", "direct"), ("A2", "fullmesh"))
    for product, scheme in (*schemes, ("A2", "hierarchy")):
        layout = layout_of(Config(16, 8, 1024, 2, 16, product=product, scheme=scheme))
        rotated = {region.name for region in layout.regions if region.rotation}
        assert rotated == ({"dispatch_slots"} if product == "A3" and scheme != "direct" else set())


# The HCCS port of a write is a hash of these bits of its address (ops-transformer 0b521cfbe), and windows
# begin at multiples of 2 MiB: an offset says which values they have.
PORT_BITS = range(9, 21)


def ports(config: Config, kind: type[WindowLayout], source: int, expert: int) -> int:
    """Values of the port's bits of a source's first slots for one expert number, over ranks with experts."""
    slots = kind(config).dispatch_slots
    offsets = (
        slots.on(rank).offset(source=source, expert=expert)
        for rank in range(config.num_shared_ranks, config.num_ranks)
    )
    return len({offset % (1 << PORT_BITS.stop) >> PORT_BITS.start for offset in offsets})


def rotated_as_published(config: Config, kind: type[WindowLayout], source: int, expert: int) -> int:
    """The same of slots ((source + rank) % EP) * localE + expert."""
    c, rows = config, config.num_max_tokens_per_rank * kind(config).slot_stride
    blocks = (((source + rank) % c.num_ranks) * c.num_local_experts + expert for rank in range(c.num_ranks))
    return len({block * rows % (1 << PORT_BITS.stop) >> PORT_BITS.start for block in blocks})


@pytest.mark.parametrize("kind", [WindowLayout, InbandLayout])
@pytest.mark.parametrize("hidden", [2048, 4096, 7168])
@given(
    ranks=st.integers(2, 48) | st.sampled_from([64, 128, 256, 384, 768]),
    tokens=st.sampled_from([128, 256]) | st.integers(1, 256),
    local=st.integers(1, 16),
    data=st.data(),
)
def test_slots_are_spread_over_ports(
    kind: type[WindowLayout], hidden: int, ranks: int, tokens: int, local: int, data: st.DataObject
) -> None:
    config = Config(ranks, tokens, hidden, 1, local * ranks, relaxed=True)
    source, expert = data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(0, local - 1))
    assert ports(config, kind, source, expert) >= min(ranks, 8)


def test_the_fewest_values_of_the_ports_bits() -> None:
    """Powers of two have the fewest. Before there was one value everywhere."""
    sizes = itertools.product((2048, 4096, 7168), (128, 256), (WindowLayout, InbandLayout))
    most = {
        (hidden, tokens, kind): ports(Config(64, tokens, hidden, 1, 64), kind, 63, 0)
        for hidden, tokens, kind in sizes
    }
    few = {(4096, 128, InbandLayout): 16, (7168, 128, InbandLayout): 16}
    few |= {(hidden, 256, InbandLayout): 8 for hidden in (4096, 7168)}
    assert most == {size: few.get(size, 32 if size[1] == 128 else 16) for size in most}


@pytest.mark.parametrize(
    ("kind", "tokens", "local", "published", "values"),
    [
        (InbandLayout, 128, 16, 1, 16),  # a source's slots for all experts take a multiple of 2 MiB
        (InbandLayout, 256, 8, 1, 8),
        (InbandLayout, 256, 4, 2, 8),
        (WindowLayout, 128, 32, 1, 32),
        (WindowLayout, 128, 16, 2, 32),
    ],
)
def test_slots_are_spread_where_the_published_rotation_has_little_effect(
    kind: type[WindowLayout], tokens: int, local: int, published: int, values: int
) -> None:
    config = Config(64, tokens, 7168, 8, local * 64, relaxed=True)
    assert (local * tokens * kind(config).slot_stride % (2 << 20) == 0) == (published == 1)
    assert rotated_as_published(config, kind, 5, 3) == published
    assert ports(config, kind, 5, 3) == values


@pytest.mark.parametrize(("shared", "routed", "fewest"), [(4, 8, 4), (1, 14, 7), (1, 15, 8), (32, 256, 8)])
def test_slots_are_spread_beside_ranks_of_shared_experts(shared: int, routed: int, fewest: int) -> None:
    """Sources are rotated by all ranks: where few of many have routed experts there are fewer values."""
    config = Config(shared + routed, 256, 7168, 1, routed, 1, shared, relaxed=True)
    counts = [ports(config, InbandLayout, source, 0) for source in range(config.num_ranks)]
    assert min(counts) == fewest


@given(configs)
def test_slots_are_aligned_and_hold_a_packed_row(config: Config) -> None:
    layout = WindowLayout(config)
    for region in (layout.dispatch_slots, layout.combine_slots):
        assert all(start % 512 == 0 for start, _ in every_item(region))
    for itemsize in (1, 2):
        slot = SlotLayout(config.hidden, itemsize)
        assert slot.row_bytes <= slot.scale_offset
        assert slot.packed_bytes <= layout.slot_stride
        assert slot.scale_offset % 32 == slot.stamp_offset % 32 == 0


@given(configs)
def test_blocks_with_flags_in_band_lie_on_boundaries_of_512_bytes(config: Config) -> None:
    """A window begins on one (`NpuWindow`, the CPU's pages), so that no block of a slot crosses one."""
    layout = InbandLayout(config)
    assert BLOCK_BYTES == 512
    assert all(start % BLOCK_BYTES == 0 for start, _ in every_item(layout.dispatch_slots))
    assert layout.dispatch_slots.stride("index") % BLOCK_BYTES == 0
    data = layout.slot_stride // BLOCK_BYTES * BLOCK_DATA_BYTES
    assert SlotLayout(config.hidden, 2).packed_bytes <= data


@given(hidden=st.integers(1, 300).map(lambda units: 128 * units), name=st.sampled_from(sorted(QUANTIZED)))
def test_what_a_row_in_band_has_besides_its_elements(hidden: int, name: str) -> None:
    row_format = QUANTIZED[name]
    slot, other = (kind.of(hidden, row_format, torch.bfloat16) for kind in (InbandSlot, SlotLayout))
    if slot.num_scales == 1:
        assert slot.scale_offset == slot.stamp_offset + WORD_BYTES * STAMP.word("scale")
        assert slot.stamp_offset == align(slot.row_bytes, UB_ALIGN)
        assert slot.scaled_bytes == slot.packed_bytes == other.packed_bytes - UB_ALIGN
    else:
        assert (slot.scale_offset, slot.stamp_offset) == (other.scale_offset, other.stamp_offset)


def test_a_row_of_7168_bytes_fills_its_blocks() -> None:
    assert InbandSlot(7168, 1, num_scales=1).packed_bytes == 15 * BLOCK_DATA_BYTES


@given(configs)
def test_slots_can_be_counted_in_units(config: Config) -> None:
    """As `dispatch_offsets` writes them. Those of V1, 2 * (H + 128) bytes each, need a smaller unit."""
    units = {WindowLayout: SLOT_ALIGN, InbandLayout: SLOT_ALIGN, ExpertSlotsLayout: UB_ALIGN}
    for kind, unit in units.items():
        slots = kind(config).dispatch_slots
        assert slots.in_units(unit).offset(zone=1, source=1) * unit == slots.offset(zone=1, source=1)
    with pytest.raises(ValueError, match="multiples of 512"):
        ExpertSlotsLayout(replace(config, hidden=7168)).dispatch_slots.in_units(SLOT_ALIGN)


@given(configs)
def test_data_bytes_follow_the_published_formula(config: Config) -> None:
    """docs/limits.md, "Window memory: HCCL_BUFFSIZE": what it has to cover on A3 fullmesh."""
    c, h = config, config.hidden
    slot = align(align(2 * h, 32) + 64, 512)
    dispatch = c.num_local_experts * c.num_max_tokens_per_rank * c.num_ranks * slot
    combine = (c.num_topk + c.num_shared_experts) * c.num_max_tokens_per_rank * align(2 * h, 512)
    assert WindowLayout(config).data_bytes == 2 * (dispatch + combine)


@given(configs)
def test_direct_rows_are_aligned_for_copies_and_in_one_piece(config: Config) -> None:
    layout = DirectLayout(config)
    for region in (layout.rows(), layout.results, layout.stamps):
        assert all(region.offset(zone=zone) % 512 == 0 for zone in range(NUM_ZONES))
    for itemsize in (1, 2):
        rows = layout.rows(itemsize)
        assert rows.stride("index") == rows.item_bytes == itemsize * config.hidden
    regions = (layout.rows(1), layout.stamps, layout.counts_status, layout.rows_status, layout.results_status)
    assert all(start % 32 == 0 for region in regions for start, _ in every_item(region))
    assert all(layout.counts.offset(source=source) % 32 == 0 for source in range(config.num_ranks))


@given(configs)
def test_direct_rows_of_bytes_stay_within_those_of_16_bits(config: Config) -> None:
    layout = DirectLayout(config)
    for zone in range(NUM_ZONES):
        first = layout.rows(1).offset(zone=zone)
        last = layout.rows(1).offset(zone=zone, index=layout.capacity - 1) + config.hidden
        assert layout.rows().offset(zone=zone) == first
        assert last <= layout.results.offset(zone=zone)


@given(configs)
def test_direct_has_room_for_what_any_rank_can_receive(config: Config) -> None:
    layout = DirectLayout(config)
    received = {rank: config.receive_capacity(rank) for rank in range(config.num_ranks)}
    assert layout.capacity == max(received.values())
    rows, stamps = layout.capacity * 2 * config.hidden, layout.capacity * 32
    assert layout.data_bytes == NUM_ZONES * (2 * align(rows, PAGE_BYTES) + align(stamps, PAGE_BYTES))
    assert layout.window_bytes == layout.state_bytes + layout.data_bytes
    assert layout.num_entries == config.num_shared_ranks + config.num_experts


def test_a_scheme_has_its_layout() -> None:
    config = Config(8, 64, 7168, 8, 64, scheme="direct")
    layout = layout_of(config)
    assert isinstance(layout, DirectLayout)
    assert layout.region("stamps") == layout.stamps


def test_zones_lie_apart_as_published() -> None:
    layout = WindowLayout(Config(8, 64, 7168, 8, 64))
    assert layout.dispatch_status.stride("zone") == layout.combine_status.stride("zone") == 500 * 1024
    assert layout.combine_status.base - layout.dispatch_status.base == 64 * 1024
    assert layout.combine_slots.base == STATE_BYTES
    assert layout.dispatch_slots.stride("zone") * NUM_ZONES == layout.data_bytes


def test_offsets_exceed_32_bits_without_wrapping() -> None:
    layout = WindowLayout(Config(8, 512, 8192, 16, 1024))
    last = layout.dispatch_slots.offset(zone=1, source=7, expert=127, index=511)
    assert last > 2**32
    assert last + layout.slot_stride == layout.window_bytes
    direct = DirectLayout(Config(64, 512, 8192, 16, 1024))
    last = direct.stamps.offset(zone=1, index=direct.capacity - 1)
    assert last > 2**32
    assert last + 32 == direct.window_bytes


def test_an_index_outside_its_extent_is_refused() -> None:
    region = WindowLayout(Config(2, 4, 64, 2, 4, relaxed=True)).combine_slots
    with pytest.raises(IndexError, match="token = 4"):
        region.offset(token=4)
    with pytest.raises(IndexError, match="no dimension"):
        region.offset(expert=0)


@pytest.mark.parametrize("kind", [WindowLayout, DirectLayout])
def test_cpp_computes_the_same_offsets(tmp_path: Path, kind: type[Layout]) -> None:
    include = include_options(tmp_path)
    layout = kind(Config(5, 3, 96, 2, 8, 1, 1, relaxed=True))
    checks, body = [], []
    for region in (*layout.regions, *(r.on(3) for r in layout.regions if r.rotation)):
        name = codegen.camel(region.kind)
        words = ", ".join(f"{word}ull" for word in region.words())
        body.append(f"    {{\n    moe::{name} {region.name}{{{words}}};")
        index = [dim.extent - 1 for dim in region.dims]
        args = ", ".join(map(str, index))
        names = [dim.name for dim in region.dims]
        places = {f"At({args})": region}
        if region.rotation:
            places |= {f"AtOn({rank}, {args})": region.on(rank) for rank in (0, 3, 4)}
        for place, there in places.items():
            checks.append(there.offset(**dict(zip(names, index, strict=True))))
            body.append(f'    std::printf("%llu\\n", (unsigned long long){region.name}.{place});')
        outside = ", ".join(map(str, [*index[:-1], region.dims[-1].extent]))
        body.append(
            f"    if (!{region.name}.Contains({args}) || {region.name}.Contains({outside})) return 1;\n    }}"
        )
    lines = "\n".join(body)
    headers = '#include <cstdio>\n#include "kernel_operator.h"\n#include "moe_layout.h"\n'
    (tmp_path / "main.cpp").write_text(f"{headers}int main() {{\n{lines}\n    return 0;\n}}\n")
    command = [*cxx(), "-std=c++17", "-pthread", *include, "main.cpp", "-o", "main"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=seconds(60))
    out = subprocess.run(
        ["./main"], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=seconds(10)
    )
    assert [int(line) for line in out.stdout.split()] == checks


@pytest.mark.parametrize("header", ["moe_layout.h", "moe_abi.h"])
def test_no_generated_header_makes_up_a_keyword(tmp_path: Path, header: str) -> None:
    """An empty __aicore__ in front of CANN's own would take it away from the functions of its headers."""
    include = include_options(tmp_path)
    done = {}
    for first in ("", '#include "kernel_operator.h"\n'):
        (tmp_path / "main.cpp").write_text(f'{first}#include "{header}"\n')
        command = [*cxx(), "-std=c++17", "-fsyntax-only", *include, "main.cpp"]
        done[first] = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "LC_ALL": "C"},
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds(60),
        )
    alone, behind = done.values()
    assert alone.returncode != 0
    # As g++ and as clang say it.
    assert re.search(r"'__aicore__' does not name a type|unknown type name '__aicore__'", alone.stderr)
    assert behind.returncode == 0, behind.stderr


def test_argument_structs_have_a_word_for_each_argument() -> None:
    for kernel in KERNELS:
        words = sum(abi.words_of(arg) for arg in kernel.args)
        assert f"sizeof({codegen.camel(kernel.name)}Args) == {words} *" in codegen.render(tables())


@pytest.mark.parametrize(("hidden", "capacity", "header_words"), [(32, 1, 1), (7168, 48, 9), (512, 3, 200)])
def test_nothing_of_tensor_parallel_ranks_lies_over_something_else(
    hidden: int, capacity: int, header_words: int
) -> None:
    layout = ExchangeLayout(hidden, capacity, header_words)
    parts = ("dispatch_status", "combine_status", "headers", "dispatch_slots", "combine_slots")
    end = 0
    for region in (getattr(layout, name) for name in parts):
        assert region.base >= end, region
        end = region.end
    assert end <= layout.window_bytes
