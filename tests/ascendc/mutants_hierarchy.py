"""Wrong kernels of the hierarchy: what is believed too early, goes elsewhere, or is not said."""

from __future__ import annotations

from .hierarchy_case import HierarchyCase
from .hierarchy_hostile import GoneCase, HostileRailCase, OddCase
from .hierarchy_words import HostileWordsCase
from .library import Patch
from .mutants import DISPATCH_WAIT, MUTANT_TIMEOUT_US, Mutant, without

RAILS = "include/rails.h"
RAIL_TOKENS = "include/rail_tokens.h"
RAIL_SEND = "include/rail_send.h"
RAIL_RELAY = "include/rail_relay.h"
RAIL_WAIT = "include/rail_wait.h"
SERVER_RETURN = "include/server_return.h"
PARTIALS_PLACE = "include/partials_place.h"
PARTIALS_SEND = "include/partials_send.h"
RETURNS_LOST = "include/returns_lost.h"
OFFSETS = "include/offsets.h"
FUSED = "include/moe_fused.h"


def case_of(**changes: object) -> HierarchyCase:
    """The usual case, with a deadline that suits mutants."""
    defaults: dict[str, object] = {"tokens": (4, 4, 4, 4), "hidden": 512, "rounds": 3}
    return HierarchyCase(**{**defaults, **changes, "timeout_us": MUTANT_TIMEOUT_US})  # type: ignore[arg-type]


_BELIEVED = (
    "        if (there > 1) {\n"
    "            believed_.Set(server, static_cast<int32_t>(first + (there - 1) * run));\n"
)
_BELIEVED_EARLY = (
    "        if (there > 0) {\n"
    "            believed_.Set(server, static_cast<int32_t>(first + there * run));\n"
)
_OVER = (
    "        const bool is_over = is_last && first + args_.message_tokens >= count && "
    "(is_first || number > 0);\n"
)
_POST_THEN_END = (
    "        if (is_whole && server != rail_.Server() && !Post(server, first, number)) {\n"
    "            return false;\n        }\n"
    + _OVER
    + "        return !is_over || ends_.Send(args_, rail_, peers_, poster_, server, count);\n"
)
_END_THEN_POST = (
    _OVER + "        if (is_over && !ends_.Send(args_, rail_, peers_, poster_, server, count)) {\n"
    "            return false;\n        }\n"
    "        return !is_whole || server == rail_.Server() || Post(server, first, number);\n"
)
_RETURN = "    run.template Phase<ServerReturn>(1, args.phase_1, false, false, false);\n"
_FLAG = "    run.template Phase<PostStatus>(2, args.phase_2, true, false, false);\n"

