"""What two tensor-parallel ranks exchange: dispatch gathers each other's rows, combine reduces them.

Both are the four steps of an operator, between two ranks and over a window of their own.
"""

from __future__ import annotations

from moe_triton.core.plan import Hole, Launch, joined, launch
from moe_triton.core.region import Region
from moe_triton.kernels.add_rows import add_rows_kernel
from moe_triton.kernels.append import append_kernel, gather_counts_kernel
from moe_triton.layout import WORD_BYTES, SlotLayout
from moe_triton.layout.call_word import Kind
from moe_triton.operators.variants import CombineVariant, DispatchVariant
from moe_triton.schemes.common.ascendc import EXCHANGE_SEND, FUSED
from moe_triton.schemes.common.flags import post, wait_for_ranks
from moe_triton.schemes.site import Operator, Site, launch_matching

_Guard = tuple[Region, Operator, int, Kind]


def gather_steps(site: Site, slot: SlotLayout, variant: DispatchVariant, zone: int) -> list[Launch]:
    """The tensor-parallel peer's rows after our own: the same four steps between two ranks."""
    exchange, peers = site.exchange, site.exchange_peers
    last = WORD_BYTES * (site.num_entries - 1)
    send = launch(
        "gather: send",
        EXCHANGE_SEND,
        "communication",
        site.num_blocks,
        rows=Hole("tokens"),
        row_bytes=slot.row_bytes,
        scales=Hole("scales") if slot.num_scales else 0,
        scale_offset=slot.scale_offset,
        scale_bytes=slot.scale_bytes,
        first_row=0,
        num_rows=Hole("recv_offsets", last),
        capacity=site.capacity,
        header=Hole("recv_offsets"),
        header_words=site.config.num_ranks,
        peers=Hole("exchange_peers"),
        peer=1 - peers.rank,
        **site.zone_of("dispatch", zone, kept=True),
        slots=exchange.dispatch_slots.words(),
        headers=exchange.headers.words(),
        report=Hole("report"),
    )
    guard: _Guard = exchange.dispatch_status, "dispatch", zone, variant.kind
    blocks, count = site.num_blocks, Hole("recv_offsets", last)
    flag = post(site, "gather: flag", *guard, peers=peers, count=count, blocks=blocks)
    wait = wait_for_ranks(site, "gather: wait", *guard, peers=peers, counts="exchange_counts", blocks=blocks)
    slots = exchange.dispatch_slots.offset(zone=zone)
    arrange = launch_matching(
        "gather: arrange",
        append_kernel(
            slot.row_bytes // WORD_BYTES,
            slot.scale_offset // WORD_BYTES,
            slot.num_scales,
            site.zones_on_device,
        ),
        "compute",
        site.num_blocks,
        {
            "slots": Hole("exchange_window", slots),
            "slot_scales": Hole("exchange_window", slots),
            "counts": Hole("exchange_counts"),
            "out_rows": Hole("tokens"),
            "out_scales": Hole("scales") if slot.num_scales else 0,
            "tp_rank": peers.rank,
            "capacity": site.capacity,
            "slot_stride": exchange.dispatch_slots.stride("index") // WORD_BYTES,
            **site.zone_in_memory("dispatch", exchange.dispatch_slots.stride("zone") // WORD_BYTES),
        },
    )
    counts = launch_matching(
        "gather: counts",
        gather_counts_kernel(site.target, site.zones_on_device),
        "compute",
        1,
        {
            "header": Hole("exchange_window", exchange.headers.offset(zone=zone)),
            "counts": Hole("exchange_counts"),
            "ep_recv_counts": Hole("recv_offsets", WORD_BYTES * site.config.num_ranks),
            "tokens_per_expert": Hole("tokens_per_expert"),
            "num_ranks": site.config.num_ranks,
            "tp_rank": peers.rank,
            "capacity": site.capacity,
            **site.zone_in_memory("dispatch", exchange.headers.stride("zone") // WORD_BYTES),
        },
    )
    return [*joined([send, flag, wait], FUSED), arrange, counts]


def reduce_steps(site: Site, variant: CombineVariant, zone: int) -> list[Launch]:
    """The peer's half of the rows back to it, and its half of ours added to our own."""
    exchange, peers = site.exchange, site.exchange_peers
    own, others = WORD_BYTES * peers.rank, WORD_BYTES * (1 - peers.rank)
    row_bytes = SlotLayout(site.config.hidden, 2).row_bytes
    send = launch(
        "reduce: send",
        EXCHANGE_SEND,
        "communication",
        site.num_blocks,
        rows=Hole("y"),
        row_bytes=row_bytes,
        scales=0,
        scale_offset=0,
        scale_bytes=0,
        first_row=Hole("exchange_counts", own),
        num_rows=Hole("exchange_counts", others),
        capacity=Hole("num_rows"),
        header=0,
        header_words=0,
        peers=Hole("exchange_peers"),
        peer=1 - peers.rank,
        **site.zone_of("combine", zone),
        slots=exchange.combine_slots.words(),
        headers=exchange.headers.words(),
        report=Hole("report"),
    )
    guard: _Guard = exchange.combine_status, "combine", zone, variant.kind
    blocks, count = site.num_blocks, Hole("exchange_counts", others)
    flag = post(site, "reduce: flag", *guard, peers=peers, count=count, blocks=blocks)
    wait = wait_for_ranks(site, "reduce: wait", *guard, peers=peers, counts="reduced_counts", blocks=blocks)
    add = launch_matching(
        "reduce: add",
        add_rows_kernel(variant.dtype, site.config.hidden, site.target, site.zones_on_device),
        "compute",
        site.num_blocks,
        {
            "rows": Hole("y"),
            "slots": Hole("exchange_window", exchange.combine_slots.offset(zone=zone)),
            "counts": Hole("exchange_counts"),
            "out": Hole("reduced_rows"),
            "tp_rank": peers.rank,
            "capacity": site.capacity,
            "slot_stride": exchange.combine_slots.stride("index") // variant.dtype.itemsize,
            **site.zone_in_memory(
                "combine", exchange.combine_slots.stride("zone") // variant.dtype.itemsize, kept=False
            ),
        },
    )
    return [*joined([send, flag, wait], FUSED), add]
