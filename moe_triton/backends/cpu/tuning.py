"""How the CPU back end copies and waits: what changes speed and never results."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
# Where the machine does not say.
USUAL_CACHE_BYTES = 16 << 20


@dataclass(frozen=True)
class CpuTuning:
    """Settings of one rank.

    Attributes:
        cached_bytes: rows that one launch writes by way of the caches; what it writes beyond that goes past
            them, since it would push out what is read next.
        spins: looks at missing flags with only a pause in between.
        yields: looks after those that let other threads run in between. Then the waiter sleeps until enough
            flags have come.
    """

    cached_bytes: int
    spins: int
    yields: int


@functools.cache
def default_tuning(num_ranks: int) -> CpuTuning:
    """What suits this machine when ``num_ranks`` ranks share it."""
    cores = len(os.sched_getaffinity(0))
    # A rank with a core of its own disturbs nobody by waiting awake, and is there at once.
    yields = 2000 if num_ranks <= cores else 20
    # A row is written by one rank and read by another: what is in flight has to fit beside what is computed.
    return CpuTuning(cached_bytes=last_level_cache_bytes() // (4 * num_ranks), spins=200, yields=yields)


def last_level_cache_bytes() -> int:
    """Bytes of the largest cache of a core, as the kernel tells."""
    sizes = [_bytes_of(path) for path in CACHES.glob("index*/size")]
    return max(sizes, default=USUAL_CACHE_BYTES)


def _bytes_of(path: Path) -> int:
    text = path.read_text(encoding="ascii").strip()
    return int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1:], 0)
