"""What is compared: cases, routes, phases, the job that ranks are started for, and what comes of it: samples.

A sample is one time of one route in one iteration; a CSV file holds them all.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from benchmarks.sizes import HIDDEN

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_OUT = ROOT / "build" / "compare"

Phase = Literal["both", "dispatch", "combine", "warm", "cold"]
PHASES: tuple[Phase, ...] = ("both", "dispatch", "combine")
# Both operators in one go, but right after the same, or with the caches emptied.
TEMPERATURES: tuple[Phase, ...] = ("warm", "cold")

ROUTES = {
    "slots": "slots",
    "direct": "direct and pull",
    "blocks": "blocks, as on A2",
    "nowait": "slots without waiting",
    "gloo_alltoallv": "gloo all-to-all-v",
    "gloo_allgather": "gloo all-gather, reduce-scatter",
    "mpi_alltoallv": "MPI all-to-all-v",
    "mpi_allgather": "MPI all-gather, reduce-scatter",
    "mpi_native": "MPI all-to-all-v, our kernels",
    "memcpy_slots": "memcpy, bytes of slots",
    "memcpy_slots_whole": "the same in one piece",
    "memcpy_direct": "memcpy, bytes of direct",
    "memcpy_whole": "the same in one piece",
}
# Those whose figures change most with what is in the caches: ours, and what they are held against.
OF_DIRECT, OF_SLOTS = ("memcpy_direct", "memcpy_whole"), ("memcpy_slots", "memcpy_slots_whole")
AT_TEMPERATURES = ("slots", "direct", *OF_SLOTS, *OF_DIRECT)


@dataclass(frozen=True, order=True)
class Case:
    """One place in the tables.

    Attributes:
        ranks: W.
        tokens: T, on every rank.
        quantize: how rows are dispatched: a name of `moe_triton.core.row_formats`, "" for as they are.
    """

    ranks: int
    tokens: int
    quantize: str

    def as_record(self) -> dict[str, object]:
        """For `benchmarks.harness.Record`."""
        return asdict(self)

    def __str__(self) -> str:
        return f"W {self.ranks}, BS {self.tokens}, {self.quantize or 'bf16'}"


@dataclass(frozen=True)
class Job:
    """What a group of ranks is started for.

    Attributes:
        kind: "compare" runs every route; "tokens" and "ranks" are the sweeps of `benchmarks.compare.figures`.
        ranks: processes.
        tokens: per rank; a sweep has all of them at once, otherwise one after the other.
        quantize: one after the other.
        routes: to be timed.
        iterations: per case, or None for as many as fit.
        seconds: per case, where iterations is None.
        results: file that rank 0 appends its messages to, a line of JSON each.
        keeps_memory: malloc keeps what is freed (`benchmarks.harness.keep_freed_memory`).
        seed: of the routing and of the order of routes.
        hidden: H.
        round_tokens: most that our buffers take in a round, None for as many as there are.
        only_both: time nothing but both operators in one go.
    """

    kind: Literal["compare", "tokens", "ranks"]
    ranks: int
    tokens: tuple[int, ...]
    quantize: tuple[str, ...]
    routes: tuple[str, ...]
    iterations: int | None
    seconds: float
    results: str
    keeps_memory: bool = True
    seed: int = 0
    hidden: int = HIDDEN
    round_tokens: int | None = None
    only_both: bool = False

    @staticmethod
    def from_json(loaded: dict[str, Any]) -> Job:
        """The inverse of ``dataclasses.asdict`` and JSON."""
        tuples = {name: tuple(loaded[name]) for name in ("tokens", "quantize", "routes")}
        return Job(**{**loaded, **tuples})

    @property
    def num_cases(self) -> int:
        """Result lines that rank 0 will write."""
        return len(self.quantize) * (len(self.tokens) if self.kind == "compare" else 1)


@dataclass(frozen=True)
class Sample:
    """One time.

    Attributes:
        route: a name of `benchmarks.compare.cases.ROUTES`.
        phase: what was timed: both operators in one go, or one of them on its own; or both in one go right
            after the same ("warm"), or with the caches emptied ("cold").
        ranks, tokens, quantize: the case.
        iteration: of the case, from 0.
        order: position in the iteration, whose routes run in random order.
        us: from the first rank in to the last rank out, in microseconds; None for an absent route.
        kernels_us: inside the kernels, on the rank that spent most there; None where a route cannot tell.
        steps: microseconds of each step, the mean over the ranks; empty where a route cannot tell.
        core_us: what the ranks' threads took of their cores, all together.
        shared: whether ranks shared a core: more than there are, or one that waited for its own.
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
    shared: bool = False

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
    "shared": lambda text: text == "1",
}


def _sample(row: dict[str, str]) -> Sample:
    values = {name: _READ.get(name, str)(row[name]) for name in COLUMNS}
    return Sample(**values)  # type: ignore[arg-type]
