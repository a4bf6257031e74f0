"""The machine's constants: measured ones in place of those assumed for its product."""

from __future__ import annotations

from collections.abc import Sequence

from moe_triton.model.constants import Machine, machine_named
from moe_triton.tools.selftest.check import Result
from moe_triton.tools.selftest.checks.constants import ALL_BLOCKS, HOP, ONE_BLOCK, STAGE
from moe_triton.tools.selftest.timing import HIGH, LOW

# Parts of torch_npu's device names, and the products whose constants apply.
PRODUCTS = {"910_93": "A3", "910C": "A3", "910B": "A2"}


ENDS = ("", LOW, HIGH)
RATES = {ALL_BLOCKS: "stream_bytes_per_cycle", ONE_BLOCK: "stream_bytes_per_cycle_alone"}


def product_of(backend: str, soc: str) -> str:
    """The machine whose assumed constants fill the gaps; A3 for an unknown device."""
    if backend == "cpu":
        return "cpu"
    return next((product for part, product in PRODUCTS.items() if part.lower() in soc.lower()), "A3")


def constants_of(results: Sequence[Result], backend: str, soc: str, date: str) -> Machine:
    """The constants of the machine of these results.

    Args:
        results: of a run.
        backend: that it ran on.
        soc: name of its devices.
        date: of the run.
    """
    assumed = machine_named(product_of(backend, soc))
    figures: dict[str, float] = {}
    for result in results:
        if result.stage == STAGE and result.status == "passed":
            figures |= result.figures
    # Rank 1 is rank 0's nearest neighbour: the other die of a card, or where there is none, another card.
    nearest = next(name for name in ("hop_sibling_us", "hop_node_us") if name in assumed.constants)
    figures |= {nearest + end: figures[HOP + end] for end in ENDS if HOP + end in figures}
    clock = figures.get("clock_ghz", assumed.clock_ghz)
    for rate, name in RATES.items():
        per_cycle = 1 / clock / (figures.get("blocks", 1) if rate == ALL_BLOCKS else 1)
        figures |= {name + end: figures[rate + end] * per_cycle for end in ENDS if rate + end in figures}
    values = {name: value for name, value in figures.items() if name in assumed.constants}
    ranges = {name: (figures[name + LOW], figures[name + HIGH]) for name in values if name + LOW in figures}
    return assumed.measured(values, f"{soc} {date}", ranges)
