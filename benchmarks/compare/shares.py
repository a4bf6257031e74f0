"""Where our routes' time goes: how busy they keep the cores, and what share each step takes.

A step's share is what its launches took, summed over the ranks, of the call's time on all cores that ranks
can have. It is known where each rank has a core to itself: elsewhere a step goes on while its rank waits for
its turn. How busy the cores are is known everywhere, from what ranks' threads took of them; a rank that waits
awake is busy. What no step takes is the rest: waiting, Python, and what comes before and after.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from benchmarks.compare.cases import ROUTES, Case
from benchmarks.compare.figures import Samples
from benchmarks.compare.tables import case_cells, text_table
from benchmarks.harness import Record, records_of
from moe_triton.tools.text_table import TextTable

# Columns, and the steps that each of them is; any other step is small. Earlier runs have a launch for packing
# alone, and another one, keep, for this rank's own rows, which arrange takes now.
STEPS = {
    "pack": ("dispatch: route + pack", "dispatch: pack"),
    "send": ("dispatch: send",),
    "arrange": ("dispatch: arrange", "dispatch: keep"),
    "send back": ("combine: send",),
    "sum": ("combine: sum",),
}
PROFILED = ("slots", "direct")
_COLUMN_OF = {step: column for column, steps in STEPS.items() for step in steps}
BUSY, SMALL, REST = "busy", "small", "rest"
COLUMNS = (BUSY, *STEPS, SMALL, REST)


def shares(samples: Samples, case: Case, route: str, cores: int) -> dict[str, float]:
    """Shares of the cores' time by column; all but the first add up to 1. Empty if the route has no times."""
    steps = samples.steps(case, route)
    if not steps:
        return {}
    total = samples.median(case, route) * min(cores, case.ranks)
    found: dict[str, float] = defaultdict(float, {BUSY: samples.core_us(case, route) / total})
    if case.ranks > cores:
        return {BUSY: found[BUSY]}
    for step, us in steps.items():
        if not is_wait(step):
            found[_COLUMN_OF.get(step, SMALL)] += us * case.ranks / total
    found[REST] = 1 - sum(share for column, share in found.items() if column != BUSY)
    return {column: found[column] for column in COLUMNS}


def is_wait(step: str) -> bool:
    """Whether nothing but waiting happens in it."""
    return "wait" in step


def shares_table(samples: Samples, route: str, cores: int) -> TextTable:
    """All cases of a route, in percent."""
    rows = []
    for case in samples.cases:
        found = shares(samples, case, route, cores)
        if found:
            percents = [f"{100 * found[column]:.0f}" if column in found else "" for column in COLUMNS]
            rows.append((*case_cells(case), *percents))
    title = f"{ROUTES[route]}: percent of {cores} cores' time"
    return text_table(title, ("ranks", "tokens", "rows", *COLUMNS), rows, left=0)


def share_records(samples: Samples, cores: int, routes: Sequence[str] = PROFILED) -> list[Record]:
    """Every share as a figure."""
    found: list[Record] = []
    for case in samples.cases:
        for route in routes:
            of = shares(samples, case, route, cores)
            figures = {f"share_{column.replace(' ', '_')}": share for column, share in of.items()}
            found += records_of("compare", {**case.as_record(), "route": route}, figures)
    return found
