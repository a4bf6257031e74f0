"""Barrier, reset, ranks that are lost, and how many shapes a group serves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_triton import torch_npu_ops as ops
from moe_triton.core.errors import ArgumentError, BufferStateError, CommunicationTimeoutError
from moe_triton.processes import RankFailedError, RankGroup
from moe_triton.torch_npu_ops import registry
from tests.patience import seconds
from tests.torch_npu_ops.setting import LOCAL_EXPERTS, experts_of, fresh, make_round

Groups = Callable[[int], RankGroup]


def table(num_ranks: int, left: list[int], *, shared_ranks: int = 0) -> torch.Tensor:
    """elastic_info of those that are left."""
    to_new = [left.index(rank) if rank in left else -1 for rank in range(num_ranks)]
    to_original = left + [0] * (num_ranks - len(left))
    experts = LOCAL_EXPERTS * (len(left) - shared_ranks)
    return torch.tensor([1, len(left), shared_ranks, experts, *to_new, *to_original], dtype=torch.int32)


def whole(rank: int, num_ranks: int, info: torch.Tensor | None, experts: int) -> bool:
    """One round among those that are left; whether each token came back as its experts made it."""
    r = make_round(rank, num_ranks, num_experts=experts)
    group = (*r.group[:3], LOCAL_EXPERTS * num_ranks)
    out = ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *group, elastic_info=info)
    combined = ops.npu_moe_distribute_combine_v2(
        experts_of(out[0]), r.ids, out[2], out[4], r.weights, *group, elastic_info=info
    )
    acc = torch.zeros(r.x.shape)
    for k in range(r.ids.shape[1]):
        acc += experts_of(r.x).float() * r.weights[:, k : k + 1]
    return torch.equal(combined, acc.bfloat16())


def lagging(rank: int, num_ranks: int) -> list[tuple[float, float]]:
    """When each rank reached and left three barriers, rank 0 being late to each."""
    times = []
    with fresh():
        x = torch.ones(1)
        for _ in range(3):
            if rank == 0:
                time.sleep(0.05)
            reached = time.monotonic()
            assert ops._npu_distribute_barrier(x, ops.group_name(), num_ranks) is x
            times.append((reached, time.monotonic()))
    return times


def test_nobody_leaves_a_barrier_before_the_last_has_reached_it(ranks: Groups) -> None:
    for rounds in zip(*ranks(3).run(lagging), strict=True):
        assert min(left for _, left in rounds) >= max(reached for reached, _ in rounds)


def absent(rank: int, num_ranks: int) -> list[str]:
    said = []
    with fresh():
        name, x = ops.group_name(), torch.ones(1)
        ops._npu_distribute_barrier(x, name, num_ranks)
        if rank == 0:
            brief = torch.tensor([20_000], dtype=torch.int32)
            with pytest.raises(CommunicationTimeoutError, match=r"rank\(s\) \[1, 2\].*0\.02 s") as caught:
                ops._npu_distribute_barrier(x, name, num_ranks, time_out=brief)
            said.append(str(caught.value.missing_ranks))
            with pytest.raises(BufferStateError, match="npu_moe_distribute_buffer_reset"):
                ops._npu_distribute_barrier(x, name, num_ranks)
        everyone = torch.zeros(4 + 2 * num_ranks, dtype=torch.int32)
        ops.npu_moe_distribute_buffer_reset(everyone, name, num_ranks, need_sync=1)
        ops._npu_distribute_barrier(x, name, num_ranks)
        said.append("went on")
    return said


def test_a_barrier_that_timed_out_names_the_absent_and_a_reset_mends_it(ranks: Groups) -> None:
    assert ranks(3).run(absent) == [["(1, 2)", "went on"], ["went on"], ["went on"]]


def scaled(rank: int, num_ranks: int) -> bool:
    with fresh():
        good = whole(rank, num_ranks, None, LOCAL_EXPERTS * num_ranks)
        left = [0, 2, 3]
        if rank not in left:
            return good
        info = table(num_ranks, left)
        ops.npu_moe_distribute_buffer_reset(info, ops.group_name(), num_ranks, need_sync=1)
        for _ in range(3):
            good &= whole(rank, num_ranks, info, LOCAL_EXPERTS * len(left))
        ops._npu_distribute_barrier(torch.ones(1), ops.group_name(), num_ranks, elastic_info=info)
        # an expert that went with its rank
        r = make_round(rank, num_ranks)
        r.ids[0, 0] = LOCAL_EXPERTS * len(left)
        with pytest.raises(ArgumentError, match=r"expert_ids is 6 at token 0, k 0"):
            ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *r.group, elastic_info=info)
        # one more goes
        left = [3, 0]
        if rank not in left:
            return good
        info = table(num_ranks, left)
        return good and whole(rank, num_ranks, info, LOCAL_EXPERTS * len(left))


def test_those_that_are_left_go_on_with_new_numbers(ranks: Groups) -> None:
    assert ranks(4).run(scaled) == [True] * 4


def killed(rank: int, num_ranks: int) -> list[str]:
    said = []
    with fresh(timeout_s=5):
        name = ops.group_name()
        whole(rank, num_ranks, None, LOCAL_EXPERTS * num_ranks)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(CommunicationTimeoutError, match=r"rank\(s\) \[1\]"):
            whole(rank, num_ranks, None, LOCAL_EXPERTS * num_ranks)
        info = table(num_ranks, [0, 2])
        ops.npu_moe_distribute_buffer_reset(info, name, num_ranks, need_sync=1)
        for _ in range(4):
            if not whole(rank, num_ranks, info, LOCAL_EXPERTS * 2):
                said.append("other numbers than before")
    return said


def test_ranks_that_outlive_another_reset_and_go_on() -> None:
    with RankGroup(3) as group:
        answers = group.run(killed, allow_failures=True)
    assert isinstance(answers[1], RankFailedError)
    assert [answers[0], answers[2]] == [[], []]


def many_shapes(rank: int, num_ranks: int) -> int:
    with fresh():
        for tokens in [*range(1, registry.KEPT_PER_GROUP + 4), 1, 2]:
            r = make_round(rank, num_ranks, tokens=tokens)
            out = ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *r.group)
            z = experts_of(out[0])
            ops.npu_moe_distribute_combine_v2(z, r.ids, out[2], out[4], r.weights, *r.group)
        return len(registry._communicators[ops.group_name()])


def test_the_buffers_of_a_group_are_bounded_and_the_oldest_goes(ranks: Groups) -> None:
    assert ranks(2).run(many_shapes) == [registry.KEPT_PER_GROUP] * 2


def uneven_shapes(rank: int, num_ranks: int) -> bool:
    """Ranks whose tokens differ use the same buffers, and drop the same ones."""
    good = True
    with fresh():
        for round_, most in enumerate([*range(2, registry.KEPT_PER_GROUP + 4), 2, 5, 3]):
            r = make_round(rank, num_ranks, tokens=1 + (rank + round_) % most)
            options = {"global_bs": most * num_ranks}
            out = ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *r.group, **options)
            z = experts_of(out[0])
            back = ops.npu_moe_distribute_combine_v2(z, r.ids, out[2], out[4], r.weights, *r.group, **options)
            acc = torch.zeros(r.x.shape)
            for k in range(r.ids.shape[1]):
                acc += experts_of(r.x).float() * r.weights[:, k : k + 1]
            good &= torch.equal(back, acc.bfloat16())
    return good


def test_ranks_with_different_numbers_of_tokens_keep_the_same_buffers(ranks: Groups) -> None:
    assert ranks(3).run(uneven_shapes) == [True] * 3


def names(rank: int, num_ranks: int) -> list[str]:
    with fresh():
        group = dist.new_group(list(range(num_ranks)))
        ops.register_group("experts", group)
        wrong = []
        if ops.group_name(group) != "experts":
            wrong.append(ops.group_name(group))
        if ops.process_group("experts") is not group:
            wrong.append("the way back")
        r = make_round(rank, num_ranks)
        out = ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, "experts", *r.group[1:])
        if out[0].shape[1] != r.x.shape[1]:
            wrong.append("shape")
        for call, code, text in (
            (lambda: ops.register_group("", group), 161002, "1 to 127"),
            (
                lambda: ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, "no", *r.group[1:]),
                161002,
                "no process",
            ),
            (
                lambda: ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, group, *r.group[1:]),
                161002,
                "name of a",
            ),
            (lambda: ops._npu_distribute_barrier(r.x, "experts", 7), 561002, "it is 2 in the group"),
        ):
            with pytest.raises(ArgumentError, match=text) as caught:
                call()
            if caught.value.code != code:
                wrong.append(f"{text}: {caught.value.code}")
        ops.release("experts")
    return wrong


def test_groups_are_known_by_their_names(ranks: Groups) -> None:
    assert ranks(2).run(names) == [[], []]


def groups_made_anew(rank: int, num_ranks: int, store: str) -> list[bool]:
    """The same calls in two groups of one name, one after the other, with their ranks in another order."""
    good = []
    with fresh():
        good.append(whole(rank, num_ranks, None, LOCAL_EXPERTS * num_ranks))
        ops.npu_moe_distribute_buffer_reset(torch.zeros(4 + 2 * num_ranks).int(), ops.group_name(), num_ranks)
        good.append(whole(rank, num_ranks, None, LOCAL_EXPERTS * num_ranks))
        former = ops.group_name()
        dist.destroy_process_group()
        turned = (rank + 1) % num_ranks
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=turned, world_size=num_ranks)
        good.append(ops.group_name() == former)
        good.append(whole(turned, num_ranks, None, LOCAL_EXPERTS * num_ranks))
    return good


def test_a_group_that_takes_another_ones_name_starts_anew(tmp_path: Path) -> None:
    with RankGroup(3) as group:
        assert group.run(groups_made_anew, str(tmp_path / "store")) == [[True] * 4] * 3


# Steps one after the other, each with the ranks that take it: "use" is a round of dispatch and combine among
# them, "anew" another group of the same name.
HISTORIES = {
    "lost from the start": "use 01, release 012, use 012",
    "lost from the start and silent": "use 01, reset 01, use 01, use 012",
    "lost and back": "use 012, reset 01, use 01, reset 012, use 012",
    "released before its first use": "release 012, use 12, release 012, use 012, reset 012, use 012",
    "another pair each time": "use 01, reset 01, use 12, reset 12, use 02, reset 02, use 12, use 012",
    "a group made anew": "use 01, reset 01, anew 012, use 12, release 012, use 012, reset 012, use 01",
}


def live(rank: int, num_ranks: int, history: str, store: str) -> list[str]:
    """The uses that went wrong."""
    wrong = []
    with fresh():
        for step in history.split(", "):
            what, ranks = step.split()
            left = [int(number) for number in ranks]
            if rank not in left:
                continue
            is_whole = len(left) == num_ranks
            info = torch.zeros(4 + 2 * num_ranks).int() if is_whole else table(num_ranks, left)
            if what == "use":
                experts = LOCAL_EXPERTS * len(left)
                wrong += [] if whole(rank, num_ranks, None if is_whole else info, experts) else [step]
            elif what == "reset":
                ops.npu_moe_distribute_buffer_reset(info, ops.group_name(), num_ranks, need_sync=1)
            elif what == "release":
                ops.release(ops.group_name())
            else:
                dist.destroy_process_group()
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{store}",
                    rank=rank,
                    world_size=num_ranks,
                    timeout=timedelta(seconds=seconds(30)),
                )
    return wrong


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_ranks_meet_whatever_each_did_before(tmp_path: Path, history: str) -> None:
    with RankGroup(3) as group:
        assert group.run(live, history, str(tmp_path / "store")) == [[]] * 3


def between_servers(rank: int, num_ranks: int) -> list[bool]:
    with fresh():
        ops.configure(relaxed=True, timeout_s=seconds(20.0), ranks_per_server=1)
        for _ in range(3):
            ops._npu_distribute_barrier(torch.zeros(1), ops.group_name(), num_ranks)
        return [made.memory.posts for made in registry._communicators[ops.group_name()].values()]


def test_a_barrier_between_servers_posts(ranks: Groups) -> None:
    assert ranks(2).run(between_servers) == [[True], [True]]
