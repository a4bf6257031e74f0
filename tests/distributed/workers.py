"""What ranks run in the distributed tests. Each function is called as ``f(rank, num_ranks, ...)``."""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from moe_triton import EPBuffer, reference
from moe_triton.cli.demo import check_received
from tests.distributed.cases import Case, Inputs, experts_of, inputs_of, smooth_scales_of


def make_buffer(case: Case, **options: Any) -> EPBuffer:
    c = case.config
    return EPBuffer(
        num_max_tokens_per_rank=c.num_max_tokens_per_rank,
        hidden=c.hidden,
        num_topk=c.num_topk,
        num_experts=c.num_experts,
        num_shared_experts=c.num_shared_experts,
        num_shared_ranks=c.num_shared_ranks,
        comm_alg=c.scheme,
        relaxed=True,
        **{"num_blocks": case.num_blocks, "kernels": case.kernels, "timeout_s": 30.0, **options},
    )


def one_round(
    buffer: EPBuffer, case: Case, inputs: Inputs, smooth: torch.Tensor | None
) -> tuple[Any, torch.Tensor]:
    output = buffer.dispatch(
        inputs.x,
        inputs.topk_idx,
        inputs.topk_weights if case.weights else None,
        quantize="int8" if case.quantize else None,
        smooth_scales=smooth,
    )
    y = experts_of(case, buffer.rank, output.tokens)
    weights = inputs.topk_weights if case.weights else None
    return output, buffer.combine(y, weights, output.handle)


def expected_round(case: Case, round_number: int) -> tuple[list[reference.Received], list[torch.Tensor]]:
    everyone = [inputs_of(case, rank, round_number) for rank in range(case.config.num_ranks)]
    weights = [i.topk_weights for i in everyone] if case.weights else None
    ids = [i.topk_idx for i in everyone]
    received = reference.dispatch(
        case.config,
        [i.x for i in everyone],
        ids,
        weights,
        quantize=case.quantize,
        smooth_scales=smooth_scales_of(case),
    )
    y = [experts_of(case, rank, r.tokens) for rank, r in enumerate(received)]
    return received, reference.combine(case.config, y, received, ids, weights)


def compare_rounds(rank: int, num_ranks: int, case: Case) -> list[str]:
    """Runs a case and names everything that is not bit-equal to the reference."""
    wrong = []
    smooth = smooth_scales_of(case)
    with make_buffer(case) as buffer:
        for number in range(case.rounds):
            inputs = inputs_of(case, rank, number)
            output, combined = one_round(buffer, case, inputs, smooth)
            received, sums = expected_round(case, number)
            wrong += [f"round {number}: {name}" for name in check_received(output, received[rank])]
            if not torch.equal(combined, sums[rank]):
                wrong.append(f"round {number}: combined")
    return wrong


def many_rounds(rank: int, num_ranks: int, case: Case, straggle_every: int) -> list[str]:
    """Many rounds over few inputs, with ranks that fall behind at random moments."""
    different = 8
    expected = [expected_round(case, number) for number in range(different)]
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
            wrong += [f"round {number}: {name}" for name in check_received(output, received[rank])]
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
