"""Wrong kernels of rows at places: where in-band rows are put, and where results are taken from."""

from __future__ import annotations

from .library import Patch
from .mutants import COMBINE_SEND, MUTANT_TIMEOUT_US, Mutant, case_of
from .mutants_inband import INBAND_RECEIVE
from .mutants_posts import rows_of
from .wrong_places import WrongPlaceCase

_RESULTS = case_of(placed=True, tokens=(3, 4), hidden=64)
_MANY_RESULTS = case_of(placed=True, tokens=(40, 40), hidden=32, blocks=1, rounds=1)
_POSTED = rows_of(placed=True, tokens=(3, 4), hidden=64)
_PARTS = case_of(placed=True, tokens=(9, 8), part_tokens=3, hidden=64)
_ROWS = case_of(placed=True, inband=True, hidden=300, scaled=True, tokens=(4, 3), schedule="D")
# 34 rows: two of them in a second batch.
_MANY_ROWS = case_of(
    placed=True, inband=True, hidden=300, tokens=(9, 8), skewed=True, schedule="D", blocks=1, rounds=2
)
_BELOW = WrongPlaceCase(tokens=(3, 4), timeout_us=MUTANT_TIMEOUT_US, is_below=True)
_BEYOND = WrongPlaceCase(tokens=(3, 4), timeout_us=MUTANT_TIMEOUT_US)

_PLACE = "args_->places == 0 ? row : places_.At(row);"
_NO_PLACE = "            report_->Add(REPORT_BAD_ROW, row);\n            return;\n"

RESULTS = (
    Mutant(
        "results taken from their own numbers",
        (Patch(COMBINE_SEND, _PLACE, "row;"),),
        _RESULTS,
    ),
    Mutant(
        "results in parts taken from their own numbers",
        (Patch(COMBINE_SEND, _PLACE, "row;"),),
        _PARTS,
    ),
    Mutant(
        "results to post taken from their own numbers",
        (Patch(COMBINE_SEND, _PLACE, "row;"),),
        _POSTED,
    ),
    Mutant(
        "results to post left at their places",
        (Patch(COMBINE_SEND, "args_->out_rows.At(zone, row);", "args_->out_rows.At(zone, place);"),),
        _POSTED,
    ),
    Mutant(
        "a table of places too short for a block's results",
        (
            Patch(
                COMBINE_SEND,
                "places_.Init(pipe, ORIGINS_PER_CHUNK);",
                "places_.Init(pipe, ORIGINS_PER_CHUNK / 16);",
            ),
        ),
        _MANY_RESULTS,
    ),
    Mutant(
        "results taken from the place of the row before",
        (Patch(COMBINE_SEND, "places_.At(row);", "places_.At(row > share_.first ? row - 1 : row);"),),
        _RESULTS,
    ),
    Mutant(
        "a block's places from the first row on",
        (Patch(COMBINE_SEND, "Fetch(args_->places, first, last", "Fetch(args_->places, 0 * first, last"),),
        _RESULTS,
        may_crash=True,
    ),
    Mutant(
        "a place below the first read",
        (Patch(COMBINE_SEND, "place < 0 || place >= args_->capacity", "place >= args_->capacity"),),
        _BELOW,
    ),
    Mutant(
        "a place beyond the last read",
        (Patch(COMBINE_SEND, "place < 0 || place >= args_->capacity", "place < 0"),),
        _BEYOND,
    ),
    Mutant(
        "a place just beyond the last read",
        (Patch(COMBINE_SEND, "place >= args_->capacity", "place > args_->capacity"),),
        _BEYOND,
    ),
    Mutant(
        "a place that is none not reported",
        (Patch(COMBINE_SEND, _NO_PLACE, "            return;\n"),),
        _BELOW,
    ),
    Mutant(
        "a place that is none reported and read",
        (Patch(COMBINE_SEND, _NO_PLACE, "            report_->Add(REPORT_BAD_ROW, row);\n"),),
        _BEYOND,
    ),
)

_SCALES = "StorePlaced(SCALES, args_.out_scales, static_cast<uint32_t>(args_.scale_bytes), first, count);"
_WEIGHTS = "StorePlaced(1, args_.out_weights, WORD_BYTES, first, count);"
_ORIGINS = "StoreEach(0, args_.out_origins, ORIGIN_BYTES, first, count);"

ROWS = (
    Mutant(
        "rows put at their own numbers",
        (Patch(INBAND_RECEIVE, "place = PlaceOf(i);", "place = first_row_ + i;"),),
        _ROWS,
    ),
    Mutant(
        "rows put at the place of the row before",
        (
            Patch(
                INBAND_RECEIVE, "places_.At(first_row_ + i);", "places_.At(first_row_ + (i > 0 ? i - 1 : i));"
            ),
        ),
        _ROWS,
    ),
    Mutant(
        "a row put in front of all that goes nowhere",
        (
            Patch(
                INBAND_RECEIVE,
                "            if (place >= 0) {\n                CopyRow(",
                "            {\n                CopyRow(",
            ),
        ),
        _ROWS,
    ),
    Mutant(
        "scales and weights put in front of all that go nowhere",
        (
            Patch(
                INBAND_RECEIVE,
                "            if (place >= 0) {\n                const uint32_t unit",
                "            {\n                const uint32_t unit",
            ),
        ),
        _ROWS,
    ),
    Mutant(
        "a row at place 0 lost",
        (
            Patch(
                INBAND_RECEIVE,
                "            if (place >= 0) {\n                CopyRow(",
                "            if (place > 0) {\n                CopyRow(",
            ),
        ),
        _ROWS,
    ),
    Mutant(
        "scales put at their rows' own numbers",
        (Patch(INBAND_RECEIVE, _SCALES, _SCALES.replace("StorePlaced", "StoreEach")),),
        _ROWS,
    ),
    Mutant(
        "weights put at their rows' own numbers",
        (Patch(INBAND_RECEIVE, _WEIGHTS, _WEIGHTS.replace("StorePlaced", "StoreEach")),),
        _ROWS,
    ),
    Mutant(
        "origins put at places",
        (Patch(INBAND_RECEIVE, _ORIGINS, _ORIGINS.replace("StoreEach", "StorePlaced")),),
        _ROWS,
    ),
    Mutant(
        "scales and weights taken as if they were packed",
        (
            Patch(
                INBAND_RECEIVE,
                "unit = static_cast<uint32_t>(i * WholeUnits(bytes));",
                "unit = static_cast<uint32_t>(i * bytes);",
            ),
        ),
        _ROWS,
    ),
    Mutant(
        "flags of rows left that go nowhere",
        (
            Patch(
                INBAND_RECEIVE,
                "            ClearFlags(slots_[i]);\n",
                "            if (PlaceOf(i) >= 0) {\n                ClearFlags(slots_[i]);\n            }\n",
            ),
        ),
        _ROWS,
    ),
    Mutant(
        "a table of places too short for a batch of rows",
        (Patch(INBAND_RECEIVE, "places_.Init(pipe, MAX_ROWS);", "places_.Init(pipe, MAX_ROWS / 2);"),),
        _MANY_ROWS,
    ),
    Mutant(
        "places read before they are loaded",
        (Patch(INBAND_RECEIVE, "places_.Fetch(args_.places", "places_.Load(args_.places"),),
        _ROWS,
        may_crash=True,
    ),
)

PLACED_MUTANTS = RESULTS + ROWS
