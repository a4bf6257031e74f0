"""Wrong kernels that say something before rows come: words of calls, tables."""

from __future__ import annotations

from .announced import CallCase, TablesCase
from .library import Patch
from .mutants import MUTANT_TIMEOUT_US, Mutant, without

CALL_POST = "include/call_post.h"
TABLES_SEND = "include/tables_send.h"

_CALLS = CallCase(timeout_us=MUTANT_TIMEOUT_US)
_ONE_BLOCK = CallCase(blocks=1, rounds=6, timeout_us=MUTANT_TIMEOUT_US)
_SHARED = CallCase(shared=1, timeout_us=MUTANT_TIMEOUT_US)
_SILENT = CallCase(rings=False, timeout_us=MUTANT_TIMEOUT_US)
_PIECES = CallCase(num_ranks=2, experts=3000, rounds=2, timeout_us=MUTANT_TIMEOUT_US)
_POSTED = CallCase(num_ranks=4, servers=(2, 2), experts=8, timeout_us=MUTANT_TIMEOUT_US)
_POSTED_BY_ONE = CallCase(servers=(1, 1, 1), blocks=1, rounds=6, timeout_us=MUTANT_TIMEOUT_US)

_SLOT_OF_SENDER = "args_.slots.At(args_.zone, place.source, first + done);"
_ENTRY_OF_SENDER = "window + args_.status.At(args_.zone, 0, args_.rank));"
_BELL = "window + args_.bells.At(args_.zone, 0)), bell_"
_SHARE = "rank >= share_.first && rank < share_.last;"
_PUT_WORDS = "poster_.Put(rank, {words, to + args_.slots.At(args_.zone, args_.rank, 0), 0, bytes, 0})"
_PUT_ENTRY = "poster_.Put(rank, {entry, to + args_.status.At(args_.zone, 0, args_.rank), 0, ENTRY_BYTES, 1})"
_PUT_BELL = "poster_.Put(rank, {bell, to + args_.bells.At(args_.zone, 0), 0, ENTRY_BYTES, 1})"

WORDS = (
    Mutant(
        "entries that overtake their words",
        (without(CALL_POST, "        FinishWords();\n"),),
        _ONE_BLOCK,
    ),
    Mutant(
        "entries of a block's words when all copies have only begun",
        (without(CALL_POST, "        AscendC::PipeBarrier<PIPE_MTE3>();\n"),),
        _CALLS,
    ),
    Mutant(
        "words sent before they are loaded",
        (
            Patch(
                CALL_POST,
                "            words_.EnQue(in);\n"
                "            AscendC::LocalTensor<int32_t> out = words_.DeQue<int32_t>();\n",
                "            AscendC::LocalTensor<int32_t> out = in;\n",
            ),
        ),
        _CALLS,
    ),
    Mutant(
        "words in the other zone",
        (Patch(CALL_POST, _SLOT_OF_SENDER, _SLOT_OF_SENDER.replace("args_.zone", "1 - args_.zone")),),
        _CALLS,
    ),
    Mutant(
        "words in the place of the next rank",
        (
            Patch(
                CALL_POST,
                _SLOT_OF_SENDER,
                _SLOT_OF_SENDER.replace("place.source", "(place.source + 1) % args_.num_ranks"),
            ),
        ),
        _CALLS,
    ),
    Mutant(
        "no words for a block's last rank",
        (Patch(CALL_POST, _SHARE, "rank >= share_.first && rank + 1 < share_.last;"),),
        _CALLS,
    ),
    Mutant(
        "the last word of each table missing",
        (
            Patch(
                CALL_POST,
                "Smaller(WORDS_PER_PIECE, count - done)",
                "Smaller(WORDS_PER_PIECE, count - done - 1)",
            ),
        ),
        _CALLS,
    ),
    Mutant(
        "counts over those of shared ranks",
        (
            Patch(
                CALL_POST,
                "args_.num_experts, CALL_HEADER_WORDS + args_.num_shared_ranks);",
                "args_.num_experts, CALL_HEADER_WORDS);",
            ),
        ),
        _SHARED,
    ),
    Mutant(
        "counts of shared ranks left out",
        (
            without(
                CALL_POST,
                "        SendWords(args_.shared_counts, args_.num_shared_ranks, CALL_HEADER_WORDS);\n",
            ),
        ),
        _SHARED,
    ),
    Mutant(
        "the first piece of words again",
        (Patch(CALL_POST, "GlobalAt<int32_t>(source)[done]", "GlobalAt<int32_t>(source)[0 * done]"),),
        _PIECES,
    ),
    Mutant(
        "every piece of words in the place of the first one",
        (Patch(CALL_POST, _SLOT_OF_SENDER, _SLOT_OF_SENDER.replace("first + done", "first")),),
        _PIECES,
    ),
)

