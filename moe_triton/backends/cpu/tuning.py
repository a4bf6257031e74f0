"""How the CPU back end copies and waits: what changes speed and never results."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import NamedTuple

from moe_triton.tuning import Tuning

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# Where the machine does not say.
USUAL_CACHE_BYTES = 16 << 20


class CpuSettings(NamedTuple):
    """The settings of `Tuning` that only this back end has, none of them left open."""

    cached_bytes: int
    spins: int
    yields: int


def settings_of(tuning: Tuning, num_ranks: int) -> CpuSettings:
    """A rank's settings, when ``num_ranks`` ranks share the machine."""
    usual = _usual(num_ranks)
    chosen = (tuning.cached_bytes, tuning.spins, tuning.yields)
    return CpuSettings(*(u if c is None else c for c, u in zip(chosen, usual, strict=True)))


@functools.cache
def _usual(num_ranks: int) -> CpuSettings:
    cores = len(os.sched_getaffinity(0))
    # A rank with a core of its own disturbs nobody by waiting awake, and is there at once.
    yields = 2000 if num_ranks <= cores else 20
    # A row is written by one rank and read by another: what is in flight has to fit beside what is computed.
    return CpuSettings(cached_bytes=last_level_cache_bytes() // (4 * num_ranks), spins=200, yields=yields)


def last_level_cache_bytes() -> int:
    """Bytes of the largest cache of a core, as the kernel tells."""
    sizes = [_bytes_of(path) for path in CACHES.glob("index*/size")]
    return max(sizes, default=USUAL_CACHE_BYTES)


def _bytes_of(path: Path) -> int:
    text = path.read_text(encoding="ascii").strip()
    return int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1:], 0)
