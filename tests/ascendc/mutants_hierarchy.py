"""Wrong kernels of the hierarchy: what is believed too early, goes elsewhere, or is not said."""

from __future__ import annotations

from .hierarchy_case import HierarchyCase
from .hierarchy_hostile import GoneCase, HostileRailCase, OddCase
from .hierarchy_words import HostileWordsCase
from .library import Patch
from .mutants import DISPATCH_WAIT, MUTANT_TIMEOUT_US, Mutant, without

RAILS = "include/rails.h"
RAIL_SEND = "include/rail_send.h"
RAIL_RELAY = "include/rail_relay.h"
RAIL_WAIT = "include/rail_wait.h"
SERVER_RETURN = "include/server_return.h"
PARTIALS_SEND = "include/partials_send.h"
RETURNS_LOST = "include/returns_lost.h"
OFFSETS = "include/offsets.h"
FUSED = "include/moe_fused.h"


def case_of(**changes: object) -> HierarchyCase:
    """The usual case, with a deadline that suits mutants."""
    defaults: dict[str, object] = {"tokens": (4, 4, 4, 4), "hidden": 512, "rounds": 3}
    return HierarchyCase(**{**defaults, **changes, "timeout_us": MUTANT_TIMEOUT_US})  # type: ignore[arg-type]


_BELIEVED = "return there == 0 ? 0 : there - 1;"
_POST_LEFT = "            if (is_left && !Post(server, 0, count)) {\n                return;\n            }\n"
_SEND_END = (
    "            if (!ends_.Send(args_, rail_, peers_, poster_, server, count)) {\n"
    "                return;\n            }\n"
)
_RETURN = "    run.template Phase<ServerReturn>(0, args.phase_0, false, false, false);\n"
_FLAG = "    run.template Phase<PostStatus>(1, args.phase_1, true, false, false);\n"

