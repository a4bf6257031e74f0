"""Ranks that hang in ten ways, for what is seen of it from outside; called as ``f(rank, num_ranks, ...)``.

The last rank is the one that does something wrong. The others tell whoever runs them that they hang, or what
they have raised, and all go on once a file is there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from moe_triton import ArgumentError, EPBuffer, MoeTritonError
from moe_triton.backends.cpu.paced_link import PacedLink, paced
from moe_triton.core.flight_file import Places
from moe_triton.core.flight_findings import LATE_TIMES
from moe_triton.processes import tell
from moe_triton.runtime import recorder
from tests.distributed.cases import Case, inputs_of
from tests.distributed.workers import make_buffer, one_round
from tests.patience import seconds

WITHIN_S = seconds(30)
TIMEOUT_S = seconds(4.0)
SLOW_LINK = 2e-6  # GB a second
LATE = ("stopped", "late", "no room", "wrong ids")
"""Situations in which the last rank comes once it may."""


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.01)


def hang(rank: int, num_ranks: int, case: Case, what: str, folder: str) -> str:
    """What a rank has raised, or "". All records are in the folder then."""
    go, error = Path(folder) / "go", ""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as around:
        patch.setenv(recorder.FOLDER_VARIABLE, folder)
        if what == "no room" and rank == num_ranks - 1:
            around.enter_context(no_room(num_ranks))
        if what == "slow link":
            around.enter_context(paced(PacedLink(SLOW_LINK)))
        buffer = make_buffer(case, timeout_s=WITHIN_S if what in (*LATE, "slow link") else TIMEOUT_S)
        inputs = [inputs_of(case, rank, number) for number in range(3)]
        for each in inputs[:2]:
            one_round(buffer, case, each, None)
        dist.barrier()
        tell(("pid", os.getpid()))
        watching = threading.Thread(target=_tell_that_it_waits, args=(buffer, go, what in LATE))
        watching.start()
        try:
            if rank == num_ranks - 1:
                MISTAKES[what](buffer, case, inputs[2], go)
            else:
                one_round(buffer, case, inputs[2], None)
        except MoeTritonError as raised:
            error = f"{type(raised).__name__}: {raised}"
            tell(("raised", error))
        until(go.exists)
        watching.join(WITHIN_S)
        buffer._communicator.recorder.keep()
        buffer.close()
    return error


def _tell_that_it_waits(buffer: EPBuffer, go: Path, is_late: bool) -> None:
    """Once a call has waited for a while, and where that ends well for long beside what is usual here."""
    while not go.exists():
        with contextlib.suppress(MoeTritonError):
            flight = buffer.flight()
            waited_us = [run.awaited[1] for run in flight.runs if run.awaited is not None]
            enough_ns = max(2e8, 2000 * LATE_TIMES * max(waited_us, default=0) * is_late)
            wait = flight.wait
            if wait is not None and time.monotonic_ns() - wait.since_ns > enough_ns:
                tell(("waits", ""))
                return
        time.sleep(0.02)


@contextlib.contextmanager
def no_room(num_ranks: int) -> Iterator[None]:
    """Shared memory has no room for a recorder."""
    wanted, allocate = Places.of(num_ranks).total_bytes, os.posix_fallocate

    def refuse(fd: int, offset: int, num_bytes: int) -> None:
        if num_bytes == wanted:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fd, offset, num_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        yield


def _killed(buffer: Any, case: Case, inputs: Any, go: Path) -> None:
    until(lambda: (go.parent / "all wait").exists())
    os.kill(os.getpid(), signal.SIGKILL)


def _stopped(buffer: Any, case: Case, inputs: Any, go: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    one_round(buffer, case, inputs, None)


def _late(buffer: Any, case: Case, inputs: Any, go: Path) -> None:
    until(go.exists)
    one_round(buffer, case, inputs, None)


def _skips(buffer: Any, case: Case, inputs: Any, go: Path) -> None:
    buffer.barrier()


def _other_shape(buffer: Any, case: Case, inputs: Any, go: Path) -> None:
    buffer.dispatch(inputs.x, inputs.topk_idx, quantize="int8")


def _wrong_ids(buffer: Any, case: Case, inputs: Any, go: Path) -> None:
    wrong = inputs.topk_idx.clone()
    wrong[0, 0] = 99
    with pytest.raises(ArgumentError):
        buffer.dispatch(inputs.x, wrong)
    _late(buffer, case, inputs, go)


def _closed(buffer: Any, case: Case, inputs: Any, go: Path) -> None:
    buffer.close()


def _usual(buffer: Any, case: Case, inputs: Any, go: Path) -> None:
    one_round(buffer, case, inputs, None)


MISTAKES: dict[str, Callable[[Any, Case, Any, Path], None]] = {
    "killed": _killed,
    "stopped": _stopped,
    "late": _late,
    "skipped call": _skips,
    "other shape": _other_shape,
    "wrong ids": _wrong_ids,
    "no room": _late,
    "closed": _closed,
    "slow link": _usual,
}


def two_groups(rank: int, num_ranks: int, case: Case, folder: str) -> str:
    """Two ranks use two buffers, each in another order."""
    go = Path(folder) / "go"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(recorder.FOLDER_VARIABLE, folder)
        buffers = [make_buffer(case, timeout_s=TIMEOUT_S) for _ in range(2)]
        inputs = inputs_of(case, rank, 0)
        tell(("pid", os.getpid()))
        first = buffers[rank]
        watching = threading.Thread(target=_tell_that_it_waits, args=(first, go, False))
        watching.start()
        error = ""
        try:
            one_round(first, case, inputs, None)
        except MoeTritonError as raised:
            error = f"{type(raised).__name__}: {raised}"
            tell(("raised", error))
        until(go.exists)
        watching.join(WITHIN_S)
        for buffer in buffers:
            buffer._communicator.recorder.keep()
            buffer.close()
    return error
