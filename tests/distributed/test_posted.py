"""Groups of several servers: equal to the reference bit for bit, whatever order queues deliver in."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_triton import ArgumentError, CommunicationTimeoutError, EPBuffer, Tuning, reference
from moe_triton.backends.cpu.nic import NicSettings, emulated_nic
from moe_triton.processes import RankGroup, tell
from moe_triton.tools.selftest.cases import wrong_received
from tests.distributed.cases import Case, inputs_of, small_case
from tests.distributed.workers import compare_rounds, make_buffer, many_rounds, one_round
from tests.patience import seconds

Groups = Callable[[int], RankGroup]
SCHEMES = ("fullmesh_v1", "fullmesh")
TIMEOUT_S = seconds(1.5)
SLOW_POST_US = 100_000.0

IN_ORDER, ORDERED, UNORDERED = NicSettings(), NicSettings(seed=11), NicSettings(seed=12, keeps_order=False)


def case_of(scheme: str, servers: tuple[int, ...], **changes: Any) -> Case:
    """A small case of a group of these servers."""
    case = small_case(sum(servers), scheme, rounds=4, **changes)
    return replace(case, config=replace(case.config, ranks_per_server=servers))


def to_one_server(case: Case, server: int) -> Case:
    """The case with a seed by which every token goes to ranks of that server alone."""
    c = case.config
    for seed in range(1000):
        drawn = replace(case, routing="one expert set", seed=seed)
        ids = inputs_of(drawn, 0, 0).topk_idx[0].tolist()
        if {c.topology.servers[c.rank_of_expert(expert)] for expert in ids} == {server}:
            return drawn
    raise AssertionError("no seed does")


def seeded(rank: int, settings: NicSettings) -> NicSettings:
    """Each rank's NIC has a seed of its own."""
    return replace(settings, seed=settings.seed + 100 * rank) if settings.seed else settings


def compare(rank: int, num_ranks: int, cases: list[tuple[Case, NicSettings]]) -> list[str]:
    wrong = []
    for case, settings in cases:
        with emulated_nic(seeded(rank, settings)):
            wrong += [f"{case}: {each}" for each in compare_rounds(rank, num_ranks, case)]
    return wrong


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("servers", [(2, 2), (3, 1)], ids=str)
def test_bits_are_the_references(ranks: Groups, scheme: str, servers: tuple[int, ...]) -> None:
    cases = [
        (case_of(scheme, servers), IN_ORDER),
        (case_of(scheme, servers, routing="sparse", tokens=(4, 0, 1, 3), num_blocks=3), UNORDERED),
        (case_of(scheme, servers, quantize="int8", smooth=True, routing="skewed"), ORDERED),
        (case_of(scheme, servers, routing="one expert set", dtype=torch.float16), UNORDERED),
        (case_of(scheme, servers, routing="none"), UNORDERED),
        *((to_one_server(case_of(scheme, servers), server), ORDERED) for server in range(2)),
    ]
    assert ranks(4).run(compare, cases, timeout_s=seconds(120)) == [[]] * 4


