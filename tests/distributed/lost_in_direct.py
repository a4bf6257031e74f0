"""Ranks that are lost inside a dispatch of `direct`, at each of its steps; called as ``f(rank, ...)``."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist

from moe_triton import DispatchOutput, EPBuffer
from moe_triton.core.plan import Launch, joined
from moe_triton.core.reach import GONE_BIT, MASKED_BIT
from moe_triton.core.region import Region
from moe_triton.layout import FLAG_BITS
from moe_triton.operators.variants import DispatchVariant
from moe_triton.schemes.direct.ascendc import FUSED
from moe_triton.schemes.direct.scheme import Dispatch
from moe_triton.tools.selftest.cases import dispatched
from tests.distributed.cases import Case, Inputs, inputs_of
from tests.distributed.direct_workers import Way, combine
from tests.distributed.masked import wrong_in_chaos
from tests.distributed.workers import make_buffer
from tests.patience import seconds

BEFORE = 2
"""Whole rounds, so that plans of both zones are there."""
AFTER = 3
SEND = 2
"""Which step of the launch."""
Moment = Literal["before", "counts", "rows", "meeting", "results"]


@dataclass(frozen=True)
class Lost:
    """A rank that does a part of a dispatch and then nothing more.

    Attributes:
        case: of all rounds, with one block.
        steps: of the launch that it does: 1, it has told its counts; 3, it has sent its rows; 4, it has said
            so.
        hearing: who hears of the last of these.
        noticed: by rank, how far each of the others is when it hears of the loss.
        rank: the one that is lost.
        dies: whether its process ends then, and nobody has to be told.
        also_dies: another one that ends, and in which of the meetings before the dispatch is repeated.
    """

    case: Case
    steps: int
    hearing: tuple[int, ...]
    noticed: tuple[Moment, ...] = ()
    rank: int = 2
    dies: bool = False
    also_dies: tuple[int, int] | None = None
    sends_late: bool = False
    """Whether it sends its rows when the others have what they are to have, but not ended the dispatch."""

    @property
    def others(self) -> list[int]:
        """Those who go on."""
        gone = {self.rank, *(self.also_dies or ())[:1]}
        return [rank for rank in range(self.case.config.num_ranks) if rank not in gone]


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("this process is dead")


def until(is_so: Callable[[], bool]) -> None:
    """Waits; raises if it is not so in the end."""
    end = time.monotonic() + seconds(20)
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


def do_steps(buffer: EPBuffer, of: Lost) -> Callable[[], None]:
    """Begins a dispatch, of which some do not hear the last step. Returns what sends its rows."""
    communicator: Any = buffer._communicator
    executables, zone = communicator._executables, communicator.zone("dispatch")
    executables.suspend_calls(True)
    variants = [variant for variant, *_ in executables._kept if isinstance(variant, DispatchVariant)]
    plans, words = Dispatch(communicator.context, variants[0], zone), communicator._fixed["peers"]
    routing, *launches = plans.whole().launches
    phases = [replace(phase, fused=None, joined=False) for phase in launches]
    told, plain, bound = phases[: of.steps], words.clone(), []

    def run(steps: list[Launch], bindings: Any) -> None:
        assert executables.compile(plans.plan(steps)).run(bindings) == 0

    def run_steps(bindings: Any) -> int:
        bound.append(bindings)
        run([routing, *(joined(told[:-1], FUSED) if of.steps > 1 else ())], bindings)
        for peer in range(of.case.config.num_ranks):
            if peer not in (*of.hearing, buffer.rank):
                words[peer] |= 1 << MASKED_BIT | 1 << GONE_BIT
        run(told[-1:], bindings)
        return 0

    def send_late() -> None:
        words.copy_(plain)
        run([phases[SEND]], bound[0])

    executables.operator(variants[0], zone, "whole", 1).run = run_steps
    dispatched(buffer, of.case, inputs_of(of.case, buffer.rank, BEFORE))
    return send_late


def flags(buffer: EPBuffer, region: Region, zone: int, ranks: list[int]) -> bool:
    """Whether flags of these are in this rank's window."""
    communicator: Any = buffer._communicator
    words = communicator._fixed["window"][: region.end].view(torch.int32)
    at = [region.offset(zone=zone, source=rank) // words.element_size() for rank in ranks]
    return all(int(words[each]) == FLAG_BITS for each in at)


def mask_when(buffer: EPBuffer, of: Lost, moment: Moment, is_lost: Callable[[], bool]) -> None:
    """Masks the rank that is lost: before this one's next call, or once its calls are so far."""
    communicator: Any = buffer._communicator
    layout, dispatch, results = (
        communicator.layout,
        communicator.zone("dispatch"),
        communicator.zone("combine"),
    )
    awaited = {
        "counts": (layout.counts_status, dispatch, of.others),
        "rows": (layout.rows_status, dispatch, [buffer.rank]),
        "meeting": (layout.barrier_status, communicator.zone("barrier"), [buffer.rank]),
        "results": (layout.results_status, results, [buffer.rank]),
    }
    if moment == "before":
        until(is_lost)
        buffer.update_mask(of.rank, True)
        return

    def run() -> None:
        until(lambda: flags(buffer, *awaited[moment]))
        until(is_lost)
        buffer.update_mask(of.rank, True)

    threading.Thread(target=run, daemon=True).start()


def at_the_end_of_it(buffer: EPBuffer, wait: Callable[[], None]) -> None:
    """Has a wait come where a dispatch has all that it is to have, and its run is not over yet."""
    participants: Any = buffer._communicator.participants
    go_on = participants.go_on

    def go_on_and_wait(operator: str, *run: Any) -> int:
        code: int = go_on(operator, *run)
        if operator == "dispatch":
            wait()
        return code

    participants.go_on = go_on_and_wait


def lose(
    rank: int, num_ranks: int, of: Lost, way: Way, options: dict[str, Any]
) -> tuple[list[str], int, int]:
    """What is wrong on this rank; how often it has repeated the dispatch; and rows that it has taken out."""
    store: Any = dist.distributed_c10d._get_default_store()
    wrong, repeated, left_out, done = [], 0, 0, f"done {of} {way}"
    with make_buffer(of.case, **options) as buffer:
        communicator: Any = buffer._communicator

        stats = torch.zeros(of.case.config.num_local_experts, dtype=torch.int32)
        told: Any = functools.partial(buffer.dispatch, cumulative_local_expert_recv_stats=stats)
        buffer.dispatch = told  # type: ignore[method-assign]

        def combining(_: EPBuffer, case: Case, inputs: Inputs, output: DispatchOutput) -> torch.Tensor:
            if not torch.equal(stats, output.tokens_per_expert.int()):
                wrong.append(f"statistics {stats.tolist()}")
            stats.zero_()
            return combine(buffer, case, inputs, output, way)

        for number in range(BEFORE):
            wrong += wrong_in_chaos(buffer, of.case, rank, number, combining)
        if rank == of.rank:
            send_late = do_steps(buffer, of)
            if of.dies:
                die()
            store.set(done, "")
            if of.sends_late:
                until(lambda: store.check([f"{done} {other}" for other in of.others]))
                send_late()
                store.set(f"{done} late", "")
        else:
            if not of.dies:
                mask_when(buffer, of, of.noticed[rank], lambda: store.check([done]))
            if of.also_dies is not None and of.also_dies[0] == rank:
                meetings, meet = iter(range(of.also_dies[1])), communicator.meet
                communicator.meet = lambda: meet() if next(meetings, None) is not None else die()
            if of.sends_late:

                def wait_for_late() -> None:
                    store.set(f"{done} {rank}", "")
                    until(lambda: store.check([f"{done} late"]))

                at_the_end_of_it(buffer, wait_for_late)
            before = communicator.counts["barrier"]
            for number in range(BEFORE, BEFORE + AFTER):
                wrong += wrong_in_chaos(buffer, of.case, rank, number, combining)
                if number == BEFORE:
                    repeated = (communicator.counts["barrier"] - before) // 2
                    gaps = communicator.participants._gaps
                    left_out = -1 if gaps is None else int(gaps[1].diff().sub(1).sum() + gaps[1][0])
            masked = buffer.query_mask().nonzero().flatten().tolist()
            if masked != [each for each in range(num_ranks) if each not in of.others]:
                wrong.append(f"{masked} are masked")
        if not of.dies:
            dist.barrier()
    return wrong, repeated, left_out
