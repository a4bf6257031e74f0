"""Calls in rounds, or with places, of groups that lose a rank: what is left, and what the reference says."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from moe_triton import (
    BufferStateError,
    DispatchOutput,
    EPBuffer,
    RankMaskedError,
    reference,
)
from moe_triton.backends.cpu.executable import TorchExecutable
from moe_triton.core.handle import PlacedHandle
from moe_triton.core.plan import Phases
from moe_triton.layout import NUM_ZONES
from moe_triton.tools.selftest.cases import Inputs, difference, expected_dispatch
from tests.distributed import long_runs, test_rows_per_rank
from tests.distributed.cases import Case, inputs_of
from tests.distributed.long_runs import Options, beside
from tests.distributed.masked import Chaos, is_over, strike
from tests.distributed.workers import make_buffer
from tests.patience import seconds


@dataclass(frozen=True)
class LongChaos(Chaos):
    """A group whose calls are in rounds, or have places.

    Attributes:
        options: of `EPBuffer.dispatch`, of one call after the other.
        dies_in: a phase before which the victim is killed, or with kernels in torch a step; "" for any moment
            after ``after_s`` seconds.
        at: which time that it would run that phase.
        calls: before the one in which it is.
        by_hand: whether it does not die but stays away, and is masked from other threads.
        deaf: ranks to which it sends nothing in that.
        runs: a phase that rank 0 runs for it.
    """

    options: tuple[Options, ...] = ({},)
    dies_in: str = ""
    at: int = 1
    by_hand: bool = False
    calls: int = 3
    deaf: tuple[int, ...] = ()
    runs: str = ""


def empty(inputs: Inputs) -> Inputs:
    return Inputs(inputs.x[:0], inputs.topk_idx[:0], inputs.topk_weights[:0])


def expected_of(
    case: Case, everyone: list[Inputs], *, per_rank: bool
) -> tuple[list[Any], list[torch.Tensor]]:
    """What each rank receives, and its sums."""
    ids = [each.topk_idx for each in everyone]
    weights = [each.topk_weights for each in everyone] if case.weights else None
    if per_rank:
        received: list[Any] = list(
            reference.dispatch_per_rank(
                case.config, [each.x for each in everyone], ids, weights, quantize=case.quantize
            )
        )
    else:
        received = list(expected_dispatch(case, everyone))
    y = [long_runs.experts_of(case, rank, each.tokens) for rank, each in enumerate(received)]
    if per_rank:
        return received, reference.combine_per_rank(case.config, y, received, list(map(len, ids)))
    return received, reference.combine(case.config, y, received, ids, weights)


def wrong_size(output: DispatchOutput, options: Options) -> list[str]:
    """Whether there are more rows than are to be."""
    handle, is_exact = output.handle, options.get("num_recv_tokens") == "exact"
    if not isinstance(handle, PlacedHandle) or not is_exact:
        return []
    rows = output.tokens_per_expert.tolist()
    if handle.results_idx is not None:
        needed = handle.num_received()
    elif handle.stride:
        needed = len(rows) * max(1, *rows)
    else:
        needed = sum(-(-count // handle.alignment) * handle.alignment for count in rows)
    found = handle.num_rows
    return [] if found == needed else [f"{found} rows in place of {needed}"]


def wrong_in_call(
    buffer: EPBuffer, case: Case, rank: int, number: int, options: Options, stats: torch.Tensor
) -> list[str]:
    """Runs a call, and names what is not the reference's without what is lost."""
    ranks, per_rank = case.config.num_ranks, options.get("do_expand") is False
    everyone = [inputs_of(case, each, number) for each in range(ranks)]
    inputs, before = everyone[rank], stats.clone()
    given = {**options, "cumulative_local_expert_recv_stats": stats}
    output = long_runs.dispatched(buffer, case, inputs, **given)
    offsets = output.handle.recv_offsets.diff(prepend=torch.zeros(1, dtype=torch.int32)).view(-1, ranks)
    came = [source == rank or bool((offsets[:, source] > 0).any()) for source in range(ranks)]
    from_them = [each if has else empty(each) for each, has in zip(everyone, came, strict=True)]
    received, _ = expected_of(case, from_them, per_rank=per_rank)
    if per_rank:
        wrong = test_rows_per_rank.wrong_parts(output, received[rank])
        y = long_runs.experts_of(case, rank, output.tokens)
        y[output.handle.num_received() :] = float("nan")
    else:
        wrong = [
            text
            for text in long_runs.wrong_of(
                output, replace(received[rank], expand_idx=output.handle.expand_idx)
            )
            if "expand_idx" not in text
        ]
        y = long_runs.results_of(case, rank, output)
    wrong += wrong_size(output, options)
    if not torch.equal(stats - before, received[rank].tokens_per_expert.int()):
        wrong.append(f"stats {(stats - before).tolist()}")
    weights = inputs.topk_weights if case.weights and not per_rank else None
    sums = buffer.combine(y, output.handle, weights)
    lost = output.handle.lost[:, : case.config.num_topk]
    everyone[rank] = replace(inputs, topk_idx=torch.where(lost, -1, inputs.topk_idx))
    _, expected = expected_of(case, everyone, per_rank=per_rank)
    if text := difference("combined", sums, expected[rank]):
        wrong.append(text)
    return [f"call {number} {options}: {text}" for text in wrong]


