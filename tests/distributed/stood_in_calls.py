"""Calls of each kind while a rank stands in for a lost relay, and what was dispatched before it did."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from moe_triton import BufferStateError, EPBuffer
from moe_triton.core.threads import Deadline
from moe_triton.tools.selftest.cases import combined, dispatched
from tests.distributed.cases import Case, Inputs, experts_of, inputs_of
from tests.distributed.masked import round_in_chaos
from tests.distributed.stand_ins import MOST_ROUNDS
from tests.distributed.workers import make_buffer
from tests.patience import UNTIL_MASKED_S

WHAT = "rows", "sums", "counts", "offsets", "lost"


def each_kind(buffer: EPBuffer, inputs: Inputs, most: int) -> dict[str, list[torch.Tensor]]:
    """What a rank gets of one dispatch and its combine, in each form of them, by both zones."""
    x, ids, weights = inputs.x, inputs.topk_idx, inputs.topk_weights
    padded = {"expert_alignment": 4, "do_zero_padding": True}
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "int8": {"quantize": "int8"},
        "aligned": padded,
        "most": {"num_max_tokens_per_rank": most},
        "most, aligned": {"num_max_tokens_per_rank": most, **padded},
    }
    got = {}
    for name, options in kinds.items():
        for number in range(2):
            output = buffer.dispatch(x, ids, weights, **options)
            handle, tokens = output.handle, output.tokens.float()
            sums = buffer.combine(tokens.to(handle.dtype), handle, weights)
            of_handle = output.tokens_per_expert, handle.recv_offsets, handle.lost[:, : ids.shape[1]]
            got[f"{name} {number}"] = [tokens[: handle.num_received()], sums, *of_handle]
    buffer.barrier()
    return got


def until_stood_in(buffer: EPBuffer, case: Case, rank: int, victim: int) -> list[str]:
    """What is wrong in rounds from a death on until somebody stands in."""
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    wrong: list[str] = []
    for number in range(MOST_ROUNDS):
        wrong += round_in_chaos(buffer, case, rank, number % case.rounds)[0]
        if buffer._communicator.masks.stand_ins:
            return wrong
    return [*wrong, "nobody stands in"]


def calls_stood_in(rank: int, num_ranks: int, case: Case, victim: int, tokens: int) -> list[str]:
    """Which results differ where a rank is stood in for from those where it brings and gets nothing."""
    inputs = inputs_of(replace(case, tokens=(tokens,) * num_ranks), rank, 0)
    of_rank = inputs.topk_idx // (case.config.num_experts // num_ranks)
    is_lost = (inputs.topk_idx >= 0) & (of_rank == victim)
    without = replace(inputs, topk_idx=torch.where(is_lost, -1, inputs.topk_idx))
    if rank == victim:
        without = Inputs(inputs.x[:0], inputs.topk_idx[:0], inputs.topk_weights[:0])
    with make_buffer(case, on_lost="mask", timeout_s=UNTIL_MASKED_S) as buffer:
        expected = each_kind(buffer, without, tokens)
        wrong = until_stood_in(buffer, case, rank, victim)
        for name, tensors in each_kind(buffer, inputs, tokens).items():
            known = [*expected[name][:-1], is_lost]
            pairs = zip(WHAT, tensors, known, strict=True)
            wrong += [f"{name}: {what}" for what, one, other in pairs if not torch.equal(one, other)]
    return wrong


def combines_of_before(rank: int, num_ranks: int, case: Case, victim: int) -> list[str]:
    """What differs in combines of dispatches from before a death, once somebody stands in.

    Without results that the lost rank would have summed, and those of its experts.
    """
    topology = case.config.topology
    is_of_rail = victim in topology.rail(rank)
    cut_off = {victim, *(topology.neighbours(victim) if is_of_rail else ())}
    inputs = inputs_of(case, rank, 0)
    of_rank = inputs.topk_idx // (case.config.num_experts // num_ranks)
    is_lost = (inputs.topk_idx >= 0) & torch.isin(of_rank, torch.tensor(sorted(cut_off)))
    with make_buffer(case, on_lost="mask", timeout_s=UNTIL_MASKED_S) as buffer:
        without = replace(inputs, topk_idx=torch.where(is_lost, -1, inputs.topk_idx))
        expected = combined(buffer, case, without, dispatched(buffer, case, without))
        outputs = [dispatched(buffer, case, inputs) for _ in range(2)]
        results = [experts_of(case, rank, output.tokens) for output in outputs]
        wrong = until_stood_in(buffer, case, rank, victim)
        for output, y in zip(outputs, results, strict=True):
            sums = combined(buffer, case, inputs, output, y)
            if not torch.equal(sums, expected):
                wrong.append("sums")
            if not torch.equal(output.handle.lost[:, : is_lost.shape[1]], is_lost):
                wrong.append("lost")
        for number in range(2):
            wrong += round_in_chaos(buffer, case, rank, number)[0]
    return wrong


def rounds_with_a_late_relay(
    rank: int, num_ranks: int, case: Case, victim: int, other: int, stand_in: int
) -> list[str]:
    """What differs where another rank dies in a combine, of which the call knows before what it passes on.

    Args:
        rank: this one.
        num_ranks: of the group.
        case: of it.
        victim: the relay that is lost first.
        other: of its server, which dies once it has dispatched.
        stand_in: who stands in for the first, and kills the second.
    """
    pids: list[Any] = [None] * num_ranks
    dist.all_gather_object(pids, os.getpid())
    with make_buffer(case, on_lost="mask", timeout_s=UNTIL_MASKED_S) as buffer:
        masks = buffer._communicator.masks
        wrong = round_in_chaos(buffer, case, rank, 0)[0] + until_stood_in(buffer, case, rank, victim)

        def mark_late(of: int, *given: Any) -> None:
            mark(of, *given)
            if of == victim and other not in masks.masked:
                os.kill(pids[other], signal.SIGKILL)
                deadline = Deadline(UNTIL_MASKED_S)
                while other not in masks.known.masked and deadline.left() > 0:
                    time.sleep(0.001)

        def wait_for_death(*_: Any) -> torch.Tensor:
            time.sleep(UNTIL_MASKED_S)
            raise AssertionError("nobody kills this rank")

        mark = masks.mark_tables_of
        if rank == stand_in:
            masks.mark_tables_of = mark_late  # type: ignore[method-assign, assignment]
        for number in range(case.rounds, case.rounds + 4):  # none that lies in the window already
            combining = wait_for_death if rank == other else combined
            wrong += round_in_chaos(buffer, case, rank, number, combining)[0]
    return wrong


def ended_from_outside(rank: int, num_ranks: int, case: Case, victim: int, how: str) -> str:
    """What a call of the rank that stands in raises that is ended from another thread, or by Ctrl-C.

    The others do not make that call.
    """
    said = ""
    with make_buffer(case, on_lost="mask", timeout_s=UNTIL_MASKED_S * 10) as buffer:
        wrong = until_stood_in(buffer, case, rank, victim)
        assert not wrong, wrong
        if rank == buffer._communicator.masks.stand_ins[victim].rank:
            inputs, communicator = inputs_of(case, rank, 0), buffer._communicator

            def end() -> None:
                while not communicator.is_busy:
                    time.sleep(0.001)
                if how == "close":
                    buffer.close()
                else:
                    os.kill(os.getpid(), signal.SIGINT)

            thread = threading.Thread(target=end)
            thread.start()
            try:
                dispatched(buffer, case, inputs)
            except (BufferStateError, KeyboardInterrupt) as error:
                said = type(error).__name__
            thread.join(UNTIL_MASKED_S)
            assert not thread.is_alive()
    return said
