"""Kernels that do not look up in memory which zone it is."""

from __future__ import annotations

from .case import Case
from .exchange import ExchangeCase
from .mutants import FLAGS, MUTANT_TIMEOUT_US, Mutant, case_of, without


def _mutant(what: str, case: Case | ExchangeCase) -> Mutant:
    return Mutant(f"{what} ignore the zone in memory", (without(FLAGS, "        FindZone(args_);\n"),), case)


ZONE_MUTANTS = (
    _mutant("rows", case_of()),
    _mutant("results in parts", case_of(tokens=(9, 8), part_tokens=3, hidden=64)),
    _mutant("rows with flags in band", case_of(inband=True)),
    _mutant("exchanges", ExchangeCase(timeout_us=MUTANT_TIMEOUT_US)),
)
