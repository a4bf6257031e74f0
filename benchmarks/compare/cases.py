"""What is compared: cases, routes, phases, and the job that ranks are started for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_OUT = ROOT / "build" / "compare"

Phase = Literal["both", "dispatch", "combine"]
PHASES: tuple[Phase, ...] = ("both", "dispatch", "combine")

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
        kind: "compare" runs every route; "tokens" and "ranks" are the sweeps of `benchmarks.compare.scaling`.
        ranks: processes.
        tokens: per rank; a sweep has all of them at once, otherwise one after the other.
        quantize: one after the other.
        routes: to be timed.
        iterations: per case, or None for as many as fit.
        seconds: per case, where iterations is None.
        results: file that rank 0 appends its messages to, a line of JSON each.
        keeps_memory: malloc keeps what is freed (`benchmarks.harness.keep_freed_memory`).
        seed: of the routing and of the order of routes.
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

    @staticmethod
    def from_json(loaded: dict[str, Any]) -> Job:
        """The inverse of ``dataclasses.asdict`` and JSON."""
        tuples = {name: tuple(loaded[name]) for name in ("tokens", "quantize", "routes")}
        return Job(**{**loaded, **tuples})

    @property
    def num_cases(self) -> int:
        """Result lines that rank 0 will write."""
        return len(self.quantize) * (len(self.tokens) if self.kind == "compare" else 1)
