"""Argument lists of the Ascend C kernels that only A3's fullmesh has (`moe_triton.core.ascendc`)."""

from __future__ import annotations

from moe_triton.core.ascendc import ADDS_TRAFFIC, CHANGES, DISPATCH_WAIT, POST_STATUS, POSTING, ZONE
from moe_triton.core.kernel import Arg, AscendCKernel, FusedKernel, numbers
from moe_triton.schemes.common.ascendc import DISPATCH_OFFSETS, ROUTED, ROWS

# Rows of T tokens to K routed and S shared experts; R ranks hold shared experts; M routed experts.
_SEND_ARGS = (
    *ROWS,
    Arg("stamp_offset", "i64", "value"),  # where the stamp, which is the row's flag, goes in a slot
    *ROUTED,
    Arg("counts", "*i32", "in"),  # (M,)
    Arg("shared_ranks", "*i32", "in"),  # (T, S) rank of each shared result, -1: not sent; null if S = 0
    Arg("shared_slots", "*i32", "in"),  # (T,) index of a token among those sent to a shared rank
    Arg("shared_counts", "*i32", "in"),  # (R,) tokens for each shared rank
    Arg("peers", "*i64", "in"),  # (EP,) window addresses
    Arg("first_token", "i64", "value"),
    Arg("num_tokens", "i64", "value"),  # tokens of this launch
    *numbers("i64", "topk num_experts num_shared_experts num_shared_ranks rank"),
    *ZONE,
    Arg("kept_rank", "i64", "value"),  # its routed rows are not sent; -1 for none
    Arg("post_status", "i64", "value"),  # 1: an entry to each expert's rank goes before the rows
    Arg("call", "i64", "value"),  # the call word (`moe_triton.layout.call_word`) of its entries
    Arg("combine_kind", "*i32", "in"),  # what the combine before adds to that, or null
    Arg("dispatch_word", "*i32", "out"),  # the word as it was posted, for the wait; or null
    Arg("begun", "*fp32", "out"),  # as in dispatch_receive, or null
    Arg("window", "*i8", "out"),  # this rank's own: rows for queued peers, which get no entries; or null
    Arg("out_offset", "i64", "value"),
    Arg("slots", "dispatch_slots", "value"),
    Arg("status", "dispatch_status", "value"),
    Arg("report", "*i32", "out"),
)

DISPATCH_SEND = AscendCKernel("dispatch_send", _SEND_ARGS)

# The same with flags in band: every 512-byte block of a slot ends in a flag of its own. The status
# entries carry counts only and wait for nothing.
INBAND_SEND = AscendCKernel("inband_send", _SEND_ARGS)

# Of a phase that looks at the flags of rows, in their stamps, and clears them.
_ROWS_ARGS = (
    Arg("window", "*i8", "inout"),
    Arg("recv_counts", "*i32", "inout"),  # (localE, EP); -1 is written where a row did not come in time
    Arg("waited_us", "*i32", "inout"),  # (localE, EP): raised to when the last row came; or null
    Arg("peers", "*i64", "in"),
    *numbers("i64", "num_local_experts num_ranks"),
    CHANGES,
    Arg("kept_rank", "i64", "value"),  # its rows are not waited for; -1 for none
    Arg("stamp_offset", "i64", "value"),
    *ZONE,
    Arg("timeout_us", "i64", "value"),
    Arg("slots", "dispatch_slots", "value"),
    Arg("report", "*i32", "out"),
)

# Waits for all rows.
DISPATCH_ROWS = AscendCKernel("dispatch_rows", _ROWS_ARGS, only_waits=True)

# Of a dispatch in parts: takes the rows that have come; only the last part waits, for all of them.
DISPATCH_TAKE = AscendCKernel(
    "dispatch_take",
    (
        *numbers("i64", "part num_parts"),
        Arg("rows_before", "*i32", "inout"),  # (EP, localE) how many of each entry's rows earlier parts took
        Arg("rows_taken", "*i32", "out"),  # (EP, localE) the same with this part
        *_ROWS_ARGS,
    ),
    only_waits=True,
)

