"""Sizes of this machine's data caches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")
UNITS = " KMG"


def data_caches(cpus: Path | None = None) -> dict[int, int]:
    """Bytes of each level's cache, by level from 1, of the first core that this process may run on.

    Args:
        cpus: where Linux describes cores; None for `CPUS`.

    Returns:
        Levels in ascending order; none where nobody says.
    """
    core = min(os.sched_getaffinity(0))
    return dict(sorted(_described((cpus or CPUS) / f"cpu{core}" / "cache")))


def _described(folder: Path) -> Iterator[tuple[int, int]]:
    for cache in folder.glob("index*"):
        try:
            level, size, kind = ((cache / name).read_text().strip() for name in ("level", "size", "type"))
            if kind != "Instruction":
                yield int(level), _bytes(size)
        except (OSError, ValueError):  # not all of them say all
            continue


def _bytes(size: str) -> int:
    """Of "2048K", or "32M"."""
    power = UNITS.index(size[-1]) if size[-1:].isalpha() else 0
    return int(size[:-1] if power else size) << 10 * power
