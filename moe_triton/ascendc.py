"""The Ascend C kernels' argument lists. Their C++ structs are generated from here (`moe_triton.codegen`).

Pointers are device addresses. An argument whose type is the name of a region is passed by value, as the
words of `Region.words`. Every argument is one 64-bit word or several; the struct has no padding.
"""

from __future__ import annotations

from moe_triton.kernel import Arg, AscendCKernel

DISPATCH_SEND = AscendCKernel(
    "dispatch_send",
    (
        Arg("rows", "*i8", "in"),  # rows to send, as they start a slot
        Arg("row_stride", "i64", "value"),  # bytes from one row to the next
        Arg("row_bytes", "i64", "value"),  # bytes of a row to send, scale included; a multiple of 32
        Arg("stamp_offset", "i64", "value"),  # where the stamp goes in a slot
        Arg("rows_per_token", "i64", "value"),  # 1, or K when every expert gets a row of its own
        Arg("topk_idx", "*i32", "in"),  # (T, K), -1 for none
        Arg("topk_weights", "*fp32", "in"),  # (T, K), or null
        Arg("expand_idx", "*i32", "in"),  # (T, K)
        Arg("counts", "*i32", "in"),  # (M,)
        Arg("peers", "*i64", "in"),  # (EP,) window addresses
        Arg("first_token", "i64", "value"),
        Arg("num_tokens", "i64", "value"),  # tokens of this launch
        Arg("total_tokens", "i64", "value"),  # tokens of the whole operator
        Arg("topk", "i64", "value"),
        Arg("num_shared_experts", "i64", "value"),
        Arg("num_shared_ranks", "i64", "value"),
        Arg("rank", "i64", "value"),
        Arg("zone", "i64", "value"),
        Arg("post_status", "i64", "value"),  # 1 on the operator's last launch
        Arg("slots", "dispatch_slots", "value"),
        Arg("status", "dispatch_status", "value"),
        Arg("report", "*i32", "out"),
    ),
)

DISPATCH_WAIT = AscendCKernel(
    "dispatch_wait",
    (
        Arg("window", "*i8", "inout"),  # this rank's own
        Arg("recv_counts", "*i32", "out"),  # (localE, EP); -1 where nothing came in time
        Arg("num_local_experts", "i64", "value"),
        Arg("zone", "i64", "value"),
        Arg("timeout_us", "i64", "value"),
        Arg("status", "dispatch_status", "value"),
        Arg("report", "*i32", "out"),
    ),
)

COMBINE_SEND = AscendCKernel(
    "combine_send",
    (
        Arg("rows", "*i8", "in"),  # expert outputs, contiguous
        Arg("row_bytes", "i64", "value"),
        Arg("triples", "*i32", "in"),  # (A, 3): source rank, token, k
        Arg("recv_offsets", "*i32", "in"),  # inclusive prefix sums; the last one is the number of rows
        Arg("num_entries", "i64", "value"),
        Arg("capacity", "i64", "value"),  # rows in `rows`
        Arg("peers", "*i64", "in"),
        Arg("num_ranks", "i64", "value"),
        Arg("zone", "i64", "value"),
        Arg("slots", "combine_slots", "value"),
        Arg("status", "combine_status", "value"),
        Arg("report", "*i32", "out"),
    ),
)

COMBINE_WAIT = AscendCKernel(
    "combine_wait",
    (
        Arg("window", "*i8", "inout"),
        Arg("topk_idx", "*i32", "in"),
        Arg("first_token", "i64", "value"),
        Arg("num_tokens", "i64", "value"),
        Arg("topk", "i64", "value"),
        Arg("num_shared_experts", "i64", "value"),
        Arg("zone", "i64", "value"),
        Arg("timeout_us", "i64", "value"),
        Arg("status", "combine_status", "value"),
        Arg("report", "*i32", "out"),
    ),
)

KERNELS: tuple[AscendCKernel, ...] = (DISPATCH_SEND, DISPATCH_WAIT, COMBINE_SEND, COMBINE_WAIT)

# A report is 16 int32 per block, {code, index of the first thing concerned, how many, 0...}: a cache line
# of its own, so that however it is written no block writes over another one's.
REPORT_WORDS = 16
REPORT_TIMEOUT = 1
REPORT_BAD_ROW = 2
MAX_BLOCKS = 48
