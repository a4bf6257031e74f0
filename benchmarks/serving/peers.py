"""The same call against gloo, Open MPI and memcpy of the bytes that it moves, by the routes of
`benchmarks.compare`.

All of them get the whole batch; what is called slots there is a buffer of the size of a round here. Both
operators are timed in one go, and routes are checked against each other first and last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.compare.cases import OF_SLOTS, Case, Job, Sample, from_message
from benchmarks.compare.figures import BEST_OF_MPI, Metric, Samples, Target
from benchmarks.compare.launch import Message, Mpi, run_job
from benchmarks.harness import with_interval
from benchmarks.serving.sizes import HIDDEN, OF_MEMCPY, ROUND_TOKENS, TOKENS, VS_GLOO, VS_MPI

OURS = "slots"
NATIVE = "mpi_native"
ROUTES = (OURS, "gloo_alltoallv", *BEST_OF_MPI, NATIVE, *OF_SLOTS)


@dataclass(frozen=True)
class Asked:
    """A ratio of two routes' times, and what is asked of it."""

    metric: Metric
    target: Target | None


ASKED = (
    Asked(Metric("vs_gloo_alltoallv", "gloo all-to-all-v / it", ("gloo_alltoallv",), (OURS,)), VS_GLOO),
    Asked(Metric("vs_mpi_best", "best of MPI / it", BEST_OF_MPI, (OURS,)), VS_MPI),
    Asked(Metric("vs_mpi_native", "MPI with our kernels / it", (NATIVE,), (OURS,)), None),
    Asked(Metric("fraction_of_memcpy", "memcpy / it", OF_SLOTS, (OURS,)), OF_MEMCPY),
    Asked(Metric("fraction_of_row_memcpy", "the same in rows / it", OF_SLOTS[:1], (OURS,)), None),
)


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        ranks, tokens, round_tokens, hidden: W, T, B, H.
        rows: how they are dispatched, one after the other: "" or "int8".
        seconds: for each of them, about.
        iterations: instead of as many as fit.
    """

    ranks: int
    rows: tuple[str, ...]
    seconds: float
    iterations: int | None = None
    tokens: int = TOKENS
    round_tokens: int = ROUND_TOKENS
    hidden: int = HIDDEN


def run(setting: Setting, mpi: Mpi, say: Callable[[str], None]) -> list[Sample]:
    """Starts the ranks and measures.

    Args:
        setting: what is measured.
        mpi: how to start them.
        say: is told how far it is.
    """
    job = Job(
        "compare",
        setting.ranks,
        (setting.tokens,),
        setting.rows,
        ROUTES,
        setting.iterations,
        setting.seconds,
        results="",
        hidden=setting.hidden,
        round_tokens=setting.round_tokens,
        only_both=True,
    )
    samples: list[Sample] = []
    case = ""

    def hear(message: Message) -> None:
        nonlocal case
        if message["kind"] == "start":
            case = message["case"]
        elif message["kind"] == "iteration":
            say(f"{case}: iteration {message['done']} of {message['total']}")
        else:
            samples.extend(from_message(message["samples"]))

    run_job(job, mpi, hear)
    return samples


def figures(samples: Samples, case: Case) -> dict[str, float]:
    """Every ratio that there is, with its interval."""
    found: dict[str, float] = {}
    for metric in (each.metric for each in ASKED):
        if (pair := samples.pair(case, metric)) is not None:
            found |= with_interval(metric.name, samples.ratios(case, *pair))
    return found


def samples_of(documents: Sequence[dict[str, Any]]) -> list[Sample]:
    """The inverse of ``dataclasses.asdict`` of each."""
    return from_message(documents)
