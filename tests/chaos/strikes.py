"""What befalls the victim of a fault, and what the other ranks do meanwhile."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from moe_triton import ArgumentError, EPBuffer
from moe_triton.processes import tell
from tests.chaos.trial import FAULTS, TIME_OUT, Operator, Trial
from tests.patience import seconds

TIMEOUT_S = 1.0
# Without an error to come, nobody is to run out of time on a busy machine.
PATIENT_S = 60.0
LONGER_THAN_A_TIMEOUT_S = TIMEOUT_S + seconds(0.6)  # the others begin to wait a little later
# More than the group's store takes, which may be a file too, and less than any window of slots.
FILE_BYTES = 900 << 10
OTHERS_LATE_S, STRUCK_AFTER_S = 0.6, 0.2
# Long enough for whoever waits meanwhile to say so.
SLOW_S = 0.7 * TIMEOUT_S
PAUSE_ALL = "all ranks are to be paused"


def timeout_of(trial: Trial) -> float:
    """Seconds that one wait may take."""
    fault = FAULTS[trial.fault]
    return TIMEOUT_S if fault.others == TIME_OUT or fault.all_are_struck else PATIENT_S


class Strike:
    """The fault of a trial as one rank sees it.

    Args:
        trial: which.
        rank: which rank sees it.

    Attributes:
        is_victim: whether it befalls this rank.
    """

    def __init__(self, trial: Trial, rank: int) -> None:
        self._trial, self._rank, self.is_victim = trial, rank, rank == trial.victim
        self._is_over = False
        self._delays = random.Random(rank)

    def before(self, operator: Operator, number: int, buffer: EPBuffer) -> bool:
        """What happens before an operator of a round.

        Returns:
            Whether the fault has struck, here or elsewhere.
        """
        trial = self._trial
        if trial.fault == "straggle":
            time.sleep(self._delays.random() * 0.02)
        is_before = (operator, number) == ("dispatch", trial.number) and not self._is_over
        if trial.fault == "wait and die" and is_before and self._rank == (trial.victim + 1) % trial.num_ranks:
            time.sleep(SLOW_S)
        if self._is_over or (operator, number) != (trial.operator, trial.number):
            return False
        self._is_over = True
        if self.is_victim:
            strike = _ON_VICTIM.get(trial.fault)
            if strike is not None:
                strike(buffer)
        elif FAULTS[trial.fault].holds_others:
            time.sleep(OTHERS_LATE_S)
        return True

    def is_now(self, number: int) -> bool:
        """Whether this round is the one that is struck, the first time that it comes."""
        return self._trial.number == number and not self._is_over

    def stay_away(self) -> None:
        """Does not come to a construction until the others have given it up."""
        self._is_over = True
        time.sleep(LONGER_THAN_A_TIMEOUT_S)

    @contextmanager
    def in_construction(self) -> Iterator[dict[str, object]]:
        """What an `EPBuffer` is constructed with, and under."""
        fault = self._trial.fault
        changes: dict[str, object] = {}
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self.is_victim and fault == "bad construction":
            changes["hidden"] = 0
        if self.is_victim and fault == "full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, limits[1]))
        self._is_over = True
        try:
            yield changes
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _kill(how: signal.Signals) -> Callable[[EPBuffer], None]:
    return lambda buffer: os.kill(os.getpid(), how)


def _stop(buffer: EPBuffer) -> None:
    pid = os.getpid()
    with subprocess.Popen(["sh", "-c", f"sleep {LONGER_THAN_A_TIMEOUT_S}; kill -CONT {pid}"]):
        os.kill(pid, signal.SIGSTOP)


def _late(buffer: EPBuffer) -> None:
    time.sleep(LONGER_THAN_A_TIMEOUT_S)


def _close(buffer: EPBuffer) -> None:
    threading.Timer(STRUCK_AFTER_S, buffer.close).start()


def _interrupt(buffer: EPBuffer) -> None:
    threading.Timer(STRUCK_AFTER_S, os.kill, (os.getpid(), signal.SIGINT)).start()


def _call_badly(buffer: EPBuffer) -> None:
    wrong = torch.zeros(4, buffer.config.hidden)
    ids = torch.zeros(4, buffer.config.num_topk, dtype=torch.int32)
    for call in (
        lambda: buffer.dispatch(wrong, ids),
        lambda: buffer.combine(wrong, 7),  # type: ignore[arg-type]
        lambda: buffer.dispatch(wrong.bfloat16(), ids + 99),
    ):
        try:
            call()
        except ArgumentError as error:
            refused = error
        else:
            raise AssertionError("a bad call was taken")
    raise refused


_ON_VICTIM: dict[str, Callable[[EPBuffer], None]] = {
    "kill": _kill(signal.SIGKILL),
    "wait and die": _kill(signal.SIGKILL),
    "host of the store": _kill(signal.SIGKILL),
    "paused machine": lambda buffer: tell(PAUSE_ALL),
    "terminate": _kill(signal.SIGTERM),
    "stop": _stop,
    "late": _late,
    "close": _close,
    "Ctrl-C": _interrupt,
    "bad call": _call_badly,
}
