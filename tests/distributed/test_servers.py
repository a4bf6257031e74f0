"""Which ranks share a server: those who disagree are told, and who is refused tells the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from moe_triton import ArgumentError, ConfigMismatchError, EPBuffer
from moe_triton import torch_npu_ops as ops
from moe_triton.processes import RankGroup
from moe_triton.torch_npu_ops import registry
from tests.distributed.cases import inputs_of, small_case
from tests.distributed.workers import expected_round, one_round
from tests.patience import seconds
from tests.torch_npu_ops.setting import make_round

Groups = Callable[[int], RankGroup]
RANKS = 4
PATIENCE_S = 60.0  # that every rank would wait for the others
AT_ONCE_S = 20.0  # far less, on a busy machine too
SIZES = {"num_max_tokens_per_rank": 4, "hidden": 64, "num_topk": 2, "num_experts": 2 * RANKS, "relaxed": True}

# What each rank passes, and the line about it.
DISAGREEMENTS: list[tuple[list[Any], str]] = [
    ([2, 2, 2, 4], "[2, 2] on rank(s) [0, 1, 2], [4] on rank(s) [3]"),
    ([1, None, None, None], "[1, 1, 1, 1] on rank(s) [0], [4] on rank(s) [1, 2, 3]"),
    (
        [4, 2, [3, 1], (1, 3)],
        "[4] on rank(s) [0], [2, 2] on rank(s) [1], [3, 1] on rank(s) [2], [1, 3] on rank(s) [3]",
    ),
    ([[3, 1], [3, 1], [2, 2], 2], "[3, 1] on rank(s) [0, 1], [2, 2] on rank(s) [2, 3]"),
]


def at_once(call: Callable[[], Any]) -> str:
    """What a call raises, long before its time-out."""
    began = time.monotonic()
    try:
        call()
    except (ConfigMismatchError, ArgumentError) as error:
        assert time.monotonic() - began < AT_ONCE_S
        return f"{type(error).__name__}: {error}"
    return "nothing"


def disagree(rank: int, num_ranks: int, options: dict[str, Any]) -> list[str]:
    wrong = []
    for given, line in DISAGREEMENTS:
        mine: dict[str, Any] = SIZES | options | {"ranks_per_server": given[rank]}
        said = at_once(lambda mine=mine: EPBuffer(timeout_s=PATIENCE_S, **mine))  # type: ignore[misc]
        if not said.startswith("ConfigMismatchError") or f"\n  ranks_per_server: {line}" not in said:
            wrong.append(f"{given}: {said}")
    return wrong


@pytest.mark.parametrize(
    "options",
    [{}, {"comm_alg": "fullmesh_v1"}, {"product": "A2"}, {"product": "A2", "comm_alg": "fullmesh"}],
    ids=str,
)
def test_who_shares_a_server_must_not_differ(ranks: Groups, options: dict[str, Any]) -> None:
    assert ranks(RANKS).run(disagree, options) == [[]] * RANKS


def disagree_in_calls(rank: int, num_ranks: int) -> list[str]:
    wrong = []
    r = make_round(rank, num_ranks)
    for given, line in DISAGREEMENTS:
        ops.configure(product="A2", relaxed=True, timeout_s=PATIENCE_S, ranks_per_server=given[rank])
        said = at_once(lambda: ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *r.group))
        if not said.startswith("ConfigMismatchError") or f"\n  ranks_per_server: {line}" not in said:
            wrong.append(f"{given}: {said}")
    ops.release(ops.group_name())
    ops.configure()
    return wrong


def test_torch_npus_functions_compare_servers(ranks: Groups) -> None:
    assert ranks(RANKS).run(disagree_in_calls) == [[]] * RANKS


# What a rank passes that it is refused for by itself, and what it says.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"ranks_per_server": [3, 2]}, "ranks_per_server is (3, 2), but the servers have the 4 ranks"),
    ({"ranks_per_server": [2, 1]}, "ranks_per_server is (2, 1), but the servers have the 4 ranks"),
    ({"ranks_per_server": "2"}, "ranks_per_server is '2', but it must be an integer"),
    ({"ranks_per_server": 2, "comm_alg": "direct"}, "ranks_per_server is [2, 2], but with comm_alg='direct'"),
    (
        {"ranks_per_server": [3, 1], "comm_alg": "fullmesh_v2"},
        "ranks_per_server is [3, 1], but with comm_alg='fullmesh_v2'",
    ),
]


def refuse(rank: int, num_ranks: int) -> list[str]:
    wrong = []
    for options, expected in REFUSED:
        mine: dict[str, Any] = SIZES | (options if rank == 1 else {})
        said = at_once(lambda mine=mine: EPBuffer(timeout_s=PATIENCE_S, **mine))  # type: ignore[misc]
        start = "ArgumentError: " if rank == 1 else "ConfigMismatchError: rank 1 cannot be constructed: "
        if not said.startswith(f"{start}{expected}"):
            wrong.append(f"{options}: {said}")
    return wrong


def test_a_rank_whose_servers_there_are_not_tells_the_others(ranks: Groups) -> None:
    assert ranks(RANKS).run(refuse) == [[]] * RANKS


def agree(rank: int, num_ranks: int) -> bool:
    """All of these say the same: one server."""
    given = [None, 4, np.int64(8), [np.int32(4)]][rank]
    case = small_case(num_ranks)
    with EPBuffer(timeout_s=seconds(20.0), comm_alg="fullmesh_v1", ranks_per_server=given, **SIZES) as buffer:
        _, combined = one_round(buffer, case, inputs_of(case, rank, 0), None)
        return buffer.config.topology.sizes == (4,) and combined.equal(expected_round(case, 0)[1][rank])


def test_the_same_servers_in_other_words(ranks: Groups) -> None:
    assert ranks(RANKS).run(agree) == [True] * RANKS


def with_a_rest(rank: int, num_ranks: int) -> list[str]:
    """What is wrong where the last server has what one number leaves, as others say with a list."""
    given, case, wrong = 3 if rank % 2 else [3, 1], small_case(num_ranks), []
    with EPBuffer(timeout_s=seconds(20.0), comm_alg="fullmesh_v1", ranks_per_server=given, **SIZES) as buffer:
        _, combined = one_round(buffer, case, inputs_of(case, rank, 0), None)
        if not combined.equal(expected_round(case, 0)[1][rank]):
            wrong.append("sums")
        sizes = {buffer.config.topology.sizes}
    ops.configure(product="A2", relaxed=True, timeout_s=seconds(20.0), ranks_per_server=3)
    r = make_round(rank, num_ranks)
    rows, _, index, _, counts, _, _ = ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *r.group)
    sums = ops.npu_moe_distribute_combine_v2(rows, r.ids, index, counts, None, *r.group)
    if not torch.equal(sums, (r.x.float() * r.ids.shape[1]).bfloat16()):
        wrong.append("torch_npu's sums")
    sizes |= {place.config.topology.sizes for place, _ in registry._communicators[r.group[0]]}
    ops.release(r.group[0])
    ops.configure()
    return wrong if sizes == {(3, 1)} else [*wrong, f"{sizes}"]


def test_the_last_server_may_have_fewer_ranks_than_one_number_says(ranks: Groups) -> None:
    assert ranks(RANKS).run(with_a_rest) == [[]] * RANKS


def inside_one_server(rank: int, num_ranks: int) -> list[str]:
    """What a buffer of A2 says where hierarchy was asked for, and whether its bits are the reference's."""
    case = small_case(num_ranks, "fullmesh")
    options: dict[str, Any] = SIZES | {"num_experts": 2 * num_ranks, "product": "A2", "comm_alg": "hierarchy"}
    with EPBuffer(timeout_s=seconds(20.0), **options) as buffer:
        _, combined = one_round(buffer, case, inputs_of(case, rank, 0), None)
        same = combined.equal(expected_round(case, 0)[1][rank])
        return [buffer.config.scheme, buffer.tuning_source()["comm_alg"], str(same)]


def test_hierarchy_inside_one_server_is_fullmesh_and_says_so(ranks: Groups) -> None:
    said = "fullmesh: a group inside one server is fullmesh on A2, also with comm_alg='hierarchy'"
    assert ranks(2).run(inside_one_server) == [["fullmesh", said, "True"]] * 2
