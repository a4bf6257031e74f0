"""Argument lists of the Ascend C kernels of hierarchy (`moe_triton.core.ascendc`).

S servers have L ranks each, and a place in the order that begins with a rank's own: 0 is that, then 1.
Rank ``s * L + c`` exchanges messages with those of the same number c on other servers, its rail, and reaches
its own server's memory. E experts on each rank.
"""

from __future__ import annotations

from moe_triton.core.ascendc import ADDS_TRAFFIC, CHANGES, DISPATCH_WAIT, POST_STATUS, POSTING, ZONE
from moe_triton.core.kernel import Arg, AscendCKernel, FusedKernel, numbers
from moe_triton.schemes.common.ascendc import DISPATCH_OFFSETS

_RAIL = (
    Arg("peers", "*i64", "in"),  # (EP,) window addresses
    *numbers("i64", "num_servers ranks_per_server rank"),
)
_ROUND = (
    Arg("numbers", "*i32", "inout"),  # (2,) by zone, the number of the round before
    *ZONE,
    Arg("call", "i64", "value"),  # the call word
)
# A token on a rail: a `RAIL_HEAD`, its row, K words {expert, position}, K weights, and its scales.
_SLOT = (
    *numbers("i64", "topk row_bytes"),
    *numbers("i64", "words_offset weights_offset scale_offset slot_bytes"),  # from the head on
)
# Each block's `moe_triton.core.records.TRAFFIC`: rows that it has written to other ranks of its server.
_TRAFFIC = Arg("traffic", "*i64", "inout")  # (blocks, 8)
# Neighbouring tokens, or rows, that a message has, but the last one for a server.
_MESSAGE_TOKENS = Arg("message_tokens", "i64", "value")

# Tokens of a part.
_TOKENS = numbers("i64", "first_token num_tokens")
# Servers, counted from this rank's own on, the last one before the first.
_PLACES = numbers("i64", "first_place num_places")
# Of each of them: [first, last), or as far as there are any.
_ROWS = numbers("i64", "first_row last_row")

# Dispatch: each token as it travels by rail, to the out part for every other server that it has experts on,
# and to the window for the own one.
RAIL_TOKENS = AscendCKernel(
    "rail_tokens",
    (
        Arg("window", "*i8", "out"),  # this rank's own
        Arg("out_offset", "i64", "value"),
        Arg("rows", "*i8", "in"),
        Arg("row_stride", "i64", "value"),  # bytes from one row to the next
        Arg("row_scale", "i64", "value"),  # where a row's scales begin; 0 where it has none
        Arg("topk_weights", "*fp32", "in"),  # (T, K)
        Arg("outer_ids", "*i32", "in"),  # (T, S), negative: no expert there
        Arg("outer_rows", "*i32", "in"),  # (T, S) earlier tokens that go there
        Arg("route_words", "*i32", "in"),  # (T, Align8(K))
        *_TOKENS,
        _MESSAGE_TOKENS,
        *numbers("i64", "num_servers ranks_per_server rank"),
        *_ROUND,
        *_SLOT,
        Arg("slots", "rail_slots", "value"),
        Arg("report", "*i32", "out"),
    ),
)

# Dispatch, from rank to rail: the tokens for each other server, then the end flag; the own one's goes to this
# rank's own in part.
RAIL_SEND = AscendCKernel(
    "rail_send",
    (
        Arg("outer_rows", "*i32", "in"),
        Arg("outer_counts", "*i32", "in"),  # (S,) tokens that go to each
        *_TOKENS,
        Arg("is_last", "i64", "value"),  # of the parts that tokens are made in
        _MESSAGE_TOKENS,
        *numbers("i64", "row_bytes slot_bytes"),  # of a token
        *_RAIL,
        *_ROUND,
        *POSTING,
        ADDS_TRAFFIC,
        Arg("slots", "rail_slots", "value"),
        Arg("ends", "rail_ends", "value"),
        Arg("report", "*i32", "out"),
    ),
)

# Dispatch, from rail to rank: each token that has come to the ranks of this server that have its experts, a
# stamp for each; behind a source's last one its entries. The first head of a message says nothing of its
# tokens: the next one's does, or the end flag.
RAIL_RELAY = AscendCKernel(
    "rail_relay",
    (
        Arg("window", "*i8", "in"),  # this rank's own
        Arg("rail_counts", "*i32", "out"),  # (S,) by place: tokens of its rank; -1: not all of them came
        Arg("num_local_experts", "i64", "value"),
        *numbers("i64", "slot_scale stamp_offset"),  # in a slot of the receiver; no scales: slot_scale is 0
        Arg("timeout_us", "i64", "value"),
        Arg("in_series", "i64", "value"),  # 1: nothing is passed on before all of every server has come
        *_RAIL,
        CHANGES,
        *_ROUND,
        *_SLOT,
        _TRAFFIC,
        Arg("rails", "rail_slots", "value"),
        Arg("ends", "rail_ends", "value"),
        Arg("slots", "dispatch_slots", "value"),
        Arg("status", "dispatch_status", "value"),
        Arg("report", "*i32", "out"),
    ),
)

