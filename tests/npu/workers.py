"""What ranks run on the stand-in. Each function is called as ``f(rank, num_ranks, ...)``."""

from __future__ import annotations

from typing import Any

import torch

from moe_triton import EPBuffer
from moe_triton.cli.demo import check_received
from moe_triton.tuning import Tuning
from tests.distributed.cases import Case, experts_of, inputs_of, smooth_scales_of
from tests.distributed.workers import expected_round, make_buffer
from tests.npu import standin
from tests.npu.device import Device


def start(case: Case, policy: str, rank: int, **options: Any) -> tuple[Device, EPBuffer]:
    device = standin.install(policy, seed=case.seed + rank)
    return device, make_buffer(case, backend="npu", **options)


def compare_rounds(rank: int, num_ranks: int, case: Case, policy: str, tuning: Tuning | None) -> list[str]:
    """Runs a case and names everything that is not bit-equal to the reference."""
    wrong = []
    smooth = smooth_scales_of(case)
    _, buffer = start(case, policy, rank, tuning=tuning)
    with buffer:
        for number in range(case.rounds):
            inputs = inputs_of(case, rank, number)
            weights = inputs.topk_weights if case.weights else None
            output = buffer.dispatch(
                inputs.x,
                inputs.topk_idx,
                weights,
                quantize="int8" if case.quantize else None,
                smooth_scales=smooth,
            )
            buffer.synchronize()
            y = experts_of(case, rank, output.tokens)
            combined = buffer.combine(y, weights, output.handle)
            if number % 2:  # or the next dispatch comes while this combine is on its way
                buffer.synchronize()
            received, sums = expected_round(case, number)
            wrong += [f"round {number}: {name}" for name in check_received(output, received[rank])]
            buffer.synchronize()
            if not torch.equal(combined, sums[rank]):
                wrong.append(f"round {number}: combined")
    return wrong
