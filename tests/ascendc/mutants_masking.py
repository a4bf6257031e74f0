"""Wrong waits and senders, where a rank is masked."""

from __future__ import annotations

from typing import Any, get_args

from .direct_masking import MaskedLaterCase, When
from .hierarchy_case import HierarchyCase
from .library import Patch
from .masking import MaskedBlocksCase, MaskedCase, MaskedDirectCase, MaskedReceivingCase
from .masking_rails import DirectEntriesCase, MaskedMeanwhileCase, MaskedRailCase
from .mutants import (
    COMBINE_SEND,
    COMBINE_WAIT,
    DISPATCH_ROWS,
    DISPATCH_WAIT,
    MUTANT_TIMEOUT_US,
    SEND_PLAN,
    STATUS_ENTRIES,
    Mutant,
    without,
)
from .standing_in import StandingInCase

SILENT_RANKS, ROW_FLAGS, RESULT_FLAGS = (
    f"include/{name}.h" for name in ("silent_ranks", "row_flags", "result_flags")
)
COMBINE_READY, INBAND_RECEIVE, DISPATCH_TAKE = (
    f"include/{name}.h" for name in ("combine_ready", "inband_receive", "dispatch_take")
)
DIRECT_STARTS, DIRECT_SEND, COUNTS_SEND = (
    f"include/{name}.h" for name in ("direct_starts", "direct_send", "counts_send")
)
BLOCKS_WAIT, BLOCK_FORMAT, RAIL_RELAY, DISPATCH_RECEIVE = (
    f"include/{name}.h" for name in ("blocks_wait", "block_format", "rail_relay", "dispatch_receive")
)
RAIL_WAIT, PARTIALS_SEND = "include/rail_wait.h", "include/partials_send.h"
POSTS, POST_STATUS, SERVER_RETURN = (
    f"include/{name}.h" for name in ("posts", "post_status", "server_return")
)


def _case(**changes: Any) -> MaskedCase:
    brings = {"before": (4, 0, 3), "entries": (4, 0, 3, 0)}.get(changes.get("when", "before"), (4, 3, 3))
    return MaskedCase(**{"topk": 3, "tokens": brings, **changes, "timeout_us": MUTANT_TIMEOUT_US})


_BEFORE = _case()
_ENTRIES = _case(when="entries")
_ROWS = _case(when="rows")
_INBAND = _case(when="rows", inband=True, hidden=300)
_RESULTS = _case(when="results")
_IN_PARTS = _case(when="results", part_tokens=2)
_ZERO_COUNT = "                    units_.SetValue(EntryOrder::UnitAt(place - chunk.first), 0);\n"
_STAND_IN = "Order<AscendC::HardEvent::MTE2_S>();\n        for (int64_t place = chunk.first"

SENDERS = (
    Mutant(
        "rows for a masked rank sent",
        (Patch(SEND_PLAN, " || (rank < To::NumRanks(*args_) && peers_.IsMasked(rank))", ""),),
        _BEFORE,
    ),
    Mutant(
        "entries for a masked rank sent",
        (Patch(STATUS_ENTRIES, "!peers_.IsMasked(rank) && ", ""),),
        _BEFORE,
    ),
    Mutant(
        "results for a masked rank sent",
        (Patch(COMBINE_SEND, "if (peers_.IsMasked(rank)) {", "if (false) {"),),
        _case(when="between"),
    ),
)

ENTRIES = (
    Mutant(
        "entries of a masked rank waited for",
        (without(DISPATCH_WAIT, "                StandIn(chunk);\n"),),
        _BEFORE,
    ),
    Mutant(
        "masks looked at only before a wait for entries",
        (Patch(DISPATCH_WAIT, "if (silent_.Look()) {\n", "if (poll.WaitedUs() == 0 && silent_.Look()) {\n"),),
        _ENTRIES,
    ),
    Mutant(
        "the table read once, and not when masks have changed",
        (Patch(SILENT_RANKS, "        if (word != word_) {\n", "        if (word_ == 0) {\n"),),
        _ENTRIES,
    ),
    Mutant(
        "the flag of a masked rank's entry as it is",
        (without(DISPATCH_WAIT, "                words.SetValue(entry + StatusEntry::FLAG, FLAG_BITS);\n"),),
        _BEFORE,
    ),
    Mutant(
        "the count of a masked rank taken",
        (without(DISPATCH_WAIT, "                words.SetValue(entry + StatusEntry::COUNT, agreed_);\n"),),
        _BEFORE,
    ),
    Mutant(
        "the call of a masked rank compared",
        (without(DISPATCH_WAIT, "                words.SetValue(entry + StatusEntry::CALL, call_);\n"),),
        _BEFORE,
    ),
    Mutant(
        "what stands for an entry over one that is still loaded",
        (Patch(DISPATCH_WAIT, _STAND_IN, _STAND_IN.partition("\n")[2].lstrip()),),
        _BEFORE,
    ),
    Mutant(
        "the count of a masked rank among those that each block has seen",
        (without(DISPATCH_WAIT, _ZERO_COUNT),),
        _BEFORE,
    ),
    Mutant(
        "counts of masked ranks stored before they are zero",
        (
            Patch(
                DISPATCH_WAIT,
                "            Order<AscendC::HardEvent::S_MTE3>();\n        }\n"
                "        Order<AscendC::HardEvent::MTE2_MTE3>();\n",
                "        }\n        Order<AscendC::HardEvent::MTE2_MTE3>();\n",
            ),
        ),
        _BEFORE,
    ),
)

