"""How long dispatch and combine take: by call, from the first rank in to the last rank out, and by kernel.

Not a benchmark: a few repetitions on a machine as it is. What a time is worth, the copy says that is
measured between the calls.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from moe_triton import EPBuffer
from moe_triton.core.config import Config
from moe_triton.tools.selftest.cases import Case, Inputs, finish, inputs_of, make_buffer
from moe_triton.tools.selftest.check import HIDDEN, Check, Finding, Place, Settings, of_rank_0
from moe_triton.tools.selftest.checks.operators import EXPERTS_PER_RANK, FIRST, SCHEMES, TOPK
from moe_triton.tools.selftest.timing import WARM_UP, percentiles

STAGE = "timing"
BATCHES, QUICK_BATCHES = (1, 16, 64, 128), (1, 64)
ITERATIONS, QUICK_ITERATIONS = 50, 10
OPERATORS: tuple[Literal["dispatch", "combine"], ...] = ("dispatch", "combine")
CALLS = (*OPERATORS, "both")
START_IN_NS = 1_000_000  # later than the slowest rank has heard of it
Steps = dict[str, list[float]]
# Names of a report's figures and facts.
STEP, TOKENS, RANKS = " step ", "tokens", "ranks"
SCHEME, ROWS, BF16 = "scheme", "rows", "bf16"


def timing_checks(settings: Settings, ranks: int) -> list[Check]:
    """By scheme and tokens per rank, not quantised and quantised; a quick run takes the first scheme."""
    own = partial(Check, stage=STAGE, function=time_rounds, ranks=ranks, needs=(FIRST,), merge=over_all_ranks)
    return [
        own(f"{scheme}, BS {tokens}, {quantize or 'bf16'}", arguments=(scheme, tokens, quantize))
        for scheme in (SCHEMES[:1] if settings.quick else SCHEMES)
        for quantize in (None, "int8")
        for tokens in (QUICK_BATCHES if settings.quick else BATCHES)
    ]


def timed_case(scheme: str, tokens: int, quantize: str | None, ranks: int, seed: int) -> Case:
    """What is timed: every rank has as many tokens, and experts are chosen uniformly."""
    config = Config(ranks, tokens, HIDDEN, TOPK, EXPERTS_PER_RANK * ranks, scheme=scheme)
    return Case(config, seed, "uniform", (tokens,), quantize=quantize)


class _Clock:
    """Times of one rank, in microseconds of CLOCK_MONOTONIC, which is the same for all ranks of a machine."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.samples: dict[str, list[float]] = {}

    def take(self, name: str, call: Callable[[], object]) -> None:
        """Times a call that all ranks make at once."""
        self._place.backend.synchronize()
        _start_together()
        begin = time.monotonic_ns() / 1000
        call()
        self._place.backend.synchronize()
        end = time.monotonic_ns() / 1000
        self.samples.setdefault(f"{name} begin", []).append(begin)
        self.samples.setdefault(f"{name} end", []).append(end)


def _start_together() -> None:
    """Returns at the same moment on all ranks of a machine, which a barrier of the host's does not."""
    start = torch.tensor([time.monotonic_ns() + START_IN_NS])
    dist.all_reduce(start, dist.ReduceOp.MAX)
    moment = int(start)
    while time.monotonic_ns() < moment:
        pass


