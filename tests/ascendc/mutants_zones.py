"""Kernels that do not look up in memory which zone it is."""

from __future__ import annotations

from .case import Case
from .exchange import ExchangeCase
from .mutants import MUTANT_TIMEOUT_US, Mutant, case_of, without

FIND = "        FindZone(args_);\n"
_INBAND = case_of(inband=True)


def _mutant(kernel: str, case: Case | ExchangeCase) -> Mutant:
    return Mutant(f"{kernel} ignores the zone in memory", (without(f"include/{kernel}.h", FIND),), case)


ZONE_MUTANTS = (
    _mutant("dispatch_send", case_of()),
    _mutant("dispatch_wait", case_of()),
    _mutant("dispatch_rows", case_of()),
    _mutant("combine_send", case_of()),
    _mutant("combine_wait", case_of()),
    _mutant("combine_ready", case_of(tokens=(9, 8), part_tokens=3, hidden=64)),
    _mutant("inband_send", _INBAND),
    _mutant("inband_receive", _INBAND),
    _mutant("exchange_send", ExchangeCase(timeout_us=MUTANT_TIMEOUT_US)),
    _mutant("post_status", ExchangeCase(timeout_us=MUTANT_TIMEOUT_US)),
)
