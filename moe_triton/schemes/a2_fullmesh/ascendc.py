"""Argument lists of the Ascend C kernels that write a block for each peer (`moe_triton.core.ascendc`).

A block is a header {int32 counts, call word, FLAG1}, rows one after the other, and FLAG2 behind the last one.
Flags are numbers of rounds: ``numbers`` holds, by zone, that of the run before.
"""

from __future__ import annotations

from moe_triton.core.ascendc import ADDS_TRAFFIC, CHANGES, ZONE
from moe_triton.core.kernel import Arg, AscendCKernel, FusedKernel, numbers
from moe_triton.schemes.common.ascendc import DISPATCH_OFFSETS, ROUTED, ROWS

# Where things are in a block.
_FORMAT = (
    *numbers("i64", "header_words flag_word call_word"),  # of the header: how many, which are FLAG1 and call
    Arg("rows_offset", "i64", "value"),  # bytes from a block's beginning to its first row
    Arg("row_step", "i64", "value"),  # bytes from one row to the next; a multiple of 32
    Arg("max_rows", "i64", "value"),  # of a block
    Arg("end_offset", "i64", "value"),  # from a block's beginning to FLAG2; 0: right behind its rows
    Arg("peer_blocks", "peer_blocks", "value"),
)
_ROUND = (
    Arg("numbers", "*i32", "inout"),  # (2,)
    *ZONE,
    Arg("call", "i64", "value"),  # the call word
)
_PEERS = (
    Arg("peers", "*i64", "in"),  # (EP,) window addresses
    *numbers("i64", "num_ranks rank"),
)
_OUT = (
    Arg("window", "*i8", "out"),  # this rank's own
    Arg("out_offset", "i64", "value"),  # where its out part begins; 0 where no peer is queued
)
# How blocks are posted that are made in the out part; where there is none, of one part and nothing else.
_POSTS = (
    Arg("payload_bytes", "i64", "value"),  # of a row: those of the row itself
    Arg("num_parts", "i64", "value"),  # in which blocks are made: of some ranks each
    Arg("part_lines", "*i32", "inout"),  # (blocks, 8): which part each block of the launch is through with
    Arg("timeout_us", "i64", "value"),  # how long a queue may be full
    Arg("traffic", "*i64", "inout"),  # (blocks, 8) `moe_triton.core.records.TRAFFIC`, or null
    ADDS_TRAFFIC,
)

# Dispatch: to each rank its counts and FLAG1, then its rows, expert by expert.
BLOCKS_SEND = AscendCKernel(
    "blocks_send",
    (
        *ROWS,
        Arg("stamp_offset", "i64", "value"),  # where the stamp goes, from the row's beginning on
        *ROUTED,
        Arg("counts", "*i32", "in"),  # (M,)
        Arg("first_token", "i64", "value"),
        *numbers("i64", "num_tokens topk num_experts num_local_experts"),
        Arg("rows_to", "*i32", "out"),  # (EP,) rows for each rank
        Arg("combine_kind", "*i32", "in"),  # as in dispatch_send, also the next one
        Arg("dispatch_word", "*i32", "out"),
        *_PEERS,
        *_OUT,
        *_POSTS,
        *_ROUND,
        *_FORMAT,
        Arg("report", "*i32", "out"),
    ),
)

# Combine: to each rank the results of its rows, in the order in which they came in its block.
BLOCKS_RETURN = AscendCKernel(
    "blocks_return",
    (
        Arg("rows", "*i8", "in"),  # expert outputs, contiguous, of `row_step` bytes each
        Arg("recv_offsets", "*i32", "in"),  # (localE, EP) prefix sums; the last is the number of rows
        Arg("num_entries", "i64", "value"),
        Arg("capacity", "i64", "value"),  # rows in `rows`
        Arg("rows_to", "*i32", "out"),  # (EP,) rows for each rank
        Arg("kind", "i64", "value"),  # as in combine_send, also the next one
        Arg("combine_kind", "*i32", "out"),
        *_PEERS,
        *_OUT,
        *_POSTS,
        *_ROUND,
        *_FORMAT,
        Arg("report", "*i32", "out"),
    ),
)

# Inside one server: FLAG2 of each rank's block. What all blocks wrote in earlier phases is there before.
BLOCKS_END = AscendCKernel(
    "blocks_end",
    (
        Arg("rows_to", "*i32", "in"),  # (EP,)
        *_PEERS,
        *_OUT,
        *_ROUND,
        *_FORMAT,
        Arg("report", "*i32", "out"),  # nothing is reported
    ),
)

# Until each rank's block is there: FLAG1, counts that are in bounds, and FLAG2 where they say that it is.
BLOCKS_WAIT = AscendCKernel(
    "blocks_wait",
    (
        Arg("window", "*i8", "in"),  # this rank's own
        Arg("recv_counts", "*i32", "out"),  # (counts of a header, EP); -1 where nothing came in time
        Arg("waited_us", "*i32", "out"),  # of the same shape, until a block was seen; 0 at once; or null
        Arg("expected_rows", "*i32", "in"),  # (EP,) rows that each rank has to send; null where it decides
        Arg("num_local_experts", "i64", "value"),  # whose counts a header has; 1 where it has one number
        Arg("max_count", "i64", "value"),  # of a single one
        Arg("peers", "*i64", "in"),
        *numbers("i64", "num_ranks timeout_us"),
        CHANGES,
        Arg("dispatch_word", "*i32", "in"),  # where the call word is kept, or null for `call`
        Arg("kept_zone", "*i32", "out"),  # as in dispatch_wait
        *_ROUND,
        *_FORMAT,
        Arg("report", "*i32", "out"),
    ),
    only_waits=True,
)

KERNELS = BLOCKS_SEND, BLOCKS_RETURN, BLOCKS_END, BLOCKS_WAIT
FUSED: tuple[FusedKernel, ...] = (
    # Behind the last row of a block is its flag: when every block's rows are there. Who posts has its own way
    # to know. Sums are of all counts; those that did not come are none. On a device later launches go by the
    # sums, whatever happened.
    FusedKernel(
        "blocks_dispatch", (BLOCKS_SEND, BLOCKS_END, BLOCKS_WAIT, DISPATCH_OFFSETS), synced=frozenset({1, 3})
    ),
    FusedKernel("blocks_combine", (BLOCKS_RETURN, BLOCKS_END, BLOCKS_WAIT), synced=frozenset({1})),
)