def time_rounds(place: Place, scheme: str, tokens: int, quantize: str | None) -> Finding:
    """Dispatch, combine, and both in a row; the kernels' own times; a copy of the same bytes."""
    settings, device = place.settings, place.backend.device
    case = timed_case(scheme, tokens, quantize, place.num_ranks, settings.seed)
    inputs = inputs_of(case, place.rank, 0).to(device)
    iterations = QUICK_ITERATIONS if settings.quick else ITERATIONS
    sent_bytes = tokens * TOPK * HIDDEN * (1 if quantize else 2)
    source, target = (torch.ones(sent_bytes, dtype=torch.uint8).to(device) for _ in range(2))
    clock = _Clock(place)
    steps: Steps = {}
    with make_buffer(case, backend=settings.backend, timeout_s=settings.wait_s) as buffer:
        one = _Round(buffer, inputs, quantize)
        calls: dict[str, Callable[[], object]] = {name: getattr(one, name) for name in CALLS}
        calls["memcpy"] = lambda: target.copy_(source)
        for number in range(WARM_UP + iterations):
            if number == WARM_UP:
                clock.samples.clear()
            for name, call in calls.items():
                clock.take(name, call)
        buffer.measure(True)  # in rounds of their own: noting may take time
        for _ in range(iterations):
            for operator in OPERATORS:
                dist.barrier()
                calls[operator]()
                finish(buffer, place.backend)
                for step, us in buffer.durations_us(operator).items():
                    steps.setdefault(f"{operator}{STEP}{step}", []).append(us)
    figures = {f"{name}_us": statistics.median(times) for name, times in steps.items()}
    for operator in OPERATORS:
        of_operator = [us for name, us in figures.items() if name.startswith(f"{operator}{STEP}")]
        figures[f"{operator}_kernels_us"] = sum(of_operator)
    figures |= {"bytes_sent": sent_bytes, TOKENS: tokens, RANKS: place.num_ranks}
    return Finding(figures=figures, facts={SCHEME: scheme, ROWS: quantize or BF16}, samples=clock.samples)


class _Round:
    """One dispatch and one combine, to be timed by themselves or in a row."""

    def __init__(self, buffer: EPBuffer, inputs: Inputs, quantize: str | None) -> None:
        self.buffer = buffer
        self._inputs = inputs
        self._quantize = quantize
        self.dispatch()
        self._results = buffer.expert_output().zero_()

    def dispatch(self) -> None:
        """Sends this rank's tokens."""
        output = self.buffer.dispatch(self._inputs.x, self._inputs.topk_idx, quantize=self._quantize)
        self._handle = output.handle

    def combine(self) -> None:
        """Brings results back; experts would have left them where the scheme wants them."""
        y = self.buffer.expert_output() if self.buffer._communicator.has_outputs_in_window else self._results
        self.buffer.combine(y, self._handle, self._inputs.topk_weights)

    def both(self) -> None:
        """One after the other."""
        self.dispatch()
        self.combine()


def over_all_ranks(findings: Sequence[Finding]) -> Finding:
    """Calls from the first rank in to the last rank out; kernels of rank 0."""
    merged = of_rank_0(findings)
    if merged.wrong or merged.skipped:
        return merged
    figures = dict(merged.figures)
    copy_us = statistics.median(_own_times(findings, "memcpy"))
    figures["memcpy_p50_us"] = copy_us
    figures["memcpy_gb_per_s"] = figures["bytes_sent"] / copy_us / 1e3
    for operator in CALLS:
        figures |= percentiles(f"{operator}_call", _spans(findings, operator))
        figures[f"{operator}_call_over_memcpy"] = figures[f"{operator}_call_p50_us"] / copy_us
    return Finding(figures=figures, facts=merged.facts)


def _spans(findings: Sequence[Finding], name: str) -> list[float]:
    """From the first rank in to the last rank out."""
    begins = zip(*(finding.samples[f"{name} begin"] for finding in findings), strict=True)
    ends = zip(*(finding.samples[f"{name} end"] for finding in findings), strict=True)
    return [max(last) - min(first) for first, last in zip(begins, ends, strict=True)]


def _own_times(findings: Sequence[Finding], name: str) -> list[float]:
    """Microseconds of each call of a name, from a rank's own begin to its own end."""
    return [
        end - begin
        for finding in findings
        for begin, end in zip(finding.samples[f"{name} begin"], finding.samples[f"{name} end"], strict=True)
    ]