# Combine, from rank to relay: the results of each entry to the rank of this server that relayed its rows, of
# some servers' sources. A post_status follows.
SERVER_RETURN = AscendCKernel(
    "server_return",
    (
        Arg("rows", "*i8", "in"),  # expert outputs, contiguous
        Arg("row_bytes", "i64", "value"),
        Arg("recv_offsets", "*i32", "in"),  # (localE, EP) inclusive prefix sums
        Arg("num_entries", "i64", "value"),
        Arg("capacity", "i64", "value"),  # rows in `rows`
        *_PLACES,
        *_RAIL,
        *ZONE,
        _TRAFFIC,
        ADDS_TRAFFIC,
        Arg("slots", "dispatch_slots", "value"),  # (zone, place of the source, expert of this server, number)
        Arg("report", "*i32", "out"),
    ),
)

# Combine, where a rank of this server is missing or made another call: the end flag names it to the rail, in
# the launch that waits, for hosts that end a plan with a launch that reports.
RETURNS_LOST = AscendCKernel(
    "returns_lost",
    (
        Arg("returned", "*i32", "in"),  # (L,) below 0: that rank's results did not come
        *_PLACES,
        *_RAIL,
        *_ROUND,
        *POSTING,
        Arg("returns", "dispatch_status", "value"),  # entries of this server's ranks
        Arg("ends", "rail_ends", "value"),
        Arg("report", "*i32", "out"),
    ),
)

# Combine: the partial rows of each server's tokens to the out part, those of this rank's own tokens to its
# window.
PARTIALS_PLACE = AscendCKernel(
    "partials_place",
    (
        Arg("window", "*i8", "out"),  # this rank's own
        Arg("out_offset", "i64", "value"),
        Arg("rows", "*i8", "in"),  # (S, tokens, row_bytes) by place
        Arg("row_bytes", "i64", "value"),  # a multiple of 32
        Arg("rail_counts", "*i32", "in"),  # (S,) as rail_relay left them
        *_PLACES,
        *_ROWS,
        *numbers("i64", "num_servers ranks_per_server rank"),
        *ZONE,
        Arg("slots", "rail_slots", "value"),
        Arg("report", "*i32", "out"),
    ),
)

# Combine, from relay to rail: the partial rows of each server's tokens, then the end flag. Where a rank of
# this server is missing or made another call, the end flag alone, which names it.
PARTIALS_SEND = AscendCKernel(
    "partials_send",
    (
        Arg("row_bytes", "i64", "value"),  # a multiple of 32
        Arg("payload_bytes", "i64", "value"),  # of these, without scales and padding
        Arg("rail_counts", "*i32", "in"),  # (S,) as rail_relay left them
        Arg("returned", "*i32", "in"),
        # (S,) by place: bit d: rank d of this server is masked, and rows for that server are without it
        Arg("left_out", "*i32", "in"),
        _MESSAGE_TOKENS,
        *_PLACES,
        *_ROWS,
        *_RAIL,
        *_ROUND,
        *POSTING,
        Arg("returns", "dispatch_status", "value"),  # as in returns_lost
        Arg("slots", "rail_slots", "value"),
        Arg("ends", "rail_ends", "value"),
        Arg("report", "*i32", "out"),
    ),
)

# Combine: until the end flag of each server's rank is there, with the number of rows that this rank's tokens
# have there.
RAIL_WAIT = AscendCKernel(
    "rail_wait",
    (
        Arg("window", "*i8", "in"),  # this rank's own
        Arg("outer_counts", "*i32", "in"),  # (S,) tokens of this rank with experts on each server
        # (S,) rows; -1: no flag came in time; -1 - lost: without the rank that is lost; 0: it was refused
        Arg("rail_seen", "*i32", "out"),
        Arg("rail_left_out", "*i32", "out"),  # (S,) what each server's end flag says of masked ranks
        Arg("timeout_us", "i64", "value"),
        *_RAIL,
        CHANGES,
        *_ROUND,
        Arg("kept_zone", "*i32", "out"),  # as in dispatch_wait
        Arg("ends", "rail_ends", "value"),
        Arg("report", "*i32", "out"),
    ),
    only_waits=True,
)

KERNELS = (
    RAIL_TOKENS,
    RAIL_SEND,
    RAIL_RELAY,
    SERVER_RETURN,
    RETURNS_LOST,
    PARTIALS_PLACE,
    PARTIALS_SEND,
    RAIL_WAIT,
)
FUSED: tuple[FusedKernel, ...] = (
    # Blocks that have nothing to post, or have posted it, relay what comes from other servers meanwhile.
    FusedKernel(
        "hierarchy_dispatch", (RAIL_SEND, RAIL_RELAY, DISPATCH_WAIT, DISPATCH_OFFSETS), synced=frozenset({3})
    ),
    # Blocks that have nothing to post of the piece before, or have posted it, return results meanwhile. Flags
    # are for whole ranks; and when every block has seen its share of theirs, who waits elsewhere hears of
    # those that are missing.
    FusedKernel(
        "hierarchy_return",
        (PARTIALS_SEND, SERVER_RETURN, POST_STATUS, DISPATCH_WAIT, RETURNS_LOST),
        synced=frozenset({2, 4}),
    ),
    FusedKernel("hierarchy_partials", (PARTIALS_SEND, RAIL_WAIT)),
)
