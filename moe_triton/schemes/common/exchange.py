"""What two tensor-parallel ranks exchange: dispatch gathers each other's rows, combine reduces them.

Both are the four steps of an operator, between two ranks and over a window of their own.
"""

from __future__ import annotations

from moe_triton.core.plan import Launch, Placeholder, Value, joined
from moe_triton.core.region import Region
from moe_triton.kernels.add_rows import add_rows_kernel
from moe_triton.kernels.append import append_kernel, gather_counts_kernel
from moe_triton.layout import WORD_BYTES, SlotLayout
from moe_triton.schemes.common.ascendc import EXCHANGE_SEND, FUSED
from moe_triton.schemes.common.steps import CombineSteps, DispatchSteps, Steps


def gather_steps(steps: DispatchSteps) -> list[Launch]:
    """The tensor-parallel peer's rows after our own: the same four steps between two ranks."""
    context, zone, exchange = steps.context, steps.zone, steps.context.exchange
    own_rows = Placeholder("recv_offsets", WORD_BYTES * (context.num_entries - 1))
    rows: dict[str, Value] = {
        "rows": Placeholder("tokens"),
        "scales": Placeholder("scales") if steps.slot.num_scales else 0,
        "first_row": 0,
        "num_rows": own_rows,
        "header": Placeholder("recv_offsets"),
        "header_words": context.config.num_ranks,
        "zone_at": steps.keeping,
    }
    regions = exchange.dispatch_slots, exchange.dispatch_status
    exchanged = _exchanged(steps, "gather", *regions, rows, own_rows, "exchange_counts")
    slots, slot, tp_rank = exchange.dispatch_slots, steps.slot, context.exchange_peers.rank
    window = Placeholder("exchange_window", slots.offset(zone=zone))
    words = slot.row_bytes // WORD_BYTES, slot.scale_offset // WORD_BYTES
    arrange = steps.launch(
        "gather: arrange",
        append_kernel(*words, slot.num_scales, context.zones_on_device),
        slots=window,
        slot_scales=window,
        counts=Placeholder("exchange_counts"),
        tp_rank=tp_rank,
        slot_stride=slots.stride("index") // WORD_BYTES,
        **steps.in_memory(slots.stride("zone") // WORD_BYTES),
    )
    counts = steps.launch(
        "gather: counts",
        gather_counts_kernel(context.target, context.zones_on_device),
        1,
        header=Placeholder("exchange_window", exchange.headers.offset(zone=zone)),
        counts=Placeholder("exchange_counts"),
        ep_recv_counts=Placeholder("recv_offsets", WORD_BYTES * context.config.num_ranks),
        tp_rank=tp_rank,
        **steps.in_memory(exchange.headers.stride("zone") // WORD_BYTES),
    )
    return [*exchanged, arrange, counts]


def reduce_steps(steps: CombineSteps) -> list[Launch]:
    """The peer's half of the rows back to it, and its half of ours added to our own."""
    context, exchange, dtype = steps.context, steps.context.exchange, steps.variant.dtype
    slots, tp_rank = exchange.combine_slots, context.exchange_peers.rank
    own, others = (Placeholder("exchange_counts", WORD_BYTES * rank) for rank in (tp_rank, 1 - tp_rank))
    rows: dict[str, Value] = {
        "rows": Placeholder("y"),
        "row_bytes": SlotLayout(context.config.hidden, 2).row_bytes,
        **dict.fromkeys(("scales", "scale_offset", "scale_bytes", "header", "header_words"), 0),
        "first_row": own,
        "num_rows": others,
        "capacity": Placeholder("num_rows"),
    }
    exchanged = _exchanged(steps, "reduce", slots, exchange.combine_status, rows, others, "reduced_counts")
    add = steps.launch(
        "reduce: add",
        add_rows_kernel(dtype, context.config.hidden, context.target, context.zones_on_device),
        rows=Placeholder("y"),
        slots=Placeholder("exchange_window", slots.offset(zone=steps.zone)),
        counts=Placeholder("exchange_counts"),
        out=Placeholder("reduced_rows"),
        tp_rank=tp_rank,
        capacity=context.capacity,
        slot_stride=slots.stride("index") // dtype.itemsize,
        **steps.in_memory(slots.stride("zone") // dtype.itemsize, kept=False),
    )
    return [*exchanged, add]


def _exchanged(
    steps: Steps,
    name: str,
    slots: Region,
    status: Region,
    rows: dict[str, Value],
    count: Placeholder,
    counts: str,
) -> list[Launch]:
    """Steps 1 to 3: rows to the peer's slots, how many they are, and until the peer's have come.

    Args:
        steps: of the operator.
        name: of the exchange.
        slots, status: of the window between the two.
        rows: which are sent.
        count: of them.
        counts: the placeholder of what both have sent.
    """
    peers, headers = steps.context.exchange_peers, steps.context.exchange.headers
    send = steps.launch(
        f"{name}: send",
        EXCHANGE_SEND,
        peers=Placeholder("exchange_peers"),
        peer=1 - peers.rank,
        slots=slots,
        headers=headers,
        **rows,
    )
    flag = steps.post(f"{name}: flag", status, peers=peers, count=count)
    wait = steps.wait_for_ranks(f"{name}: wait", status, peers=peers, recv_counts=Placeholder(counts))
    return joined([send, flag, wait], FUSED)