HIERARCHY_MUTANTS = (
    Mutant(
        "a message believed by its own head",
        (Patch(RAIL_RELAY, _BELIEVED, _BELIEVED_EARLY),),
        case_of(rounds=6),
    ),
    Mutant(
        "a message of several tokens believed by its own head",
        (Patch(RAIL_RELAY, _BELIEVED, _BELIEVED_EARLY),),
        case_of(rounds=6, message_tokens=2),
    ),
    Mutant(
        "tokens of a message believed one by one",
        (Patch(RAIL_RELAY, "const int64_t run = runs_.At(server);", "const int64_t run = 1;"),),
        case_of(rounds=6, message_tokens=3, tokens=(8, 8, 8, 8)),
    ),
    Mutant(
        "a token believed by a flag at its tail",
        (
            Patch(RAIL_RELAY, _BELIEVED, _BELIEVED_EARLY),
            Patch(
                RAIL_RELAY,
                "runs_.At(server) == 0 && !LearnRun(server)",
                "runs_.At(server) == 0 && (runs_.Set(server, 1), false)",
            ),
            Patch(
                RAIL_RELAY,
                "args_.rails.At(args_.zone, rail_.PlaceOf(server), first);",
                "args_.rails.At(args_.zone, rail_.PlaceOf(server), first) + args_.scale_offset;",
            ),
            Patch(
                RAIL_TOKENS,
                "            SetHead(half, RailHead::NUMBER, number);\n",
                "            SetHead(half, RailHead::NUMBER, number);\n"
                "            SetHead(half, static_cast<uint32_t>(args_.scale_offset / 4), number);\n",
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
        (Patch(RAIL_SEND, _POST_THEN_END, _END_THEN_POST),),
        case_of(message_tokens=0, rounds=6),
    ),
    Mutant(
        "the end flag before the last run of tokens",
        (Patch(RAIL_SEND, _POST_THEN_END, _END_THEN_POST),),
        case_of(message_tokens=3, rounds=6),
    ),
    Mutant(
        "a message of a part that is not whole",
        (Patch(RAIL_SEND, "number >= (is_last ? 1 : args_.message_tokens);", "number >= 1;"),),
        case_of(message_tokens=4, parts=2, tokens=(7, 6, 7, 5), rounds=6),
    ),
    Mutant(
        "a part that begins with the messages of the one before",
        (Patch(RAIL_SEND, "args_.first_token == 0 ? 0 : EarlierAt(server);", "0;"),),
        case_of(message_tokens=2, parts=2, tokens=(7, 6, 7, 5)),
    ),
    Mutant(
        "tokens that are not where those before them end",
        (Patch(RAIL_TOKENS, "places_.At(entry));", "token);"),),
        case_of(tokens=(6, 6, 6, 6), topk=1),
    ),
    Mutant(
        "what both halves of a core's buffer hold made over while it is written",
        (
            without(RAIL_TOKENS, "        const uint32_t half = double_buffer_.Take();\n"),
            Patch(
                RAIL_TOKENS,
                "        SetHead(half, RailHead::TOKEN,",
                "        const uint32_t half = 0;\n        SetHead(half, RailHead::TOKEN,",
            ),
            without(RAIL_TOKENS, "        double_buffer_.Give();\n"),
        ),
        case_of(rounds=6, blocks=1),
    ),
    Mutant(
        "results of all servers returned with the first piece's flag",
        (Patch(SERVER_RETURN, "place >= args_.first_place && place < ", "place < "),),
        case_of(pieces=2),
    ),
    Mutant(
        "a piece's flag where another piece's is looked for",
        (Patch(FUSED, _RETURN + _FLAG, _FLAG.replace("true", "false") + _RETURN),),
        case_of(pieces=2, rounds=6),
    ),
    Mutant(
        "partial rows of a piece at the places of another one",
        (Patch(PARTIALS_PLACE, "rail_.ServerAt(place), args_.rows +", "rail_.ServerAt(i), args_.rows +"),),
        case_of(pieces=2),
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
                "route_.Load(args_.window + args_.rails.At(1 - args_.zone, rail_.PlaceOf(server), index) + ",
            ),
        ),
        case_of(),
    ),
    Mutant(
        "results left in the other zone",
        (
            Patch(
                SERVER_RETURN,
                "args_.slots.At(zone, place, expert, first));",
                "args_.slots.At(1 - zone, place, expert, first));",
            ),
        ),
        case_of(),
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
                RAIL_TOKENS,
                "return args_.slots.At(args_.zone, static_cast<uint64_t>(rail_.PlaceOf(server)), ",
                "return args_.slots.At(server == rail_.Server() ? args_.zone : 0, rail_.PlaceOf(server), ",
            ),
            Patch(
                RAIL_SEND,
                "slot = args_.slots.At(args_.zone, rail_.PlaceOf(server), first);",
                "slot = args_.slots.At(0, rail_.PlaceOf(server), first);",
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
                "return PlaceOf(server) % AscendC::GetBlockNum() == AscendC::GetBlockIdx();",
                "return PlaceOf(server) >= 0;",
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
        HostileRailCase(change="a token of another round", message_tokens=0),
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
        (Patch(PARTIALS_SEND, "if (lost.number < 0) {", "if (args_.num_servers > 0) {"),),
        GoneCase(in_combine=True, is_said_late=True),
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
        "messages of no tokens taken for some",
        (
            Patch(RAIL_RELAY, "head_.At(RailHead::TOKENS) < 1 || ", ""),
            Patch(RAIL_RELAY, "if (run < 1) {", "if (run < -1) {"),
        ),
        HostileRailCase(change="messages of no tokens"),
    ),
    Mutant(
        "a lost rank that nobody hears of from what sends",
        (Patch(PARTIALS_SEND, "} else if (IsLast() && ", "} else if (args_.num_servers == 0 && "),),
        GoneCase(in_combine=True, is_said_late=True),
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
