"""What a run leaves: samples as CSV, figures and their machine as JSON, tables on the terminal."""

from __future__ import annotations

import json
from dataclasses import dataclass
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
from benchmarks.harness import SHARED_NOTE, Record, cores
from benchmarks.reports import machine, versions, write_json
from benchmarks.sizes import EXPERTS, HIDDEN, TOPK


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
        write_json(path, vars(self))


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