HIERARCHY_MUTANTS = (
    Mutant(
        "a token believed by its own head",
        (Patch(RAIL_RELAY, _BELIEVED, "return there;"),),
        case_of(rounds=6),
    ),
    Mutant(
        "a token believed by a flag at its tail",
        (
            Patch(RAIL_RELAY, _BELIEVED, "return there;"),
            Patch(
                RAIL_RELAY,
                "args_.rails.At(args_.zone, server, first);",
                "args_.rails.At(args_.zone, server, first) + args_.scale_offset;",
            ),
            Patch(
                RAIL_SEND,
                "        SetHead(RailHead::NUMBER, number);\n",
                "        SetHead(RailHead::NUMBER, number);\n"
                "        SetHead(static_cast<uint32_t>(args_.scale_offset / sizeof(int32_t)), number);\n",
            ),
        ),
        case_of(rounds=6),
    ),
    Mutant(
        "a token relayed before it has come",
        (
            Patch(
                RAIL_RELAY,
                "RailHead::NUMBER) == number_) {\n            ++",
                "RailHead::NUMBER) >= 0) {\n            ++",
            ),
        ),
        case_of(),
    ),
    Mutant(
        "the end flag on another queue",
        (
            Patch(
                RAILS,
                "return poster.Put(static_cast<uint64_t>(rank), {",
                "return poster.Put(static_cast<uint64_t>((rank + 1) % args.num_servers), {",
            ),
        ),
        case_of(tokens=(2, 2, 2), servers=(1, 1, 1)),
    ),
    Mutant(
        "the end flag before the one message of all tokens",
        (Patch(RAIL_SEND, _POST_LEFT + _SEND_END, _SEND_END + _POST_LEFT),),
        case_of(by_token=False, rounds=6),
    ),
    Mutant(
        "counts before their tokens",
        (without(RAIL_RELAY, "            FinishRows();\n"),),
        case_of(rounds=6),
    ),
    Mutant(
        "forwarded rows of both zones in one place",
        (
            Patch(
                RAIL_RELAY,
                "args_.slots.At(args_.zone, rail_.RankOn(server),",
                "args_.slots.At(0, rail_.RankOn(server),",
            ),
            Patch(
                OFFSETS,
                "args_.slots.At(args_.zone, source_, expert_, index);",
                "args_.slots.At(0, source_, expert_, index);",
            ),
        ),
        case_of(schedule="D", rounds=8, straggle=0.4, slots_read_from=0),
    ),
    Mutant(
        "a flag before a block's results",
        (Patch(FUSED, _RETURN + _FLAG, _RETURN + _FLAG.replace("true", "false")),),
        case_of(tokens=(6, 6, 6, 6), blocks=3, rounds=6),
    ),
    Mutant(
        "a choice read in the other zone",
        (
            Patch(
                RAIL_RELAY,
                "route_.Load(slot + ",
                "route_.Load(args_.window + args_.rails.At(1 - args_.zone, server, index) + ",
            ),
        ),
        case_of(),
    ),
    Mutant(
        "results left in the other zone",
        (
            Patch(
                SERVER_RETURN,
                "args_.slots.At(zone, server, expert, first));",
                "args_.slots.At(1 - zone, server, expert, first));",
            ),
        ),
        case_of(),
    ),
    Mutant(
        "a token that is posted before it is there",
        (without(RAIL_SEND, "        FinishToken();\n"),),
        case_of(rounds=6),
    ),
    Mutant(
        "a partial row that is posted before it is there",
        (without(PARTIALS_SEND, "        FinishRows();\n"),),
        case_of(rounds=6),
    ),
    *(
        Mutant(
            f"{what} posted behind a barrier of the copies alone",
            (
                Patch(
                    file,
                    "        Order<AscendC::HardEvent::MTE3_S>();\n",
                    "        AscendC::PipeBarrier<PIPE_MTE3>();\n",
                ),
            ),
            case_of(rounds=6),
        )
        for what, file in (("a token", RAIL_SEND), ("a partial row", PARTIALS_SEND))
    ),
    Mutant(
        "an end flag that is posted before it is there",
        (
            Patch(
                RAILS,
                "        Order<AscendC::HardEvent::MTE3_S>();\n        const int64_t rank = ",
                "        const int64_t rank = ",
            ),
        ),
        case_of(rounds=6),
    ),
    Mutant(
        "an end flag made over the one before",
        (without(RAILS, "        FinishRows();\n"),),
        case_of(rounds=6, blocks=1, tokens=(1, 4, 3, 2), absent=0.3),
    ),
    Mutant(
        "tokens of both zones in one place of the out part",
        (
            Patch(
                RAIL_SEND,
                "static_cast<uint64_t>(args_.out_offset) + args_.slots.At(args_.zone, server, index);",
                "static_cast<uint64_t>(args_.out_offset) + args_.slots.At(0, server, index);",
            ),
        ),
        # A rank has to be a round ahead of its own NIC, also where its core is another's for long: this one
        # has most to post, and waits for others only.
        case_of(schedule="D", rounds=2, tokens=(8, 1, 1, 1), ring_items=64, post_us=40_000.0),
    ),
    Mutant(
        "two cores on one queue",
        (
            Patch(
                RAILS,
                "return place % AscendC::GetBlockNum() == AscendC::GetBlockIdx();",
                "return place >= 0;",
            ),
        ),
        case_of(blocks=2),
    ),
    Mutant(
        "a token of another call",
        (Patch(RAIL_RELAY, "if (call == static_cast<int32_t>(args_.call)) {", "if (call != 0) {"),),
        HostileRailCase(change="a token of another call"),
    ),
    Mutant(
        "a token of another round",
        (Patch(RAIL_RELAY, "head_.At(RailHead::NUMBER) != number_ || ", ""),),
        HostileRailCase(change="a token of another round", by_token=False),
    ),
    Mutant(
        "a choice that nobody compares with those before",
        (Patch(RAIL_RELAY, "if (position != counts_.At(count)) {", "if (position < 0) {"),),
        HostileRailCase(change="a position of another token"),
    ),
    Mutant(
        "a lost source that is said to have nothing",
        (Patch(RAIL_RELAY, "is_lost ? LOST_COUNT : ", "is_lost ? 0 : "),),
        GoneCase(),
    ),
    Mutant(
        "a relay that does not say for whom it waits",
        (Patch(RETURNS_LOST, "if (lost.number >= 0 &&", "if (lost.number > args_.ranks_per_server &&"),),
        GoneCase(in_combine=True),
    ),
    Mutant(
        "sums without the results of a rank that is gone",
        (Patch(PARTIALS_SEND, "if (FirstLost(args_).number < 0) {", "if (args_.num_servers > 0) {"),),
        GoneCase(in_combine=True),
    ),
    Mutant(
        "an end flag that says that a rank is gone taken for partial rows",
        (
            Patch(RAIL_WAIT, "if (lost != 0 && lost_call != call", "if (args_.zone > 1 && lost_call != call"),
            Patch(RAIL_WAIT, "if (lost != 0 || count != ", "if (count != "),
        ),
        GoneCase(in_combine=True),
    ),
    Mutant(
        "another call of a neighbour that no other server hears of",
        (Patch(RETURNS_LOST, "call != static_cast<int32_t>(args.call)", "call == 0"),),
        OddCase(),
    ),
    Mutant(
        "another call of a neighbour taken for none",
        (Patch(RETURNS_LOST, "rank + 1, lost.call)", "rank + 1, 0)"),),
        OddCase(),
    ),
    Mutant(
        "an end flag that may say of any rank that it is gone",
        (Patch(RAILS, "rank < (server + 1) * ranks_;", "server >= 0;"),),
        HostileWordsCase(place="partial end"),
    ),
    Mutant(
        "an entry that may count any rows",
        (Patch(DISPATCH_WAIT, "count >= args_.count_end)", "count < args_.zone)"),),
        HostileWordsCase(place="entry"),
    ),
)