def straggle(rank: int, num_ranks: int, case: Case, settings: NicSettings) -> list[str]:
    with emulated_nic(seeded(rank, settings)):
        return many_rounds(rank, num_ranks, replace(case, rounds=60), 4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_late_ranks_change_nothing(ranks: Groups, scheme: str) -> None:
    assert ranks(4).run(straggle, case_of(scheme, (2, 2)), UNORDERED, timeout_s=seconds(120)) == [[]] * 4


def masked(rank: int, num_ranks: int, case: Case, settings: NicSettings) -> list[str]:
    """Rounds in which a mask leaves 0 to 4 tokens of each rank, against the reference without the others."""
    c, wrong = case.config, []
    with emulated_nic(seeded(rank, settings)), make_buffer(case) as buffer:
        for number in range(2):
            everyone = [inputs_of(case, each, number) for each in range(num_ranks)]
            masks = [torch.arange(len(i.x)) < (each + number) % 5 for each, i in enumerate(everyone)]
            ids = [i.topk_idx.where(m[:, None], -1) for i, m in zip(everyone, masks, strict=True)]
            x, weights = [i.x for i in everyone], [i.topk_weights for i in everyone]
            received = reference.dispatch(c, x, ids, weights)
            sums = reference.combine(c, [r.tokens for r in received], received, ids, weights)
            own = everyone[rank]
            output = buffer.dispatch(own.x, own.topk_idx, own.topk_weights, active_mask=masks[rank])
            combined = buffer.combine(output.tokens, output.handle, own.topk_weights)
            wrong += [f"round {number}: {name}" for name in wrong_received(output, received[rank])]
            wrong += [] if torch.equal(combined, sums[rank]) else [f"round {number}: combined"]
    return wrong


@pytest.mark.long  # up to 16 processes on two cores
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("servers", [(2, 2, 2, 2), (4, 4), (2,) * 8], ids=str)
def test_more_servers(ranks: Groups, scheme: str, servers: tuple[int, ...]) -> None:
    count = sum(servers)
    cases = [
        (case_of(scheme, servers, routing=routing, quantize=quantize), settings)
        for routing in ("uniform", "skewed", "one expert set", "sparse")
        for quantize, settings in ((None, UNORDERED), ("int8", ORDERED))
    ]
    cases.append((to_one_server(case_of(scheme, servers), len(servers) - 1), UNORDERED))
    few = tuple(rank % 5 for rank in range(count))  # none and one among them, others in each round
    cases.append((case_of(scheme, servers, tokens=few, num_blocks=3), UNORDERED))
    assert ranks(count).run(compare, cases, timeout_s=seconds(400)) == [[]] * count
    assert (
        ranks(count).run(masked, case_of(scheme, servers), UNORDERED, timeout_s=seconds(100)) == [[]] * count
    )


# Failure.


def without_a_server(rank: int, num_ranks: int, case: Case) -> tuple[str, tuple[int, ...], float]:
    """The last server's ranks stop after a round; what the others are told, and when."""
    c = case.config
    with make_buffer(case, timeout_s=TIMEOUT_S) as buffer:
        inputs = inputs_of(case, rank, 0)
        one_round(buffer, case, inputs, None)
        if c.topology.servers[rank] == c.topology.num_servers - 1:
            time.sleep(2 * TIMEOUT_S)
            return "", (), 0.0
        began = time.monotonic()
        try:
            one_round(buffer, case, inputs, None)
        except CommunicationTimeoutError as error:
            return str(error), error.missing_ranks, time.monotonic() - began
    return "nothing", (), 0.0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_server_that_is_gone_is_named(ranks: Groups, scheme: str) -> None:
    found = ranks(4).run(without_a_server, case_of(scheme, (2, 2)), timeout_s=seconds(60))
    for said, missing, took in found[:2]:
        assert missing == (2, 3), said
        assert "server 1 (ranks 2 to 3)" in said
        assert took < 20


@pytest.mark.parametrize(
    ("name", "tuning"),
    [
        ("tuning.dispatch_tokens", Tuning(dispatch_tokens=2)),
        ("tuning.combine_tokens", Tuning(combine_tokens=2)),
    ],
)
def test_parts_are_refused_between_servers(ranks: Groups, name: str, tuning: Tuning) -> None:
    for said in ranks(2).run(_refused, tuning):
        assert said.startswith(name), said


def _refused(rank: int, num_ranks: int, tuning: Tuning) -> str:
    sizes = {"num_max_tokens_per_rank": 4, "hidden": 64, "num_topk": 2, "num_experts": 4}
    try:
        EPBuffer(**sizes, comm_alg="fullmesh_v1", ranks_per_server=1, relaxed=True, tuning=tuning)  # type: ignore[arg-type]
    except ArgumentError as error:
        return str(error)
    return "nothing"


def drop(rank: int, num_ranks: int, case: Case) -> bool:
    """Rank 0 drops its buffer while its NIC still has most of what it posted; the others get it all."""
    inputs = inputs_of(case, rank, 0)
    with emulated_nic(NicSettings(post_us=SLOW_POST_US if rank == 0 else 0.0)):
        buffer = make_buffer(case)
    output = buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)
    num_rows = int(output.tokens_per_expert.sum())
    del output, buffer
    gc.collect()
    return num_rows >= 0


_kept: list[object] = []


def leave(rank: int, num_ranks: int, case: Case, trace: str) -> bool:
    """Rank 0's process ends while its NIC still has most of what it posted, and its buffer is open."""
    inputs = inputs_of(case, rank, 0)
    with emulated_nic(NicSettings(post_us=SLOW_POST_US if rank == 0 else 0.0)):
        buffer = make_buffer(case, trace=trace)
    _kept.append(buffer)
    if rank == 0:
        tell("goes")  # before the last calls: what is sent to it then is read once this function has returned
    output = buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)
    return int(output.tokens_per_expert.sum()) >= 0


def test_what_was_posted_arrives_from_a_process_that_ends_without_close(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    with RankGroup(2) as group:
        let_go = lambda rank, message: group._pipes[rank].send(None)  # noqa: E731
        case = case_of("fullmesh", (1, 1))
        said = group.run(leave, case, str(trace), timeout_s=seconds(60), hear=let_go)
        group.processes[0].join(seconds(30))
        assert (said, group.processes[0].exitcode) == ([True] * 2, 0)
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert {event["pid"] for event in events if event["name"] == "dispatch #0"} == {0, 1}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_was_posted_arrives_from_a_buffer_that_is_dropped(ranks: Groups, scheme: str) -> None:
    assert ranks(4).run(drop, case_of(scheme, (1, 1, 1, 1)), timeout_s=seconds(60)) == [True] * 4
