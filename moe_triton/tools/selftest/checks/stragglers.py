"""Ranks that are late, and one that never arrives."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from moe_triton.core.errors import CommunicationTimeoutError
from moe_triton.tools.selftest import cases
from moe_triton.tools.selftest.check import Check, Finding, Place, Settings, of_rank_0
from moe_triton.tools.selftest.checks.operators import FIRST, plain_case

STAGE = "stragglers"
DELAYS_MS, QUICK_DELAYS_MS = (50, 200, 500), (50, 200)
NEVER_WAIT_S, QUICK_NEVER_WAIT_S = 3.0, 1.0
# The error is raised some time after the deadline of the wait itself.
NEVER_GRACE_S = 20.0


def straggler_checks(settings: Settings, ranks: int) -> list[Check]:
    """Late ranks, then an absent one, after which its buffers are broken."""
    delays = QUICK_DELAYS_MS if settings.quick else DELAYS_MS
    late = [
        Check(f"a rank {delay} ms late", STAGE, come_late, (delay,), ranks, (FIRST,), judge_waits)
        for delay in delays
    ]
    return [*late, Check("a rank that never comes", STAGE, never_come, ranks=ranks, needs=(FIRST,))]


def come_late(place: Place, delay_ms: int) -> Finding:
    """Each rank in turn is late for a round; the results must be the same."""
    case = dataclasses.replace(plain_case(place.settings, place.num_ranks), rounds=1)
    received, sums = cases.expected_round(case, 0)
    inputs = cases.inputs_of(case, place.rank, 0).to(place.backend.device)
    begins, ends, wrong = [], [], []
    with cases.make_buffer(case, backend=place.settings.backend, timeout_s=place.settings.wait_s) as buffer:
        cases.one_round(buffer, case, inputs, None)
        cases.finish(buffer, place.backend)
        for late in range(place.num_ranks):
            dist.barrier()
            if place.rank == late:
                time.sleep(delay_ms / 1000)
            begins.append(time.monotonic() * 1000)
            output = cases.dispatched(buffer, case, inputs)
            cases.finish(buffer, place.backend)
            ends.append(time.monotonic() * 1000)
            out = cases.combined(buffer, case, inputs, output)
            differences = cases.wrong_parts(output, out, received[place.rank], sums[place.rank])
            wrong += [f"rank {late} late: {text}" for text in differences]
    return Finding(wrong=tuple(wrong), samples={"begin_ms": begins, "end_ms": ends})


def judge_waits(findings: Sequence[Finding]) -> Finding:
    """No rank may have ended a dispatch before the late rank began it; and how long the others waited."""
    if (merged := of_rank_0(findings)).wrong:
        return merged
    waits, wrong = [], []
    for late in range(len(findings)):
        began = findings[late].samples["begin_ms"][late]
        for rank, finding in enumerate(findings):
            if (ended := finding.samples["end_ms"][late]) < began:
                wrong.append(f"rank {rank} had its rows {began - ended:.1f} ms before rank {late} sent any")
            if rank != late:
                waits.append(ended - finding.samples["begin_ms"][late])
    figures = {"wait_min_ms": min(waits), "wait_p50_ms": statistics.median(waits), "wait_max_ms": max(waits)}
    return Finding(wrong=tuple(wrong), figures=figures)


def never_come(place: Place) -> Finding:
    """The last rank leaves out a dispatch: all others must name it in an error, soon after the timeout."""
    case = plain_case(place.settings, place.num_ranks)
    absent = place.num_ranks - 1
    wait_s = QUICK_NEVER_WAIT_S if place.settings.quick else NEVER_WAIT_S
    inputs = cases.inputs_of(case, place.rank, 0).to(place.backend.device)
    with cases.make_buffer(case, backend=place.settings.backend, timeout_s=wait_s) as buffer:
        cases.one_round(buffer, case, inputs, None)
        cases.finish(buffer, place.backend)
        dist.barrier()
        wrong: tuple[str, ...] = ()
        seconds = 0.0
        if place.rank != absent:

            def call() -> None:
                cases.one_round(buffer, case, inputs, None)
                cases.finish(buffer, place.backend)

            start = time.monotonic()
            wrong = _miss(call, absent)
            seconds = time.monotonic() - start
        dist.barrier()  # its window stays until no rank uses it any more
    if seconds > wait_s + NEVER_GRACE_S:
        wrong = (*wrong, f"the error came after {seconds:.1f} s; a wait may take {wait_s:g} s")
    return Finding(wrong=wrong, figures={"wait_s": wait_s, "error_after_s": seconds})


def _miss(call: Callable[[], object], absent: int) -> tuple[str, ...]:
    """What is wrong with the end of a call that waits for an absent rank."""
    try:
        call()
    except CommunicationTimeoutError as error:
        if error.missing_ranks == (absent,):
            return ()
        return (f"ranks {list(error.missing_ranks)} were missed instead of {absent}: {error}",)
    return (f"nobody missed rank {absent}",)
