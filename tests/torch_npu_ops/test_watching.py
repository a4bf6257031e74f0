"""What a group does, by its name: a line, a record and numbers for each of its windows, from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist

from moe_triton import ArgumentError, BufferStateError
from moe_triton import torch_npu_ops as ops
from moe_triton.metrics import prometheus
from moe_triton.processes import RankGroup
from moe_triton.runtime import recorder
from tests.distributed.hangs import until
from tests.torch_npu_ops.setting import experts_of, fresh, make_round

Groups = Callable[[int], RankGroup]


def a_round(rank: int, num_ranks: int, tokens: int) -> None:
    r = make_round(rank, num_ranks, tokens=tokens)
    out = ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *r.group)
    ops.npu_moe_distribute_combine_v2(experts_of(out[0]), r.ids, out[2], out[4], r.weights, *r.group)


def watched(rank: int, num_ranks: int) -> list[str]:
    """What is wrong."""
    wrong, name = [], ops.group_name()
    with fresh():
        if ops.status(name) or ops.flight(name) or ops.metrics(name):
            wrong.append("something is said before the first call")
        for tokens in (3, 3, 5):
            a_round(rank, num_ranks, tokens)
        lines = ops.status(name).splitlines()
        if len(lines) != 2 or not all("in no call for" in line for line in lines):
            wrong.append(f"status: {lines}")
        # A window's calls are on record there: two rounds of one shape, and one of the other.
        rounds = [sum(run.operator == "dispatch" for run in each.runs) for each in ops.flight(name)]
        numbers = ops.metrics(name)
        counted = [(each.rounds["dispatch"], each.tokens["combine"]) for each in numbers]
        if rounds != [2, 1] or counted != [(2, 6), (1, 5)]:
            wrong.append(f"rounds {rounds}, metrics {counted}")
        if prometheus(numbers).count("\nmoe_triton_ranks{") != 2:
            wrong.append("numbers of the two windows are not told apart")
    return wrong


def test_every_window_has_a_line_a_record_and_numbers(ranks: Groups) -> None:
    assert ranks(2).run(watched) == [[], []]


def waits(rank: int, num_ranks: int) -> str:
    """What a rank says from another thread while its dispatch waits."""
    said: list[str] = []
    name = ops.group_name()
    with fresh():
        a_round(rank, num_ranks, 3)

        def look() -> None:
            until(lambda: "for rank 1" in ops.status(name))
            said.append(ops.status(name))
            dist.barrier()

        if rank == 1:
            dist.barrier()
            a_round(rank, num_ranks, 3)
            return ""
        thread = threading.Thread(target=look)
        thread.start()
        a_round(rank, num_ranks, 3)
        thread.join()
    return said[0]


def test_another_thread_says_for_whom_a_call_waits(ranks: Groups) -> None:
    line, _ = ranks(2).run(waits)
    assert line.startswith("rank 0")
    assert "in dispatch number 1" in line


def without(rank: int, num_ranks: int) -> list[str]:
    """What is raised without a recorder, and for a name of no group."""
    said = []
    with pytest.MonkeyPatch.context() as patch, fresh():
        patch.setenv(recorder.VARIABLE, "off")
        a_round(rank, num_ranks, 3)
        for function in (ops.status, ops.flight, ops.metrics):
            with pytest.raises(BufferStateError) as off:
                function(ops.group_name())
            with pytest.raises(ArgumentError) as unknown:
                function("nobody's")
            said += [str(off.value), str(unknown.value)]
    return said


def test_without_a_recorder_or_a_group_errors_say_so(ranks: Groups) -> None:
    for said in ranks(2).run(without):
        for off, unknown in zip(said[::2], said[1::2], strict=True):
            assert off.startswith("there is no flight recorder (MOE_TRITON_FLIGHT is off)")
            assert unknown.startswith("name is ")