# Where a row is in its slot, and where it goes.
_ROW = (
    Arg("capacity", "i64", "value"),  # rows in `out_rows`
    Arg("row_bytes", "i64", "value"),
    Arg("scale_offset", "i64", "value"),
    Arg("scale_bytes", "i64", "value"),  # of a row
)
_OUTPUTS = (
    Arg("out_rows", "*i8", "out"),  # (A, row_bytes)
    Arg("out_scales", "*fp32", "out"),  # (A, scale_bytes / 4), or null
    Arg("out_origins", "*i32", "out"),  # (A, 3)
    Arg("out_weights", "*fp32", "out"),  # (A,), or null
)

# Takes each row out of its slot as it comes. Clears entries and turns the zone when all blocks have begun.
_RECEIVE_ARGS = (
    *_ROWS_ARGS,
    Arg("all_counts", "*i32", "in"),  # (localE, EP) as dispatch_wait left them
    Arg("max_count", "i64", "value"),  # of rows from a rank for an entry; what is above counts as this
    Arg("begun", "*fp32", "inout"),  # (blocks, 8): 1.0 where one has begun; zero between launches
    Arg("turned", "*i32", "out"),  # as in inband_receive, from here on
    Arg("status", "dispatch_status", "value"),
    *_ROW,
    *_OUTPUTS,
)

DISPATCH_RECEIVE = AscendCKernel("dispatch_receive", _RECEIVE_ARGS, only_waits=True)

# The same of rows with flags in band.
INBAND_COLLECT = AscendCKernel("inband_collect", _RECEIVE_ARGS, only_waits=True)

# Waits for each in-band row, takes it out of its slot to its final place, and clears its flags.
INBAND_RECEIVE = AscendCKernel(
    "inband_receive",
    (
        Arg("window", "*i8", "inout"),
        Arg("recv_offsets", "*i32", "in"),  # (localE, EP) inclusive prefix sums
        # (A,) where row, scales and weight go, below 0: nowhere; null: to the row's own number
        Arg("places", "*i32", "in"),
        Arg("waited_us", "*i32", "inout"),  # (localE, EP): raised to when the last row came; or null
        Arg("peers", "*i64", "in"),
        *numbers("i64", "num_entries num_ranks"),
        CHANGES,
        *_ROW,
        Arg("stamp_offset", "i64", "value"),
        *_OUTPUTS,
        *ZONE,
        Arg("turned", "*i32", "out"),  # where the other zone is written, not `zone_at`; or null
        Arg("timeout_us", "i64", "value"),
        Arg("status", "dispatch_status", "value"),  # entries to clear, all of them seen; or none
        Arg("slots", "dispatch_slots", "value"),
        Arg("report", "*i32", "out"),
    ),
    only_waits=True,
)

# Results that go back, and to whom.
_RESULTS = (
    Arg("origins", "*i32", "in"),  # (A, 3): source rank, token, k
    Arg("places", "*i32", "in"),  # (A,) which of `rows` is the result of each of them; null: its own number
    Arg("recv_offsets", "*i32", "in"),  # inclusive prefix sums; the last one is the number of rows
    Arg("num_entries", "i64", "value"),  # 0: there is nothing to send
    Arg("capacity", "i64", "value"),  # rows in `rows`
    Arg("peers", "*i64", "in"),
    Arg("num_ranks", "i64", "value"),
)
_PARTS = (
    Arg("part", "i64", "value"),  # results of tokens [part, part + 1) * part_tokens of each rank,
    Arg("num_parts", "i64", "value"),  # with the last part those of all that are left
    Arg("part_tokens", "i64", "value"),
    Arg("progress", "*i32", "inout"),  # (blocks,) records `part_progress`, or null for one part
)
_COMBINE_REGIONS = (Arg("slots", "combine_slots", "value"), Arg("status", "combine_status", "value"))

