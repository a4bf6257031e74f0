"""Groups of several servers on the NPU's back end: kernels post, and the stand-in's NIC carries it out.

It delivers the pieces of messages in any order that queues have, each rank's under a seed of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_triton.processes import RankGroup, run_ranks
from moe_triton.schemes.rank_context import MESSAGE_TOKENS
from tests.distributed.cases import Case, inputs_of
from tests.npu import posts_workers
from tests.npu.device import POLICIES
from tests.npu.test_dispatch_combine import config

Ranks = Callable[[int], RankGroup]
ON_A3 = "A3's hierarchy"
NAMES = ["fullmesh_v1", "fullmesh", "hierarchy", ON_A3]
SCHEMES = pytest.mark.parametrize("scheme", NAMES)


def case_of(scheme: str, servers: tuple[int, ...], quantize: str | None = None, **changes: Any) -> Case:
    """Three rounds of a group of these servers."""
    count = sum(servers)
    plain = config(count, "hierarchy" if scheme == ON_A3 else scheme, num_experts=2 * count)
    plain = replace(plain, product="A3") if scheme == ON_A3 else plain
    case = Case(plain, 3, "sparse", (5, 8, 0, 7)[:count], quantize, rounds=3, num_blocks=2)
    return replace(case, config=replace(plain, ranks_per_server=servers), **changes)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("quantize", [None, "int8"])
@SCHEMES
def test_bits_are_the_references(
    ranks: Ranks, scheme: str, quantize: str | None, policy: str, tmp_path: Path
) -> None:
    """On A2 servers are told apart: vector cores do not reach the other one."""
    case = case_of(scheme, (1, 1), quantize)
    assert ranks(2).run(posts_workers.compare, case, policy, str(tmp_path)) == [[]] * 2


@SCHEMES
def test_servers_of_several_ranks(ranks: Ranks, scheme: str, tmp_path: Path) -> None:
    """A hierarchy's are alike, and its rows have no smooth scales."""
    is_relayed = scheme in ("hierarchy", ON_A3)
    servers = (2, 2) if is_relayed else (3, 1)
    case = case_of(scheme, servers, routing="uniform", smooth=not is_relayed, quantize="int8")
    assert ranks(4).run(posts_workers.compare, case, "random", str(tmp_path)) == [[]] * 4


@pytest.mark.parametrize("policy", POLICIES)
@SCHEMES
def test_graphs_post_as_well(ranks: Ranks, scheme: str, policy: str, tmp_path: Path) -> None:
    case = case_of(scheme, (1, 1), tokens=(8, 8))
    assert ranks(2).run(posts_workers.replay, case, policy, str(tmp_path)) == [[]] * 2


def test_traffic_waits_for_what_has_not_run(ranks: Ranks) -> None:
    """Two messages for each block: RoCE is not known to keep order inside one."""
    for in_handle, sent, returned in ranks(2).run(posts_workers.traffic, case_of("fullmesh", (1, 1))):
        assert in_handle is None
        assert sent.posts == returned.posts == (2, 0)
        assert sent.framing_bytes.between > 0


@pytest.mark.parametrize("do_expand", [True, False])
@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh"])
def test_traffic_of_rounds_is_that_of_all(ranks: Ranks, scheme: str, do_expand: bool) -> None:
    """Each call by hand says ahead what it has, in two messages, as the one in rounds does once."""
    case = case_of(scheme, (1, 1), tokens=(17, 8), routing="uniform")
    args = posts_workers.traffic_of_rounds, case, do_expand
    for by_hand, (sent, returned) in ranks(2).run(*args):
        assert len(by_hand) == 3
        assert sent - 2 == sum(counts[0] - 2 for counts in by_hand)
        assert returned == sum(counts[1] for counts in by_hand) > 0


def test_traffic_of_a_hierarchy_waits_as_well(ranks: Ranks) -> None:
    """A message for 8 tokens with an expert on the other server, one for their partial rows, and ends."""
    case = case_of("hierarchy", (1, 1))
    crossing = [int((inputs_of(case, rank, 0).topk_idx // 2 == 1 - rank).any(1).sum()) for rank in range(2)]
    assert min(crossing) > 0
    messages = [-(-tokens // MESSAGE_TOKENS) for tokens in crossing]
    for rank, (in_handle, sent, returned) in enumerate(ranks(2).run(posts_workers.traffic, case)):
        assert in_handle is None
        assert sent.posts == (messages[rank] + 1, 0)
        assert returned.posts == (messages[1 - rank] + 1, 0)


@pytest.mark.parametrize("scheme", [name for name in NAMES if name != ON_A3])  # its plans are A2's
def test_a_server_that_is_gone_is_named(scheme: str) -> None:
    assert run_ranks(posts_workers.gone, 2, (case_of(scheme, (1, 1)),))[0] == (1,)


@SCHEMES
def test_kernels_that_do_not_post_are_refused_before_anything_is_sent(ranks: Ranks, scheme: str) -> None:
    for rank, (said, launches) in enumerate(
        ranks(2).run(posts_workers.without_posts, case_of(scheme, (1, 1)))
    ):
        assert said.startswith(
            f"ToolchainError: rank(s) [{1 - rank}] are reached by queues, but libmoe_kernels_npu"
        )
        assert "AICPU's BatchWrite needs HCCL's operator package" in said
        assert "moe-triton build --memfabric installed" in said
        assert launches == 0


def test_cann_shmem_is_refused(ranks: Ranks) -> None:
    for rank, said in enumerate(ranks(2).run(posts_workers.over_shmem, case_of("fullmesh", (1, 1)))):
        assert said.startswith(
            f"ToolchainError: rank(s) [{1 - rank}] are reached by queues, but windows come"
        )
        assert "Run: pip install memfabric-hybrid==1.3.0; or make a group of each server's ranks" in said


def test_one_buffer_at_a_time_posts(ranks: Ranks) -> None:
    """memfabric's functions on the device know one window; others are left to buffers that do not post."""
    plain = Case(config(), 5, "uniform", (8, 8), num_blocks=2)
    for good, said in ranks(2).run(posts_workers.several, case_of("fullmesh_v1", (1, 1)), plain):
        assert good == [True] * 5
        assert said.startswith("WindowError: memfabric posts from its window number 0 alone")


def test_torch_npus_functions_make_room_for_the_next_window(ranks: Ranks, tmp_path: Path) -> None:
    """Of a group's buffers that post one is there at a time, and barriers are its."""
    assert ranks(2).run(posts_workers.operators, str(tmp_path)) == [[True] * 6] * 2
