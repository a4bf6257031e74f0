"""``moe-triton selftest --backend npu``: its own checks, run on the stand-in, find nothing wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moe_triton.processes import RankGroup
from moe_triton.tools.selftest.check import Settings
from moe_triton.tools.selftest.run import checks_of
from tests.npu import selftest_workers
from tests.npu.device import AT_ONCE
from tests.patience import seconds

Ranks = Callable[[int], RankGroup]
SETTINGS = Settings("npu", ranks=2, quick=True, timeout_s=seconds(40.0))
# Times of the stand-in say nothing. Its graphs do not hold what torch computes between the calls:
# test_graphs.py has graphs that do without.
CHECKS = [check for check in checks_of(SETTINGS, 2) if check.stage not in ("graphs", "timing", "constants")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name.replace(" ", "_"))
def test_it_passes_on_the_stand_in(ranks: Ranks, check: selftest_workers.Check) -> None:
    group = ranks(check.ranks)
    findings = group.run(selftest_workers.run, check, SETTINGS, AT_ONCE)
    merged = check.merge([finding for finding in findings if finding is not None])
    assert merged.wrong == ()
    assert merged.skipped == ""