COMBINE_SEND = AscendCKernel(
    "combine_send",
    (
        Arg("rows", "*i8", "in"),  # expert outputs, contiguous
        Arg("row_bytes", "i64", "value"),
        *_RESULTS,
        *ZONE,
        Arg("numbers", "*i32", "in"),  # (2,) of the round before, by zone; or null without flags
        Arg("kept_rank", "i64", "value"),  # gets flags without rows; -1 for none
        Arg("flag_rows", "i64", "value"),  # 1: a flag after each row; 0: none, a post_status follows
        *_PARTS,
        Arg("kind", "i64", "value"),  # what this combine adds to the next dispatch's call word
        Arg("combine_kind", "*i32", "out"),  # where that is kept
        Arg("window", "*i8", "out"),  # this rank's own, for rows to queued peers, without flags; or null
        Arg("out_rows", "indexed_slots", "value"),  # where they go in it, by their numbers; none
        *_COMBINE_REGIONS,
        Arg("report", "*i32", "out"),
    ),
)

COMBINE_WAIT = AscendCKernel(
    "combine_wait",
    (
        Arg("kept_zone", "*i32", "out"),  # as in dispatch_wait
        Arg("window", "*i8", "inout"),
        Arg("topk_idx", "*i32", "in"),  # ids outside [0, M): nothing comes back
        Arg("active_index", "*i32", "in"),  # (T,), negative: nothing comes back for this token; or null
        Arg("waited_us", "*i32", "out"),  # (T, K + S) until a result was seen; 0 at once; or null
        Arg("peers", "*i64", "in"),
        *numbers("i64", "num_ranks num_shared_ranks"),
        CHANGES,
        *numbers("i64", "first_token num_tokens topk num_experts num_shared_experts"),
        *ZONE,
        Arg("numbers", "*i32", "inout"),  # as in combine_send; this round's is kept in the other zone
        Arg("timeout_us", "i64", "value"),
        Arg("status", "combine_status", "value"),
        Arg("report", "*i32", "out"),
    ),
    only_waits=True,
)

# Of a combine in parts: waits until a share of this rank's tokens is complete, whichever they are, and lists
# them. A block that waits long sends the results of later parts meanwhile.
COMBINE_READY = AscendCKernel(
    "combine_ready",
    (
        Arg("rows", "*i8", "in"),  # as in combine_send, up to `progress`
        Arg("row_bytes", "i64", "value"),
        *_RESULTS,
        Arg("kept_rank", "i64", "value"),
        *_PARTS,
        Arg("window", "*i8", "inout"),  # as in combine_wait, up to `waited_us`
        Arg("topk_idx", "*i32", "in"),
        Arg("active_index", "*i32", "in"),
        Arg("waited_us", "*i32", "inout"),
        Arg("is_timed", "i64", "value"),  # 1: `waited_us` is wanted; otherwise it is used in a trace only
        Arg("num_tokens", "i64", "value"),  # T, of all parts
        Arg("num_shared_ranks", "i64", "value"),
        CHANGES,
        *numbers("i64", "topk num_experts num_shared_experts"),
        Arg("pending", "*i64", "inout"),  # (T,) results that a token waits for, a bit each; -1: it is taken
        Arg("ready_tokens", "*i32", "out"),  # (T,): from T * part / parts on, before T * (part + 1) / parts
        Arg("first_part", "i64", "value"),  # up to `part`: those that are taken together
        Arg("bounds", "*i32", "out"),  # (2,) where the tokens of those begin and end in the list
        *ZONE,
        Arg("numbers", "*i32", "inout"),  # as in combine_send; this round's is kept in the other zone
        Arg("kept_zone", "*i32", "out"),  # as in dispatch_wait
        Arg("timeout_us", "i64", "value"),
        *_COMBINE_REGIONS,
        Arg("report", "*i32", "out"),
    ),
)

