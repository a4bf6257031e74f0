"""Argument lists of Ascend C kernels, from which `moe_triton.tools.codegen` makes their C++ structs.

Here are those that every scheme has; the others are in the schemes' folders, all of them in
`moe_triton.schemes.ascendc`.

Pointers are device addresses. An argument whose type is the name of a region is passed by value, as the
words of `Region.words`. Every argument is one 64-bit word or several; the struct has no padding.

``zone_at`` is the address of the zone in device memory, for launches that are captured once and replayed;
null if the zone is ``zone``.

``out_offset`` is where the out part of this rank's window begins, which mirrors what peers write: what goes
to a queued peer lies there as if that peer had sent it here. 0 where no peer is queued.
"""

from __future__ import annotations

from moe_triton.core.kernel import Arg, AscendCKernel
from moe_triton.core.records import REPORT

ZONE = (Arg("zone", "i64", "value"), Arg("zone_at", "*i32", "in"))
# Of a kernel that posts: its block's part of the launch's `moe_triton.core.records.TRAFFIC`, and how long a
# queue may be full.
POSTING = (
    Arg("window", "*i8", "inout"),  # this rank's own
    Arg("out_offset", "i64", "value"),
    Arg("timeout_us", "i64", "value"),
    Arg("traffic", "*i64", "inout"),  # (blocks, 8), or null
)

# The word behind those of the peers (`moe_triton.core.reach`): how many ranks are masked, and how often that
# has changed. Null where none can be.
CHANGES = Arg("changes", "*i64", "in")
# The word behind that: what the running call knows of it. Null where calls go on whatever they know.
KNOWN = Arg("known", "*i64", "in")
# What stands for the set of masked ranks that the call goes by, and goes with an entry where every rank has
# to go by the same one. Null where none does.
AGREED = Arg("agreed", "*i32", "in")

DISPATCH_WAIT = AscendCKernel(
    "dispatch_wait",
    (
        Arg("window", "*i8", "inout"),  # this rank's own
        Arg("peers", "*i64", "in"),  # (EP,) words of the ranks whose entries these are
        CHANGES,
        KNOWN,  # where a wait has to end with all entries, or with none of a rank that is masked meanwhile
        AGREED,  # what counts have to be
        Arg("recv_counts", "*i32", "out"),  # (localE, EP); -1 where nothing came in time
        # (localE, EP), or null: what every block has seen when it ends its wait, of all entries. They stay.
        Arg("all_counts", "*i32", "out"),
        Arg("waited_us", "*i32", "out"),  # (localE, EP) until an entry was seen; 0 at once; or null
        Arg("num_local_experts", "i64", "value"),
        Arg("count_end", "i64", "value"),  # counts below 0, or from here on, are reported; 0: none are
        Arg("is_relayed", "i64", "value"),  # 1: entries come from those who relay; 0: from each rank itself
        *ZONE,
        Arg("timeout_us", "i64", "value"),
        Arg("call", "i64", "value"),  # the call word that entries must have
        Arg("combine_kind", "*i32", "in"),  # what the combine before adds to that, or null
        Arg("dispatch_word", "*i32", "in"),  # where both stand together, kept by an earlier launch; or null
        Arg("kept_zone", "*i32", "out"),  # where the zone is kept for later launches, or null
        Arg("turned", "*i32", "out"),  # where the other zone is written, or null; for a single block
        Arg("status", "dispatch_status", "value"),
        Arg("report", "*i32", "out"),
    ),
    only_waits=True,
)

# An entry {1.0f, count, call word} to every rank, at (zone, 0, this rank). What earlier launches of the
# stream wrote is there before it, and what all blocks wrote in earlier phases: their end is the ordering. To
# a queued peer it is posted, behind what earlier phases posted there; traffic is added to theirs.
POST_STATUS = AscendCKernel(
    "post_status",
    (
        Arg("peers", "*i64", "in"),
        Arg("num_ranks", "i64", "value"),
        Arg("count", "*i32", "in"),  # one number that goes with the flag, or null for 0
        Arg("call", "i64", "value"),  # the call word
        Arg("kind", "i64", "value"),  # as in combine_send
        Arg("combine_kind", "*i32", "out"),  # or null
        Arg("rank", "i64", "value"),
        *ZONE,
        *POSTING,
        Arg("status", "dispatch_status", "value"),
        Arg("report", "*i32", "out"),
    ),
)

# Of a kernel that posts: 1 where an earlier launch of the call has posted as well.
ADDS_TRAFFIC = Arg("adds_traffic", "i64", "value")

ENTRY_KERNELS = DISPATCH_WAIT, POST_STATUS
"""How ranks tell and hear that something has come: with every scheme, and where a back end is tried."""

# A report of a phase is one of `moe_triton.core.records.REPORT` per block. These are the codes in it.
REPORT_WORDS = REPORT.num_words
REPORT_TIMEOUT = 1
REPORT_BAD_ROW = 2
REPORT_MISMATCH = 3
REPORT_STRAY = 4
REPORT_MASKED = 5
"""Ranks have been masked while a plan ran, which has stopped behind a launch; or a block has given up a wait
because of that, or met ranks that go by other masks."""
MAX_BLOCKS = 48

# Kinds of a trace's events: a block of a launch; in it, a wait for a peer, and the block's steps; and a
# message to a peer on the link between servers.
TRACE_BLOCK, TRACE_WAIT, TRACE_WRITE, TRACE_SYNC, TRACE_FLAG, TRACE_WRITE_AND_FLAG, TRACE_POLL = range(7)
TRACE_POST, TRACE_LINK = 7, 8

MAX_POST_PARTS = 63
"""Parts that blocks are made in, at most: a word has the number of a round and of a part (block_posts.h)."""
