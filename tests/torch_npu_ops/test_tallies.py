"""Ranks of torch_npu's functions whose calls go to different windows that there are, or to a new one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_triton import CommunicationTimeoutError, ConfigMismatchError
from moe_triton import torch_npu_ops as ops
from moe_triton.core.config import Config
from moe_triton.processes import RankGroup
from moe_triton.rendezvous.meeting import shared_store_of
from moe_triton.runtime import communicator
from tests.patience import seconds
from tests.torch_npu_ops.setting import fresh, make_round
from tests.torch_npu_ops.test_elastic import words

Options = dict[str, Any]
Groups = Callable[[int], RankGroup]
LONG_S = 600.0  # far longer than a test may take


def dispatch(rank: int, num_ranks: int, how: Options) -> None:
    how = dict(how)
    inputs = make_round(rank, num_ranks, num_experts=how.pop("moe_expert_num", None))
    if how.pop("barrier", False):
        ops._npu_distribute_barrier(inputs.x, *inputs.group[:2])
    else:
        ops.npu_moe_distribute_dispatch_v2(inputs.x, inputs.ids, *inputs.group, **how)


def differ(rank: int, num_ranks: int, first: Options, other: Options, is_new: bool) -> list[str]:
    """What is said where the last rank's next call goes to another window; then all go on, and once more."""
    said = []
    with pytest.MonkeyPatch.context() as patch, fresh(LONG_S):
        patch.setattr(communicator, "patience_s", lambda timeout_s: 0.2)
        for _ in range(2):
            for how in [first] if is_new else [first, other, first]:
                dispatch(rank, num_ranks, how)
            with pytest.raises(ConfigMismatchError) as caught:
                dispatch(rank, num_ranks, other if rank == num_ranks - 1 else first)
            said.append(str(caught.value))
            ops.release(ops.group_name())
            dist.barrier()
        dispatch(rank, num_ranks, other)
    return said


USUAL: Options = {"global_bs": 12}
DIFFERENT = {
    "global_bs / ep_world_size: 4 on rank(s) [0, 1], 8 on rank(s) [2]": {"global_bs": 24},
    "comm_alg: 'fullmesh_v1' on rank(s) [0, 1], 'fullmesh_v2' on rank(s) [2]": {"comm_alg": "fullmesh_v2"},
    "moe_expert_num: 6 on rank(s) [0, 1], 9 on rank(s) [2]": {"moe_expert_num": 9},
}


def check(told: list[list[str]], line: str) -> None:
    """Each of the first ranks may or may not have heard of the other by then."""
    for rank, text in ((rank, text) for rank, texts in enumerate(told) for text in texts):
        name, values = line.split(": ")
        usual, odd = values.split(" on rank(s) ")[0], values.split("], ")[1]
        title, *lines, remedy = text.split("\n")
        assert title.endswith(": ranks made different calls:")
        assert remedy.startswith("Make the same calls on every rank")
        assert len(lines) == 1
        assert lines[0].startswith(f"  {name}: {usual} on rank(s) [")
        assert lines[0].endswith(odd)
        assert str(rank) in lines[0]


@pytest.mark.parametrize("line", DIFFERENT)
def test_calls_that_go_to_different_windows(ranks: Groups, line: str) -> None:
    check(ranks(3).run(differ, USUAL, USUAL | DIFFERENT[line], False), line)


def test_a_call_that_needs_a_new_window_where_others_need_none(ranks: Groups) -> None:
    line = "global_bs / ep_world_size: 4 on rank(s) [0, 1], 8 on rank(s) [2]"
    check(ranks(3).run(differ, USUAL, {"global_bs": 24}, True), line)


def test_a_barrier_in_place_of_a_dispatch(ranks: Groups) -> None:
    for text in itertools.chain(*ranks(2).run(differ, {}, {"barrier": True}, False)):
        assert "\n  operator: 'dispatch' on rank(s) [0], 'barrier' on rank(s) [1]\n" in text


def lose_the_last(rank: int, num_ranks: int) -> str:
    """All but the last rank go on without it."""
    config = Config(num_ranks, 4, 64, 2, 2 * num_ranks, relaxed=True)
    table = torch.tensor(words(config, range(num_ranks - 1)), dtype=torch.int32)
    # Only at the end: the others may come to it next.
    with fresh(LONG_S if rank < num_ranks - 1 else seconds(3)):
        if rank < num_ranks - 1:
            inputs, left = make_round(rank, num_ranks), torch.tensor([[0, 3]] * 4, dtype=torch.int32)
            ops.npu_moe_distribute_dispatch_v2(inputs.x, left, *inputs.group, elastic_info=table, **USUAL)
            return ""
        with pytest.raises(ConfigMismatchError) as caught:
            dispatch(rank, num_ranks, USUAL)
        return str(caught.value)


def test_ranks_that_differ_in_who_is_left(ranks: Groups) -> None:
    told = ranks(3).run(lose_the_last)
    assert told[:2] == ["", ""]
    assert "elastic_info: [2] on rank(s) [0, 1], [] on rank(s) [2]" in told[2]


def late_in_turn(rank: int, num_ranks: int) -> None:
    """Calls alternate between windows, and each rank is late to some: the others have said so by then."""
    with pytest.MonkeyPatch.context() as patch, fresh(seconds(60)):
        patch.setattr(communicator, "patience_s", lambda timeout_s: 0.1)
        dispatch(rank, num_ranks, USUAL)
        dispatch(rank, num_ranks, USUAL | {"global_bs": 24})
        store = shared_store_of(dist.group.WORLD)
        others = [f"tallies/{other}" for other in range(num_ranks) if other != rank]
        for number in range(2 * num_ranks):
            dist.barrier()
            before = [store.get(key) if store.check([key]) else b"" for key in others]
            dist.barrier()
            deadline = time.monotonic() + seconds(30)
            while number % num_ranks == rank and time.monotonic() < deadline:
                now = [store.get(key) if store.check([key]) else b"" for key in others]
                if all(one != other for one, other in zip(before, now, strict=True)):
                    break
                time.sleep(0.01)
            dispatch(rank, num_ranks, USUAL | {"global_bs": 12 * (1 + number % 2)})


def test_ranks_that_are_late_are_waited_for(ranks: Groups) -> None:
    ranks(3).run(late_in_turn)


def missed(rank: int, num_ranks: int) -> str:
    """Rank 1 makes no second call; rank 0 has been told nothing that says that it differs."""
    with pytest.MonkeyPatch.context() as patch, fresh(seconds(2)):
        patch.setattr(communicator, "patience_s", lambda timeout_s: 0.1)
        dispatch(rank, num_ranks, USUAL)
        if rank == 0:
            with pytest.raises(CommunicationTimeoutError) as caught:
                dispatch(rank, num_ranks, USUAL)
            return str(caught.value)
        return ""


def test_a_rank_that_makes_no_call_is_missed(ranks: Groups) -> None:
    assert "waiting for rank(s) [1]" in ranks(2).run(missed)[0]
