"""What each rank of a trial does: rounds that are compared, and a new buffer after each error."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from moe_triton import ArgumentError, CommunicationTimeoutError, EPBuffer, MoeTritonError
from moe_triton.backends.cpu import window as window_module
from moe_triton.rendezvous import meeting
from tests.chaos.strikes import Strike, timeout_of
from tests.chaos.trial import FAULTS, ROUNDS, Account, Operator, Seen, Trial
from tests.distributed.cases import Case, experts_of, inputs_of, small_case
from tests.distributed.workers import expected_round

MOST_TRIES = 20
SHM = Path("/dev/shm")
R = TypeVar("R")


def live_through(rank: int, num_ranks: int, trial: Trial, prefix: str) -> Account:
    """Runs all rounds of a trial, whatever happens; called as ``f(rank, num_ranks, ...)`` on every rank."""
    window_module.PREFIX = prefix
    logging.getLogger("moe_triton").setLevel(logging.ERROR)  # that waits last is what trials are for
    life = Life(rank, trial)
    life.run()
    gc.collect()  # errors that are raised while another one is handled keep its frames, and what these held
    return Account(tuple(life.errors), tuple(life.wrong), tuple(held(prefix)))


def held(prefix: str) -> list[str]:
    """Windows that this process still has open or mapped; other threads may close files meanwhile."""
    held = [line for line in Path("/proc/self/maps").read_text().splitlines() if prefix in line]
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = str(descriptor.readlink())
            held += [target] if prefix in target else []
    return held


TOKENS_IN_ROUNDS = 9, 4, 0, 13
"""Of ranks whose calls have several rounds: by turns each of them has most."""


@dataclass
class Life:
    """One rank's way through a trial."""

    rank: int
    trial: Trial
    errors: list[Seen] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.case = self._case(self.trial.num_ranks)
        self.strike = Strike(self.trial, self.rank)
        self.group: dist.ProcessGroup | None = None
        self.began = 0.0

    def _case(self, num_ranks: int) -> Case:
        usual = small_case(num_ranks, self.trial.scheme, seed=self.trial.seed)
        if self.trial.in_rounds:
            usual = replace(usual, tokens=TOKENS_IN_ROUNDS[:num_ranks])
        return replace(usual, config=replace(usual.config, ranks_per_server=self.trial.ranks_per_server))

    def run(self) -> None:
        """All rounds, in as many buffers as it takes."""
        if FAULTS[self.trial.fault].has_host:
            self._host_store()
        number, buffer = 0, self._new_buffer()
        while number < ROUNDS:
            if self._strikes_construction(number):
                buffer.close()
                self._construct_under_the_fault()
                buffer = self._new_buffer()
            try:
                self._noting(lambda number=number, buffer=buffer: self._round(number, buffer))
                number += 1
            except (MoeTritonError, KeyboardInterrupt):
                buffer.close()
                number, buffer = self._begin_again(number)
        buffer.close()

    def _host_store(self) -> None:
        """The victim hosts the store of this library, as the process of rank 0 usually does."""
        host = self.trial.victim
        is_host = self.rank == host
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if is_host else None
        port = [store.port if store else 0]
        dist.broadcast_object_list(port, src=host)
        world = dist.group.WORLD
        assert world is not None
        meeting._stores[world] = store or dist.TCPStore("localhost", port[0], wait_for_workers=False)

    def _strikes_construction(self, number: int) -> bool:
        is_struck = self.trial.fault in ("bad construction", "full disk", "never comes")
        return is_struck and self.strike.is_now(number)

    def _construct_under_the_fault(self) -> None:
        if self.trial.fault == "never comes" and self.strike.is_victim:
            self.strike.stay_away()
            return
        with self.strike.in_construction() as changes:
            try:
                self._noting(lambda: self._construct(**changes).close())
            except MoeTritonError:
                return
        self.wrong.append("a construction went well that could not")

    def _construct(self, **changes: object) -> EPBuffer:
        c = self.case.config
        settings: dict[str, object] = {
            "num_max_tokens_per_rank": c.num_max_tokens_per_rank,
            "hidden": c.hidden,
            "num_topk": c.num_topk,
            "num_experts": c.num_experts,
            "product": c.product,
            "comm_alg": c.scheme,
            "ranks_per_server": c.ranks_per_server,
            "relaxed": True,
            "timeout_s": timeout_of(self.trial),
        }
        return EPBuffer(self.group, **{**settings, **changes})  # type: ignore[arg-type]

    def _new_buffer(self) -> EPBuffer:
        """Ranks come to it whenever they have seen an error of their own: nobody tells them to."""
        for _ in range(MOST_TRIES):
            try:
                return self._construct()
            except CommunicationTimeoutError as error:
                last = error
        raise last

    def _begin_again(self, number: int) -> tuple[int, EPBuffer]:
        fault = FAULTS[self.trial.fault]
        if fault.is_deadly and self.group is None:
            left = [rank for rank in range(self.trial.num_ranks) if rank != self.trial.victim]
            self.group = dist.new_group(left, use_local_synchronization=True)
            self.rank = left.index(self.rank)
            self.case = self._case(len(left))
        buffer = self._new_buffer()
        # Over the user's own group, which our time-outs have not touched.
        earliest = torch.tensor([number])
        dist.all_reduce(earliest, dist.ReduceOp.MIN, group=self.group)
        return int(earliest), buffer

    def _round(self, number: int, buffer: EPBuffer) -> None:
        inputs = inputs_of(self.case, self.rank, number)
        weights = inputs.topk_weights
        is_other = self._struck_before("dispatch", number, buffer) and self.strike.is_victim
        output = buffer.dispatch(
            inputs.x,
            inputs.topk_idx,
            None if is_other and self.trial.fault == "other weights" else weights,
            quantize="int8" if is_other and self.trial.fault == "other rows" else None,
        )
        y = experts_of(self.case, self.rank, output.tokens)
        is_struck = self._struck_before("combine", number, buffer)
        is_other_results = is_struck and self.trial.fault == "other results"
        other_results = is_other_results and self.strike.is_victim
        combined = buffer.combine(y, output.handle, weights, comm_quantize="int8" if other_results else None)
        if not torch.equal(combined, expected_round(self.case, number)[1][self.rank]):
            self.wrong.append(f"round {number} gave other bits than the reference")

    def _struck_before(self, operator: Operator, number: int, buffer: EPBuffer) -> bool:
        try:
            return self.strike.before(operator, number, buffer)
        except ArgumentError as error:  # a bad call: the buffer goes on
            self.errors.append(Seen(type(error).__name__, str(error), 0.0))
            return True
        finally:
            self.began = time.monotonic()

    def _noting(self, call: Callable[[], R]) -> R:
        self.began = time.monotonic()
        try:
            return call()
        except (MoeTritonError, KeyboardInterrupt) as error:
            named = (
                (error.missing_ranks, error.uncertain_ranks)
                if isinstance(error, CommunicationTimeoutError)
                else ((), ())
            )
            seconds = time.monotonic() - self.began
            self.errors.append(Seen(type(error).__name__, str(error), seconds, *named))
            raise
