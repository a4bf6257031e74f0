"""The timeline against what the CPU back end did: order, overlap and waits of real ranks with delays put in.

The kernels' costs are the durations that the trace has; when each launch begins and what waits for what is
the timeline's own. Delays are several times as long as what the machine adds, and nothing is said of how long
anything takes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from autotune.model.constants import Machine, machine_named
from autotune.model.cost import Cost, KernelCost, Work
from autotune.model.kernel_costs.counted.run import standing_for
from autotune.model.timelines.timeline import Streams, Timeline, cpu_walk, one_stream, walk_ranks
from autotune.model.traffic import Traffic, traffic_of
from moe_triton.backends.cpu.executable import NativeExecutable
from moe_triton.core.kernel import AscendCKernel, TritonKernel
from moe_triton.core.plan import Plan
from moe_triton.core.tuning import Tuning
from moe_triton.processes import RankGroup
from moe_triton.tools.selftest.cases import combined, dispatched
from tests.autotune.model.delays import Delays, build, delayed
from tests.distributed.cases import Case, inputs_of, small_case
from tests.distributed.workers import make_buffer, one_round
from tests.patience import seconds

Groups = Callable[[int], RankGroup]
DELAY_S = seconds(0.3)  # several times as long as what a busy machine adds
MARGIN_US = DELAY_S / 3 * 1e6
ATTEMPTS = 3
TOKENS, PARTS, ROUND = 6, 3, 1
IDLE = {
    "launch_graph_us": 0,
    "event_us": 0,
    "flag_latency_us": 0,
    "hop_node_us": 0,
    "remote_write_gb_per_s": 1e9,
}


RIGHT, ONE_STREAM, TOGETHER = "as it runs", "on one stream", "as if both ranks began together"


@dataclass(frozen=True)
class Ran:
    """A launch as the trace has it, in us.

    Attributes:
        begin, end: of its first block, and of its last one.
        seen: when the last peer that it waited for was seen; its begin if it waited for none.
    """

    begin: float
    end: float
    seen: float


def case_of(comm_alg: str) -> Case:
    case = small_case(2, comm_alg, "int8", num_blocks=2, tokens=(TOKENS,) * 2, rounds=1)
    return replace(case, config=replace(case.config, num_max_tokens_per_rank=TOKENS))


def run_late(
    rank: int, num_ranks: int, comm_alg: str, path: str, library: str, delays: list[Delays]
) -> dict[str, list[str]]:
    """One round, in which ranks are late and launches take long; the first rank compares.

    Returns:
        By operator and order of launches, what the timeline says otherwise than the trace.
    """
    case = case_of(comm_alg)
    parts = -(-TOKENS // PARTS)
    tuning = Tuning(communication_blocks=1, dispatch_tokens=parts, combine_tokens=parts)
    plans: dict[str, Plan] = {}
    make = NativeExecutable.run

    def noting(self: NativeExecutable, *args: Any) -> int:
        plans[self.plan.operator] = self.plan
        return make(self, *args)

    with pytest.MonkeyPatch.context() as patch, delayed(Path(library), delays[rank]):
        patch.setattr(NativeExecutable, "run", noting)
        with make_buffer(case, trace=path, tuning=tuning) as buffer:
            one_round(buffer, case, inputs_of(case, rank, 0), None)  # compiles
            dist.barrier()
            time.sleep(delays[rank].get(("dispatch", "", 0), 0))
            output = dispatched(buffer, case, inputs_of(case, rank, ROUND))
            dist.barrier()
            time.sleep(delays[rank].get(("combine", "", 0), 0))
            combined(buffer, case, inputs_of(case, rank, ROUND), output)
    dist.barrier()
    return compare(case, plans, Path(path)) if rank == 0 else {}


def compare(case: Case, plans: dict[str, Plan], path: Path) -> dict[str, list[str]]:
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    found = {}
    for operator, plan in plans.items():
        name = f"{operator} #{ROUND}"
        of_ranks = [[e for e in events if e["pid"] == rank] for rank in range(2)]
        ran = [launches_of(plan, mine, name) for mine in of_ranks]
        begins = [next(e["ts"] for e in mine if e["name"] == name) for mine in of_ranks]
        for order, streams, at in (
            (RIGHT, cpu_walk, begins),
            (ONE_STREAM, one_stream, begins),
            (TOGETHER, cpu_walk, [min(begins)] * 2),
        ):
            timelines = walked(case, plan, ran, at, streams)
            found[f"{operator}, {order}"] = differences(plan, ran, timelines)
        found[operator] = facts(case, plan, ran)
    return found


def names_of(plan: Plan) -> list[str]:
    """Steps, numbered among those of the same name."""
    steps = [launch.step for launch in plan.launches]
    return [f"{step} {steps[:index].count(step)}" for index, step in enumerate(steps)]


def launches_of(plan: Plan, events: list[dict[str, Any]], operator: str) -> list[Ran]:
    """Each launch of a plan on one rank. Launches of the same step follow one another."""
    of_step: dict[str, list[dict[str, Any]]] = {}
    waits = []
    for event in sorted(events, key=lambda e: e["ts"]):
        if event["args"].get("of") == operator:
            (waits if event["cat"] == "wait" else of_step.setdefault(event["name"], [])).append(event)
    found = []
    for launch in plan.launches:
        named = of_step[launch.step]
        blocks = [named.pop(0) for _ in range(launch.blocks)]
        begin, end = min(e["ts"] for e in blocks), max(e["ts"] + e["dur"] for e in blocks)
        seen = [
            wait["ts"] + wait["dur"] for wait in waits if any(_is_within(wait, block) for block in blocks)
        ]
        found.append(Ran(begin, end, max([begin, *seen])))
    assert not any(of_step[launch.step] for launch in plan.launches)
    return found


def _is_within(wait: dict[str, Any], block: dict[str, Any]) -> bool:
    """Whether a block waited there.

    A busy machine may end a launch's last block while its first core waits in the launch behind it already.
    """
    return bool(wait["tid"] == block["tid"] and 0 <= wait["ts"] - block["ts"] <= block["dur"])


def walked(
    case: Case, plan: Plan, ran: list[list[Ran]], begins: list[float], streams: Streams
) -> list[Timeline]:
    """The timeline of both ranks, of kernels that take as long as they took, without what they waited."""
    traffics = traffics_of(case)
    placed = [0, 0]

    def kernel_cost_of(kernel: AscendCKernel | TritonKernel) -> KernelCost:
        def kernel_cost(work: Work, machine: Machine) -> Cost:
            rank = work.traffic.rank
            launch = ran[rank][placed[rank]]
            placed[rank] += 1
            return Cost({"took": launch.end - launch.seen})

        return kernel_cost

    machine = machine_named("cpu").replaced(IDLE)
    return walk_ranks(plan, traffics, machine, kernel_costs=kernel_cost_of, streams=streams, begins_us=begins)


def traffics_of(case: Case) -> list[Traffic]:
    """Of both ranks."""
    ids = np.stack([inputs_of(case, rank, ROUND).topk_idx.numpy() for rank in range(2)])
    tiers = [("self", "node"), ("node", "self")]
    return [traffic_of(case.config, rank, ids, tiers[rank]) for rank in range(2)]


def differences(plan: Plan, ran: list[list[Ran]], timelines: list[Timeline]) -> list[str]:
    """Begins and ends that come in another order, and waits that are longer or shorter by far."""
    measured, predicted = {}, {}
    found = []
    for rank, timeline in enumerate(timelines):
        for number, (launch, span) in enumerate(zip(ran[rank], timeline.spans, strict=True)):
            name = f"rank {rank}'s {names_of(plan)[number]}"
            measured[f"{name} begins"], measured[f"{name} ends"] = launch.begin, launch.end
            predicted[f"{name} begins"], predicted[f"{name} ends"] = span.begin_us, span.end_us
            waited = launch.seen - launch.begin
            if abs(waited - span.waited_us) > MARGIN_US:
                found.append(f"{name} waited {waited:.0f}, not {span.waited_us:.0f} us")
    for a, b in permutations(measured, 2):
        if predicted[a] + MARGIN_US < predicted[b] and measured[a] > measured[b]:
            found.append(f"{a} after {b}, not before it")
        if measured[a] + MARGIN_US < measured[b] and predicted[a] > predicted[b]:
            found.append(f"{a} before {b}, not after it")
    return found


def facts(case: Case, plan: Plan, ran: list[list[Ran]]) -> list[str]:
    """What was long in the trace: launches, and waits with the peer's launch that they ended with."""
    found, names, run = [], names_of(plan), standing_for(plan, traffics_of(case))
    for rank, launches in enumerate(ran):
        for number, launch in enumerate(launches):
            if launch.end - launch.seen > MARGIN_US:
                found.append(f"rank {rank}'s {names[number]} is long")
            if launch.seen - launch.begin <= MARGIN_US:
                continue
            awaited, senders = run.awaited(number, rank), set()
            of_peer = awaited.rank == 1 - rank
            for index, share in zip(awaited.launch[of_peer], awaited.share[of_peer], strict=True):
                sender = ran[1 - rank][index]
                told = sender.begin + share * (sender.end - sender.begin)
                if abs(told - launch.seen) < MARGIN_US:
                    senders.add(int(index))
            found += [f"rank {rank}'s {names[number]} waits for {names[index]}" for index in sorted(senders)]
    return found


