"""A dispatch whose first blocks receive while the others send: see `tests.ascendc.receiving`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .case import BRIEF_US
from .library import Library, Patch, build
from .receiving import MissingCase, ReceivingCase, ReceivingWorld, check_missing

CASES = {
    "two_blocks": ReceivingCase(tokens=(4, 3), timed=True),
    "one_row": ReceivingCase(tokens=(1, 0), topk=1, experts_per_rank=1, weighted=False),
    "more_receive": ReceivingCase(tokens=(5, 7, 2), blocks=5, first_blocks=4, topk=3, straggle=0.3, rounds=4),
    "more_send": ReceivingCase(tokens=(5, 7, 2), blocks=5, topk=3, scaled=True, rounds=4, timed=True),
    "more_than_entries": ReceivingCase(tokens=(3, 2), blocks=8, first_blocks=6, experts_per_rank=1, topk=1),
    "many_scales": ReceivingCase(
        tokens=(5, 8), blocks=4, first_blocks=2, topk=3, scaled=True, num_scales=9, hidden=96
    ),
    "no_rows": ReceivingCase(tokens=(3, 2), absent=1.0, timed=True),
    "shared": ReceivingCase(tokens=(3, 4, 2), blocks=4, first_blocks=2, shared=(1, 1), topk=3),
    "skewed": ReceivingCase(tokens=(90, 60), blocks=4, first_blocks=2, skewed=True, hidden=32),
    "many_rows": ReceivingCase(tokens=(700, 900), first_blocks=1, topk=1, experts_per_rank=1, hidden=32),
    "many_entries": ReceivingCase(tokens=(9, 8), blocks=3, experts_per_rank=500, topk=8, hidden=32),
    "real": ReceivingCase(
        tokens=(16, 8), blocks=48, first_blocks=24, topk=8, experts_per_rank=16, hidden=7168, scaled=True
    ),
}
# The same launches of rows with flags in band.
INBAND = {name: replace(case, inband=True) for name, case in CASES.items()}
INBAND["long_rows"] = replace(INBAND["more_send"], hidden=6000)
# More than a block notes to have taken.
INBAND["more_rows"] = replace(INBAND["many_rows"], tokens=(1300, 1400), topk=2)
# As long as rows may be, and a time of each entry: all of the local memory.
INBAND["longest_rows"] = replace(INBAND["more_send"], hidden=12 * 1024 - 32, scaled=False)
# Every token goes to every expert. Waits are in vain: they need not be long.
MISSING = {
    "a_rank": MissingCase(tokens=(2, 2, 2), blocks=3, topk=6, timeout_us=BRIEF_US),
    "a_rank_of_two": MissingCase(tokens=(2, 2, 2), blocks=4, first_blocks=2, topk=6, timeout_us=BRIEF_US),
    "rows": MissingCase(tokens=(2, 2, 2), blocks=3, topk=6, timeout_us=BRIEF_US, is_away=False),
    "rows_of_two": MissingCase(
        tokens=(2, 2, 2), blocks=5, first_blocks=2, topk=6, timeout_us=BRIEF_US, is_away=False, timed=True
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_receives_while_it_sends(library: Library, case: ReceivingCase) -> None:
    for seed in range(3):
        ReceivingWorld(library, case, seed).run()


@pytest.mark.parametrize("case", INBAND.values(), ids=INBAND)
def test_collects_while_it_sends(library: Library, case: ReceivingCase) -> None:
    for seed in range(3):
        ReceivingWorld(library, case, seed).run()


@pytest.mark.parametrize("case", MISSING.values(), ids=MISSING)
@pytest.mark.parametrize("inband", [False, True], ids=["stamps", "inband"])
def test_says_what_is_missing(library: Library, case: MissingCase, inband: bool) -> None:
    check_missing(library, replace(case, inband=inband))


# The second block raises its flag half a second late: as on a machine that has more to do than cores.
LATE = Patch(
    "include/begun_blocks.h",
    "        AscendC::Duplicate(flag_, 1.0f, static_cast<int32_t>(STATUS_ENTRY_WORDS));\n",
    """        const int64_t until = AscendC::GetSystemCycle() + 500'000 * CYCLES_PER_US;
        while (AscendC::GetBlockIdx() == 1 && AscendC::GetSystemCycle() < until) {
        }
        AscendC::Duplicate(flag_, 1.0f, static_cast<int32_t>(STATUS_ENTRY_WORDS));
""",
)


@pytest.mark.long  # two launchers are compiled
def test_a_time_out_does_not_end_the_wait_for_blocks_that_begin_late() -> None:
    """What they know of the zone would change under them, and their flags be left for the next launch."""
    launchers = {"moe_dispatch_send", "moe_receiving_dispatch"}
    late = Library(build(strict=False, patches=[LATE], launchers=launchers))
    check_missing(late, replace(MISSING["a_rank_of_two"], timeout_us=50_000))
