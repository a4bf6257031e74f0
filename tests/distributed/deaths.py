"""Ranks of which some die, leave or stop; called as ``f(rank, num_ranks, ...)``."""

from __future__ import annotations

import contextlib
import errno
import itertools
import multiprocessing.util
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from moe_triton import CommunicationTimeoutError, EPBuffer, RankHealth, RankLostError, processes
from moe_triton import torch_npu_ops as ops
from moe_triton.backends.cpu.paced_link import PacedLink, paced
from moe_triton.processes import tell
from moe_triton.rendezvous import deaths as rendezvous_deaths
from moe_triton.rendezvous import meeting as rendezvous
from moe_triton.rendezvous.attempts import Attempt
from moe_triton.rendezvous.deaths import NOT_WATCHED, Watch
from moe_triton.rendezvous.meeting import Meeting
from moe_triton.rendezvous.process_ends import BY_SOCKET
from tests.distributed.cases import Case, inputs_of, small_case
from tests.distributed.failures import message_of, wait_until_stopped
from tests.distributed.interrupted import TIMEOUT_S, WITHIN_S, torch_npu_call
from tests.distributed.workers import make_buffer, one_round
from tests.patience import seconds

Named = tuple[str, tuple[int, ...], str]
SHORT_S = seconds(2.0)


@contextlib.contextmanager
def without_pidfds() -> Iterator[None]:
    """As on a kernel, or under a filter of its calls, that has none."""

    def refuse(pid: int) -> NoReturn:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pidfd_open", refuse)
        yield


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("this process is dead")


def fork_that_lives_on() -> None:
    """A child that has all that this process has open, but for what says that this rank has died."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            assert processes._to_group
            processes._to_group.close()
            time.sleep(600)
        os._exit(0)
    tell(child)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def states(buffer: EPBuffer) -> list[str]:
    return [each.state for each in buffer.health()]


def lost_by(call: Callable[[], object]) -> Named:
    """How a call has ended that needed a rank which is lost, at once."""
    start = time.monotonic()
    with pytest.raises(RankLostError) as caught:
        call()
    assert time.monotonic() - start < WITHIN_S < TIMEOUT_S
    return caught.value.operator, caught.value.missing_ranks, str(caught.value)


def killed(rank: int, num_ranks: int, case: Case, moment: str, has_pidfds: bool) -> Any:
    """The last rank dies while others wait for it, or between their calls. A child of it lives on."""
    with contextlib.nullcontext() if has_pidfds else without_pidfds():
        buffer = make_buffer(case, timeout_s=TIMEOUT_S)
    inputs, dying = inputs_of(case, rank, 0), num_ranks - 1
    one_round(buffer, case, inputs, None)
    # Rows for every rank, and from every rank.
    ids = torch.arange(case.config.num_topk * 4).view(4, -1).int() % case.config.num_experts
    x = inputs.x.new_zeros(4, case.config.hidden)
    output = buffer.dispatch(x, ids) if moment == "combine" else None
    dist.barrier()
    if rank == dying:
        fork_that_lives_on()
        time.sleep(0.2)  # until others wait, most likely; whichever it is, they have to notice
        die()
    if moment == "between calls":
        until(lambda: states(buffer)[dying] == "dead")
    if output is None:
        named = lost_by(lambda: buffer.dispatch(x, ids))
    else:
        named = lost_by(lambda: buffer.combine(output.tokens, output.handle))
    broken = message_of(lambda: buffer.dispatch(x, ids), Exception)
    health = buffer.health()
    buffer.close()
    return named, broken, health[dying]


def server_killed(rank: int, num_ranks: int, case: Case, dying: tuple[int, ...], are_joined: bool) -> Any:
    """Ranks of the last server die. Servers are only played, and know of each other what real ones would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous_deaths, "JOINS_SERVERS", are_joined)
        buffer, inputs = make_buffer(case, timeout_s=TIMEOUT_S), inputs_of(case, rank, 0)
    one_round(buffer, case, inputs, None)
    until(lambda: all(each.sign not in (BY_SOCKET, NOT_WATCHED) for each in buffer.health()))
    signs = [each.sign for each in buffer.health()]
    dist.barrier()
    if rank in dying:
        die()
    named = lost_by(lambda: one_round(buffer, case, inputs, None))
    until(lambda: all(states(buffer)[each] == "dead" for each in dying))
    health = buffer.health()
    buffer.close()
    return named, signs, health


