"""Wrong kernels of the direct scheme: counts before rows, rows at their places, stamps beside them."""

from __future__ import annotations

from .direct import DirectCase
from .library import Patch
from .mutants import MUTANT_TIMEOUT_US, SEND_PLAN, SEND_ROWS, STATUS_ENTRIES, Mutant, without
from .mutants_calls import POST_STATUS

COUNTS_SEND = "include/counts_send.h"
DIRECT_SEND = "include/direct_send.h"
DIRECT_STARTS = "include/direct_starts.h"
_ARGS = "        args_ = args;\n"
_REPORT = "        report_.Init("
_SHARED_WORDS = "        SendWords(args_.shared_counts, args_.num_shared_ranks, 0, ranks);\n"
_ROUTED_WORDS = "        SendWords(args_.counts, args_.num_experts, args_.num_shared_ranks, ranks);\n"


def case_of(**changes: object) -> DirectCase:
    """The usual case, with a deadline that suits mutants."""
    defaults: dict[str, object] = {"tokens": (4, 4), "hidden": 512, "rounds": 3}
    return DirectCase(**{**defaults, **changes, "timeout_us": MUTANT_TIMEOUT_US})  # type: ignore[arg-type]


_ROWS_ONLY = case_of(schedule="D")
_SHARED = case_of(tokens=(3, 2, 3, 2), shared=(2, 2), hidden=64)
_RESULTS = case_of(row_per_result=True, scaled=True, topk=3)
_MANY_EXPERTS = case_of(tokens=(2, 2), experts_per_rank=1100, hidden=32, rounds=1)

COUNTS = (
    Mutant(
        "a counts flag before the counts",
        (
            without(COUNTS_SEND, _SHARED_WORDS),
            without(COUNTS_SEND, _ROUTED_WORDS),
            Patch(
                COUNTS_SEND,
                "        }\n    }\n\nprivate:\n",
                # A pause that a block may make anywhere, here on one rank, so that the other is ahead.
                "        }\n"
                "        AscendC::PipeBarrier<PIPE_ALL>();\n"
                "        for (uint32_t nap = 0; args_.rank == 1 && nap < 40; ++nap) PollPause(30000, 0, 1);\n"
                + _SHARED_WORDS
                + _ROUTED_WORDS
                + "    }\n\nprivate:\n",
            ),
        ),
        _ROWS_ONLY,
    ),
    Mutant(
        "no barrier between counts and their flag",
        (without(COUNTS_SEND, "        AscendC::PipeBarrier<PIPE_MTE3>();\n"),),
        _ROWS_ONLY,
    ),
    Mutant(
        "counts announced before other blocks have sent theirs",
        (
            # Each block sends counts to its own ranks, and its flags to those of its neighbour.
            Patch(
                COUNTS_SEND,
                "        for (int64_t rank = ranks.first; rank < ranks.last; ++rank) {\n"
                "            if (!peers_.IsMasked(rank)) {\n                entry_",
                "        const int64_t blocks = AscendC::GetBlockNum();\n"
                "        const int64_t block = (AscendC::GetBlockIdx() + 1) % blocks;\n"
                "        const Share others = SplitEvenly(args_.num_ranks, block, blocks);\n"
                "        for (int64_t rank = others.first; rank < others.last; ++rank) {\n"
                "            if (!peers_.IsMasked(rank)) {\n                entry_",
            ),
        ),
        case_of(schedule="D", blocks=2, rounds=6),
    ),
    Mutant(
        "counts sent before they are loaded",
        (
            Patch(
                COUNTS_SEND,
                "            words_.EnQue(in);\n"
                "            AscendC::LocalTensor<int32_t> out = words_.DeQue<int32_t>();\n",
                "            AscendC::LocalTensor<int32_t> out = in;\n",
            ),
        ),
        _ROWS_ONLY,
    ),
    Mutant(
        "a counts flag sent before it is written",
        (without(COUNTS_SEND, "        Order<AscendC::HardEvent::S_MTE3>();\n"),),
        _ROWS_ONLY,
    ),
    Mutant(
        "counts for one rank too few",
        (Patch(COUNTS_SEND, "SplitEvenly(args_.num_ranks, ", "SplitEvenly(args_.num_ranks - 1, "),),
        case_of(rounds=1),
    ),
    Mutant(
        "counts in another rank's place",
        (
            Patch(
                COUNTS_SEND,
                "args_.slots.At(args_.zone, args_.rank,",
                "args_.slots.At(args_.zone, rank_,",
            ),
            Patch(
                COUNTS_SEND,
                "    CountsSendArgs args_;\n",
                "    CountsSendArgs args_;\n    int64_t rank_ = 0;\n",
            ),
        ),
        _ROWS_ONLY,
    ),
    Mutant(
        "counts of zone 0 in every round",
        (Patch(COUNTS_SEND, _ARGS, _ARGS + "        args_.slots.zone_stride = 0;\n"),),
        _ROWS_ONLY,
    ),
    Mutant(
        "routed counts over the shared ones",
        (
            Patch(
                COUNTS_SEND, "args_.num_experts, args_.num_shared_ranks, ranks", "args_.num_experts, 0, ranks"
            ),
        ),
        _SHARED,
    ),
    Mutant(
        "no shared counts",
        (
            without(
                COUNTS_SEND, "        SendWords(args_.shared_counts, args_.num_shared_ranks, 0, ranks);\n"
            ),
        ),
        _SHARED,
    ),
    Mutant(
        "later pieces of the counts over the first",
        (Patch(COUNTS_SEND, "args_.rank, first + done);", "args_.rank, first);"),),
        _MANY_EXPERTS,
    ),
    Mutant(
        "the same piece of the counts again",
        (Patch(COUNTS_SEND, "[done]", "[0]"),),
        _MANY_EXPERTS,
    ),
    Mutant(
        "counts by whole pieces",
        (
            Patch(
                COUNTS_SEND,
                "ExactWords(Smaller(WORDS_PER_PIECE, count - done))",
                "ExactWords(WORDS_PER_PIECE)",
            ),
        ),
        _SHARED,
    ),
)