ROWS = (
    Mutant(
        "rows of a masked rank waited for",
        (
            Patch(
                DISPATCH_ROWS, "                    flags_.StandIn(pieces_[i].first, pieces_[i].count);\n", ""
            ),
        ),
        _ROWS,
    ),
    Mutant(
        "nobody's rows waited for once a rank is masked",
        (Patch(DISPATCH_ROWS, "if (flags_.IsSilent(pieces_[i].place)) {", "if (true) {"),),
        _ROWS,
    ),
    Mutant(
        "rows of a masked rank waited for in a part",
        (Patch(DISPATCH_TAKE, "!(has_silent && flags_.IsSilent(place))", "true"),),
        _case(when="rows", takes=2),
    ),
    Mutant(
        "what stands for a stamp over one that is still loaded",
        (
            Patch(
                ROW_FLAGS,
                "        Order<AscendC::HardEvent::MTE2_S>();\n        for (int64_t i = at;",
                "        for (int64_t i = at;",
            ),
        ),
        _ROWS,
    ),
    Mutant(
        "rows in band of a masked rank waited for",
        (without(INBAND_RECEIVE, "            StandIn(first, count);\n"),),
        _INBAND,
    ),
    Mutant(
        "masks not looked at in a wait for rows in band",
        (without(INBAND_RECEIVE, "            silent_.Look();\n"),),
        _INBAND,
    ),
    Mutant(
        "flags in band summed before what stands for them is there",
        (
            Patch(
                INBAND_RECEIVE,
                "            }\n        }\n        AscendC::PipeBarrier<PIPE_V>();\n",
                "            }\n        }\n",
            ),
        ),
        _INBAND,
    ),
)

RESULTS = (
    Mutant(
        "results of a masked rank waited for",
        (Patch(COMBINE_WAIT, "expected_.Awaited(token, expected)", "expected"),),
        _RESULTS,
    ),
    Mutant(
        "masks not looked at in a wait for results",
        (without(COMBINE_WAIT, "        expected_.LookForSilent();\n"),),
        _RESULTS,
    ),
    Mutant(
        "no result waited for once a rank is masked",
        (Patch(RESULT_FLAGS, "awaited &= ~bit;", "awaited = 0;"),),
        _RESULTS,
    ),
    Mutant(
        "masks not looked at in a wait for results in parts",
        (Patch(COMBINE_READY, " || expected_.LookForSilent()", ""),),
        _IN_PARTS,
    ),
    Mutant(
        "results of a masked rank waited for in parts",
        (Patch(COMBINE_READY, "has_ids_ ? expected_.Awaited(token, expected) : expected", "expected"),),
        _IN_PARTS,
    ),
)

_RECEIVING = MaskedReceivingCase(topk=3, timeout_us=MUTANT_TIMEOUT_US)
_DIRECT = MaskedDirectCase(topk=3, rounds=3, timeout_us=MUTANT_TIMEOUT_US)
_BLOCKS = MaskedBlocksCase(topk=3, rounds=3, timeout_us=MUTANT_TIMEOUT_US)
_RAIL = MaskedRailCase(timeout_us=MUTANT_TIMEOUT_US)
_LATER = {when: MaskedLaterCase(topk=3, when=when, timeout_us=MUTANT_TIMEOUT_US) for when in get_args(When)}
_NO_ROWS = "silent_->Has(source + s) ? 0 : count"

