"""What launchers start on several hosts, and groups beside the default one there.

    torchrun --nnodes 2 --max-restarts 1 ... -m tests.hosts.launched

A rank ends in its first attempt, between a dispatch and its combine. Those of the next one say what is wrong.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from moe_triton.rendezvous import meeting
from moe_triton.tools.selftest.cases import wrong_received
from tests.distributed.cases import inputs_of
from tests.distributed.workers import expected_round, make_buffer, one_round
from tests.hosts.rounds import case_of

VICTIM, ITS_ROUND, ITS_STATUS = 3, 1, 9
ENDED = "MOE_TEST_ENDED"  # variable: a file that says that it has


def wrong_rounds(rank: int, num_ranks: int, ends_in: int = -1, **options: Any) -> list[str]:
    """What is wrong in rounds of a group, whose rank this is; it ends in one of them if it is told to."""
    case, wrong = case_of(num_ranks, "fullmesh_v1"), list[str]()
    with make_buffer(case, **options) as buffer:
        of_case = replace(case, config=buffer.config)
        for number in range(case.rounds):
            inputs = inputs_of(of_case, rank, number)
            if number == ends_in:
                buffer.dispatch(inputs.x, inputs.topk_idx)
                os._exit(ITS_STATUS)
            output, sums = one_round(buffer, of_case, inputs, None)
            received, expected = expected_round(of_case, number)
            wrong += wrong_received(output, received[rank])
            wrong += [] if torch.equal(sums, expected[rank]) else [f"round {number}: sums"]
    return wrong


def in_new_groups(rank: int, num_ranks: int) -> list[str]:
    """Rounds of the ranks with even numbers and of those with odd ones, each in a group of their own."""
    groups = [dist.new_group(list(range(first, num_ranks, 2))) for first in range(2)]
    return wrong_rounds(rank // 2, num_ranks // 2, group=groups[rank % 2])


def without_a_store(rank: int, num_ranks: int) -> list[Any]:
    """Rounds of a group to which torch gave no store, and at which address ours is."""
    with mock.patch.object(distributed_c10d, "_get_process_group_store", return_value=None):
        wrong = wrong_rounds(rank, num_ranks)
    return [wrong, meeting._stores[dist.group.WORLD].host]  # type: ignore[index]


def main() -> None:
    """A rank that torchrun starts."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # TORCHELASTIC_RESTART_COUNT does not say it: each host counts what has ended there.
    is_first = rank == VICTIM and not (ended := Path(os.environ[ENDED])).exists()
    if is_first:
        ended.touch()
    wrong = wrong_rounds(rank, dist.get_world_size(), ITS_ROUND if is_first else -1)
    print(f"rank {rank}: wrong {wrong}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