_FLOATS = "            stamp.SetValue(Stamp::SCALE, args_->scales != 0 ? scales_.At(visit.row_number) : 0);\n"

ROWS = (
    Mutant(
        "rows one place further",
        (Patch(SEND_PLAN, "slot = args.slots.At(zone, place);", "slot = args.slots.At(zone, place + 1);"),),
        case_of(),
    ),
    Mutant(
        "stamps one place further",
        (
            Patch(
                SEND_PLAN, "stamp = args.stamps.At(zone, place);", "stamp = args.stamps.At(zone, place + 1);"
            ),
        ),
        case_of(),
    ),
    Mutant(
        "stamps of zone 0",
        (Patch(SEND_PLAN, "stamp = args.stamps.At(zone, place);", "stamp = args.stamps.At(0, place);"),),
        case_of(),
    ),
    Mutant(
        "rows of zone 0",
        (Patch(DIRECT_SEND, f"{_ARGS}{_REPORT}", f"{_ARGS}        args_.slots.zone_stride = 0;\n{_REPORT}"),),
        case_of(),
    ),
    Mutant(
        "weight and scale changed over",
        (
            Patch(SEND_PLAN, "SetValue(Stamp::WEIGHT, weighted", "SetValue(Stamp::SCALE, weighted"),
            Patch(SEND_PLAN, _FLOATS, _FLOATS.replace("Stamp::SCALE", "Stamp::WEIGHT")),
        ),
        case_of(scaled=True),
    ),
    Mutant(
        "several scales to the first row's",
        (Patch(SEND_PLAN, "args.scale_slots.At(zone, place)", "args.scale_slots.At(zone, 0)"),),
        case_of(scaled=True, num_scales=9),
    ),
    Mutant(
        "scales of tokens where results have their own",
        (Patch(SEND_PLAN, "scales_.At(visit.row_number)", "scales_.At(visit.token)"),),
        _RESULTS,
    ),
    Mutant(
        "scales read before they are loaded",
        (
            Patch(
                SEND_PLAN,
                "                scales_.Load(args_->scales, first * args_->rows_per_token, "
                "count * args_->rows_per_token);\n            }\n        }\n"
                "        Order<AscendC::HardEvent::MTE2_S>();\n",
                "                Order<AscendC::HardEvent::MTE2_S>();\n"
                "                scales_.Load(args_->scales, first * args_->rows_per_token, "
                "count * args_->rows_per_token);\n            }\n        }\n",
            ),
        ),
        _RESULTS,
    ),
    Mutant(
        "more tokens at a time than scales fit",
        (
            Patch(
                SEND_PLAN,
                "Larger(args_->rows_per_token, Larger(args_->topk, num_shared_))",
                "Larger(args_->topk, num_shared_)",
            ),
        ),
        case_of(
            tokens=(700, 5, 5),
            topk=1,
            shared=(1, 1),
            hidden=32,
            rounds=1,
            row_per_result=True,
            scaled=True,
            blocks=1,
        ),
    ),
    Mutant(
        "rows for all shared ranks as for the first",
        (
            Patch(
                DIRECT_STARTS,
                "return earlier_.GetValue(static_cast<uint32_t>(rank));",
                "return earlier_.GetValue(0);",
            ),
        ),
        case_of(tokens=(3, 2, 4, 1), shared=(1, 2), hidden=64),
    ),
    Mutant(
        "routed rows as if there were no shared ranks",
        (
            Patch(
                SEND_PLAN,
                "NumSharedRanks() + routed_rank;",
                "routed_rank;",
            ),
        ),
        _SHARED,
    ),
    Mutant(
        "each rank's experts counted as all",
        (
            Patch(
                SEND_PLAN,
                "return static_cast<uint64_t>(args.num_local_experts);",
                "return static_cast<uint64_t>(args.num_experts);",
            ),
        ),
        case_of(),
    ),
    Mutant(
        "rows packed closer than they are",
        (
            Patch(
                SEND_PLAN,
                "static_cast<uint64_t>(row * args_->row_stride)",
                "static_cast<uint64_t>(row * args_->row_bytes)",
            ),
        ),
        _RESULTS,
    ),
    Mutant(
        "stamps of one visit written over those of the one before",
        (Patch(SEND_ROWS, "double_buffer_.Take() * MAX_VISIT", "double_buffer_.Take() * 0"),),
        case_of(tokens=(8, 8), blocks=1),
    ),
    Mutant(
        "flags posted before they are written",
        (without(POST_STATUS, "        Order<AscendC::HardEvent::S_MTE3>();\n"),),
        case_of(),
    ),
    Mutant(
        "an entry that is not cleared before it is written",
        (without(STATUS_ENTRIES, "        Order<AscendC::HardEvent::V_S>();\n"),),
        case_of(),
    ),
)

DIRECT_MUTANTS = COUNTS + ROWS
