"""The model's timeline of dispatch and combine on this CPU, against what they take, in the same rounds.

``python -m benchmarks.model_on_cpu [--json FILE] [--markdown FILE]``. In every round the constants of the CPU
are measured first (`moe_triton.tools.selftest.cpu_probe`), then a dispatch and a combine; the timeline of
each is computed from that round's constants, so that a machine that is slower for a while is so for both.
Times are of the plan, without Python: from the first rank's begin to the last rank's end. When each rank
began is given to the timeline, unless ranks share cores: then one that began late waited for a core, and that
is for the model to say. What other programs took of the cores stands beside: where that is more than a few
percent, ranks are interrupted and wait for cores, of which the model knows nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch.distributed as dist
from rich.console import Console

from autotune.model.constants import Machine, machine_named
from autotune.model.timelines import cpu
from autotune.model.traffic import Traffic, traffic_of
from benchmarks.harness import MAX_RANKS, Record, at_least, parser, records_of, run_main, write_records
from moe_triton.backends.base import TracedCall, TraceEvent
from moe_triton.core.ascendc import TRACE_BLOCK
from moe_triton.core.plan import Plan
from moe_triton.processes import RankGroup
from moe_triton.starting_line import StartingLine
from moe_triton.tools.progress import progress
from moe_triton.tools.selftest.cases import Case, inputs_of, make_buffer
from moe_triton.tools.selftest.check import Settings
from moe_triton.tools.selftest.checks.timing import timed_case
from moe_triton.tools.selftest.cpu_probe import CpuProbe
from moe_triton.tools.text_table import TextTable, markdown_of, names, numbers, print_parts

WARM_UP = 3
OPERATORS = ("dispatch", "combine")
Spans = list[tuple[int, int]]  # begin and end in ns: of a call, and then of each of its launches


@dataclass(frozen=True)
class Round:
    """One operator of one round.

    Attributes:
        operator: "dispatch" or "combine".
        measured_us, predicted_us: from the first rank's begin to the last one's end.
        measured_steps_us, predicted_steps_us: by step, on rank 0, waits included.
    """

    operator: str
    measured_us: float
    predicted_us: float
    measured_steps_us: Mapping[str, float]
    predicted_steps_us: Mapping[str, float]


@dataclass(frozen=True)
class Taken:
    """One round on one rank.

    Attributes:
        constants: by name; none of a rank without a core.
        spans: by operator.
    """

    constants: Mapping[str, float]
    spans: Mapping[str, Spans]


def measure(
    rank: int, num_ranks: int, scheme: str, tokens: int, quantize: str | None, rounds: int, path: str
) -> tuple[list[Round], float]:
    """Measures on all ranks; rank 0 predicts.

    Returns:
        The rounds, on rank 0; and the seconds of cores that this rank took.
    """
    before_s = time.process_time()
    case = timed_case(scheme, tokens, quantize, num_ranks, Settings().seed)
    own, plans = _taken(case, rank, WARM_UP + rounds, path)
    everyone: list[list[Taken]] = [[]] * num_ranks
    dist.all_gather_object(everyone, own[WARM_UP:])
    measured_rounds = []
    if rank == 0:
        traffics = _traffics(case)
        for number in range(rounds):
            machine = _machine([taken[number].constants for taken in everyone])
            for operator in OPERATORS:
                spans = [taken[number].spans[operator] for taken in everyone]
                measured_rounds.append(_round(plans[operator], traffics, machine, spans))
    return measured_rounds, time.process_time() - before_s


def _taken(case: Case, rank: int, rounds: int, path: str) -> tuple[list[Taken], dict[str, Plan]]:
    """What each round took on this rank, and the plans that ran."""
    inputs, line = inputs_of(case, rank, 0), StartingLine()
    taken: list[Taken] = []
    plans: dict[str, Plan] = {}
    with make_buffer(case, trace=path) as buffer:
        log = buffer._communicator._executables.log
        assert log is not None
        probe = CpuProbe(buffer._communicator.backend, rank, case.config.num_ranks, Settings().wait_s)
        for _ in range(rounds):
            constants = probe.measure()
            line.wait()
            received = buffer.dispatch(inputs.x, inputs.topk_idx, quantize=case.quantize)
            # Who is done must not take a core from those who are not.
            line.wait()
            y = buffer.expert_output()
            y[: received.handle.num_received()].zero_()  # as experts would have written it
            line.wait()
            buffer.combine(y, received.handle, inputs.topk_weights)
            line.wait()
            calls, events, _ = log.take()
            plans |= {call.plan.operator: call.plan for call in calls}
            taken.append(Taken(constants, {call.plan.operator: _spans(call, events) for call in calls}))
        probe.close()
    return taken, plans


def _spans(call: TracedCall, events: Sequence[TraceEvent]) -> Spans:
    """Begin and end in ns of a call, and of each launch: the first block's begin and the last one's end."""
    blocks = [e for e in events if e.call == call.number and e.kind == TRACE_BLOCK]
    spans = [(call.begin_ns, call.end_ns)]
    for index in range(len(call.plan.launches)):
        of_launch = [e for e in blocks if e.launch == index]
        spans.append((min(e.begin_ns for e in of_launch), max(e.end_ns for e in of_launch)))
    return spans


def _traffics(case: Case) -> list[Traffic]:
    ranks = case.config.num_ranks
    ids = np.stack([inputs_of(case, rank, 0).topk_idx.numpy() for rank in range(ranks)])
    return [traffic_of(case.config, rank, ids, cpu.tiers(ranks, rank)) for rank in range(ranks)]


def _machine(measured: Sequence[Mapping[str, float]]) -> Machine:
    """The CPU by the figures of all ranks that measured: their medians."""
    have = [figures for figures in measured if figures]
    medians = {name: statistics.median(figures[name] for figures in have) for name in have[0]}
    cores = {"cores": float(len(have)), "hop_sibling_us": 0.0}
    return machine_named("cpu").measured({**medians, **cores}, "this CPU, in this round")


def _round(plan: Plan, traffics: list[Traffic], machine: Machine, spans: Sequence[Spans]) -> Round:
    first = min(own[0][0] for own in spans)
    has_core = len(spans) <= machine.cores
    begins = [(own[0][0] - first) / 1e3 if has_core else 0.0 for own in spans]
    timelines = cpu.timelines(plan, traffics, machine, begins)
    measured = max(own[0][1] for own in spans) - first
    of_rank_0 = [(end - begin) / 1e3 for begin, end in spans[0][1:]]
    predicted = [span.end_us - span.begin_us for span in timelines[0].spans]
    return Round(
        plan.operator,
        measured / 1e3,
        max(timeline.end_us for timeline in timelines),
        plan.by_step(of_rank_0),
        plan.by_step(predicted),
    )


def _ratios(rounds: Sequence[Round], operator: str) -> list[float]:
    return [r.predicted_us / r.measured_us for r in rounds if r.operator == operator]


def _cells(rounds: Sequence[Round], operator: str) -> list[str]:
    """Measured us, predicted / measured, and its spread."""
    us = statistics.median(r.measured_us for r in rounds if r.operator == operator)
    low, middle, high = np.percentile(_ratios(rounds, operator), (10, 50, 90))
    return [f"{us:.0f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]


def _records(case: dict[str, object], rounds: Sequence[Round]) -> list[Record]:
    records: list[Record] = []
    for operator in OPERATORS:
        of_operator = [r for r in rounds if r.operator == operator]
        about = {**case, "operator": operator}
        ratios = _ratios(rounds, operator)
        spread = {f"predicted / measured, p{p}": float(np.percentile(ratios, p)) for p in (10, 50, 90)}
        us = {
            "measured": statistics.median(r.measured_us for r in of_operator),
            "predicted": statistics.median(r.predicted_us for r in of_operator),
        }
        for step in of_operator[0].measured_steps_us:
            us[f"measured {step}"] = statistics.median(r.measured_steps_us[step] for r in of_operator)
            us[f"predicted {step}"] = statistics.median(r.predicted_steps_us[step] for r in of_operator)
        records += records_of("model_on_cpu", about, us, "us")
        records += records_of("model_on_cpu", about, spread, "ratio")
    return records


COLUMNS = (
    numbers("ranks"),
    numbers("tokens"),
    names("rows"),
    names("scheme"),
    numbers("others"),
    *(
        numbers(heading, alone=f"{operator}, {heading}")
        for operator in OPERATORS
        for heading in ("us", "predicted / measured", "p10 to p90")
    ),
)


def _parts(rows: Sequence[Sequence[str]], off: Mapping[int, Sequence[float]]) -> list[TextTable | str]:
    """The table, dispatch left and combine right, and how far the model is off by the number of ranks."""
    lines = []
    for ranks, shares in off.items():
        mean, worst = np.mean(np.abs(shares)), np.max(np.abs(shares))
        lines.append(f"- {ranks} ranks: off by {mean:.0%} in the mean, {worst:.0%} at worst.")
    text = "Dispatch left, combine right; microseconds from the first rank's begin to the last one's end."
    return [text, TextTable(COLUMNS, rows, more="--markdown FILE"), "\n".join(lines)]


def _busy_s() -> tuple[float, float]:
    """Seconds that all cores together were busy, and that have passed on them, since the machine started."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    ticks = [int(field) for field in fields]  # proc(5): user nice system idle iowait irq softirq steal
    per_s = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - ticks[3] - ticks[4]) / per_s, sum(ticks) / per_s