ENTRIES = (
    Mutant(
        "no entry for a block's last rank",
        (
            Patch(
                CALL_POST,
                "rank = share_.first; rank < share_.last; ++rank",
                "rank = share_.first; rank + 1 < share_.last; ++rank",
            ),
        ),
        _CALLS,
    ),
    Mutant(
        "entries in the other zone",
        (Patch(CALL_POST, _ENTRY_OF_SENDER, _ENTRY_OF_SENDER.replace("args_.zone", "1 - args_.zone")),),
        _CALLS,
    ),
    Mutant(
        "entries in the place of their receiver",
        (Patch(CALL_POST, _ENTRY_OF_SENDER, _ENTRY_OF_SENDER.replace("args_.rank", "rank")),),
        _CALLS,
    ),
    Mutant(
        "entries of another call",
        (Patch(CALL_POST, "static_cast<int32_t>(args_.call)", "static_cast<int32_t>(args_.call + 1)"),),
        _CALLS,
    ),
    Mutant(
        "entries sent before they are written",
        (without(CALL_POST, "        Order<AscendC::HardEvent::S_MTE3>();\n"),),
        _CALLS,
    ),
)

BELLS = (
    Mutant(
        "bells rung before they are made",
        (without(CALL_POST, "        Order<AscendC::HardEvent::V_MTE3>();\n"),),
        _CALLS,
    ),
    Mutant(
        "nobody rung for",
        (without(CALL_POST, "                Ring(window);\n"),),
        _CALLS,
    ),
    Mutant(
        "only the first rank of a block rung for",
        (
            Patch(
                CALL_POST,
                "        if (args_.bell != 0) {\n",
                "        if (args_.bell != 0 && window == peers_.WindowOf(share_.first)) {\n",
            ),
        ),
        _CALLS,
    ),
    Mutant(
        "bells in the other zone",
        (Patch(CALL_POST, _BELL, _BELL.replace("args_.zone", "1 - args_.zone")),),
        _CALLS,
    ),
    Mutant(
        "bells in places of their senders",
        (Patch(CALL_POST, _BELL, _BELL.replace(", 0)", ", args_.rank)")),),
        _CALLS,
    ),
    Mutant(
        "a bell of no word",
        (Patch(CALL_POST, "        if (args_.bell != 0) {\n", "        {\n"),),
        _SILENT,
    ),
)

POSTED = (
    Mutant(
        "entries of words posted before the words",
        (
            Patch(CALL_POST, _PUT_WORDS, "POST_WORDS"),
            Patch(CALL_POST, _PUT_ENTRY, _PUT_WORDS),
            Patch(CALL_POST, "POST_WORDS", _PUT_ENTRY),
        ),
        _POSTED_BY_ONE,
    ),
    Mutant(
        "words posted that another block copies",
        (Patch(CALL_POST, "IsPosted(rank) ? Poster::IsOwner(rank) : rank", "rank"),),
        _POSTED,
    ),
    Mutant(
        "posts by blocks that queues do not belong to",
        (Patch(CALL_POST, "if (Poster::IsOwner(rank) && peers_.", "if (peers_."),),
        _POSTED,
    ),
    Mutant(
        "the last unit of words not posted",
        (Patch(CALL_POST, "0, bytes, 0}", "0, bytes - static_cast<int64_t>(UB_ALIGN), 0}"),),
        _POSTED,
    ),
    Mutant(
        "words posted to the place of their receiver",
        (Patch(CALL_POST, _PUT_WORDS, _PUT_WORDS.replace("args_.rank", "rank")),),
        _POSTED,
    ),
    Mutant(
        "words posted from the other zone",
        (
            Patch(
                CALL_POST,
                "args_.slots.At(args_.zone, place.source, 0);",
                "args_.slots.At(1 - args_.zone, place.source, 0);",
            ),
        ),
        _POSTED,
    ),
    Mutant(
        "entries posted from a place that all have in common",
        (
            Patch(
                CALL_POST,
                "args_.status.At(args_.zone, 0, place.source);",
                "args_.status.At(args_.zone, 0, 0 * place.source);",
            ),
        ),
        _POSTED_BY_ONE,
    ),
    Mutant(
        "bells posted from a place that all have in common",
        (
            Patch(
                CALL_POST,
                "args_.bells.At(args_.zone, place.source);",
                "args_.bells.At(args_.zone, 0 * place.source);",
            ),
        ),
        _POSTED_BY_ONE,
    ),
    Mutant(
        "bells posted before they are written",
        (without(CALL_POST, "        Order<AscendC::HardEvent::MTE3_S>();\n"),),
        _POSTED,
    ),
    Mutant(
        "bells posted to the place of their sender",
        (Patch(CALL_POST, _PUT_BELL, _PUT_BELL.replace(", 0), 0", ", args_.rank), 0")),),
        _POSTED,
    ),
    Mutant(
        "no bells where words are posted",
        (Patch(CALL_POST, "        if (args_.bell == 0 || !is_posted) {", "        if (true) {"),),
        _POSTED,
    ),
)

