"""Argument lists of the Ascend C kernels that several schemes have (`moe_triton.core.ascendc`)."""

from __future__ import annotations

from moe_triton.core.ascendc import (
    ADDS_TRAFFIC,
    DISPATCH_WAIT,
    ENTRY_KERNELS,
    POST_STATUS,
    POSTING,
    ZONE,
)
from moe_triton.core.kernel import Arg, AscendCKernel, FusedKernel, numbers

# Rows of T tokens to K routed and S shared experts; M routed experts.
ROWS = (
    Arg("rows", "*i8", "in"),  # rows to send, as they start a slot
    Arg("row_stride", "i64", "value"),  # bytes from one row to the next
    Arg("row_bytes", "i64", "value"),  # bytes of a row to send; a multiple of 32
)
ROUTED = (
    Arg("rows_per_token", "i64", "value"),  # 1, or K + S when every result has a row of its own
    Arg("topk_idx", "*i32", "in"),  # (T, K); ids outside [0, M) are not sent
    Arg("topk_weights", "*fp32", "in"),  # (T, K), or null
    Arg("expand_idx", "*i32", "in"),  # (T, K) index of a row among this rank's for the expert
)

# From the counts: where the rows of each expert and source end, how many each expert has, the slot of each.
DISPATCH_OFFSETS = AscendCKernel(
    "dispatch_offsets",
    (
        Arg("recv_counts", "*i32", "in"),  # (localE, EP); below 0 where nothing came in time
        Arg("recv_offsets", "*i32", "out"),  # (localE, EP) inclusive prefix sums
        Arg("tokens_per_expert", "*i64", "out"),  # (localE,)
        Arg("recv_stats", "*i32", "inout"),  # (localE,) to which each expert's rows are added, or null
        Arg("trailer", "*i32", "out"),  # `moe_triton.core.records.TRAILER`
        Arg("row_slots", "*i32", "out"),  # (A,), or null: the slot of each row, as `slots` counts it
        *numbers("i64", "num_local_experts num_ranks"),
        Arg("max_count", "i64", "value"),  # of rows from a rank for an expert; what is above counts as this
        Arg("capacity", "i64", "value"),  # of the output, in rows: no sum is above it
        Arg("cumulative", "i64", "value"),  # 1: `tokens_per_expert` with those of the experts before
        *ZONE,
        Arg("kept_rank", "i64", "value"),  # `row_slots` has -1 for each row of it; -1 for none
        # 1: slots of a source have one number for all experts, whose rows lie there one after the other
        Arg("by_source", "i64", "value"),
        Arg("slots", "dispatch_slots", "value"),  # offsets in units (`Region.in_units`), not in bytes
        Arg("report", "*i32", "out"),  # nothing is reported
    ),
)

# Consecutive rows to one peer's slots, for the exchange between two tensor-parallel ranks.
EXCHANGE_SEND = AscendCKernel(
    "exchange_send",
    (
        Arg("rows", "*i8", "in"),  # contiguous
        Arg("row_bytes", "i64", "value"),  # a multiple of 32
        Arg("scales", "*fp32", "in"),  # those of each row, or null
        Arg("scale_offset", "i64", "value"),  # where they go in a slot
        Arg("scale_bytes", "i64", "value"),  # of a row
        Arg("first_row", "*i32", "in"),  # the first row to send, or null for 0
        Arg("num_rows", "*i32", "in"),  # how many
        Arg("capacity", "i64", "value"),  # rows in `rows`
        Arg("header", "*i32", "in"),  # words that go along, or null
        Arg("header_words", "i64", "value"),
        Arg("peers", "*i64", "in"),
        Arg("peer", "i64", "value"),  # whose slots
        *ZONE,
        Arg("slots", "indexed_slots", "value"),
        Arg("headers", "exchange_headers", "value"),
        Arg("report", "*i32", "out"),
    ),
)

# Before a call in rounds: a header and this rank's counts of the whole call to every rank, and an entry that
# announces them. To a queued peer they are posted. And a word in every rank's window that such a call rings.
CALL_POST = AscendCKernel(
    "call_post",
    (
        Arg("header", "*i32", "in"),  # `moe_triton.core.records.CALL_HEADER`
        Arg("counts", "*i32", "in"),  # (M,)
        Arg("shared_counts", "*i32", "in"),  # (R,), or null if R = 0
        *numbers("i64", "num_experts num_shared_ranks"),
        Arg("peers", "*i64", "in"),
        *numbers("i64", "num_ranks rank"),
        Arg("bell", "i64", "value"),  # the word to ring with, or 0: no rank has to hear of it
        Arg("call", "i64", "value"),  # the call word of the entries
        *ZONE,
        *POSTING,
        ADDS_TRAFFIC,
        Arg("slots", "direct_counts", "value"),
        Arg("status", "dispatch_status", "value"),
        Arg("bells", "indexed_slots", "value"),
        Arg("report", "*i32", "out"),
    ),
)

# Where a token comes once for each rank, ahead of rows: to every rank all of this rank's ids, and weights.
TABLES_SEND = AscendCKernel(
    "tables_send",
    (
        Arg("row_ids", "*i32", "in"),  # (T, K)
        Arg("row_weights", "*fp32", "in"),  # (T, K), or null
        *numbers("i64", "num_tokens topk"),
        Arg("peers", "*i64", "in"),
        *numbers("i64", "num_ranks rank"),
        *ZONE,
        *POSTING,
        ADDS_TRAFFIC,
        Arg("tables", "row_tables", "value"),
        Arg("report", "*i32", "out"),
    ),
)

KERNELS = (*ENTRY_KERNELS, DISPATCH_OFFSETS, TABLES_SEND, EXCHANGE_SEND, CALL_POST)
# Flags follow rows of a launch, or stand alone.
EXCHANGE = FusedKernel("exchange", (EXCHANGE_SEND, POST_STATUS, DISPATCH_WAIT), frozenset({1}))
FUSED = (EXCHANGE,)
