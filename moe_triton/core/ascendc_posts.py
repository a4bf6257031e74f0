"""The argument lists of the Ascend C kernels that post rows of fullmesh to queues: see
`moe_triton.core.ascendc`.
"""

from __future__ import annotations

from moe_triton.core.kernel import Arg, AscendCKernel

# Of a kernel that posts: its block's part of the launch's `moe_triton.core.records.TRAFFIC`, and how long a
# queue may be full.
POSTING = (
    Arg("window", "*i8", "inout"),  # this rank's own
    Arg("out_offset", "i64", "value"),
    Arg("timeout_us", "i64", "value"),
    Arg("traffic", "*i64", "inout"),  # (blocks, 8), or null
)

# To each queued peer: for every expert of its that gets rows a message with all of them, whose slots are
# neighbours in the out part, then one with its entries. What earlier phases or launches wrote is there.
DISPATCH_POST = AscendCKernel(
    "dispatch_post",
    (
        Arg("counts", "*i32", "in"),  # (M,)
        Arg("shared_counts", "*i32", "in"),  # (R,) tokens for each shared rank; null if R = 0
        Arg("peers", "*i64", "in"),
        Arg("num_shared_ranks", "i64", "value"),
        Arg("rank", "i64", "value"),
        Arg("zone", "i64", "value"),
        Arg("zone_at", "*i32", "in"),
        Arg("row_bytes", "i64", "value"),  # of a row alone
        Arg("slot_bytes", "i64", "value"),  # in use, stamp included
        Arg("call", "i64", "value"),  # as in dispatch_send, also the next one
        Arg("combine_kind", "*i32", "in"),
        *POSTING,
        Arg("slots", "dispatch_slots", "value"),
        Arg("status", "dispatch_status", "value"),
        Arg("report", "*i32", "out"),
    ),
)

# To each queued peer: the rows that combine_send left for it, each with its flag behind it, in a message of
# its own; or no flags, and a post_status follows. What earlier phases or launches wrote is there.
COMBINE_POST = AscendCKernel(
    "combine_post",
    (
        Arg("origins", "*i32", "in"),  # as in combine_send, up to `capacity`
        Arg("recv_offsets", "*i32", "in"),
        Arg("num_entries", "i64", "value"),
        Arg("capacity", "i64", "value"),
        Arg("peers", "*i64", "in"),
        Arg("num_ranks", "i64", "value"),
        Arg("zone", "i64", "value"),
        Arg("zone_at", "*i32", "in"),
        Arg("numbers", "*i32", "in"),  # as in combine_send
        Arg("row_bytes", "i64", "value"),  # of a row, as combine_send copies it
        Arg("payload_bytes", "i64", "value"),  # of these, without scales and padding
        Arg("flag_rows", "i64", "value"),
        *POSTING,
        Arg("out_rows", "indexed_slots", "value"),
        Arg("out_flags", "indexed_slots", "value"),  # a flag for each peer, which serves all of its rows
        Arg("slots", "combine_slots", "value"),
        Arg("status", "combine_status", "value"),
        Arg("report", "*i32", "out"),
    ),
)
