"""The machine's constants: measured ones in place of those assumed for its product."""

from __future__ import annotations

from collections.abc import Sequence

from moe_triton.costs import FIELDS, MachineConstants, assumed_constants
from moe_triton.tools.selftest.check import Result
from moe_triton.tools.selftest.checks.constants import ALL_BLOCKS, ONE_BLOCK, STAGE

# Parts of torch_npu's device names, and the products whose constants apply.
PRODUCTS = {"910_93": "A3", "910C": "A3", "910B": "A2"}


def product_of(backend: str, soc: str) -> str:
    """The machine whose assumed constants fill the gaps; A3 for an unknown device."""
    if backend == "cpu":
        return "cpu"
    return next((product for part, product in PRODUCTS.items() if part.lower() in soc.lower()), "A3")


def constants_of(results: Sequence[Result], backend: str, soc: str, date: str) -> MachineConstants:
    """The constants of the machine of these results.

    Args:
        results: of a run.
        backend: that it ran on.
        soc: name of its devices.
        date: of the run.
    """
    assumed = assumed_constants(product_of(backend, soc))
    figures: dict[str, float] = {}
    for result in results:
        if result.stage == STAGE and result.status == "passed":
            figures |= result.figures
    measured = {name: value for name, value in figures.items() if name in FIELDS}
    where = f"{soc} {date}"
    constants = assumed.merge(measured, where)
    clock = constants.clock_ghz
    rates: dict[str, float] = {}
    if ALL_BLOCKS in figures:
        rates["stream_bytes_per_cycle"] = figures[ALL_BLOCKS] / figures["blocks"] / clock
        rates["stream_bytes_per_cycle_alone"] = figures[ONE_BLOCK] / clock
    return constants.merge(rates, where)
