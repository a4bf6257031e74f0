"""Who is named when ranks that wait die, leave or are paused together: nobody innocent, but with a doubt."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from moe_triton import CommunicationTimeoutError
from moe_triton.processes import RankFailedError, RankGroup, run_ranks, tell
from moe_triton.rendezvous import meeting, notes
from tests.distributed.cases import inputs_of, small_case
from tests.distributed.failures import unwatched
from tests.distributed.workers import make_buffer, one_round, patient_buffer
from tests.patience import seconds

Groups = Callable[[int], RankGroup]
Named = tuple[tuple[int, ...], tuple[int, ...], str]

TIMEOUT_S = seconds(2.0)
# Longer than a wait takes to leave its note, whatever the rule: half of the time-out and more.
SLOW_S = 0.7 * TIMEOUT_S
SCHEMES = ("fullmesh_v1", "fullmesh_v2", "direct", "fullmesh")


def named_by(call: Callable[[], object]) -> Named:
    """Whom a call names: with or without a doubt, and all that it says."""
    with pytest.raises(CommunicationTimeoutError) as caught:
        call()
    error = caught.value
    return error.missing_ranks, error.uncertain_ranks, str(error)


def wait_and_die(rank: int, num_ranks: int, scheme: str) -> Named | None:
    """Rank 0 waits for the slow rank 1, which comes; then it dies."""
    case = small_case(num_ranks, scheme)
    with unwatched(patient_buffer(case, timeout_s=TIMEOUT_S)) as buffer:
        one_round(buffer, case, inputs_of(case, rank, 0), None)
        inputs = inputs_of(case, rank, 1)
        if rank == 1:
            time.sleep(SLOW_S)
        output = buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        # Rank 1 has sent its results, and does not wait yet: it is well, and leaves no note.
        pending = buffer.combine(output.tokens, output.handle, wait=False)
        store = distributed_c10d._get_default_store()
        if rank == 1:
            store.wait(["named"], timedelta(seconds=seconds(60)))
        named = named_by(pending.wait)
        store.set("named", "")
        return named


@pytest.mark.parametrize("scheme", [each for each in SCHEMES if each != "direct"])  # which has no halves
def test_who_waited_for_a_slow_rank_and_died_is_named_alone(scheme: str) -> None:
    results = run_ranks(wait_and_die, 3, (scheme,), allow_failures=True)
    assert isinstance(results[0], RankFailedError)
    assert [result[0] for result in results[1:]] == [(0,), (0,)], results


def lose_the_store(rank: int, num_ranks: int) -> Named | None:
    """Rank 0 hosts the store that ranks leave their notes in, and dies."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = [store.port if store else 0]
    dist.broadcast_object_list(port, src=0)
    world = dist.group.WORLD
    assert world is not None
    meeting._stores[world] = store or dist.TCPStore("localhost", port[0], wait_for_workers=False)
    case = small_case(num_ranks)
    with unwatched(patient_buffer(case, timeout_s=seconds(1.0))) as buffer:
        one_round(buffer, case, inputs_of(case, rank, 0), None)
        dist.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return named_by(lambda: one_round(buffer, case, inputs_of(case, rank, 1), None))


def test_without_a_store_there_is_a_doubt_and_the_error_says_why() -> None:
    for missing, uncertain, said in run_ranks(lose_the_store, 3, allow_failures=True)[1:]:
        assert 0 in missing
        assert uncertain == missing
        assert notes.NO_STORE in said


def paused(rank: int, num_ranks: int, timeout_s: float, scheme: str) -> str:
    """Rank 0 is slow in each round, so that the others wait for it nearly all the time."""
    case = small_case(num_ranks, scheme)
    with patient_buffer(case, timeout_s=timeout_s) as buffer:
        for number in range(8):
            if rank == 0:
                time.sleep(0.1)
                tell(number)
            one_round(buffer, case, inputs_of(case, rank, number), None)
    return "all went well"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nobody_is_named_after_all_ranks_have_been_paused_together(ranks: Groups, scheme: str) -> None:
    timeout_s, group = seconds(1.0), ranks(3)

    def pause(_: int, number: object) -> None:
        if number in (3, 5):
            for signaled in (signal.SIGSTOP, signal.SIGCONT):
                for process in group.processes:
                    assert process.pid
                    os.kill(process.pid, signaled)
                if signaled == signal.SIGSTOP:
                    time.sleep(1.2 * timeout_s)

    assert group.run(paused, timeout_s, scheme, hear=pause) == ["all went well"] * 3


def interrupted(rank: int, num_ranks: int) -> Any:
    """Rank 1 waits for rank 2, which never comes, and is interrupted."""
    case = small_case(num_ranks)
    with patient_buffer(case, timeout_s=TIMEOUT_S) as buffer:
        if rank == 2:
            return None
        if rank == 0:
            return named_by(lambda: one_round(buffer, case, inputs_of(case, rank, 0), None))
        interrupt = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            one_round(buffer, case, inputs_of(case, rank, 0), None)
        return None


def test_who_only_waits_for_the_interrupted_is_not_named(ranks: Groups) -> None:
    missing, uncertain, _ = ranks(3).run(interrupted)[0]
    assert 2 in missing
    assert not uncertain


def construct_twice(rank: int, num_ranks: int) -> list[tuple[int, ...]]:
    """Rank 2 never comes; rank 1 comes when rank 0 has given up."""
    said = []
    for turn in range(2):
        if rank == turn:
            with pytest.raises(CommunicationTimeoutError) as caught:
                make_buffer(small_case(num_ranks), timeout_s=0.2)
            said.append(caught.value.missing_ranks)
        dist.barrier()
    return said


def test_who_has_given_up_a_construction_is_not_named_beside_one_that_never_comes(ranks: Groups) -> None:
    assert ranks(3).run(construct_twice) == [[(1, 2)], [(2,)], []]