OTHER_SCHEMES = (
    Mutant(
        "rows of a masked rank waited for where they are taken",
        (Patch(DISPATCH_RECEIVE, " || LeaveOutSilent(places) == missing", ""),),
        _RECEIVING,
    ),
    Mutant(
        "masks not looked at where rows are taken",
        (without(DISPATCH_RECEIVE, "        flags_.LookForSilent();  // while they come\n"),),
        _RECEIVING,
    ),
    Mutant(
        "no rows waited for where they are taken once a rank is masked",
        (
            Patch(
                DISPATCH_RECEIVE, "            if (flags_.IsSilent(place)) {\n", "            if (true) {\n"
            ),
        ),
        _RECEIVING,
    ),
    Mutant(
        "counts of a masked rank in direct's sums",
        (Patch(DIRECT_STARTS, "            if (silent_.Has(source)) {\n", "            if (false) {\n"),),
        _DIRECT,
    ),
    Mutant(
        "counts of a masked rank among those received",
        (Patch(DIRECT_SEND, _NO_ROWS, "count"),),
        _DIRECT,
    ),
    Mutant(
        "masks not looked at before counts are summed",
        (without(DIRECT_STARTS, "        silent_.Look();\n"),),
        _DIRECT,
    ),
    Mutant(
        "counts clamped before those of masked ranks are zero",
        (
            Patch(
                DIRECT_STARTS,
                "static_cast<int32_t>(row_words_));\n                AscendC::PipeBarrier<PIPE_V>();\n",
                "static_cast<int32_t>(row_words_));\n",
            ),
        ),
        _DIRECT,
    ),
    Mutant(
        "counts sent to a masked rank",
        (
            Patch(
                COUNTS_SEND,
                "                if (!peers_.IsMasked(rank)) {\n",
                "                if (true) {\n",
            ),
        ),
        _DIRECT,
    ),
    Mutant(
        "blocks of a masked rank waited for",
        (Patch(BLOCKS_WAIT, "if (silent_.Look() && silent_.Has(rank)) {", "if (false) {"),),
        _BLOCKS,
    ),
    Mutant(
        "blocks of a masked rank missing",
        (Patch(BLOCKS_WAIT, "!is_there && silent_.Has(rank) ? 0 : -1", "-1"),),
        _BLOCKS,
    ),
    Mutant(
        "a block's header for a masked rank",
        (Patch(BLOCK_FORMAT, "            if (peers.IsMasked(rank)) {\n", "            if (false) {\n"),),
        _BLOCKS,
    ),
    Mutant(
        "a block's end for a masked rank",
        (Patch(BLOCK_FORMAT, " || peers.IsMasked(rank)", ""),),
        _BLOCKS,
    ),
    Mutant(
        "tokens of a masked rank's rail waited for",
        (without(RAIL_RELAY, "                FinishSilent();\n"),),
        _RAIL,
    ),
    Mutant(
        "entries for a masked rank of the server",
        (Patch(RAIL_RELAY, " && !peers_.IsMasked(rail_.Neighbour(receiver))", ""),),
        MaskedRailCase(tokens=(2, 3, 0, 2, 3, 2), lost=2, timeout_us=MUTANT_TIMEOUT_US),
    ),
)


def _meanwhile(during: Any, **changes: Any) -> MaskedMeanwhileCase:
    return MaskedMeanwhileCase(**{"during": during, "timeout_us": MUTANT_TIMEOUT_US, **changes})


RAILS = (
    Mutant(
        "masks looked at only before a wait for tokens by rail",
        (Patch(RAIL_RELAY, "if (silent_.Look()) {", "if (poll.WaitedUs() == 0 && silent_.Look()) {"),),
        _meanwhile("relay"),
    ),
    Mutant(
        "rows counted that a masked rank's relay had passed on",
        (
            Patch(
                RAIL_RELAY,
                "                counts_.Set(server * NumNeighbourExperts() + i, 0);\n            }\n"
                "            Finish(server, 0,",
                "            }\n            Finish(server, 0,",
            ),
        ),
        _meanwhile("relay"),
    ),
    Mutant(
        "no tokens by rail waited for once a rank is masked",
        (Patch(RAIL_RELAY, "|| !silent_.Has(rail_.RankOn(server))", "|| !silent_.HasAny()"),),
        _meanwhile("relay"),
    ),
    Mutant(
        "rows waited for that a masked rank would have passed on",
        (Patch(SILENT_RANKS, "words_.IsSilent(number) : ", "words_.IsMasked(number) : "),),
        _RAIL,
    ),
    Mutant(
        "what ranks say themselves taken for relayed",
        (Patch(SILENT_RANKS, "words_.IsGone(number)", "words_.IsSilent(number)"),),
        DirectEntriesCase(),
    ),
    Mutant(
        "results of a masked rank waited for by who sums them",
        (without(DISPATCH_WAIT, "                StandIn(chunk);\n"),),
        _meanwhile("returned"),
    ),
    Mutant(
        "sums of a masked rank waited for",
        (Patch(RAIL_WAIT, "if (silent_.Look() && silent_.Has(rail_.RankOn(server))) {", "if (false) {"),),
        _meanwhile("partials"),
    ),
    Mutant(
        "no sums waited for once a rank is masked",
        (Patch(RAIL_WAIT, "silent_.Look() && silent_.Has(rail_.RankOn(server))", "silent_.Look()"),),
        _meanwhile("partials"),
    ),
    Mutant(
        "sums of a masked rank missing",
        (Patch(RAIL_WAIT, "silent_.Has(rail_.RankOn(server)) ? 0 : -1", "-1"),),
        _meanwhile("partials"),
    ),
    Mutant(
        "who is left out not heard",
        (Patch(RAIL_WAIT, "is_there ? end_.At(RailEnd::LEFT_OUT) : 0", "0"),),
        HierarchyCase(tokens=(3, 2, 4, 1)),
    ),
    Mutant(
        "who is left out said by piece",
        (Patch(PARTIALS_SEND, "args_.left_out, args_.first_place + i", "args_.left_out, i"),),
        HierarchyCase(tokens=(3, 2, 4, 1), servers=(2, 2), pieces=2),
    ),
)

