"""Groups in which a relay dies, and another rank of its server comes to stand in for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_triton.tools.selftest.cases import dispatched  # noqa: F401
from tests.distributed.cases import Case
from tests.distributed.masked import round_in_chaos
from tests.distributed.workers import make_buffer
from tests.patience import UNTIL_MASKED_S

ROUNDS_BEHIND, MOST_ROUNDS = 6, 20_000


@dataclass(frozen=True)
class Relayed:
    """Ranks that die one after the other.

    Attributes:
        case: whose rounds the others run.
        victims: ranks.
        stand_ins: who is to stand in for each of them in the end.
        before: rounds before the first one dies.
    """

    case: Case
    victims: Sequence[int]
    stand_ins: dict[int, int]
    before: int = 3


def rounds_with_stand_ins(rank: int, num_ranks: int, of: Relayed) -> list[str]:
    """What differs from the reference; and once all stand in, what is lost but the victims' experts."""
    case, wrong, behind = of.case, [], 0
    victims = list(of.victims)
    of_rank = torch.arange(case.config.num_experts) // (case.config.num_experts // num_ranks)
    with make_buffer(case, on_lost="mask", timeout_s=UNTIL_MASKED_S) as buffer:
        masks = buffer._communicator.masks
        for number in range(MOST_ROUNDS):
            stand_ins = {lost: each.rank for lost, each in masks.stand_ins.items()}
            died = len([lost for lost in of.victims if lost not in victims])
            if victims and len(stand_ins) == died and number >= of.before:
                if rank == victims[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                del victims[0]
            said, lost = round_in_chaos(buffer, case, rank, number % case.rounds)
            wrong += said
            if stand_ins == of.stand_ins:
                behind += 1
                others = set(of_rank[lost.long()].tolist()) - set(of.victims)
                if behind > 1 and others:
                    wrong.append(f"round {number}: results of ranks {sorted(others)} are lost")
            if behind == ROUNDS_BEHIND or len(wrong) > 5:
                return wrong
    return [f"no stand-ins after {MOST_ROUNDS} rounds"]
