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
MOST_CACHED_BYTES = 256 << 10


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
    # A handful of rows reaches its reader through the caches. More are written without first reading what
    # they overwrite: found faster from some hundred kilobytes on, whatever ran in between.
    share = _last_level_cache_bytes() // (32 * num_ranks)
    return CpuSettings(cached_bytes=min(share, MOST_CACHED_BYTES), spins=200, yields=yields)


def _last_level_cache_bytes() -> int:
    """Of the largest cache of a core, as the kernel tells."""
    sizes = [_bytes_of(path) for path in CACHES.glob("index*/size")]
    return max(sizes, default=USUAL_CACHE_BYTES)


def _bytes_of(path: Path) -> int:
    text = path.read_text(encoding="ascii").strip()
    return int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1:], 0)
