"""Samples: one time of one route in one iteration, and the CSV file that holds them all."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from benchmarks.compare.cases import Case, Phase


@dataclass(frozen=True)
class Sample:
    """One time.

    Attributes:
        route: a name of `benchmarks.compare.cases.ROUTES`.
        phase: what was timed: both operators in one go, or one of them on its own.
        ranks, tokens, quantize: the case.
        iteration: of the case, from 0.
        order: position in the iteration, whose routes run in random order.
        us: from the first rank in to the last rank out, in microseconds; None for an absent route.
        kernels_us: inside the kernels, on the rank that spent most there; None where a route cannot tell.
        steps: microseconds of each step, the mean over the ranks; empty where a route cannot tell.
        core_us: what the ranks' threads took of their cores, all together.
        absent: why there is no time, or "".
    """

    route: str
    phase: Phase
    ranks: int
    tokens: int
    quantize: str
    iteration: int
    order: int
    us: float | None
    kernels_us: float | None = None
    absent: str = ""
    steps: dict[str, float] = field(default_factory=dict)
    core_us: float = 0.0

    @property
    def case(self) -> Case:
        """Which case this belongs to."""
        return Case(self.ranks, self.tokens, self.quantize)


COLUMNS = tuple(each.name for each in fields(Sample))


def absent_sample(route: str, case: Case, reason: str) -> Sample:
    """What stands for a route that could not run."""
    return Sample(route, "both", case.ranks, case.tokens, case.quantize, 0, 0, None, absent=reason)


def write_csv(path: Path, samples: Iterable[Sample]) -> None:
    """Writes every sample, a row each."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for sample in samples:
            writer.writerow({name: _text(value) for name, value in asdict(sample).items()})


def read_csv(path: Path) -> list[Sample]:
    """The inverse of `write_csv`."""
    with path.open(newline="", encoding="utf-8") as file:
        return [_sample(row) for row in csv.DictReader(file)]


def from_message(rows: Sequence[dict[str, object]]) -> list[Sample]:
    """Samples that came as JSON objects."""
    return [Sample(**row) for row in rows]  # type: ignore[arg-type]


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, dict):
        return json.dumps({name: round(us, 2) for name, us in value.items()}) if value else ""
    return str(int(value)) if isinstance(value, bool) else str(value)


def _float(text: str) -> float | None:
    return float(text) if text else None


# How columns are read that are no texts.
_READ: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(("ranks", "tokens", "iteration", "order"), int),
    **dict.fromkeys(("us", "kernels_us", "core_us"), _float),
    "steps": lambda text: json.loads(text) if text else {},
}


def _sample(row: dict[str, str]) -> Sample:
    values = {name: _READ.get(name, str)(row[name]) for name in COLUMNS}
    return Sample(**values)  # type: ignore[arg-type]
