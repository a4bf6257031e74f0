"""Wrong kernels that post: what is not complete, on other queues, from places that are still in use."""

from __future__ import annotations

from .blocks_case import BlocksCase
from .blocks_hostile import TOO_MANY, HostileBlockCase
from .library import Patch
from .mutants import MUTANT_TIMEOUT_US, Mutant, without
from .posts import PostingCase

BLOCK_POSTS = "include/block_posts.h"
BLOCKS_WAIT = "include/blocks_wait.h"
FORMAT = "include/block_format.h"
DISPATCH_POST = "include/dispatch_post.h"
COMBINE_POST = "include/combine_post.h"
POSTS = "include/posts.h"
FLAGS = "include/flags.h"
RING = "emulation/post_ring.h"
SOURCE_STARTS = "include/source_starts.h"
FUSED = "include/moe_fused.h"


def blocks_of(**changes: object) -> BlocksCase:
    """The usual case of blocks, of a server each, with a deadline that suits mutants."""
    defaults: dict[str, object] = {"tokens": (4, 4), "servers": (1, 1), "hidden": 512, "rounds": 3}
    return BlocksCase(**{**defaults, **changes, "timeout_us": MUTANT_TIMEOUT_US})  # type: ignore[arg-type]


def rows_of(**changes: object) -> PostingCase:
    """That of rows."""
    defaults: dict[str, object] = {"tokens": (4, 4), "servers": (1, 1), "hidden": 512, "rounds": 3}
    return PostingCase(**{**defaults, **changes, "timeout_us": MUTANT_TIMEOUT_US})  # type: ignore[arg-type]


