"""What two tensor-parallel ranks exchange: dispatch gathers each other's rows, combine reduces them.

Both are the four steps of an operator, between two ranks and over a window of their own.
"""

from __future__ import annotations

from typing import Literal

from moe_triton.core import ascendc
from moe_triton.core.plan import Hole, Launch, launch
from moe_triton.kernels.add_rows import add_rows_kernel
from moe_triton.kernels.append import append_kernel, gather_counts_kernel
from moe_triton.layout import WORD_BYTES, SlotLayout
from moe_triton.layout.call_word import Kind, call_word
from moe_triton.schemes.site import Operator, Site, launch_matching
from moe_triton.schemes.variants import CombineVariant, DispatchVariant

ExchangeStep = Literal["gather", "reduce"]
_OPERATOR = "tensor-parallel exchange"
_PART_OF: dict[ExchangeStep, Operator] = {"gather": "dispatch", "reduce": "combine"}


def gather_steps(site: Site, slot: SlotLayout, variant: DispatchVariant, zone: int) -> list[Launch]:
    """The tensor-parallel peer's rows after our own: the same four steps between two ranks."""
    exchange = site.exchange
    assert site.exchange_rank is not None
    peer = 1 - site.exchange_rank
    last = WORD_BYTES * (site.num_entries - 1)
    send = launch(
        "gather: send",
        ascendc.EXCHANGE_SEND,
        "communication",
        site.num_blocks,
        rows=Hole("tokens"),
        row_bytes=slot.row_bytes,
        scales=Hole("scales") if variant.quantize else 0,
        scale_offset=slot.scale_offset,
        first_row=0,
        num_rows=Hole("recv_offsets", last),
        capacity=site.capacity,
        header=Hole("recv_offsets"),
        header_words=site.config.num_ranks,
        peers=Hole("exchange_peers"),
        peer=peer,
        **site.zone_of("dispatch", zone),
        slots=exchange.dispatch_slots.words(),
        headers=exchange.headers.words(),
        report=Hole("report"),
    )
    flag = _post(site, "gather", zone, Hole("recv_offsets", last), variant.kind)
    wait = _wait(site, "gather", zone, variant.kind)
    slots = exchange.dispatch_slots.offset(zone=zone)
    arrange = launch_matching(
        "gather: arrange",
        append_kernel(
            slot.row_bytes // WORD_BYTES,
            slot.scale_offset // WORD_BYTES,
            variant.quantize,
            site.zones_on_device,
        ),
        "compute",
        site.num_blocks,
        {
            "slots": Hole("exchange_window", slots),
            "slot_scales": Hole("exchange_window", slots),
            "counts": Hole("exchange_counts"),
            "out_rows": Hole("tokens"),
            "out_scales": Hole("scales") if variant.quantize else 0,
            "tp_rank": site.exchange_rank,
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
            "tp_rank": site.exchange_rank,
            "capacity": site.capacity,
            **site.zone_in_memory("dispatch", exchange.headers.stride("zone") // WORD_BYTES),
        },
    )
    return [send, flag, wait, arrange, counts]


def reduce_steps(site: Site, variant: CombineVariant, zone: int) -> list[Launch]:
    """The peer's half of the rows back to it, and its half of ours added to our own."""
    exchange = site.exchange
    assert site.exchange_rank is not None
    own, others = WORD_BYTES * site.exchange_rank, WORD_BYTES * (1 - site.exchange_rank)
    row_bytes = SlotLayout(site.config.hidden, 2).row_bytes
    send = launch(
        "reduce: send",
        ascendc.EXCHANGE_SEND,
        "communication",
        site.num_blocks,
        rows=Hole("y"),
        row_bytes=row_bytes,
        scales=0,
        scale_offset=0,
        first_row=Hole("exchange_counts", own),
        num_rows=Hole("exchange_counts", others),
        capacity=Hole("num_rows"),
        header=0,
        header_words=0,
        peers=Hole("exchange_peers"),
        peer=1 - site.exchange_rank,
        **site.zone_of("combine", zone),
        slots=exchange.combine_slots.words(),
        headers=exchange.headers.words(),
        report=Hole("report"),
    )
    flag = _post(site, "reduce", zone, Hole("exchange_counts", others), variant.kind)
    wait = _wait(site, "reduce", zone, variant.kind)
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
            "tp_rank": site.exchange_rank,
            "capacity": site.capacity,
            "slot_stride": exchange.combine_slots.stride("index") // variant.dtype.itemsize,
            **site.zone_in_memory("combine", exchange.combine_slots.stride("zone") // variant.dtype.itemsize),
        },
    )
    return [send, flag, wait, add]


def _post(site: Site, step: ExchangeStep, zone: int, count: Hole, kind: Kind) -> Launch:
    """The flag of an exchange between tensor-parallel ranks, with the number of our own rows."""
    exchange = site.exchange
    status = exchange.dispatch_status if step == "gather" else exchange.combine_status
    assert site.exchange_rank is not None
    return launch(
        f"{step}: flag",
        ascendc.POST_STATUS,
        "communication",
        1,
        peers=Hole("exchange_peers"),
        num_ranks=2,
        count=count,
        call=call_word(_OPERATOR, kind),
        kind=0,
        combine_kind=0,
        rank=site.exchange_rank,
        **site.zone_of(_PART_OF[step], zone),
        status=status.words(),
        report=Hole("report"),
    )


def _wait(site: Site, step: ExchangeStep, zone: int, kind: Kind) -> Launch:
    """The wait of an exchange: afterwards both ranks' numbers of rows are known."""
    exchange = site.exchange
    status = exchange.dispatch_status if step == "gather" else exchange.combine_status
    counts = "exchange_counts" if step == "gather" else "reduced_counts"
    return launch(
        f"{step}: wait",
        ascendc.DISPATCH_WAIT,
        "communication",
        1,
        window=Hole("exchange_window"),
        recv_counts=Hole(counts),
        waited_us=0,
        num_local_experts=1,
        **site.zone_of(_PART_OF[step], zone),
        timeout_us=site.timeout_us,
        call=call_word(_OPERATOR, kind),
        dispatch_word=0,
        status=status.words(),
        report=Hole("report"),
    )
