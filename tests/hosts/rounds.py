"""What ranks on several hosts do in tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_triton import (
    ArgumentError,
    CommunicationTimeoutError,
    EPBuffer,
    MoeTritonError,
    RankLostError,
    Tuning,
)
from moe_triton.backends.cpu.window import QueuedWindow
from moe_triton.tools.selftest.cases import wrong_received
from tests.distributed.cases import Case, inputs_of, small_case
from tests.distributed.masked import Chaos, is_over, rounds_in_chaos, wrong_in_chaos
from tests.distributed.workers import expected_round, make_buffer, one_round, patient_buffer
from tests.patience import seconds

MOST_ROUNDS = 100_000
COLLECTIVES = "all_reduce", "all_gather", "all_to_all", "broadcast", "gather", "scatter", "send", "recv"
SENT = 8  # column of bytes sent, in what Linux says of interfaces


def case_of(num_ranks: int, scheme: str, row_format: str = "", **fields: Any) -> Case:
    """A small case whose servers nobody has named."""
    case = small_case(num_ranks, scheme, *([row_format] if row_format else []), rounds=3, weights=True)
    return replace(case, config=replace(case.config, **{"ranks_per_server": None, **fields}).normalized())


def sent_bytes() -> int:
    """By this host, over its cable."""
    (line,) = (each for each in Path("/proc/self/net/dev").read_text().splitlines() if "eth0:" in each)
    return int(line.partition(":")[2].split()[SENT])


@contextlib.contextmanager
def without_collectives() -> Iterator[None]:
    """Nothing goes by torch meanwhile."""

    def refuse(*given: Any, **named: Any) -> None:
        raise AssertionError("a collective of torch's")

    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            for each in (name, f"{name}_single", f"{name}_into_tensor", f"{name}_object", f"i{name}"):
                patch.setattr(dist, each, refuse, raising=False)
        yield


def rounds(rank: int, num_ranks: int, scheme: str, row_format: str) -> dict[str, Any]:
    """Rounds by the reference, on the servers that hosts are; and what of it went over the cable."""
    case, signs = case_of(num_ranks, scheme, row_format), set[str]()
    for _ in range(4):  # ports are free again, and whoever comes first is watched
        with make_buffer(case) as buffer:
            dist.barrier()
            health, topology = buffer.health(), buffer.config.topology
            elsewhere = set(range(num_ranks)) - set(topology.neighbours(rank)) - {rank}
            signs |= {health[other].sign for other in elsewhere}
    with make_buffer(case) as buffer:
        sizes, window = buffer.config.topology.sizes, buffer._communicator._windows[0]
        assert isinstance(window, QueuedWindow)
        assert window._fabric is not None
        dist.barrier()
        before, written = sent_bytes(), window._fabric.written_bytes
        with without_collectives():
            wrong, posted = wrong_rounds(buffer, case, rank)
        dist.barrier()  # all have come there: nothing is under way
        written = window._fabric.written_bytes - written
        return {
            "host": os.uname().nodename,
            "sizes": sizes,
            "signs": sorted(signs),
            "wrong": wrong,
            "posted": posted,
            "written": written,
            "sent": sent_bytes() - before,
        }


def by_tables(rank: int, num_ranks: int, schemes: list[str], folders: list[str]) -> list[Any]:
    """The scheme that "auto" takes on each product, where each rank has tables of its own, and its bits."""
    found: list[Any] = []
    for scheme in schemes:  # their product's own
        case, tuning = case_of(num_ranks, scheme), Tuning(tables=folders[rank])
        asked = replace(case, config=replace(case.config, scheme="auto"))
        with make_buffer(asked, tuning=tuning, outputs="window") as buffer:
            of_case = replace(case, config=buffer.config)
            _, sums = one_round(buffer, of_case, inputs_of(of_case, rank, 0), None)
            found.append((buffer.config.scheme, sums.equal(expected_round(of_case, 0)[1][rank])))
            dist.barrier()
    return found


def traced(rank: int, num_ranks: int, scheme: str, path: str) -> bool:
    """Rounds between barriers, in a trace of each host."""
    case = case_of(num_ranks, scheme)
    with make_buffer(case, trace=path) as buffer:
        of_case = replace(case, config=buffer.config)
        for number in range(case.rounds):
            buffer.barrier()
            one_round(buffer, of_case, inputs_of(of_case, rank, number), None)
        dist.barrier()
    return True


def wrong_rounds(buffer: EPBuffer, case: Case, rank: int) -> tuple[list[str], int]:
    """What is wrong in rounds of a case, by the reference; and bytes that were posted to other servers."""
    wrong: list[str] = []
    posted = 0
    of_case = replace(case, config=buffer.config)
    for number in range(case.rounds):
        output, sums = one_round(buffer, of_case, inputs_of(of_case, rank, number), None)
        received, expected = expected_round(of_case, number)
        wrong += wrong_received(output, received[rank])
        wrong += [] if torch.equal(sums, expected[rank]) else [f"round {number}: sums"]
        for operator in ("dispatch", "combine"):
            traffic = buffer.traffic(operator)  # type: ignore[arg-type]
            posted += traffic.payload_bytes.between + traffic.framing_bytes.between
    return wrong, posted


def refusals(rank: int, num_ranks: int, asked: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """What is said of schemes, or splits, that several hosts cannot have."""
    return [_refusal(case_of(num_ranks, scheme, **fields)) for scheme, fields in asked]


def _refusal(case: Case, **options: Any) -> str:
    try:
        make_buffer(case, **options).close()
        return "made"
    except (ArgumentError, MoeTritonError) as error:
        return str(error)


def until_some_die(rank: int, num_ranks: int, scheme: str, victims: list[int], before: int) -> list[int]:
    """Rounds until ranks are killed: whom the others are told of."""
    case = case_of(num_ranks, scheme)
    with make_buffer(case, timeout_s=60.0) as buffer:
        of_case = replace(case, config=buffer.config)
        try:
            for number in range(MOST_ROUNDS):
                if number == before and rank in victims:
                    os.kill(os.getpid(), signal.SIGKILL)
                one_round(buffer, of_case, inputs_of(of_case, rank, number % case.rounds), None)
        except RankLostError as error:
            return list(error.missing_ranks)
    return []


def refused_masks(rank: int, num_ranks: int) -> list[Any]:
    """What is said of masks, and whether rounds are right that follow."""
    case, said = case_of(num_ranks, "fullmesh_v1"), list[Any]()
    with make_buffer(case) as buffer:
        case = replace(case, config=buffer.config)
        said += [_refusal(case, on_lost="mask")]
        with pytest.raises(ArgumentError) as error:
            buffer.update_mask((rank + 1) % num_ranks, True)
        said += [str(error.value), wrong_rounds(buffer, case, rank)[0] == []]
        dist.barrier()
    return said


def rounds_without(
    rank: int, num_ranks: int, scheme: str, victim: int, stopped_s: float | None, timeout_s: float
) -> list[Any]:
    """Rounds that go on without a rank that is killed, or stopped for a while: see `rounds_in_chaos`."""
    case = case_of(num_ranks, scheme)
    with make_buffer(case) as buffer:
        of_case = replace(case, config=buffer.config)
        dist.barrier()
    wrong, masked, raised = rounds_in_chaos(
        rank, num_ranks, Chaos(of_case, victim, 0.3, stopped_s, timeout_s)
    )
    if stopped_s is not None:
        dist.barrier()  # the first rank has the store, which the one that was stopped asks
    return [wrong, masked, raised]


def rounds_cut_apart(rank: int, num_ranks: int, scheme: str, timeout_s: float) -> list[Any]:
    """Rounds while the cable of the last host is out, and behind that: as `rounds_in_chaos` has it."""
    case, wrong, raised = case_of(num_ranks, scheme), list[str](), ""
    with make_buffer(case) as buffer:
        case = replace(case, config=buffer.config)
        dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    with patient_buffer(case, on_lost="mask", timeout_s=timeout_s) as buffer:
        wrong += wrong_in_chaos(buffer, case, rank, 0)
        dist.barrier()
        if rank == num_ranks - 1:
            set_link("down")
        number = 1
        try:
            while not is_over(buffer, number):
                wrong += wrong_in_chaos(buffer, case, rank, number % case.rounds)
                number += 1
            store.wait(["the cable is in again"], timedelta(seconds=seconds(120)))
            for later in range(20):  # what was on its way comes now
                wrong += wrong_in_chaos(buffer, case, rank, later % case.rounds)
        except MoeTritonError as error:
            raised = repr(error)
        masked = buffer.query_mask().nonzero().flatten().tolist()
        if rank == num_ranks - 1:
            set_link("up")
            store.set("the cable is in again", "")
        dist.barrier()
    return [wrong[:5], masked, raised]


def set_link(state: str) -> None:
    """Takes this host's cable out, or puts it in again."""
    subprocess.run(["ip", "link", "set", "eth0", state], check=True)