_TABLES = TablesCase(timeout_us=MUTANT_TIMEOUT_US)
_TABLE_PIECES = TablesCase(num_ranks=2, tokens=700, rounds=2, timeout_us=MUTANT_TIMEOUT_US)
_POSTED_TABLES = TablesCase(num_ranks=4, servers=(2, 2), timeout_us=MUTANT_TIMEOUT_US)

_COPY_TO = (
    "place.window + args_.tables.At(args_.zone, place.source, table);\n                AscendC::DataCopyPad("
)
_POST_TO = "peers_.WindowOf(rank) + args_.tables.At(args_.zone, args_.rank, table);"
_POST_WEIGHTS = " || (args_.row_weights != 0 && !PostTable(rank, WEIGHTS))"

TABLES = (
    Mutant(
        "ids where weights belong",
        (
            Patch(TABLES_SEND, "Copy(args_.row_ids, IDS);", "Copy(args_.row_ids, WEIGHTS);"),
            Patch(TABLES_SEND, "Copy(args_.row_weights, WEIGHTS);", "Copy(args_.row_weights, IDS);"),
        ),
        _TABLES,
    ),
    Mutant(
        "ids twice",
        (Patch(TABLES_SEND, "Copy(args_.row_weights, WEIGHTS);", "Copy(args_.row_ids, WEIGHTS);"),),
        _TABLES,
    ),
    Mutant(
        "tables in the other zone",
        (Patch(TABLES_SEND, _COPY_TO, _COPY_TO.replace("args_.zone", "1 - args_.zone")),),
        _TABLES,
    ),
    Mutant(
        "tables in the place of their receiver",
        (Patch(TABLES_SEND, _COPY_TO, _COPY_TO.replace("place.source", "rank")),),
        _TABLES,
    ),
    Mutant(
        "no tables for the last rank",
        (Patch(TABLES_SEND, "; rank < args_.num_ranks; rank +=", "; rank + 1 < args_.num_ranks; rank +="),),
        _TABLES,
    ),
    Mutant(
        "tables sent before they are loaded",
        (
            Patch(
                TABLES_SEND,
                "            words_.EnQue(in);\n"
                "            AscendC::LocalTensor<int32_t> out = words_.DeQue<int32_t>();\n",
                "            AscendC::LocalTensor<int32_t> out = in;\n",
            ),
        ),
        _TABLES,
    ),
    Mutant(
        "the first piece of a table again",
        (Patch(TABLES_SEND, "GlobalAt<int32_t>(source)[done]", "GlobalAt<int32_t>(source)[0 * done]"),),
        _TABLE_PIECES,
    ),
    Mutant(
        "every piece of a table in the place of the first one",
        (Patch(TABLES_SEND, "GlobalAt<int32_t>(to)[done]", "GlobalAt<int32_t>(to)[0 * done]"),),
        _TABLE_PIECES,
    ),
    Mutant(
        "tables posted before they are copied",
        (without(TABLES_SEND, "            Order<AscendC::HardEvent::MTE3_S>();\n"),),
        _POSTED_TABLES,
    ),
    Mutant(
        "weights not posted",
        (without(TABLES_SEND, _POST_WEIGHTS),),
        _POSTED_TABLES,
    ),
    Mutant(
        "ids posted twice",
        (Patch(TABLES_SEND, _POST_WEIGHTS, _POST_WEIGHTS.replace("rank, WEIGHTS", "rank, IDS")),),
        _POSTED_TABLES,
    ),
    Mutant(
        "tables posted to the other zone",
        (Patch(TABLES_SEND, _POST_TO, _POST_TO.replace("args_.zone", "1 - args_.zone")),),
        _POSTED_TABLES,
    ),
    Mutant(
        "tables posted to the place of their receiver",
        (Patch(TABLES_SEND, _POST_TO, _POST_TO.replace("args_.rank", "rank")),),
        _POSTED_TABLES,
    ),
    Mutant(
        "tables posted by blocks that queues do not belong to",
        (Patch(TABLES_SEND, "if (!Poster::IsOwner(rank) || !peers_.", "if (!peers_."),),
        _POSTED_TABLES,
    ),
)

ANNOUNCED_MUTANTS = WORDS + ENTRIES + BELLS + POSTED + TABLES
