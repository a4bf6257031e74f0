"""Wrong kernels again: tables, masks and times, full waits, the exchange between two ranks."""

from __future__ import annotations

from .exchange import ExchangeCase
from .library import Patch
from .mutants import (
    COMBINE_SEND,
    COMBINE_WAIT,
    DISPATCH_WAIT,
    MUTANT_TIMEOUT_US,
    RESULT_FLAGS,
    ROW_COPY,
    SEND_PLAN,
    STATUS_ENTRIES,
    WAITS,
    Mutant,
    case_of,
    without,
)

POST_STATUS = "include/post_status.h"
EXCHANGE_SEND = "include/exchange_send.h"

_SHARED = case_of(tokens=(3, 2, 3, 2), shared=(1, 2), hidden=64)
_FULL_WAIT = case_of(full_wait=True, tokens=(3, 3))
_EXCHANGE = ExchangeCase(timeout_us=MUTANT_TIMEOUT_US)
_MANY_SCALES = ExchangeCase(timeout_us=MUTANT_TIMEOUT_US, rows=(1100, 1030), row_bytes=32, blocks=1, rounds=1)

TABLES = (
    Mutant(
        "shared ranks ignored",
        (
            Patch(
                SEND_PLAN,
                "        const int32_t rank = shared_ranks_.At(token * num_shared_ + s);\n",
                "        const int32_t rank = static_cast<int32_t>(s);\n",
            ),
        ),
        _SHARED,
    ),
    Mutant(
        "shared slots ignored",
        (
            Patch(
                SEND_PLAN,
                "shared_slots_.At(token);",
                "static_cast<int32_t>(token);",
            ),
        ),
        case_of(tokens=(5, 4, 5), shared=(1, 1), inactive=0.4, hidden=64),
    ),
    Mutant(
        "shared ranks' counts from the routed table",
        (
            Patch(
                STATUS_ENTRIES,
                "is_shared ? args_->shared_counts : args_->counts",
                "args_->counts",
            ),
        ),
        _SHARED,
    ),
    Mutant(
        "masked shared results sent",
        (Patch(SEND_PLAN, "        if (rank == -1) {\n            return false;\n        }\n", ""),),
        case_of(tokens=(5, 4, 5), shared=(1, 1), inactive=0.4, hidden=64),
    ),
    Mutant(
        "special ids sent",
        (Patch(SEND_PLAN, "if (id < 0 || id >= args_->num_experts) {", "if (id < 0) {"),),
        case_of(special=0.5),
    ),
    Mutant(
        "special ids waited for",
        (Patch(RESULT_FLAGS, "id >= 0 && id < args_->num_experts ? ResultBits", "id >= 0 ? ResultBits"),),
        case_of(special=0.5, rounds=1),
    ),
    Mutant(
        "masked tokens waited for",
        (Patch(RESULT_FLAGS, "if (args_->active_index != 0 && active_.At(token) < 0) {", "if (false) {"),),
        case_of(inactive=0.5, rounds=1),
    ),
    Mutant(
        "times stored before they are written",
        (
            Patch(
                WAITS,
                "Table::Store(address_, count);",
                "AscendC::DataCopyPad(GlobalAt<int32_t>(address_)[first], Entries(), ExactWords(count));\n"
                "            Order<AscendC::HardEvent::MTE3_S>();",
            ),
        ),
        case_of(timed=True, hidden=64),
    ),
    Mutant(
        "times of unexpected results left as they are",
        (
            Patch(
                COMBINE_WAIT,
                "            waited_.Expect(TimeOf(token) + k, HasBit(expected, k));\n",
                "            if (HasBit(expected, k)) waited_.Expect(TimeOf(token) + k);\n",
            ),
        ),
        case_of(timed=True, hidden=64, absent=0.5),
    ),
    Mutant(
        "times of what never came not kept apart",
        (
            Patch(
                DISPATCH_WAIT,
                "if (waited_.IsWanted()) {\n            ExpectAll",
                "if (false) {\n            ExpectAll",
            ),
        ),
        case_of(timed=True, hidden=64),
    ),
)