# To each queued peer: for every expert of its that gets rows a message with all of them, whose slots are
# neighbours in the out part, or two of each; then one with its entries. What earlier phases or launches
# wrote is there.
DISPATCH_POST = AscendCKernel(
    "dispatch_post",
    (
        Arg("counts", "*i32", "in"),  # (M,)
        Arg("shared_counts", "*i32", "in"),  # (R,) tokens for each shared rank; null if R = 0
        Arg("peers", "*i64", "in"),
        *numbers("i64", "num_shared_ranks rank"),
        *ZONE,
        Arg("row_bytes", "i64", "value"),  # of a row alone
        Arg("slot_bytes", "i64", "value"),  # in use, stamp included
        Arg("front_bytes", "i64", "value"),  # of row and scales, posted apart from the stamp; 0: all at once
        Arg("call", "i64", "value"),  # as in dispatch_send, also the next one
        Arg("combine_kind", "*i32", "in"),
        *POSTING,
        ADDS_TRAFFIC,
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
        *_RESULTS,
        *ZONE,
        Arg("numbers", "*i32", "in"),  # as in combine_send
        Arg("row_bytes", "i64", "value"),  # of a row, as combine_send copies it
        Arg("payload_bytes", "i64", "value"),  # of these, without scales and padding
        Arg("flag_rows", "i64", "value"),
        *POSTING,
        ADDS_TRAFFIC,
        Arg("out_rows", "indexed_slots", "value"),
        Arg("out_flags", "indexed_slots", "value"),  # a flag for each peer, which serves all of its rows
        *_COMBINE_REGIONS,
        Arg("report", "*i32", "out"),
    ),
)

KERNELS = (
    DISPATCH_SEND,
    INBAND_SEND,
    DISPATCH_ROWS,
    DISPATCH_TAKE,
    DISPATCH_RECEIVE,
    INBAND_COLLECT,
    INBAND_RECEIVE,
    COMBINE_SEND,
    COMBINE_WAIT,
    COMBINE_READY,
    DISPATCH_POST,
    COMBINE_POST,
)


def _receiving(name: str, *phases: AscendCKernel) -> FusedKernel:
    """Of which some blocks receive while the others send."""
    return FusedKernel(name, phases, continuing=frozenset({3}), on_first=frozenset({1, 2, 3}))


# An operator's half is the same kernel without the other half's phases.
FUSED: tuple[FusedKernel, ...] = (
    FusedKernel(
        "dispatch", (DISPATCH_SEND, DISPATCH_WAIT, DISPATCH_OFFSETS, DISPATCH_ROWS), continuing=frozenset({3})
    ),
    FusedKernel("dispatch_in_parts", (DISPATCH_SEND, DISPATCH_WAIT, DISPATCH_OFFSETS, DISPATCH_TAKE)),
    _receiving("receiving_dispatch", DISPATCH_SEND, DISPATCH_WAIT, DISPATCH_OFFSETS, DISPATCH_RECEIVE),
    FusedKernel("inband_dispatch", (INBAND_SEND, DISPATCH_WAIT, DISPATCH_OFFSETS)),
    _receiving("receiving_inband_dispatch", INBAND_SEND, DISPATCH_WAIT, DISPATCH_OFFSETS, INBAND_COLLECT),
    FusedKernel("combine", (COMBINE_SEND, COMBINE_WAIT)),
    FusedKernel("combine_in_parts", (COMBINE_SEND, COMBINE_READY)),
    # Flags for whole ranks: what all blocks wrote is there.
    FusedKernel("combine_by_rank", (COMBINE_SEND, POST_STATUS, DISPATCH_WAIT), frozenset({1})),
    # What is posted was written by all blocks. Nothing is where a row is that names no place: none is posted.
    FusedKernel(
        "posting_dispatch",
        (DISPATCH_SEND, DISPATCH_POST, DISPATCH_WAIT, DISPATCH_OFFSETS, DISPATCH_ROWS),
        synced=frozenset({1}),
        guarded=frozenset({1}),
        continuing=frozenset({4}),
    ),
    FusedKernel("posting_combine", (COMBINE_SEND, COMBINE_POST, COMBINE_WAIT), frozenset({1})),
    FusedKernel(
        "posting_combine_by_rank", (COMBINE_SEND, COMBINE_POST, POST_STATUS, DISPATCH_WAIT), frozenset({1})
    ),
)