BLOCKS = (
    Mutant(
        "FLAG1 of an unordered message believed",
        (
            Patch(
                BLOCKS_WAIT,
                "return IsFlagThere<true>(end, rank, left) && IsHeaderRight(block, rank);",
                "(void)end;\n"
                "            const uint64_t at = block + args_.flag_word / UNIT_WORDS * UB_ALIGN;\n"
                "            return IsFlagThere<false>(at, rank, left) && IsHeaderRight(block, rank);",
            ),
        ),
        blocks_of(rounds=6),
    ),
    Mutant(
        "FLAG2 in an unordered message",
        (
            Patch(BLOCK_POSTS, "poster_.Put(rank, {local, remote, payload, framing, 0})", "true"),
            Patch(
                BLOCK_POSTS,
                "{local + end, remote + end, 0, EndOfBlocks::BYTES, 1}",
                "{local, remote, payload, static_cast<int64_t>(end) + EndOfBlocks::BYTES - payload, 1}",
            ),
        ),
        blocks_of(rounds=6, topk=1, tokens=(2, 2)),
    ),
    Mutant(
        "FLAG2 on the queue of another rank",
        (
            Patch(
                BLOCK_POSTS,
                "poster_.Put(rank, {local + end, remote + end,",
                "poster_.Put((rank + 1) % args_->num_ranks, {local + end, remote + end,",
            ),
        ),
        blocks_of(tokens=(2, 2, 2), servers=(1, 1, 1)),
    ),
    Mutant(
        "FLAG2 posted before the rows",
        (
            Patch(
                BLOCK_POSTS,
                "        if (poster_.Put(rank, {local, remote, payload, framing, 0})) {\n"
                "            poster_.Put(rank, {local + end, remote + end, 0, EndOfBlocks::BYTES, 1});\n",
                "        if (poster_.Put(rank, {local + end, remote + end, 0, EndOfBlocks::BYTES, 1})) {\n"
                "            poster_.Put(rank, {local, remote, payload, framing, 0});\n",
            ),
        ),
        blocks_of(rounds=6),
    ),
    Mutant(
        "a block posted before FLAG2 is written",
        (without(BLOCK_POSTS, "        Order<AscendC::HardEvent::MTE3_S>();\n"),),
        blocks_of(keeps_order=True, rounds=6),
    ),
    Mutant(
        "a block posted behind a barrier of the copies alone",
        (
            Patch(
                BLOCK_POSTS,
                "        Order<AscendC::HardEvent::MTE3_S>();\n",
                "        AscendC::PipeBarrier<PIPE_MTE3>();\n",
            ),
        ),
        blocks_of(),
    ),
    Mutant(
        "places in blocks cleared while scalar code reads them",
        (
            Patch(
                SOURCE_STARTS,
                "        Order<AscendC::HardEvent::S_V>();\n        AscendC::Duplicate(",
                "        AscendC::Duplicate(",
            ),
        ),
        blocks_of(tokens=(6, 6), blocks=3),
    ),
    Mutant(
        "blocks posted before other cores have written them",
        (
            Patch(
                BLOCK_POSTS,
                "for (int64_t block = 0; block < AscendC::GetBlockNum(); ++block) {",
                "for (int64_t block = 0; block < 1; ++block) {",
            ),
        ),
        blocks_of(tokens=(6, 6), blocks=3, rounds=6),
    ),
    Mutant(
        "a core that says too early that it has made a part",
        (without(BLOCK_POSTS, "        AscendC::PipeBarrier<PIPE_MTE3>();\n"),),
        blocks_of(tokens=(6, 6), blocks=3, rounds=6),
    ),
    Mutant(
        "what cores said of parts in the round before",
        (
            Patch(
                BLOCK_POSTS,
                "static_cast<uint32_t>(lines_.At(block * UNIT_WORDS)) - base_;",
                "static_cast<uint32_t>(lines_.At(block * UNIT_WORDS)) % PARTS_OF_A_ROUND;",
            ),
        ),
        blocks_of(tokens=(6, 6), blocks=3, rounds=6),
    ),
    Mutant(
        "a part posted when the one before it is made",
        (
            Patch(
                BLOCK_POSTS,
                "parts <= static_cast<uint32_t>(part) ||",
                "parts < static_cast<uint32_t>(part) ||",
            ),
        ),
        blocks_of(tokens=(4, 4, 4), servers=(1, 1, 1), blocks=3, rounds=6, post_parts=3),
    ),
    Mutant(
        "rows of a rank that no part has",
        (
            Patch(
                BLOCK_POSTS,
                "place < places.last;\n    }\n\n    // This block",
                "place + 1 < places.last;\n    }\n\n    // This block",
            ),
        ),
        blocks_of(tokens=(3, 3, 3), servers=(1, 1, 1)),
    ),
    Mutant(
        "two cores on one queue",
        (
            Patch(
                POSTS,
                "static_cast<int64_t>(rank) % AscendC::GetBlockNum() == AscendC::GetBlockIdx()",
                "rank >= 0",
            ),
        ),
        blocks_of(blocks=2),
    ),
    Mutant(
        "blocks of both zones in one place of the out part",
        (
            Patch(
                FORMAT,
                "return BlockIn(args, place.window, place.source);\n}\n\n// Where the rows",
                "return place.window + args.peer_blocks.At(static_cast<int64_t>(place.source) == args.rank ? "
                "args.zone : 0, place.source);\n}\n\n// Where the rows",
            ),
        ),
        blocks_of(rounds=6),
    ),
    Mutant(
        "FLAG2 at a count that was not checked",
        (
            Patch(BLOCKS_WAIT, "count < 0 || count > args_.max_count", "false"),
            Patch(BLOCKS_WAIT, "rows_ <= args_.max_rows &&", "rows_ >= 0 &&"),
        ),
        HostileBlockCase(
            tokens=(2, 3),
            servers=(1, 1),
            keeps_order=True,
            header=TOO_MANY,
            has_other_end=True,
            timeout_us=MUTANT_TIMEOUT_US,
        ),
    ),
    Mutant(
        "a ring whose oldest item is overwritten",
        (
            without(
                RING,
                "        if (tail - head_.load(std::memory_order_acquire) == entries_.size()) return false;"
                "\n",
            ),
        ),
        blocks_of(rounds=6),
    ),
    Mutant(
        "FLAG2 that stale rows look like",
        (Patch(FORMAT, "static_cast<uint32_t>(number) * 0x9E3779B1U", "(number != 0 ? 0x9E3779B1U : 0)"),),
        HostileBlockCase(
            tokens=(2, 3, 2),
            first_number=3,
            header=0,
            has_end=False,
            has_old_block=True,
            timeout_us=MUTANT_TIMEOUT_US,
        ),
    ),
    Mutant(
        "a block written straight to where only a queue leads",
        (Patch(FLAGS, "if (args.out_offset != 0 && IsQueued(rank)) {", "if (args.out_offset < 0) {"),),
        blocks_of(),
    ),
)

_PUT_ROW = (
    "            poster_.Put(rank, {local, to + args_.slots.At(zone, token, k), args_.payload_bytes, "
    "padding, 0});\n"
)
_UNLESS_POSTED = (
    "        if (!is_posted || args_.flag_rows == 0) {\n            return is_posted;\n        }\n"
    "        constexpr int64_t FLAG_BYTES = STATUS_ENTRY_BYTES;\n"
)
_RESULTS = "    run.template Phase<CombinePost>(1, args.phase_1, true, false, false);\n"
_WAIT = "    run.template Phase<CombineWait>"
_FLAGS = "    run.template Phase<PostStatus>"
_PUT_FLAG = "poster_.Put(rank, {FlagOf(rank), to + args_.status.At(zone, token, k), 0, FLAG_BYTES, 1});\n"