def _options() -> argparse.Namespace:
    arguments = parser("The model's timeline on this CPU, against measured times.")
    arguments.add_argument("--markdown", type=Path, help="write the table to this file")
    arguments.add_argument("--rounds", type=at_least(1), default=12)
    arguments.add_argument("--ranks", type=at_least(1, MAX_RANKS), nargs="+", default=[2, 4, 8])
    arguments.add_argument("--tokens", type=at_least(1), nargs="+", default=[16, 64, 128], help="per rank")
    arguments.add_argument("--schemes", nargs="+", default=["fullmesh_v1", "direct"])
    return arguments.parse_args()


def main() -> None:
    """Measure every case and print the table."""
    options = _options()
    rows, records = [], []
    off: dict[int, list[float]] = {}
    for ranks in options.ranks:
        with RankGroup(ranks) as group, tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "trace.json")
            for scheme, quantize, tokens in product(options.schemes, (None, "int8"), options.tokens):
                before = _busy_s()
                arguments = (scheme, tokens, quantize, options.rounds, path)
                with progress(f"{ranks} ranks, {scheme}, {quantize or 'bf16'}, {tokens} tokens"):
                    per_rank: list[tuple[list[Round], float]] = group.run(measure, *arguments, timeout_s=600)
                busy, all_cores = (now - was for now, was in zip(_busy_s(), before, strict=True))
                others = max(0.0, busy - sum(taken_s for _, taken_s in per_rank)) / all_cores
                rounds, _ = per_rank[0]
                case = {"ranks": ranks, "tokens": tokens, "rows": quantize or "bf16", "scheme": scheme}
                cells = [cell for operator in OPERATORS for cell in _cells(rounds, operator)]
                rows.append([*map(str, case.values()), f"{others:.0%}", *cells])
                records += _records({**case, "others": others}, rounds)
                ratios = [statistics.median(_ratios(rounds, operator)) for operator in OPERATORS]
                off.setdefault(ranks, []).extend(ratio - 1 for ratio in ratios)
    parts = _parts(rows, off)
    print_parts(parts, Console())
    if options.markdown is not None:
        options.markdown.write_text(markdown_of(parts) + "\n")
    write_records(options.json, records)


if __name__ == "__main__":
    run_main(main)
