"""What ranks on several hosts do in tests."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from moe_triton import ArgumentError, CommunicationTimeoutError, EPBuffer, MoeTritonError, RankLostError
from moe_triton.tools.selftest.cases import wrong_received
from tests.distributed.cases import Case, inputs_of, small_case
from tests.distributed.workers import expected_round, make_buffer, one_round

MOST_ROUNDS = 100_000


def case_of(num_ranks: int, scheme: str, row_format: str = "", **fields: Any) -> Case:
    """A small case whose servers nobody has named."""
    case = small_case(num_ranks, scheme, *([row_format] if row_format else []), rounds=3, weights=True)
    return replace(case, config=replace(case.config, **{"ranks_per_server": None, **fields}).normalized())


def rounds(rank: int, num_ranks: int, scheme: str, row_format: str) -> dict[str, Any]:
    """Rounds by the reference, on the servers that hosts are; and what of it was posted."""
    case = case_of(num_ranks, scheme, row_format)
    with make_buffer(case) as buffer:
        sizes = buffer.config.topology.sizes
        wrong = wrong_rounds(buffer, case, rank)
        posted = buffer.traffic("dispatch").posts.between
        dist.barrier()
    return {"host": os.uname().nodename, "sizes": sizes, "wrong": wrong, "posted": posted}


def wrong_rounds(buffer: EPBuffer, case: Case, rank: int) -> list[str]:
    """What is wrong in rounds of a case, by the reference."""
    wrong: list[str] = []
    of_case = replace(case, config=buffer.config)
    for number in range(case.rounds):
        output, sums = one_round(buffer, of_case, inputs_of(of_case, rank, number), None)
        received, expected = expected_round(of_case, number)
        wrong += wrong_received(output, received[rank])
        wrong += [] if torch.equal(sums, expected[rank]) else [f"round {number}: sums"]
    return wrong


def refusals(rank: int, num_ranks: int, scheme: str, fields: dict[str, Any]) -> str:
    """What is said of a scheme, or a split, that several hosts cannot have."""
    try:
        with make_buffer(case_of(num_ranks, scheme, **fields)):
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


def set_link(state: str) -> None:
    """Takes this host's cable out, or puts it in again."""
    subprocess.run(["ip", "link", "set", "eth0", state], check=True)


def rounds_over_a_cut(rank: int, num_ranks: int, scheme: str, culprit: int, cut_s: float) -> list[str]:
    """Rounds while the cable of a host is out for some seconds: what is wrong in them."""
    case = case_of(num_ranks, scheme)
    with make_buffer(case, timeout_s=60.0) as buffer:
        wrong = wrong_rounds(buffer, case, rank)
        dist.barrier()
        back = threading.Timer(cut_s, set_link, ["up"])
        if rank == culprit:
            set_link("down")
            back.start()
        wrong += wrong_rounds(buffer, case, rank)
        if rank == culprit:
            back.join()
        dist.barrier()
    return wrong


def rounds_after_a_cut(rank: int, num_ranks: int, scheme: str, culprit: int) -> dict[str, Any]:
    """A cable is out until all have run out of time, and then goes on with what it has kept; a new buffer."""
    case, missed = case_of(num_ranks, scheme), []
    buffer = make_buffer(case, timeout_s=2.0)
    wrong = wrong_rounds(buffer, case, rank)
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
        wrong += wrong_rounds(buffer, case, rank)
        dist.barrier()
    return {"missed": missed, "wrong": wrong}
