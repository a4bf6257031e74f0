"""The figures of the whole table as text files, so that a change in the compiler's schedule shows in review.

One file per chip, one line per case. They contain the estimates too: the docs are made from these files, on
machines without the compiler.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autotune.gate.report import PIPES, GateReport

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "autotune" / "gate" / "golden"
"""In a checkout of the project; an installed package has no golden files."""

ESTIMATES = ("bandwidth", "mte2_cycles", "mte3_cycles", "v_cycles", "s_cycles")
COLUMNS = (
    *("case", "ub_bytes", "ub_percent", "loads", "stores", *PIPES),
    *("set", "wait", "barriers", "loops", "scalar_loops", "switched_off"),
    *(*ESTIMATES, "bound", "rejected"),
)

Row = dict[str, str]


@dataclass(frozen=True)
class Difference:
    """A change in one case; ``column`` is empty for a new or missing case."""

    case: str
    column: str
    before: str
    after: str

    def __str__(self) -> str:
        if not self.column:
            return f"{self.case}: {'new' if self.after else 'gone'}"
        return f"{self.case}: {self.column} {self.before or 'none'} -> {self.after or 'none'}"


def row_of(case: str, outcome: GateReport | str) -> Row:
    """A line of a golden file.

    Args:
        outcome: the report, or why the compiler rejects the kernel.
    """
    row: Row = {**dict.fromkeys(COLUMNS, ""), "case": case}
    if isinstance(outcome, str):
        return row | {"rejected": outcome}
    row |= {
        "ub_bytes": str(outcome.ub_bytes),
        "ub_percent": f"{100 * outcome.ub_share:.1f}",
        "loads": _buffering(outcome, "load"),
        "stores": _buffering(outcome, "store"),
        **{str(pipe): str(outcome.instructions[pipe]) for pipe in PIPES},
        "set": str(outcome.flags_set),
        "wait": str(outcome.flags_waited),
        "barriers": " ".join(f"{pipe}:{count}" for pipe, count in outcome.barriers.items()),
        "loops": str(outcome.loops),
        "scalar_loops": str(outcome.scalar_loops),
        "switched_off": " ".join(outcome.switched_off),
    }
    if estimate := outcome.estimate:
        figures = (estimate.bandwidth, estimate.mte2, estimate.mte3, estimate.v, estimate.s)
        row |= {name: f"{cycles:.0f}" for name, cycles in zip(ESTIMATES, figures, strict=True)}
        row["bound"] = estimate.bound
    return row


def _buffering(report: GateReport, kind: Literal["load", "store"]) -> str:
    twice, copies = report.double_buffered(kind)
    return f"{twice}/{copies}" if copies else ""


def text_of(rows: Iterable[Row]) -> str:
    """A golden file, sorted by case."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(sorted(rows, key=lambda row: row["case"]))
    return out.getvalue()


def read(soc: str, folder: Path = FOLDER) -> dict[str, Row]:
    """The kept lines of a chip by case; empty if there is no file yet."""
    path = folder / f"{soc}.csv"
    if not path.is_file():
        return {}
    return {row["case"]: row for row in csv.DictReader(io.StringIO(path.read_text()))}


def write(soc: str, rows: Iterable[Row], folder: Path = FOLDER) -> Path:
    """Replaces the kept lines of a chip."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{soc}.csv"
    path.write_text(text_of(rows))
    return path


def compare(kept: Mapping[str, Row], rows: Iterable[Row], *, is_whole: bool = True) -> list[Difference]:
    """What differs, by case.

    Args:
        is_whole: every case was compiled, so that a kept case which was not found is gone.
    """
    differences, seen = [], set()
    for row in sorted(rows, key=lambda row: row["case"]):
        name = row["case"]
        seen.add(name)
        before = kept.get(name)
        if before is None:
            differences.append(Difference(name, "", "", "new"))
            continue
        changed = (column for column in COLUMNS if before.get(column) != row[column])
        differences += [Difference(name, column, before.get(column) or "", row[column]) for column in changed]
    gone = sorted(set(kept) - seen) if is_whole else []
    return differences + [Difference(name, "", "kept", "") for name in gone]
