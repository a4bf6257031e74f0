"""Absent ranks and dying ranks: who is named, and what is left."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_triton import (
    BufferStateError,
    CommunicationTimeoutError,
)
from moe_triton.backends.cpu import window as window_module
from moe_triton.backends.cpu.triton import cache, loader
from moe_triton.processes import RankFailedError, RankGroup, run_ranks
from moe_triton.rendezvous.meeting import Meeting
from tests.distributed.cases import inputs_of, small_case
from tests.distributed.failures import leftovers, message_of, new_prefix, prefixed, wait_until_stopped
from tests.distributed.interrupted import messages
from tests.distributed.workers import make_buffer, one_round, patient_buffer
from tests.patience import seconds

Groups = Callable[[int], RankGroup]


def absent_from_dispatch(rank: int, num_ranks: int, before: int) -> Any:
    case = small_case(num_ranks)
    with patient_buffer(case, timeout_s=seconds(3.0)) as buffer:
        for _ in range(before):
            one_round(buffer, case, inputs_of(case, rank, 0), None)
        if rank in (1, 3):
            return None
        with pytest.raises(CommunicationTimeoutError) as caught:
            one_round(buffer, case, inputs_of(case, rank, 1), None)
        assert "broken" in message_of(
            lambda: buffer.dispatch(*vars(inputs_of(case, rank, 1)).values()), BufferStateError
        )
        error = caught.value
        return error.operator, error.number, error.zone, error.missing_ranks


@pytest.mark.parametrize("before", [1, 4])
def test_a_rank_that_never_dispatches_is_named(before: int) -> None:
    results = run_ranks(absent_from_dispatch, 4, (before,))
    said = ("dispatch", before, before % 2, (1, 3))
    assert results == [said, None, said, None]


def absent_from_combine(rank: int, num_ranks: int, before: int) -> Any:
    case = small_case(num_ranks, num_blocks=2, weights=False)
    with patient_buffer(case, timeout_s=seconds(3.0)) as buffer:
        for _ in range(before):
            one_round(buffer, case, inputs_of(case, rank, 0), None)
        x = torch.zeros(4, 64, dtype=torch.bfloat16)
        # Every token has an expert on rank 2 and one at home.
        ids = torch.tensor([[4, 2 * rank + 1]] * 4, dtype=torch.int32)
        output = buffer.dispatch(x, ids)
        if rank == 2:
            return None
        with pytest.raises(CommunicationTimeoutError) as caught:
            buffer.combine(output.tokens, output.handle)
        error = caught.value
        return error.operator, error.number, error.zone, error.missing_ranks


@pytest.mark.parametrize("before", [0, 5])
def test_a_rank_that_never_combines_is_named(before: int) -> None:
    results = run_ranks(absent_from_combine, 4, (before,))
    said = ("combine", before, before % 2, (2,))
    assert results == [said, said, None, said]


def stopped_while_it_compiles(rank: int, num_ranks: int, folder: str) -> Any:
    """Rank 1 is, in its first dispatch; rank 0 compiles all the same, and then waits for it."""
    pids = [m["pid"] for m in Meeting(None, seconds(60)).exchange({"pid": os.getpid()}, "pids")]
    with pytest.MonkeyPatch.context() as patch, messages() as said:
        patch.setenv("MOE_TRITON_CACHE", folder)
        patch.setattr(cache, "LOCK_WAIT_S", seconds(600))
        case = small_case(num_ranks)
        buffer, inputs = make_buffer(case, timeout_s=seconds(3)), inputs_of(case, rank, 0)
        if rank == 1:  # with the lock of the first kernel that both need
            patch.setattr(loader, "find_toolchain", lambda: os.kill(os.getpid(), signal.SIGSTOP))
        else:
            wait_until_stopped(pids[1])
        try:
            with pytest.raises(CommunicationTimeoutError) as caught:
                buffer.dispatch(inputs.x, inputs.topk_idx)
        finally:
            os.kill(pids[1], signal.SIGKILL)
        return said, caught.value.missing_ranks, pids[1]


def test_a_rank_that_is_stopped_while_it_compiles_is_named(tmp_path: Path) -> None:
    found = run_ranks(stopped_while_it_compiles, 2, (str(tmp_path),), allow_failures=True)[0]
    said, missing, pid = found
    assert missing == (1,)
    assert said[0].startswith(f"rank 1 of 2 (process {pid} on {socket.gethostname()}) has been building the ")


def absent_from_construction(rank: int, num_ranks: int) -> Any:
    if rank == 1:
        return None  # alive, but it never comes
    case = small_case(num_ranks)
    with pytest.raises(CommunicationTimeoutError) as caught:
        make_buffer(case, timeout_s=seconds(3.0))
    return caught.value.missing_ranks


def test_a_rank_that_never_constructs_is_named() -> None:
    assert run_ranks(absent_from_construction, 3) == [(1,), None, (1,)]


def die(rank: int, num_ranks: int, how: int, moment: str, prefix: str) -> Any:
    """Rank 1 dies: before its window has lost its name, or in the middle of a round."""
    case = small_case(num_ranks)
    window_module.PREFIX = prefix
    if moment == "named" and rank == 1:
        window_module._map = lambda name, num_bytes: os.kill(os.getpid(), how)  # type: ignore[assignment]
    try:
        with make_buffer(case, timeout_s=seconds(4.0)) as buffer:
            if rank == 1:
                os.kill(os.getpid(), how)
                time.sleep(30)
            one_round(buffer, case, inputs_of(case, rank, 0), None)
    except CommunicationTimeoutError as error:
        return error.missing_ranks, leftovers(prefix)
    return "nobody was missed"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["named", "round"])
def test_a_dying_rank_is_named_and_leaves_nothing_behind(how: int, moment: str) -> None:
    prefix = new_prefix()
    results = run_ranks(die, 3, (how, moment, prefix), allow_failures=True)
    assert isinstance(results[1], RankFailedError)
    assert results[0] == results[2] == ((1,), [])
    assert not leftovers(prefix)


def test_windows_have_no_name_while_in_use(ranks: Groups) -> None:
    assert ranks(2).run(names_in_use, new_prefix()) == [[], []]


def names_in_use(rank: int, num_ranks: int, prefix: str) -> list[str]:
    with prefixed(prefix), make_buffer(small_case(num_ranks)):
        dist.barrier()
        return leftovers(prefix)


def try_again(rank: int, num_ranks: int, moment: str) -> list[str]:
    """Rank 1 is late: rank 0 gives up, and both go on, on the same group."""
    case, said = small_case(num_ranks), []
    dist.barrier()
    if moment == "construction":
        if rank == 0:
            said.append(message_of(lambda: make_buffer(case, timeout_s=0.5), CommunicationTimeoutError))
        dist.barrier()  # the group is its owner's: our time-outs do not touch it
    elif moment == "both":
        # each waits for the other at another time
        for patient in (0, 1):
            if rank == patient:
                kind = CommunicationTimeoutError
                said.append(message_of(lambda: make_buffer(case, timeout_s=0.3), kind))
            dist.barrier()
    else:
        # Both have to come to the construction in this time.
        with make_buffer(case, timeout_s=seconds(2.0)) as buffer:
            if rank == 0:
                dispatch = lambda: one_round(buffer, case, inputs_of(case, rank, 1), None)  # noqa: E731
                said.append(message_of(dispatch, CommunicationTimeoutError))
            dist.barrier()
    with make_buffer(case, timeout_s=seconds(20.0)) as buffer:
        inputs = inputs_of(case, rank, 2)
        one_round(buffer, case, inputs, None)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert int(total) == num_ranks
    return said


@pytest.mark.parametrize("moment", ["construction", "both", "call"])
def test_after_a_time_out_ranks_go_on_on_the_same_group(moment: str) -> None:
    first, second = run_ranks(try_again, 2, (moment,))
    assert len(first) == 1
    assert "timed out waiting for rank(s) [1]" in first[0]
    assert len(second) == (moment == "both")