FULL_WAIT = (
    Mutant(
        "rows without flags that leave the last one on its way",
        (
            # The status is posted by the same launch, before the barrier at its end.
            Patch(
                COMBINE_SEND,
                "                    SendRow(row, token);\n                }\n            }\n        }\n",
                "                    SendRow(row, token);\n                }\n            }\n        }\n"
                "        if (!is_flagged_) {\n"
                "            AscendC::Duplicate(flag_, static_cast<int32_t>(FLAG_BITS), 8);\n"
                "            Order<AscendC::HardEvent::V_MTE3>();\n"
                "            const uint64_t at = 400 * 1024 + static_cast<uint64_t>(args_->zone) * 500 * "
                "1024;\n"
                "            for (int64_t r = 0; r < args_->num_ranks; ++r) {\n"
                "                for (int64_t s = 0; s < args_->num_ranks; ++s) {\n"
                "                    AscendC::DataCopy(GlobalAt<int32_t>(peers_.WindowOf(r) + at + s * 32), "
                "flag_, 8);\n"
                "                }\n"
                "            }\n"
                "        }\n",
            ),
        ),
        _FULL_WAIT,
    ),
    Mutant(
        "a status for one rank too few",
        (
            Patch(
                POST_STATUS,
                "blocks_.ShareOf(args_.num_ranks)",
                "blocks_.ShareOf(args_.num_ranks - 1)",
            ),
        ),
        case_of(full_wait=True, rounds=1),
    ),
    Mutant(
        "a status sent before it is written",
        (without(POST_STATUS, "        Order<AscendC::HardEvent::S_MTE3>();\n"),),
        _FULL_WAIT,
    ),
    Mutant(
        "no V_S wait before a status is written",
        (without(STATUS_ENTRIES, "        Order<AscendC::HardEvent::V_S>();\n"),),
        _FULL_WAIT,
    ),
    Mutant(
        "the status area's extents looked at without flags",
        (Patch(ROW_COPY, "(!is_flagged || args.status", "(args.status"),),
        _FULL_WAIT,
    ),
)

EXCHANGE = (
    Mutant(
        "one row too few",
        (
            Patch(
                EXCHANGE_SEND,
                "return {first, first + Smaller(number, most)};",
                "return {first, first + Smaller(number, most) - (number > 0 ? 1 : 0)};",
            ),
        ),
        _EXCHANGE,
    ),
    Mutant(
        "the first row ignored",
        (Patch(EXCHANGE_SEND, "args_.first_row == 0 ? 0 :", "args_.first_row != 0 ? 0 :"),),
        _EXCHANGE,
    ),
    Mutant(
        "rows one slot further",
        (
            Patch(
                EXCHANGE_SEND,
                "args_.slots.At(args_.zone, i);",
                "args_.slots.At(args_.zone, i + 1);",
            ),
        ),
        _EXCHANGE,
    ),
    Mutant(
        "scales of the first rows",
        (Patch(EXCHANGE_SEND, "LoadScales(first_row + first,", "LoadScales(first,"),),
        _EXCHANGE,
    ),
    Mutant(
        "one scale where rows have several",
        (
            Patch(
                EXCHANGE_SEND,
                "bytes = static_cast<uint32_t>(args_.scale_bytes);",
                "bytes = sizeof(float);",
            ),
        ),
        ExchangeCase(timeout_us=MUTANT_TIMEOUT_US, num_scales=57),
    ),
    Mutant(
        "scales loaded over those being sent",
        (without(EXCHANGE_SEND, "        Order<AscendC::HardEvent::MTE3_MTE2>();\n"),),
        _MANY_SCALES,
    ),
    Mutant(
        "a header by whole 32 bytes",
        (
            Patch(
                EXCHANGE_SEND,
                "ExactWords(Smaller(WORDS_PER_PIECE, args_.header_words - word));",
                "ExactWords((Smaller(WORDS_PER_PIECE, args_.header_words - word) + 7) / 8 * 8);",
            ),
        ),
        ExchangeCase(timeout_us=MUTANT_TIMEOUT_US, header_words=1001, rounds=1),
    ),
    Mutant(
        "a header sent before it is loaded",
        (
            Patch(
                EXCHANGE_SEND,
                "            words_.EnQue(in);\n"
                "            AscendC::LocalTensor<int32_t> out = words_.DeQue<int32_t>();\n",
                "            AscendC::LocalTensor<int32_t> out = in;\n",
            ),
        ),
        _EXCHANGE,
    ),
    Mutant(
        "no header",
        (Patch(EXCHANGE_SEND, "GetBlockIdx() == 0 && args_.header", "GetBlockIdx() == 1 && args_.header"),),
        ExchangeCase(timeout_us=MUTANT_TIMEOUT_US, blocks=1),
    ),
)

CALL_MUTANTS = TABLES + FULL_WAIT + EXCHANGE
