"""Ranks that move weights while hosts are ahead of their devices; each as ``f(rank, num_ranks, ...)``."""

from __future__ import annotations

import random
from typing import Any

import torch

from moe_triton import BufferStateError, EPBuffer
from moe_triton.backends.npu.runtime import Runtime
from moe_triton.backends.npu.side_copies import NpuSideCopies
from moe_triton.balance import Mover, allocate
from moe_triton.balance.weights import Side
from tests.balance.test_mover import EXPERTS, SLOTS, placement
from tests.npu import standin
from tests.npu.device import Device, FakeCapture, FakeGraph, Work
from tests.patience import seconds

HIDDEN, TOKENS, TOPK, EVERY = 64, 6, 2, 3


def moving(
    rank: int, num_ranks: int, policy: str, seed: int, side: Side, rounds: int
) -> tuple[list[str], int]:
    """Rounds of row-wise experts: which of them are wrong, and how many switches there were."""
    device = standin.install(policy, seed + rank)
    shared, mine = random.Random(seed), random.Random((seed, rank).__hash__())
    wrong: list[str] = []
    with EPBuffer(
        num_max_tokens_per_rank=TOKENS,
        hidden=HIDDEN,
        num_topk=TOPK,
        num_experts=num_ranks * SLOTS,
        relaxed=True,
        backend="npu",
        timeout_s=seconds(30.0),
    ) as buffer:
        weights = allocate(buffer, 1, {"w": ((HIDDEN,), torch.bfloat16)}, side=side, checkpoint_steps=EVERY)
        factors = torch.rand(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
        now = placement(shared, num_ranks, 1)
        for slot, expert in enumerate(now.phy2log.view(num_ranks, SLOTS)[rank].tolist()):
            weights.layer(0)["w"][slot].copy_(factors[expert])
        buffer.barrier()
        mover = Mover(weights, now, num_ranks * SLOTS)
        results, switches = [], 0
        for number in range(rounds):
            switches += len(mover.switch(number))
            goal = placement(shared, num_ranks, 1)
            if number % 10 == 0 and not mover.is_moving:
                mover.begin(goal)
            mover.step(mine.choice([1, 64, 1000]))
            draw = torch.Generator().manual_seed(100 * number + rank)
            x = torch.randn(TOKENS, HIDDEN, generator=draw).bfloat16()
            ids = torch.rand(TOKENS, EXPERTS, generator=draw).topk(TOPK).indices.int()
            scale = torch.rand(TOKENS, TOPK, generator=draw)
            received = buffer.dispatch(x, ids, eplb_table=mover.table(0))
            y = experts(device, received, weights.layer(0)["w"])
            out = buffer.combine(y, received.handle, scale)
            expected = torch.zeros(TOKENS, HIDDEN)
            for k in range(TOPK):
                expected = expected + (x * factors[ids[:, k].long()]).float() * scale[:, k : k + 1]
            results.append((out, expected.bfloat16()))
            # On all ranks in the same rounds: this device goes on only while its host waits.
            if shared.random() < 0.3 or number == rounds - 1:
                buffer.synchronize()
                first = number + 1 - len(results)
                wrong += [f"round {first + n}" for n, (o, e) in enumerate(results) if not torch.equal(o, e)]
                results.clear()
        with FakeCapture(FakeGraph(device)):
            try:
                mover.switch(rounds)
                wrong.append("a switch in a graph")
            except BufferStateError:
                pass
        weights.close()
    return wrong, switches


def side_copies(rank: int, num_ranks: int, follows: bool) -> tuple[list[bool], list[int], list[int]]:
    """Marks before and after all has run, and what a side copy found of a copy in turn."""
    device = standin.install("communication first")
    copies = NpuSideCopies(Runtime())
    source, middle, end = (torch.full((4,), n, dtype=torch.uint8) for n in (1, 2, 3))
    copies.copy_in_turn(middle, source)
    in_turn = copies.mark_in_turn()
    if follows:
        copies.follow()
    copies.copy(end, middle)
    beside = copies.mark()
    said = [in_turn(), beside(), copies.is_capturing()]
    before = end.tolist()
    device.synchronize()
    return [*said, in_turn(), beside()], before, end.tolist()


def experts(device: Device, received: Any, weights: torch.Tensor) -> torch.Tensor:
    """Row-wise experts on the current stream."""
    y = torch.zeros_like(received.tokens)

    def run() -> None:
        slots = torch.repeat_interleave(torch.arange(SLOTS), received.tokens_per_expert)
        y[: len(slots)] = received.tokens[: len(slots)] * weights[slots]

    device.by_queue(Work("copy", "", device.user_stream, run))
    return y