ROWS = (
    Mutant(
        "entries posted before they are written",
        (without(DISPATCH_POST, "        Order<AscendC::HardEvent::S_MTE3>();\n"),),
        rows_of(rounds=6),
    ),
    Mutant(
        "rows of a neighbour expert's count",
        (Patch(DISPATCH_POST, "counts_.At(i))) {", "counts_.At(0))) {"),),
        rows_of(topk=2),
    ),
    Mutant(
        "rows that all come where the first one does",
        (
            Patch(
                DISPATCH_POST, "Put(rank, {local + slot, remote + slot,", "Put(rank, {local + slot, remote,"
            ),
        ),
        rows_of(apart=True),
    ),
    Mutant(
        "stamps that stay behind",
        (Patch(DISPATCH_POST, "{local + slot + stamp, remote", "{local + stamp, remote"),),
        rows_of(apart=True),
    ),
    Mutant(
        "rows left in the other zone of the receiver",
        (
            Patch(
                DISPATCH_POST,
                "peers_.WindowOf(rank) + at;",
                "peers_.WindowOf(rank) + args_.slots.AtOn(rank, 1 - args_.zone, args_.rank, expert, 0);",
            ),
        ),
        rows_of(),
    ),
    Mutant(
        "rows left where another receiver has those of this rank",
        (
            Patch(
                DISPATCH_POST,
                "peers_.WindowOf(rank) + at;",
                "peers_.WindowOf(rank) + args_.slots.At(args_.zone, args_.rank, expert, 0);",
            ),
        ),
        rows_of(),
    ),
    Mutant(
        "results that are posted before their flag is made",
        (without(COMBINE_POST, "        Order<AscendC::HardEvent::MTE3_S>();\n"),),
        # The flags of several queues, of which each but its first message finds it made.
        rows_of(tokens=(2, 2, 2, 2), servers=(1, 1, 1, 1), rounds=1),
    ),
    Mutant(
        "the flag before its row",
        (
            Patch(
                COMBINE_POST,
                _PUT_ROW + _UNLESS_POSTED + "        return " + _PUT_FLAG,
                "            "
                + _PUT_FLAG.replace("FLAG_BYTES", "static_cast<int64_t>(STATUS_ENTRY_BYTES)")
                + "        return is_posted &&\n"
                + _PUT_ROW,
            ),
        ),
        rows_of(rounds=6),
    ),
    Mutant(
        "the flag of another result",
        (
            Patch(
                COMBINE_POST,
                "to + args_.status.At(zone, token, k), 0, FLAG_BYTES, 1}",
                "to + args_.status.At(zone, token, 0), 0, FLAG_BYTES, 1}",
            ),
        ),
        rows_of(topk=3),
    ),
    Mutant(
        "rows posted before other cores have left them",
        (Patch(FUSED, "<DispatchPost>(1, args.phase_1, true,", "<DispatchPost>(1, args.phase_1, false,"),),
        rows_of(tokens=(6, 6), blocks=3, rounds=6),
    ),
    Mutant(
        "results posted before other cores have left them",
        (Patch(FUSED, _RESULTS + _WAIT, _RESULTS.replace("true", "false") + _WAIT),),
        rows_of(tokens=(6, 6), blocks=3, rounds=6),
    ),
    Mutant(
        "results of ranks posted before other cores have left them",
        (Patch(FUSED, _RESULTS + _FLAGS, _RESULTS.replace("true", "false") + _FLAGS),),
        rows_of(tokens=(6, 6), blocks=3, rounds=6, full_wait=True),
    ),
    Mutant(
        "results of both zones in one place of the out part",
        (Patch(COMBINE_POST, "args_.out_rows.At(zone, row)", "args_.out_rows.At(0, row)"),),
        rows_of(rounds=6),
    ),
    Mutant(
        "rows for one queue by every core",
        (
            Patch(
                POSTS,
                "static_cast<int64_t>(rank) % AscendC::GetBlockNum() == AscendC::GetBlockIdx()",
                "rank >= 0",
            ),
        ),
        rows_of(blocks=2),
    ),
)

POST_MUTANTS = (*BLOCKS, *ROWS)
