"""Argument lists of the Ascend C kernels that only the direct scheme has (`moe_triton.core.ascendc`)."""

from __future__ import annotations

from moe_triton.core.ascendc import AGREED, DISPATCH_WAIT, KNOWN, POST_STATUS
from moe_triton.core.kernel import Arg, AscendCKernel, FusedKernel, numbers
from moe_triton.schemes.common.ascendc import DISPATCH_OFFSETS, EXCHANGE, ROUTED, ROWS

# This rank's counts to every rank, and an entry that announces them.
COUNTS_SEND = AscendCKernel(
    "counts_send",
    (
        Arg("counts", "*i32", "in"),  # (M,)
        Arg("shared_counts", "*i32", "in"),  # (R,), or null if R = 0
        *numbers("i64", "num_experts num_shared_ranks"),
        Arg("peers", "*i64", "in"),
        *numbers("i64", "num_ranks rank zone"),
        Arg("call", "i64", "value"),  # as in dispatch_send
        Arg("combine_kind", "*i32", "in"),
        AGREED,
        Arg("slots", "direct_counts", "value"),
        Arg("status", "dispatch_status", "value"),
        Arg("report", "*i32", "out"),
    ),
)

# Rows to their places in the receivers' outputs, a stamp for each; the places follow from the counts of all
# ranks. No flags: a post_status follows.
DIRECT_SEND = AscendCKernel(
    "direct_send",
    (
        *ROWS,
        Arg("scales", "*fp32", "in"),  # one per row, for its stamp, or null
        Arg("scale_offset", "i64", "value"),  # where several scales begin, from the row's beginning on
        Arg("scale_bytes", "i64", "value"),  # bytes of them, a multiple of 32; 0 where there are none
        *ROUTED,
        Arg("shared_ranks", "*i32", "in"),  # (T, S) rank of each shared result, -1: not sent; null if S = 0
        Arg("shared_slots", "*i32", "in"),  # (T,) index of a token among those sent to a shared rank
        Arg("peers", "*i64", "in"),
        KNOWN,
        *numbers("i64", "first_token num_tokens topk num_experts"),
        Arg("num_local_experts", "i64", "value"),  # of a rank of routed experts
        *numbers("i64", "num_shared_experts num_shared_ranks num_ranks rank"),
        Arg("window", "*i8", "in"),  # this rank's own, where the counts of all ranks are
        Arg("counts", "direct_counts", "value"),
        Arg("max_count", "i64", "value"),  # of rows from a rank for an entry; what is above counts as this
        Arg("recv_counts", "*i32", "out"),  # (localE, EP) this rank's counts, as they were sent
        Arg("result_offsets", "*i64", "out"),  # (T, K + S) elements of 16 bits from this rank's first result
        Arg("result_bytes", "i64", "value"),  # from one result to the next
        Arg("zone", "i64", "value"),
        Arg("slots", "indexed_slots", "value"),
        Arg("scale_slots", "indexed_slots", "value"),  # where several scales go
        Arg("stamps", "indexed_slots", "value"),
        Arg("report", "*i32", "out"),
    ),
)

KERNELS = COUNTS_SEND, DIRECT_SEND
FUSED: tuple[FusedKernel, ...] = (
    # Rows follow when every rank's counts are there; their flag when every block's rows are.
    FusedKernel(
        "direct_dispatch",
        (COUNTS_SEND, DISPATCH_WAIT, DIRECT_SEND, POST_STATUS, DISPATCH_OFFSETS, DISPATCH_WAIT),
        synced=frozenset({2, 3}),
        guarded=frozenset({2, 3, 4, 5}),
    ),
    EXCHANGE,
)
