"""Calls in graphs: captured once, run many times, with anything in between."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moe_triton.core.tuning import Tuning
from moe_triton.processes import RankGroup, run_ranks
from tests.distributed.cases import Case
from tests.npu import graph_workers
from tests.npu.device import POLICIES
from tests.npu.test_dispatch_combine import config

Ranks = Callable[[int], RankGroup]
# What leaves the zones turned and what does not; combines that need a wait of their own.
LAYERS = [(1,), (1, 1), (2,), (3, 1)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layers", LAYERS, ids=str)
@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "fullmesh"])
def test_graphs_give_the_references_bits(
    ranks: Ranks, scheme: str, layers: tuple[int, ...], policy: str
) -> None:
    case = Case(config(scheme=scheme), 11, "sparse", (8, 8), num_blocks=2)
    for wrong in ranks(2).run(graph_workers.replay_graphs, case, policy, layers):
        assert wrong == []


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layers", LAYERS, ids=str)
def test_graphs_of_blocks_that_receive(ranks: Ranks, layers: tuple[int, ...], policy: str) -> None:
    case = Case(config(), 11, "sparse", (8, 8), num_blocks=3)
    tuning = Tuning(receiving_blocks=2)
    for wrong in ranks(2).run(graph_workers.replay_graphs, case, policy, layers, tuning):
        assert wrong == []


@pytest.mark.parametrize("hidden", [64, 301])
def test_graphs_that_write_over_given_outputs(ranks: Ranks, hidden: int) -> None:
    case = Case(config(hidden=hidden), 11, "sparse", (8, 8), num_blocks=2)
    for wrong in ranks(2).run(graph_workers.replay_graphs, case, "random", (1, 1), None, True):
        assert wrong == []


def test_nothing_is_prepared_inside_a_graph(ranks: Ranks) -> None:
    case = Case(config(), 11, "uniform", (8, 8), num_blocks=2)
    for said in ranks(2).run(graph_workers.refusals, case):
        (message,) = said
        assert "a dispatch of this kind has not run before" in message
        assert "Run the same calls once before the capture" in message


def test_direct_is_not_captured(ranks: Ranks) -> None:
    case = Case(config(scheme="direct"), 11, "uniform", (8, 8), num_blocks=2)
    for said in ranks(2).run(graph_workers.refusals, case):
        assert len(said) == 2
        assert all("comm_alg='direct' cannot be captured" in message for message in said)


@pytest.mark.parametrize("tuning", [None, Tuning(receiving_blocks=1)], ids=["in turn", "received"])
def test_a_missing_peer_of_a_graph_is_named(tuning: Tuning | None) -> None:
    case = Case(config(), 11, "uniform", (8, 8), num_blocks=2)
    assert run_ranks(graph_workers.replay_without_a_peer, 2, (case, tuning))[0] == ("dispatch", [1])


@pytest.mark.parametrize("wait", ["synchronize", "the next call"])
def test_a_missing_peer_is_named_later(wait: str) -> None:
    case = Case(config(), 11, "uniform", (8, 8), num_blocks=2)
    operator, missing, afterwards = run_ranks(graph_workers.late_failure, 2, (case, wait))[0]
    assert (operator, missing) == ("dispatch 1", [1])
    assert "the buffer is broken" in afterwards


def test_calls_under_way_do_not_wait_again_for_who_is_gone() -> None:
    case = Case(config(), 11, "uniform", (8, 8), num_blocks=2)
    assert run_ranks(graph_workers.many_late, 2, (case, 6))[0]


def test_ctrl_c_ends_a_wait_for_the_device() -> None:
    case = Case(config(), 11, "uniform", (8, 8), num_blocks=2)
    said, at_once, afterwards = run_ranks(graph_workers.interrupted, 2, (case,))[0]
    assert said == "interrupted"
    assert at_once
    assert "broken: a wait for the device ended in KeyboardInterrupt" in afterwards


def test_a_table_of_replicas_is_data_of_a_graph(ranks: Ranks) -> None:
    case = Case(config(), 11, "sparse", (8, 8), num_blocks=2)
    assert ranks(2).run(graph_workers.replay_with_tables, case) == [[]] * 2
