"""What ranks run in the distributed tests. Each function is called as ``f(rank, num_ranks, ...)``."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from moe_triton import EPBuffer, Tuning
from moe_triton.tools.selftest import cases
from moe_triton.tools.selftest.cases import expected_round, one_round, wrong_received
from tests.distributed.cases import Case, inputs_of, smooth_scales_of
from tests.patience import seconds

__all__ = [
    "bits_of_a_round",
    "by_turns",
    "compare_rounds",
    "expected_round",
    "make_buffer",
    "many_rounds",
    "one_round",
    "patient_buffer",
]


def make_buffer(case: Case, **options: Any) -> EPBuffer:
    """The buffer of a case. Ranks have long to answer where no test says how long. Collective."""
    return cases.make_buffer(case, **{"timeout_s": seconds(30.0), **options})


def patient_buffer(case: Case, **options: Any) -> EPBuffer:
    """A buffer whose ranks have all the time to meet: its time-out is for what comes later. Collective."""
    with mock.patch("moe_triton.buffer.seconds_to_meet", return_value=seconds(120)):
        return make_buffer(case, **options)


def by_turns(make: Callable[[int], Any], count: int) -> list[Any]:
    """What `make` gives for each number, made by one rank each, for all. Collective.

    The reference says at once what all ranks have to receive: each of them would work out the same.
    """
    made = []
    for number in range(count):
        made += [make(number)] if dist.get_rank() == number % dist.get_world_size() else [None]
    for number in range(count):
        box = made[number : number + 1]
        dist.broadcast_object_list(box, src=number % dist.get_world_size())
        made[number] = box[0]
    return made


def compare_rounds(rank: int, num_ranks: int, case: Case, tuning: Tuning | None = None) -> list[str]:
    """Runs a case and names everything that is not bit-equal to the reference."""
    wrong = []
    smooth = smooth_scales_of(case)
    expected = by_turns(lambda number: expected_round(case, number), case.rounds)
    with make_buffer(case, tuning=tuning) as buffer:
        for number in range(case.rounds):
            inputs = inputs_of(case, rank, number)
            output, combined = one_round(buffer, case, inputs, smooth)
            received, sums = expected[number]
            wrong += [f"round {number}: {name}" for name in wrong_received(output, received[rank])]
            if not torch.equal(combined, sums[rank]):
                wrong.append(f"round {number}: combined")
    return wrong


def many_rounds(rank: int, num_ranks: int, case: Case, straggle_every: int) -> list[str]:
    """Many rounds over few inputs, with ranks that fall behind at random moments."""
    different = 8
    expected = by_turns(lambda number: expected_round(case, number), different)
    mine = [inputs_of(case, rank, number) for number in range(different)]
    late = random.Random(rank)
    wrong = []
    with make_buffer(case) as buffer:
        for number in range(case.rounds):
            pick = number % different
            if late.randrange(straggle_every) == 0:
                time.sleep(late.random() * 0.004)
            output, combined = one_round(buffer, case, mine[pick], None)
            received, sums = expected[pick]
            wrong += [f"round {number}: {name}" for name in wrong_received(output, received[rank])]
            if not torch.equal(combined, sums[rank]):
                wrong.append(f"round {number}: combined")
            if len(wrong) > 5:
                break
    return wrong


def bits_of_a_round(rank: int, num_ranks: int, case: Case, delays: list[float]) -> bytes:
    """The bits of a round in which each rank comes late by its own delay."""
    with make_buffer(case) as buffer:
        inputs = inputs_of(case, rank, 0)
        time.sleep(delays[rank])
        _, combined = one_round(buffer, case, inputs, None)
        return combined.view(torch.uint8).numpy().tobytes()
