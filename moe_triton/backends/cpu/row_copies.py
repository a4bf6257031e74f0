"""How this machine copies rows fastest: known of its processor, or timed once and kept with the kernels."""

from __future__ import annotations

import ctypes
import functools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moe_triton.backends.cpu import native
from moe_triton.backends.cpu.triton import cache
from moe_triton.core.cpu_caches import data_caches
from moe_triton.core.cpu_family import cpu_family
from moe_triton.core.errors import ToolchainError
from moe_triton.core.logs import log_of
from moe_triton.core.tuning import ALL_BYTES

_log = log_of("kernels")

LIBRARY, STREAM = "library", "stream"
"""The C library's memcpy, which every way is compared with; and streaming stores."""

MEASURED = {"amd-25-1": (LIBRARY, True), "amd-26": (LIBRARY, False), "intel-6-207": (LIBRARY, True)}
"""By vendor and family, or model: the way through the caches, and whether rows are streamed that the second
cache does not hold. From whole operators, with experts that read what they get (docs/speed.md)."""

# Two cores copy rows of 14 KB to 8 places each, as many as fill the second cache so often, and for so long.
_CACHES, _PLACES, _ROW_BYTES, _MOST_NS = 8, 8, 14336, 200_000_000
_MOST_ROWS = 256  # 29 MB a core
_UNKNOWN_CACHE_BYTES = 1 << 20
_LEAST_GAIN = 1.05  # on a machine that others use, a timing is no better
_METHOD = 2  # part of the key of what is kept: another one times anew


@dataclass(frozen=True)
class CacheSizes:
    """Bytes of a core's second cache, and of the last one that it shares; None where nobody says."""

    second: int | None
    last: int | None


@dataclass(frozen=True)
class RowCopies:
    """How a machine copies rows.

    Attributes:
        number: of the way through the caches, for native code.
        name: of that.
        streams: whether streaming stores are faster for what the second cache does not hold.
        caches: of the machine.
        is_timed: whether its own timing says so.
    """

    number: int
    name: str
    streams: bool
    caches: CacheSizes
    is_timed: bool

    def cached_bytes(self, num_ranks: int) -> int:
        """Bytes of rows that a launch writes through the caches.

        A rank is sent about as much as it sends, and reads it next: from the cache that holds it.

        Args:
            num_ranks: that share the last cache.
        """
        second, last = self.caches.second, self.caches.last
        if self.streams and second is not None:
            return second
        return ALL_BYTES if last is None else last // num_ranks


def chosen() -> RowCopies:
    """What is fastest here, on as many cores as this process may run on now."""
    return _chosen(min(2, len(os.sched_getaffinity(0))))


@functools.cache
def _chosen(threads: int) -> RowCopies:
    caches, names = cache_sizes(), _names()
    for family, (name, streams) in MEASURED.items():
        if f"{cpu_family()}-".startswith(f"{family}-"):
            return RowCopies(names.index(name), name, streams, caches, is_timed=False)
    second = caches.second or _UNKNOWN_CACHE_BYTES
    rows = min(_MOST_ROWS, math.ceil(_CACHES * second / (_PLACES * _ROW_BYTES)))
    key = cache.entry_key(("row copies", _METHOD, cpu_family(), names, rows, threads))

    def build() -> bytes:
        return json.dumps(timed(names, rows, threads)).encode()

    try:
        with cache.fetch(cache.cache_folder(), key, build, ".json", "the timing of row copies") as entry:
            speed_ups = json.loads(entry.body())
    except ToolchainError:  # there is no place to keep it, as compiling will say
        speed_ups = json.loads(build())
    except MemoryError as error:
        _log.info("copies of rows are not timed: %s", error)
        names, speed_ups = [LIBRARY], {LIBRARY: 1.0, STREAM: 0.0}
    return fastest(names, speed_ups, caches)


def timed(names: list[str], rows: int, threads: int) -> dict[str, float]:
    """How many times as fast as the first way each one is here, and streaming stores.

    Args:
        names: of all ways through the caches.
        rows: that each thread copies to 8 places in a turn.
        threads: that do so at the same time.

    Raises:
        MemoryError: there is no room for the rows, or for a thread.
    """
    speed_ups = (ctypes.c_double * (len(names) + 1))()
    if native.library().moe_time_row_copies(rows, threads, _MOST_NS, speed_ups):
        raise MemoryError(f"{threads} threads with {rows} rows each")
    found = dict(zip((*names, STREAM), speed_ups, strict=True))
    _log.info("copies of rows, times as fast as memcpy: %s", found)
    return found


def fastest(names: list[str], speed_ups: Mapping[str, float], caches: CacheSizes) -> RowCopies:
    """Chooses by how many times as fast as "library" each way is, and "stream"."""
    name = max(names, key=speed_ups.__getitem__)
    if speed_ups[name] < _LEAST_GAIN * speed_ups[LIBRARY]:
        name = LIBRARY
    streams = speed_ups[STREAM] >= _LEAST_GAIN * speed_ups[name]
    return RowCopies(names.index(name), name, streams, caches, is_timed=True)


def _names() -> list[str]:
    """Of the ways through the caches, by their numbers."""
    library = native.library()
    names: list[str] = []
    while name := library.moe_row_copy_name(len(names)):
        names.append(name.decode())
    return names


def cache_sizes(cpus: Path | None = None) -> CacheSizes:
    """Of the first core that this process may run on.

    Args:
        cpus: where Linux describes cores; None for where it does.
    """
    sizes = data_caches(cpus)
    return CacheSizes(sizes.get(2), sizes[max(sizes)] if max(sizes, default=1) > 1 else None)
