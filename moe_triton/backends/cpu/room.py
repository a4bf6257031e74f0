"""How much memory is left for windows: on the machine, and in the control groups of this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
# Version 1 writes "no limit" as the largest multiple of a page that 63 bits hold.
_NO_LIMIT = 1 << 62
# Of each version: the files with the limit and with what is used, and what fields of memory.stat begin with.
_VERSIONS = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}
# Pages of files are evicted when memory is needed; shared memory is not among them.
_RECLAIMABLE = ("inactive_file", "active_file")


class Limit(NamedTuple):
    """The memory that a control group leaves to all of its processes together.

    Attributes:
        key: identifies the group among those of this machine.
        name: of its folder.
        free: bytes.
    """

    key: str
    name: str
    free: int


def available_memory(proc: Path = PROC) -> int:
    """Bytes available on this machine without swapping."""
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return sys.maxsize


def cgroup_limits(proc: Path = PROC, mount: Path = CGROUPS) -> list[Limit]:
    """The limits on this process's memory, of its control group and those around it, of both versions.

    Args:
        proc: where procfs is.
        mount: where control groups are.
    """
    limits = []
    for line in _lines(proc / "self" / "cgroup"):
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            limits_around = (_limit(folder, 1) for folder in _around(mount / "memory", path))
        elif not controllers:
            root = mount if (mount / "cgroup.controllers").exists() else mount / "unified"
            limits_around = (_limit(folder, 2) for folder in _around(root, path))
        else:
            continue
        limits += [limit for limit in limits_around if limit is not None]
    return limits


def _around(root: Path, path: str) -> Iterator[Path]:
    """A control group's folder and those of its ancestors, as far as they are visible to this process.

    A container may see its own group as the root, although its path names it from the real root.
    """
    inside = Path(path.strip("/"))
    if ".." not in inside.parts:
        for part in (inside, *inside.parents):
            if part.parts and (root / part).is_dir():
                yield root / part
    yield root


def _limit(folder: Path, version: int) -> Limit | None:
    most_file, used_file, prefix = _VERSIONS[version]
    most, used = _number(folder / most_file), _number(folder / used_file)
    if most is None or used is None or most > _NO_LIMIT:
        return None
    fields = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    reclaimable = sum(int(fields.get(f"{prefix}{name}", 0)) for name in _RECLAIMABLE)
    status = folder.stat()
    return Limit(
        f"{status.st_dev}:{status.st_ino}", str(folder), max(0, most - used + min(used, reclaimable))
    )


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeError):
        return []
