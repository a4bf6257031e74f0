"""How the CPU back end copies and waits: what changes speed and never results."""

from __future__ import annotations

import os
from typing import NamedTuple

from moe_triton.backends.cpu.nic import Nic
from moe_triton.backends.cpu.paced_link import PacedLink
from moe_triton.core.tuning import Tuning, usual_on_cpu


class CpuSettings(NamedTuple):
    """The settings of `Tuning` that only this back end has, all decided; a paced link and a NIC, if any."""

    cached_bytes: int
    spins: int
    yields: int
    link: PacedLink | None = None
    nic: Nic | None = None


def settings_of(
    tuning: Tuning, num_ranks: int, link: PacedLink | None = None, nic: Nic | None = None
) -> CpuSettings:
    """A rank's settings, when ``num_ranks`` ranks share the machine."""
    usual = usual_on_cpu(num_ranks, len(os.sched_getaffinity(0)))
    given = {name: getattr(tuning, name) for name in ("cached_bytes", "spins", "yields")}
    chosen = {name: usual[name] if value is None else value for name, value in given.items()}
    return CpuSettings(**chosen, link=link, nic=nic)
