"""What ranks on several hosts do in tests."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from moe_triton import ArgumentError, MoeTritonError, RankLostError
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
    wrong: list[str] = []
    case = case_of(num_ranks, scheme, row_format)
    with make_buffer(case) as buffer:
        sizes = buffer.config.topology.sizes
        of_case = replace(case, config=buffer.config)
        for number in range(case.rounds):
            output, sums = one_round(buffer, of_case, inputs_of(of_case, rank, number), None)
            received, expected = expected_round(of_case, number)
            wrong += wrong_received(output, received[rank])
            wrong += [] if torch.equal(sums, expected[rank]) else [f"round {number}: sums"]
        posted = buffer.traffic("dispatch").posts.between
        dist.barrier()
    return {"host": os.uname().nodename, "sizes": sizes, "wrong": wrong, "posted": posted}


def refusals(rank: int, num_ranks: int, scheme: str, fields: dict[str, Any]) -> str:
    """What is said of a scheme, or a split, that several hosts cannot have."""
    try:
        with make_buffer(case_of(num_ranks, scheme, **fields)):
            return "made"
    except (ArgumentError, MoeTritonError) as error:
        return str(error)


def until_one_dies(rank: int, num_ranks: int, scheme: str, victim: int, before: int) -> list[Any]:
    """Rounds until a rank is killed: what the others are told, and after how many seconds at most."""
    case = case_of(num_ranks, scheme)
    with make_buffer(case, timeout_s=60.0) as buffer:
        of_case = replace(case, config=buffer.config)
        try:
            for number in range(MOST_ROUNDS):
                if number == before and rank == victim:
                    os.kill(os.getpid(), signal.SIGKILL)
                began = time.monotonic()
                one_round(buffer, of_case, inputs_of(of_case, rank, number % case.rounds), None)
        except RankLostError as error:
            return [list(error.missing_ranks), time.monotonic() - began]
    return []
