"""What two tensor-parallel ranks exchange: dispatch gathers each other's rows, combine reduces them.

Both are the four steps of an operator, between two ranks and over a window of their own.
"""

from __future__ import annotations

from moe_triton.core.plan import Hole, Launch, Value, joined
from moe_triton.core.region import Region
from moe_triton.kernels.add_rows import add_rows_kernel
from moe_triton.kernels.append import append_kernel, gather_counts_kernel
from moe_triton.layout import WORD_BYTES, SlotLayout
from moe_triton.schemes.common.ascendc import EXCHANGE_SEND, FUSED
from moe_triton.schemes.common.steps import CombineSteps, DispatchSteps, Steps


def gather_steps(steps: DispatchSteps) -> list[Launch]:
    """The tensor-parallel peer's rows after our own: the same four steps between two ranks."""
    site, zone, exchange = steps.site, steps.zone, steps.site.exchange
    own_rows = Hole("recv_offsets", WORD_BYTES * (site.num_entries - 1))
    rows: dict[str, Value] = {
        "rows": Hole("tokens"),
        "scales": Hole("scales") if steps.slot.num_scales else 0,
        "first_row": 0,
        "num_rows": own_rows,
        "header": Hole("recv_offsets"),
        "header_words": site.config.num_ranks,
        "zone_at": steps.keeping,
    }
    regions = exchange.dispatch_slots, exchange.dispatch_status
    exchanged = _exchanged(steps, "gather", *regions, rows, own_rows, "exchange_counts")
    slots, slot, tp_rank = exchange.dispatch_slots, steps.slot, site.exchange_peers.rank
    window, words = Hole("exchange_window", slots.offset(zone=zone)), (slot.row_bytes, slot.scale_offset)
    arrange = steps.launch(
        "gather: arrange",
        append_kernel(*(each // WORD_BYTES for each in words), slot.num_scales, site.zones_on_device),
        slots=window,
        slot_scales=window,
        counts=Hole("exchange_counts"),
        tp_rank=tp_rank,
        slot_stride=slots.stride("index") // WORD_BYTES,
        **steps.in_memory(slots.stride("zone") // WORD_BYTES),
    )
    counts = steps.launch(
        "gather: counts",
        gather_counts_kernel(site.target, site.zones_on_device),
        1,
        header=Hole("exchange_window", exchange.headers.offset(zone=zone)),
        counts=Hole("exchange_counts"),
        ep_recv_counts=Hole("recv_offsets", WORD_BYTES * site.config.num_ranks),
        tp_rank=tp_rank,
        **steps.in_memory(exchange.headers.stride("zone") // WORD_BYTES),
    )
    return [*exchanged, arrange, counts]


def reduce_steps(steps: CombineSteps) -> list[Launch]:
    """The peer's half of the rows back to it, and its half of ours added to our own."""
    site, exchange, dtype = steps.site, steps.site.exchange, steps.variant.dtype
    slots, tp_rank = exchange.combine_slots, site.exchange_peers.rank
    own, others = (Hole("exchange_counts", WORD_BYTES * rank) for rank in (tp_rank, 1 - tp_rank))
    rows: dict[str, Value] = {
        "rows": Hole("y"),
        "row_bytes": SlotLayout(site.config.hidden, 2).row_bytes,
        **dict.fromkeys(("scales", "scale_offset", "scale_bytes", "header", "header_words"), 0),
        "first_row": own,
        "num_rows": others,
        "capacity": Hole("num_rows"),
    }
    exchanged = _exchanged(steps, "reduce", slots, exchange.combine_status, rows, others, "reduced_counts")
    add = steps.launch(
        "reduce: add",
        add_rows_kernel(dtype, site.config.hidden, site.target, site.zones_on_device),
        rows=Hole("y"),
        slots=Hole("exchange_window", slots.offset(zone=steps.zone)),
        counts=Hole("exchange_counts"),
        out=Hole("reduced_rows"),
        tp_rank=tp_rank,
        capacity=site.capacity,
        slot_stride=slots.stride("index") // dtype.itemsize,
        **steps.in_memory(slots.stride("zone") // dtype.itemsize, kept=False),
    )
    return [*exchanged, add]


def _exchanged(
    steps: Steps, name: str, slots: Region, status: Region, rows: dict[str, Value], count: Hole, counts: str
) -> list[Launch]:
    """Steps 1 to 3: rows to the peer's slots, how many they are, and until the peer's have come.

    Args:
        steps: of the operator.
        name: of the exchange.
        slots, status: of the window between the two.
        rows: which are sent.
        count: of them.
        counts: the hole of what both have sent.
    """
    peers, headers = steps.site.exchange_peers, steps.site.exchange.headers
    send = steps.launch(
        f"{name}: send",
        EXCHANGE_SEND,
        peers=Hole("exchange_peers"),
        peer=1 - peers.rank,
        slots=slots,
        headers=headers,
        **rows,
    )
    flag = steps.post(f"{name}: flag", status, peers=peers, count=count)
    wait = steps.wait_for_ranks(f"{name}: wait", status, peers=peers, recv_counts=Hole(counts))
    return joined([send, flag, wait], FUSED)
