"""Ranks that move weights while hosts are ahead of their devices; each as ``f(rank, num_ranks, ...)``."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch

from moe_triton import BufferStateError, EPBuffer
from moe_triton.backends.npu.runtime import Runtime
from moe_triton.backends.npu.side_copies import NpuSideCopies
from moe_triton.balance import EplbCommunicator, Mover, adopt, allocate, allocate_redundant_experts
from moe_triton.balance.weights import Side
from tests.balance.test_mover import EXPERTS, SLOTS, placement
from tests.npu import standin
from tests.npu.device import Device, FakeCapture, FakeGraph, FakeStream, Work
from tests.patience import seconds

HIDDEN, TOKENS, TOPK, EVERY = 64, 6, 2, 3


def make_buffer(num_ranks: int) -> EPBuffer:
    """Collective."""
    return EPBuffer(
        num_max_tokens_per_rank=TOKENS,
        hidden=HIDDEN,
        num_topk=TOPK,
        num_experts=num_ranks * SLOTS,
        relaxed=True,
        backend="npu",
        timeout_s=seconds(30.0),
    )


def moving(
    rank: int, num_ranks: int, policy: str, seed: int, side: Side, held: str, rounds: int
) -> tuple[list[str], int]:
    """Rounds of row-wise experts: which of them are wrong, and how many switches there were."""
    device = standin.install(policy, seed + rank)
    shared, mine = random.Random(seed), random.Random((seed, rank).__hash__())
    wrong: list[str] = []
    with make_buffer(num_ranks) as buffer:
        if held == "allocated":
            specs = {"w": ((HIDDEN,), torch.bfloat16)}
            weights = allocate(buffer, 1, specs, side=side, checkpoint_steps=EVERY)
        else:
            own = [{"w": torch.zeros(SLOTS, HIDDEN, dtype=torch.bfloat16)}]
            weights = adopt(buffer, own, side=side, stage_bytes=192 * num_ranks, checkpoint_steps=EVERY)
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


def rearranging(rank: int, num_ranks: int, policy: str, seed: int, layers: int) -> list[str]:
    """Moves of experts that a framework has planned: which are wrong."""
    device = standin.install(policy, seed + rank)
    wrong: list[str] = []
    with make_buffer(num_ranks) as buffer:
        communicator = EplbCommunicator(buffer, stage_bytes=128 * num_ranks, timeout_s=seconds(30.0))
        streams = device.user_stream, FakeStream(device, "the caller's")
        for layer in range(layers):
            communicator.set_stream(streams[layer % 2])
            draw = random.Random(layer)
            moves = [(draw.randrange(num_ranks), draw.randrange(num_ranks), each) for each in range(5)]
            came = {}
            for source, to, expert in moves:
                if source == rank:
                    given = torch.zeros(50, dtype=torch.int32)
                    # The stream has not got there yet.
                    device.by_queue(
                        Work("copy", "", streams[layer % 2], partial(given.fill_, 10 * layer + expert))
                    )
                    communicator.add_send([given], to, expert)
                if to == rank:
                    came[expert] = torch.zeros(50, dtype=torch.int32)
                    communicator.add_recv([came[expert]], source, expert)
            communicator.execute()
            for expert, tensor in came.items():
                if not (tensor == 10 * layer + expert).all():
                    wrong.append(f"expert {expert} of layer {layer}: {tensor.unique().tolist()}")
        buffer.barrier()
        communicator.close()
    return wrong


def training(rank: int, num_ranks: int, policy: str, seed: int, rounds: int) -> list[str]:
    """Weights to slots and gradients back, while the device runs when it likes: what is wrong."""
    device = standin.install(policy, seed + rank)
    wrong: list[str] = []
    with make_buffer(num_ranks) as buffer:
        specs = {"w": ((4,), torch.bfloat16), "grads": ((4,), torch.float32)}
        redundant = allocate_redundant_experts(buffer, 1, specs)
        slots = redundant.tensors
        mapping = torch.tensor([[(r + 1) % num_ranks] for r in range(num_ranks)])  # of one expert a rank
        for number in range(rounds):
            own, grads = torch.zeros(1, 4).bfloat16(), torch.zeros(1, 4)
            # What was asked of the stream before has not run when the call begins.
            for tensor, value in ((own, 10 * number + rank), (grads, rank), (slots["grads"], 100 + rank)):
                device.by_queue(Work("copy", "", device.user_stream, partial(tensor.fill_, value)))
            buffer.synchronize()  # the stand-in's torch operators run at once, and not in the stream
            redundant.lb_prefetch_weights(slots["w"], own, mapping)
            redundant.lb_reduce_grads(slots["grads"], grads, mapping)
            if not (slots["w"] == 10 * number + (rank + 1) % num_ranks).all():
                wrong.append(f"weights of round {number}: {slots['w'].tolist()}")
            if not (grads == rank + 100 + (rank - 1) % num_ranks).all():
                wrong.append(f"gradients of round {number}: {grads.tolist()}")
        redundant.close()
    return wrong


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
