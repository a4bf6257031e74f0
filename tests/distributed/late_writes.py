"""A rank that is masked, lives, and writes when others have long gone on."""

from __future__ import annotations

import contextlib
import ctypes
import operator
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist

from moe_triton import DispatchOutput, EPBuffer, RankMaskedError
from moe_triton.backends.cpu import executable
from moe_triton.runtime.renewals import Renewals
from moe_triton.tools.selftest.cases import combined, difference, dispatched, wrong_received
from tests.distributed.cases import Case, Inputs, inputs_of, smooth_scales_of
from tests.distributed.masked import Masked, mask
from tests.distributed.workers import make_buffer
from tests.patience import seconds

LATE_ROUND = 2
"""In the zone of the round in which the rank was stopped, which was the first one."""
RECEIVER, QUICK, SLOW = 0, 1, 2
GARBAGE = 0x3F


def until(holds: Callable[[], bool]) -> None:
    """Waits until something holds."""
    deadline = time.monotonic() + seconds(30)
    while not holds():
        assert time.monotonic() < deadline, "results did not come"
        time.sleep(0.001)


def places(of: Masked, number: int, source: int) -> list[tuple[int, int]]:
    """Token and k of the receiver's entries in a round that a rank's experts have."""
    case = of.case
    ids = inputs_of(case, RECEIVER, number).topk_idx.tolist()
    shape = [(token, k) for token, row in enumerate(ids) for k in range(len(row))]
    return [(t, k) for t, k in shape if ids[t][k] >= 0 and case.config.rank_of_expert(ids[t][k]) == source]


def flags_of(buffer: EPBuffer, at: list[tuple[int, int]], zone: int) -> list[int]:
    """The flags of results in the receiver's window, as this process sees it."""
    status, window = buffer.layout.region("combine_status"), buffer._communicator._windows[0].view(RECEIVER)
    begins = [status.offset(zone=zone, token=token, k=k) for token, k in at]
    return [int(window[begin : begin + 4].view(torch.int32)) for begin in begins]


def write_bytes(buffer: EPBuffer, at: list[tuple[int, int]], zone: int) -> None:
    """What a copy does that goes on after its process was stopped, and has not come to its flag yet."""
    slots, window = buffer.layout.region("combine_slots"), buffer._communicator._windows[0].view(RECEIVER)
    for token, k in at:
        begin = slots.offset(zone=zone, token=token, k=k)
        window[begin : begin + slots.item_bytes].fill_(GARBAGE)


def stopped_in_a_combine(
    rank: int, num_ranks: int, of: Masked, is_guarded: bool, is_whole: bool
) -> list[str]:
    """Runs rounds of which the last rank misses all but the first dispatch, and writes in the third combine.

    Then the receiver has all results of one peer, which lie where the late rank's would have lain in the
    first round, and waits for another peer's.

    Args:
        rank, num_ranks: of the group.
        of: the case.
        is_guarded: whether the receiver has other memory there by then; otherwise nobody gets any.
        is_whole: whether the late rank makes its whole combine; otherwise it leaves bytes alone.
    """
    guard = contextlib.nullcontext() if is_guarded else mock.patch.object(Renewals, "behind")
    with make_buffer(of.case) as buffer, guard:
        if rank == of.gone[0]:
            write_late(buffer, of, is_whole)
            return []
        wrong = []
        for number in range(LATE_ROUND + 2):
            wrong += one_round(buffer, of, number, combine_late if number == LATE_ROUND else combined)
        dist.barrier()
    return wrong


def one_round(buffer: EPBuffer, of: Masked, number: int, combine: Callable[..., torch.Tensor]) -> list[str]:
    """A round of one that goes on, and what is wrong with it."""
    case, rank = of.case, buffer.rank
    inputs = inputs_of(case, rank, number)
    received, sums = of.expected(number)
    output = dispatched(buffer, case, inputs, smooth_scales_of(case))
    if number == 0:
        mask(buffer, of.gone)
    wrong = wrong_received(output, received[rank])
    text = difference("combined", combine(buffer, case, inputs, output), sums[rank])
    return [f"round {number}: {each}" for each in [*wrong, *([text] if text else [])]]


