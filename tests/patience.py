"""How long tests wait for others, by one factor: a loaded machine takes longer, and is no failure.

    MOE_TEST_PATIENCE=3 make test

What a test gives others (a process to end, a file to appear, ranks to answer, a group's `timeout_s` where its
length is not the point) is `seconds(n)`. Where the point is that something happens soon, it is measured
against what else ran in that test, or counted in events. Without the variable it is 1, or 3 where CI is set.
"""

from __future__ import annotations

import os

FACTOR = "MOE_TEST_PATIENCE"
PATIENCE = float(os.environ.get(FACTOR, "3" if os.environ.get("CI") else "1"))


def seconds(on_an_idle_machine: float) -> float:
    """A deadline: many times what it takes on an idle machine, times the factor."""
    return on_an_idle_machine * PATIENCE


UNTIL_MASKED_S = seconds(8.0)
"""`timeout_s` where whoever does not come is masked: an innocent one is seconds late on a loaded machine."""