def died_beside_others(rank: int, num_ranks: int) -> Any:
    """Rank 2 dies while ranks 0 and 1 are in a combine that needs only them; it goes on to its end."""
    case, link = small_case(num_ranks, "fullmesh_v2"), PacedLink(10.0)
    with paced(link), make_buffer(case, timeout_s=TIMEOUT_S) as buffer:
        one_round(buffer, case, inputs_of(case, rank, 0), None)
        # Every token of ranks 0 and 1 goes to both of them.
        ids = torch.tensor([[0, 2]] * 4, dtype=torch.int32)
        x = torch.ones(4 if rank < 2 else 0, case.config.hidden, dtype=torch.bfloat16)
        output = buffer.dispatch(x, ids[: len(x)])
        dist.barrier()
        if rank == 2:
            time.sleep(0.2)
            die()
        link.set(x.nbytes / 1e9)  # a second for what each sends to the other one
        sums = buffer.combine(output.tokens, output.handle)
        until(lambda: states(buffer)[2] == "dead")
        return bool((sums == 2).all()), lost_by(lambda: buffer.dispatch(x, ids))


def stuck_behind(rank: int, num_ranks: int) -> Any:
    """Rank 0 waits for rank 1 alone, which does not combine any more, for it has seen that rank 2 is dead."""
    case = small_case(num_ranks, "fullmesh_v2")
    buffer = make_buffer(case, timeout_s=TIMEOUT_S)
    one_round(buffer, case, inputs_of(case, rank, 0), None)
    x = torch.ones(4, case.config.hidden, dtype=torch.bfloat16)
    output = buffer.dispatch(x, torch.tensor([[0, 2]] * 4, dtype=torch.int32))
    dist.barrier()
    if rank == 2:
        time.sleep(0.2)
        die()
    if rank == 1:
        until(lambda: states(buffer)[2] == "dead")
    named = lost_by(lambda: buffer.combine(output.tokens, output.handle))
    buffer.close()
    return named


def leave(rank: int, num_ranks: int) -> Any:
    """Rank 1 closes, and ends; rank 2 ends as Python's processes do, with its buffer open."""
    case = small_case(num_ranks)
    buffer = make_buffer(case, timeout_s=TIMEOUT_S)
    one_round(buffer, case, inputs_of(case, rank, 0), None)
    dist.barrier()
    if rank == 1:
        buffer.close()
        os._exit(0)
    if rank == 2:
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
        os._exit(0)
    losses = buffer._communicator.participants.losses
    watch = losses._watches["expert"]
    until(lambda: sum(gone.has_ended for gone in watch.gone().values()) == 2)
    health = buffer.health()
    # Nobody is dead, so that the call begins; but what it waits for cannot come.
    named = lost_by(lambda: one_round(buffer, case, inputs_of(case, rank, 1), None))
    buffer.close()
    return health, named


def stop(rank: int, num_ranks: int) -> Any:
    """Rank 1 is stopped, and is late for it, not dead."""
    pids = [m["pid"] for m in Meeting(None, seconds(60)).exchange({"pid": os.getpid()}, "pids")]
    case, found = small_case(num_ranks), list[RankHealth]()
    with make_buffer(case, timeout_s=seconds(30)) as buffer:
        one_round(buffer, case, inputs_of(case, rank, 0), None)
    buffer = make_buffer(case, timeout_s=SHORT_S)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_until_stopped(pids[1])

    def look() -> None:
        until(lambda: states(buffer)[1] == "late")
        found.extend(buffer.health())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        with pytest.raises(CommunicationTimeoutError) as caught:
            one_round(buffer, case, inputs_of(case, rank, 0), None)
        looking.join(WITHIN_S)
        return type(caught.value).__name__, caught.value.missing_ranks, found, states(buffer)
    finally:
        os.kill(pids[1], signal.SIGKILL)


def _watching() -> tuple[int, int]:
    """Threads that watch others, and file descriptors by which they do."""
    unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    kinds = [
        "pidfd",
        "moe_triton-board",
        *(f"socket:[{line[6]}]" for line in unix if "moe_triton-" in line[-1]),
    ]
    links = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(str(each.readlink()))
    threads = [thread for thread in threading.enumerate() if thread.name == "moe_triton deaths"]
    return len(threads), sum(any(kind in link for kind in kinds) for link in links)