_STANDING_IN = StandingInCase(tokens=(3, 3, 3, 0, 3, 3), timeout_us=MUTANT_TIMEOUT_US)

STAND_INS = (
    Mutant(
        "nothing posted to a rank that another one stands in for",
        (Patch(POSTS, "if (peers_->IsMasked(rank)) {", "if (peers_->IsGone(rank)) {"),),
        _STANDING_IN,
    ),
    Mutant(
        "no results for what a stand-in sums",
        (Patch(SERVER_RETURN, "if (peers_.IsMasked(relay)) {", "if (peers_.IsGone(relay)) {"),),
        _STANDING_IN,
    ),
    Mutant(
        "sums of a stand-in not waited for",
        (Patch(RAIL_WAIT, "args.changes, Senders::RELAYS);", "args.changes);"),),
        _STANDING_IN,
    ),
    Mutant(
        "words waited for of a rank whose relay another one has taken over",
        (Patch(SILENT_RANKS, "words_.IsGone(number)", "words_.IsMasked(number)"),),
        _STANDING_IN,
    ),
    Mutant(
        "a stand-in not told that results are there",
        (Patch(POST_STATUS, "if (!peers_.IsMasked(rank) && ", "if (!peers_.IsGone(rank) && "),),
        _STANDING_IN,
    ),
)

DIRECT_LATER = (
    Mutant(
        "counts waited for of a rank that is masked meanwhile",
        (Patch(DISPATCH_WAIT, "if (HaveMasksChanged()) {", "if (false) {"),),
        _LATER["counts"],
    ),
    Mutant(
        "no counts of a rank that is masked meanwhile",
        (Patch(DISPATCH_WAIT, "if (args.known != 0) {", "if (false) {"),),
        _LATER["counts"],
    ),
    Mutant(
        "a wait for counts that was given up as one that timed out",
        (Patch(DISPATCH_WAIT, "gave_up_ ? REPORT_MASKED : REPORT_TIMEOUT", "REPORT_TIMEOUT"),),
        _LATER["others' counts"],
    ),
    Mutant(
        "counts summed without those of a rank that is masked meanwhile",
        (Patch(SILENT_RANKS, "words_.IsKnownSilent(number)", "words_.IsMasked(number)"),),
        _LATER["rows to send"],
    ),
    Mutant(
        "masks that differ not noticed",
        (Patch(DISPATCH_WAIT, "args_.agreed != 0 && count != agreed_", "false"),),
        _LATER["other masks"],
    ),
    Mutant(
        "masks not told with counts",
        (Patch(COUNTS_SEND, "args_.agreed == 0 ? 0 : ReadFresh<int32_t>(args_.agreed)", "0"),),
        _LATER["rows to send"],
    ),
    Mutant(
        "masks that are not those of this rank where one is left out",
        (Patch(DISPATCH_WAIT, "COUNT, agreed_);", "COUNT, 0);"),),
        _LATER["rows to send"],
    ),
    Mutant(
        "rows waited for of a rank that is masked meanwhile",
        (
            Patch(
                DISPATCH_WAIT,
                "            silent_.Init(args.peers, sources, args.changes, "
                "args.is_relayed != 0 ? Senders::RELAYED : Senders::RANKS);\n",
                "",
            ),
        ),
        _LATER["rows"],
    ),
    Mutant(
        "a dispatch that is called off as one whose rows are there",
        (
            Patch(
                DISPATCH_WAIT, "args_.agreed != 0 && count != agreed_", "args_.known != 0 && count != agreed_"
            ),
        ),
        _LATER["called off"],
    ),
)

MASKING_MUTANTS = SENDERS + ENTRIES + ROWS + RESULTS + OTHER_SCHEMES + RAILS + STAND_INS + DIRECT_LATER
