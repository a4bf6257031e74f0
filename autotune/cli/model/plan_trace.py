"""A priced plan for Perfetto: a process for the rank, threads for streams, waits and the pipes of a core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autotune.model.bodies.movement import us_of
from autotune.model.bodies.replay import replay_of
from autotune.model.clusters.prices import PricedPlan
from autotune.model.constants import Machine
from autotune.model.cost import Place, Work, work_of
from autotune.model.timelines.timeline import Span
from autotune.model.traffic import Traffic
from autotune.npu_compiler.socs import SOC_OF_PRODUCT
from moe_triton.core.kernel import TritonKernel
from moe_triton.runtime.traces import TraceFile

Json = dict[str, Any]
THREADS = "compute", "communication", "waits for other ranks"
PIPES = "S", "MTE2", "V", "MTE3"


def write_trace(path: Path, operators: Sequence[PricedPlan], traffic: Traffic, machine: Machine) -> None:
    """Writes operators that follow one another, with every instruction of the slowest cores.

    Raises:
        ArgumentError: the file cannot be written.
    """
    file = TraceFile(path)
    file.start(is_first=True)
    file.add(events_of(operators, traffic, machine))


def events_of(operators: Sequence[PricedPlan], traffic: Traffic, machine: Machine) -> Iterator[Json]:
    """The events, in Chrome's JSON; times in microseconds."""
    yield _meta(traffic.rank, 0, "process_name", f"rank {traffic.rank}")
    threads = [*THREADS, *map(_pipe_thread, PIPES)]
    for number, name in enumerate(threads):
        yield _meta(traffic.rank, number, "thread_name", name)
    begin = 0.0
    for priced in operators:
        line = priced.timeline
        for index, span in enumerate(line.spans):
            work = work_of(span.launch, traffic, Place(line.run, index, line.number))
            for event in (*_of_launch(priced, span), *_of_pipes(span, work, machine)):
                tid = threads.index(event["tid"])
                yield {**event, "ph": "X", "pid": traffic.rank, "tid": tid, "ts": begin + event["ts"]}
        begin += priced.us


def _of_launch(priced: PricedPlan, span: Span) -> Iterator[Json]:
    operator, step, cost = priced.plan.operator, span.launch.step, span.cost
    before = span.launch_us + span.event_us
    yield _span("launch", operator, span.stream, span.begin_us - before, before, of=step)
    arguments = {
        "of": operator,
        "kernel": span.launch.kernel.name,
        "blocks": span.launch.blocks,
        "most of it": cost.bound,
        "parts_us": dict(cost.parts),
        "bytes": int(cost.read + cost.written),
        "sent_bytes": int(cost.leaving),
    }
    yield _span(step, span.stream, span.stream, span.begin_us, span.end_us - span.begin_us, **arguments)
    if span.waited_us > 0:
        begin = span.end_us - span.waited_us
        yield _span(step, "wait", THREADS[-1], begin, span.waited_us, of=operator)


def _of_pipes(span: Span, work: Work, machine: Machine) -> Iterator[Json]:
    """Every instruction of the slowest core of a launch that is replayed."""
    kernel, step = span.launch.kernel, span.launch.step
    if not isinstance(kernel, TritonKernel):
        return
    soc = SOC_OF_PRODUCT[work.traffic.config.product]
    replayed = replay_of(kernel, soc, work.arguments, work.blocks, machine, with_spans=True)  # type: ignore[arg-type]
    for each in replayed.slowest.spans:
        begin, us = span.begin_us + us_of(machine, each.begin), us_of(machine, each.end - each.begin)
        yield _span(each.name, "pipe", _pipe_thread(each.pipe), begin, us, of=step, bytes=each.num_bytes)


def _pipe_thread(pipe: str) -> str:
    return f"slowest core: {pipe}"


def _span(name: str, category: str, thread: str, begin_us: float, us: float, **arguments: object) -> Json:
    return {"name": name, "cat": category, "tid": thread, "ts": begin_us, "dur": us, "args": arguments}


def _meta(pid: int, tid: int, kind: str, name: str) -> Json:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