def shared(rank: int, num_ranks: int) -> Any:
    """Buffers and torch_npu's functions of one group: what there is for it, and what they say of a death."""
    case, before = small_case(num_ranks), _watching()
    one = make_buffer(case, timeout_s=TIMEOUT_S)
    process_of = one._communicator.participants.losses._watches["expert"]._held.peers[1 - rank]
    assert process_of
    until(lambda: process_of.process is not None and process_of.process.sign != "")
    with_one = _watching()
    others = [make_buffer(case, timeout_s=TIMEOUT_S) for _ in range(3)]
    with_four = _watching()
    for other in others[1:]:
        other.close()
    call = torch_npu_call(rank, num_ranks)
    dist.barrier()
    if rank == 1:
        die()
    until(lambda: states(one)[1] == "dead")
    inputs = inputs_of(case, rank, 0)
    calls = [call, *(lambda b=b: one_round(b, case, inputs, None) for b in (one, others[0]))]
    said = [lost_by(each)[1] for each in calls]
    ops.release(ops.group_name())
    for buffer in (one, others[0]):
        buffer.close()
    until(lambda: _watching() == before)
    return said, with_one, with_four


def host_store(rank: int, host: int) -> None:
    """Has ranks meet over a store in the process of one of them."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if rank == host else None
    port = [store.port if store else 0]
    dist.broadcast_object_list(port, src=host)
    world = dist.group.WORLD
    assert world is not None
    rendezvous._stores[world] = store or dist.TCPStore("localhost", port[0], wait_for_workers=False)


def dies_constructing(rank: int, num_ranks: int, dying: int, moment: int | str, hosts: bool) -> Any:
    """A rank dies in a construction: before it says something for the so-manieth time, or right behind that.

    Args:
        rank: of this process.
        num_ranks: of the group.
        dying: who does.
        moment: before which exchange; "said" for right behind its first message, while another rank is late;
            "take" for behind the first exchange, before it connects to anybody.
        hosts: whether its process hosts the store.
    """
    case, pids = small_case(num_ranks), [0] * num_ranks
    if hosts:
        host_store(rank, dying)
    dist.all_gather_object(pids, os.getpid())
    end = os.pidfd_open(pids[dying])
    dist.barrier()
    exchange, exchanges = Meeting.exchange, itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        if rank == dying:

            def die_or_exchange(self: Meeting, *given: Any) -> list[dict[str, Any]]:
                return die() if next(exchanges) == moment else exchange(self, *given)

            patch.setattr(Meeting, "exchange", die_or_exchange)
            if moment == "said":
                patch.setattr(Attempt, "_wait", lambda *given: die())
            if moment == "take":
                patch.setattr(Watch, "take", lambda *given: die())
        elif moment == "said" and rank == (dying + 1) % num_ranks:
            assert select.select([end], [], [], seconds(20.0))[0]
        with pytest.raises(CommunicationTimeoutError) as caught:
            make_buffer(case, timeout_s=seconds(600.0))
    os.close(end)
    if not hosts:
        make_buffer(small_case(num_ranks), timeout_s=TIMEOUT_S, lost_ranks=[dying]).close()
    error = caught.value
    return isinstance(error, RankLostError), error.operator, error.missing_ranks, str(error)


def dies_beside_a_buffer(rank: int, num_ranks: int) -> Named:
    """A rank dies that has a buffer with others, while these meet for the next one, or just before."""
    with make_buffer(small_case(num_ranks), timeout_s=TIMEOUT_S):
        dist.barrier()
        if rank == 1:
            die()
        return lost_by(lambda: make_buffer(small_case(num_ranks), timeout_s=seconds(600.0)))


def known_to_be_dead(rank: int, num_ranks: int) -> Named:
    """A rank dies, which one buffer of the group notices, and then another one is constructed."""
    with make_buffer(small_case(num_ranks), timeout_s=TIMEOUT_S) as first:
        if rank == 1:
            die()
        until(lambda: states(first)[1] == "dead")
        return lost_by(lambda: make_buffer(small_case(num_ranks), timeout_s=TIMEOUT_S))


def case_on_servers(num_ranks: int, scheme: str = "fullmesh") -> Case:
    """Two servers, half of the ranks on each."""
    case = small_case(num_ranks, scheme)
    return replace(case, config=replace(case.config, ranks_per_server=num_ranks // 2))