HEARD_S = 0.4


class _AwayError(Exception):
    """A rank takes no part any more."""


def leave_in(buffer: EPBuffer, of: LongChaos) -> None:
    """Has this process killed when it is about to run a phase, or leave the call."""
    communicator: Any = buffer._communicator
    operator, times = communicator._executables.operator, itertools.count(1)
    launch = TorchExecutable._launch_ascend_c

    def launched(executable: TorchExecutable, phases: Phases, bindings: Any) -> None:
        if any(each.step == of.dies_in for each in phases) and next(times) == of.at:
            os.kill(os.getpid(), signal.SIGKILL)
        launch(executable, phases, bindings)

    def found(variant: Any, zone: int, name: str, parts: int) -> Any:
        if name == of.dies_in and next(times) == of.at:
            if of.deaf:  # others have heard it by then, and go on to wait for those that have not
                time.sleep(HEARD_S)
            if of.by_hand:
                raise _AwayError
            os.kill(os.getpid(), signal.SIGKILL)
        return operator(variant, zone, name, parts)

    communicator._executables.operator = found
    TorchExecutable._launch_ascend_c = launched  # type: ignore[method-assign]
    communicator._run_in_turn = lambda phases: False  # which looks all of them up first
    buffer._calls = None  # native ones, which look nothing up
    # It is to go, not to have others agree with it.
    communicator.participants.settle = lambda number, find: find()


def executables_of(buffer: EPBuffer) -> Any:
    """What was compiled, by what it is for."""
    return buffer._communicator._executables._kept


def mask_when_waiting(buffer: EPBuffer, rank: int) -> None:
    """Masks a rank from another thread once this one has waited for a while."""
    communicator = buffer._communicator

    def mask() -> None:
        while not communicator.is_busy:
            time.sleep(0.001)
        time.sleep(0.3)
        buffer.update_mask(rank, True)

    threading.Thread(target=mask, daemon=True).start()


def calls_without(rank: int, num_ranks: int, of: LongChaos) -> tuple[list[str], list[int], str]:
    """Runs calls in one of which a rank is lost: what is wrong, who is masked, what was raised."""
    wrong, raised = [], ""
    settings: dict[str, Any] = {} if of.by_hand else {"on_lost": "mask"}
    with make_buffer(of.case, timeout_s=of.timeout_s, tuning=beside(of.case), **settings) as buffer:
        stats = torch.zeros(buffer.num_local_experts, dtype=torch.int32)
        try:
            for number in range(of.case.rounds):
                if number == of.calls and rank == of.victim:
                    for each in of.deaf:
                        buffer.update_mask(each, True)
                    # As one does that dies in between, it sends them nothing, and names them to nobody.
                    if (on_lost := buffer._communicator.participants._on_lost) is not None:
                        on_lost.name = lambda _: None  # type: ignore[method-assign]
                    leave_in(buffer, of)
                elif number == of.calls and of.by_hand:
                    mask_when_waiting(buffer, of.victim)
                options = of.options[number % len(of.options)]
                wrong += wrong_in_call(buffer, of.case, rank, number, options, stats)
        except _AwayError:
            raised = "away"
        except BufferStateError as error:
            raised = str(error)
        masked = buffer.query_mask().nonzero().flatten().tolist()
        if of.runs and rank == 0 and of.runs not in {key[2] for key in executables_of(buffer)}:
            wrong.append(f"no {of.runs}")
        if of.by_hand:
            dist.barrier()
    return wrong[:5], masked, raised


def all_calls_once(buffer: EPBuffer, of: LongChaos, stats: torch.Tensor) -> list[str]:
    """Makes each call in each zone: what is wrong."""
    turns = range(NUM_ZONES * len(of.options))
    made = [(number % of.case.rounds, of.options[number % len(of.options)]) for number in turns]
    return [text for call in made for text in wrong_in_call(buffer, of.case, buffer.rank, *call, stats)]


def calls_in_chaos(rank: int, num_ranks: int, of: LongChaos) -> tuple[list[str], list[int], str]:
    """Runs calls until all others have gone on for some: what is wrong, who is masked, what was raised."""
    raised, calls = "", len(of.options)
    stats = torch.zeros(of.case.config.num_local_experts, dtype=torch.int32)
    # A rank that first compiles a kernel, or makes plans of it, is late without a fault.
    with make_buffer(of.case, timeout_s=seconds(120.0), tuning=beside(of.case)) as buffer:
        wrong = all_calls_once(buffer, of, stats)
    with make_buffer(of.case, on_lost="mask", timeout_s=of.timeout_s, tuning=beside(of.case)) as buffer:
        run = partial(wrong_in_call, buffer, of.case, rank)
        wrong += all_calls_once(buffer, of, stats)
        if rank == of.victim:
            strike(of)
        number = NUM_ZONES * calls
        try:
            while not is_over(buffer, number):
                turn = number % of.case.rounds
                wrong += run(turn, of.options[turn % calls], stats)
                number += 1
        except RankMaskedError as error:
            raised = str(error)
        masked = buffer.query_mask().nonzero().flatten().tolist()
    return wrong[:5], masked, raised