def late_in_a_combine(rank: int, num_ranks: int, of: Masked, is_guarded: bool) -> list[str]:
    """Runs rounds of which the last rank is late in the first combine, and reads what others have by then.

    All its peers have told it that their results are there, and masked it after that.
    """
    case, nobody = of.case, ((ctypes.c_uint64 * 0)(), 0, 0)
    looks = mock.patch.object(executable, "masked_by", return_value=nobody)
    with contextlib.nullcontext() if is_guarded else looks, make_buffer(case) as buffer:
        inputs = inputs_of(case, rank, 0)
        output = dispatched(buffer, case, inputs, smooth_scales_of(case))
        if rank in of.gone:
            dist.barrier()  # the others have gone on
            try:
                sums = combined(buffer, case, inputs, output)
            except RankMaskedError as error:
                return [str(error)]
            finally:
                dist.barrier()
            return [
                difference("combined", sums, replace(of, gone=()).expected(0)[1][rank]) or "as it should be"
            ]
        status, (late,) = buffer.layout.region("results_status"), of.gone
        begin = status.offset(zone=buffer._communicator.zone("combine"), source=rank)
        window = buffer._communicator._windows[0].view(late)[begin : begin + 4].view(torch.int32)
        before = int(window)
        with ThreadPoolExecutor(1) as beside:
            sum_ = beside.submit(combined, buffer, case, inputs, output)
            until(lambda: int(window) != before)
            mask(buffer, of.gone)
            sum_.result(seconds(60))
        rounds = range(1, LATE_ROUND + 1)
        wrong = [text for number in rounds for text in one_round(buffer, of, number, combined)]
        dist.barrier()
        dist.barrier()  # it has read
    return wrong


def combine_late(buffer: EPBuffer, case: Case, inputs: Inputs, output: DispatchOutput) -> torch.Tensor:
    """A combine in whose middle the late rank writes."""
    of, zone = Masked(case, (case.config.num_ranks - 1,)), buffer._communicator.zone("combine")
    at = places(of, LATE_ROUND, QUICK)
    before = flags_of(buffer, at, zone)
    dist.barrier()
    with ThreadPoolExecutor(1) as beside:
        if buffer.rank != SLOW:
            sum_ = beside.submit(combined, buffer, case, inputs, output)
        if buffer.rank == RECEIVER:
            assert set(at) & set(places(of, 0, of.gone[0])), "nothing would be overwritten"
            until(lambda: all(map(operator.ne, flags_of(buffer, at, zone), before)))
        dist.barrier()  # the late rank writes
        dist.barrier()
        if buffer.rank == SLOW:
            return combined(buffer, case, inputs, output)
        return sum_.result(seconds(60))


def write_late(buffer: EPBuffer, of: Masked, is_whole: bool) -> None:
    """What the rank does that is masked."""
    case, zone = of.case, buffer._communicator.zone("combine")
    inputs, at = inputs_of(case, buffer.rank, 0), places(of, 0, buffer.rank)
    output = dispatched(buffer, case, inputs, smooth_scales_of(case))
    dist.barrier()  # the others are about to combine
    dist.barrier()
    with ThreadPoolExecutor(1) as beside:
        if is_whole:
            before = flags_of(buffer, at, zone)
            sum_ = beside.submit(combined, buffer, case, inputs, output)
            until(lambda: all(map(operator.ne, flags_of(buffer, at, zone), before)))
        else:
            write_bytes(buffer, at, zone)
        dist.barrier()
        dist.barrier()  # the others are done
        if is_whole:  # nobody sends to it any more
            mask(buffer, set(range(case.config.num_ranks)) - {buffer.rank})
            sum_.result(seconds(60))
