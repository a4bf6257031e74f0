"""How the CPU back end copies and waits: what changes speed and never results."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

from moe_triton.backends.cpu.nic import Nic
from moe_triton.backends.cpu.paced_link import PacedLink
from moe_triton.core.tuning import Tuning

ALL_BYTES = 1 << 62


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
    usual = _usual(num_ranks)
    chosen = {name: getattr(tuning, name) for name in ("cached_bytes", "spins", "yields")}
    return usual._replace(
        link=link, nic=nic, **{name: value for name, value in chosen.items() if value is not None}
    )


@functools.cache
def _usual(num_ranks: int) -> CpuSettings:
    cores = len(os.sched_getaffinity(0))
    # A rank with a core of its own can keep polling without disturbing others, and reacts at once.
    yields = 2000 if num_ranks <= cores else 20
    # With prefetches ahead of the stores, cached writes are faster than streaming stores.
    return CpuSettings(cached_bytes=ALL_BYTES, spins=200, yields=yields)