def rounds_over_a_cut(rank: int, num_ranks: int, scheme: str, culprit: int, cut_s: float) -> list[str]:
    """Rounds while the cable of a host is out for some seconds: what is wrong in them."""
    case = case_of(num_ranks, scheme)
    with make_buffer(case, timeout_s=60.0) as buffer:
        wrong, _ = wrong_rounds(buffer, case, rank)
        dist.barrier()
        back = threading.Timer(cut_s, set_link, ["up"])
        if rank == culprit:
            set_link("down")
            back.start()
        wrong += wrong_rounds(buffer, case, rank)[0]
        if rank == culprit:
            back.join()
        dist.barrier()
    return wrong


def rounds_after_a_cut(rank: int, num_ranks: int, scheme: str, culprit: int) -> dict[str, Any]:
    """A cable is out until all have run out of time, and then goes on with what it has kept; a new buffer."""
    case, missed = case_of(num_ranks, scheme), []
    buffer = patient_buffer(case, timeout_s=seconds(2.0))
    wrong, _ = wrong_rounds(buffer, case, rank)
    dist.barrier()
    if rank == culprit:
        set_link("down")
    try:
        while not missed:
            wrong_rounds(buffer, case, rank)
    except CommunicationTimeoutError as error:
        missed = list(error.missing_ranks)
    buffer.close()
    if rank == culprit:
        set_link("up")
    with make_buffer(case, timeout_s=60.0) as buffer:
        wrong += wrong_rounds(buffer, case, rank)[0]
        dist.barrier()
    return {"missed": missed, "wrong": wrong}