_LATE = "rank 0's wait 0 waits for send 0"
_COMBINE = ["rank 0's sum 1 is long", "rank 1's wait 0 waits for send 0", "rank 1's sum 2 is long"]
ROWS_TAKEN = {
    "dispatch": ["rank 0's arrange 0 is long", _LATE, "rank 1's arrange 1 is long"],
    "combine": _COMBINE,
}
ROWS_IN_BAND = {
    "dispatch": [
        "rank 0's pack 0 is long",
        _LATE,
        "rank 1's pack 1 is long",
        "rank 0's arrange 0 waits for send 2",
    ],
    "combine": _COMBINE,
}
COUNTS_FIRST = {
    "dispatch": ["rank 0's wait for counts 0 waits for send counts 0", "rank 1's stamps 0 is long"],
    "combine": ["rank 1's wait 0 waits for flag 0", "rank 1's sum 0 is long"],
}


@pytest.mark.parametrize(
    ("comm_alg", "expected"),
    [("fullmesh_v1", ROWS_TAKEN), ("fullmesh_v2", ROWS_IN_BAND), ("direct", COUNTS_FIRST)],
)
def test_the_timeline_agrees_with_the_trace(
    ranks: Groups, tmp_path: Path, comm_alg: str, expected: dict[str, list[str]]
) -> None:
    local = "arrange" if expected is ROWS_TAKEN else "pack"
    delays: list[Delays] = [
        {("dispatch", local, 0): DELAY_S, ("combine", "", 0): 2 * DELAY_S, ("combine", "sum", 1): DELAY_S},
        {
            ("dispatch", "", 0): 2 * DELAY_S,
            ("dispatch", local, 1): DELAY_S,
            ("dispatch", "stamps", 0): DELAY_S,
            # The last: a rank that is held up before may have sent later parts already, in a wait that had
            # nothing to see yet, while the timeline has every row where its launch stands.
            ("combine", "sum", 2 if expected is not COUNTS_FIRST else 0): DELAY_S,
        },
    ]
    library = str(build(tmp_path))
    for attempt in range(ATTEMPTS):
        path = tmp_path / f"trace {attempt}.json"
        found, _ = ranks(2).run(run_late, comm_alg, str(path), library, delays)
        # A machine that stops a rank for as long as a delay is no reason to fail; a timeline that is wrong
        # is wrong every time.
        if not any(found[f"{operator}, {RIGHT}"] for operator in expected):
            break
    for operator, facts_of_operator in expected.items():
        assert set(found[operator]) >= set(facts_of_operator)
        assert found[f"{operator}, {RIGHT}"] == []
        assert found[f"{operator}, {TOGETHER}"] != []  # it would show if waits were not understood
    if expected is not COUNTS_FIRST:
        assert found[f"combine, {ONE_STREAM}"] != []  # and so would it if overlap was not
