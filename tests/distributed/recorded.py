"""Ranks whose flight recorders are looked at; called as ``f(rank, num_ranks, ...)``."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_triton import CommunicationTimeoutError, EPBuffer, MoeTritonError, RankLostError
from moe_triton.core.flight_file import PREFIX, Flight, read_file
from moe_triton.runtime import recorder
from tests.distributed.cases import Case, inputs_of
from tests.distributed.hangs import no_room, until
from tests.distributed.workers import make_buffer, one_round
from tests.patience import seconds

ROUNDS = 5
LATE_S = 0.05
ASKED_S = seconds(20)


def rounds(buffer: Any, case: Case, rank: int, number: int = ROUNDS, late_s: float = 0.0) -> None:
    """Some dispatches and combines; a rank may be late for each."""
    for each in range(number):
        time.sleep(late_s)
        one_round(buffer, case, inputs_of(case, rank, each), None)


def recorded(rank: int, num_ranks: int, case: Case, slow: int, kernels: str) -> tuple[Flight, Any, int]:
    """What a rank has recorded of rounds for which one rank is late, its metrics and its window's rows."""
    with make_buffer(case, kernels=kernels) as buffer:
        assert isinstance(buffer, EPBuffer)
        rounds(buffer, case, rank, 2)  # kernels are compiled
        rounds(buffer, case, rank, ROUNDS, LATE_S if rank == slow else 0.0)
        return buffer.flight(), buffer.metrics(), buffer.capacity


def asked(rank: int, num_ranks: int, case: Case, late: int) -> list[str]:
    """What a rank says while it waits, on another thread."""
    said: list[str] = []
    with make_buffer(case) as buffer:
        rounds(buffer, case, rank, 1)
        if rank == late:
            dist.barrier()
            rounds(buffer, case, rank, 1)
            return said

        def look() -> None:
            until(lambda: f"for rank {late}" in buffer.status())
            said.append(buffer.status())
            wait = buffer.flight().wait
            assert wait is not None
            assert wait.ranks == [late]
            dist.barrier()

        looking = threading.Thread(target=look)
        looking.start()
        rounds(buffer, case, rank, 1)
        looking.join(ASKED_S)
        assert not looking.is_alive()
        return said


def killed(rank: int, num_ranks: int, case: Case, folder: str) -> tuple[list[str], list[bool]]:
    """The last rank is killed; the others write down what it has recorded, and remove its file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(recorder.FOLDER_VARIABLE, folder)
        buffer = make_buffer(case)
        rounds(buffer, case, rank, 2)
        paths = list(filter(None, buffer._communicator.recorder.files))
        if rank == num_ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RankLostError) as caught:
            rounds(buffer, case, rank, 100)
        state = buffer._communicator.recorder.memory.read()
        assert state.state == "broken"
        assert state.why == f"RankLostError: {caught.value}"
        written = sorted(each.name for each in Path(folder).iterdir() if each.name.startswith("flight-"))
        dist.barrier(group=dist.new_group(range(num_ranks - 1)))
        buffer.close()
        return written, [path.exists() for path in (paths[rank], paths[-1])]


def without_room(rank: int, num_ranks: int, case: Case) -> tuple[str, int]:
    """A rank whose shared memory has no room for a recorder, which calls do not need."""
    with no_room(num_ranks):
        buffer = make_buffer(case)
    with buffer:
        rounds(buffer, case, rank, 1)
        memory = buffer._communicator.recorder.memory
        return str(memory.path), len(buffer.flight().runs)


def switched_off(rank: int, num_ranks: int, case: Case) -> tuple[str, list[str]]:
    """A buffer without a recorder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(recorder.VARIABLE, "off")
        with make_buffer(case) as buffer:
            rounds(buffer, case, rank, 1)
            with pytest.raises(MoeTritonError) as caught:
                buffer.status()
            # Others make files in that folder meanwhile: those count that this process maps.
            maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
            return str(caught.value), [line for line in maps if PREFIX in line]


def refused(rank: int, num_ranks: int, case: Case, variable: str, value: str, takes: bool) -> str:
    """What a rank raises whose variable is wrong, before any other has been waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variable, value)
        before = signal.getsignal(signal.SIGUSR2)
        if takes:
            signal.signal(signal.SIGUSR2, lambda *_: None)
        try:
            with pytest.raises(MoeTritonError) as caught:
                make_buffer(case)
        finally:
            if takes:
                signal.signal(signal.SIGUSR2, before)
        return str(caught.value)


def asked_by_signal(rank: int, num_ranks: int, case: Case) -> str:
    """What a process prints on a signal, while its main thread is in a call that waits."""
    read_end, write_end = os.pipe()
    stderr = os.dup(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_TRITON_DUMP_SIGNAL", "usr2")
        with make_buffer(case) as buffer:
            rounds(buffer, case, rank, 1)
            if rank == num_ranks - 1:
                dist.barrier()
                rounds(buffer, case, rank, 1)
                return ""
            os.dup2(write_end, 2)
            text: list[str] = []

            def look() -> None:
                until(lambda: f"for rank {num_ranks - 1}" in buffer.status())
                os.kill(os.getpid(), signal.SIGUSR2)
                text.append(os.read(read_end, 4096).decode())
                dist.barrier()

            looking = threading.Thread(target=look)
            looking.start()
            try:
                rounds(buffer, case, rank, 1)
                looking.join(ASKED_S)
            finally:
                os.dup2(stderr, 2)
            return text[0]


def timed_out(rank: int, num_ranks: int, case: Case, folder: str) -> tuple[int, Flight | None]:
    """Counts of a rank that has waited in vain, and what was written down of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(recorder.FOLDER_VARIABLE, folder)
        with make_buffer(case, timeout_s=seconds(1.0)) as buffer:
            rounds(buffer, case, rank, 1)
            if rank == 0:
                with pytest.raises(CommunicationTimeoutError):
                    rounds(buffer, case, rank, 1)
            dist.barrier()
            timeouts = buffer.metrics().timeouts
            group = buffer._communicator.recorder.group
    return timeouts, read_file(Path(folder) / f"flight-{group}-rank0.json") if rank == 0 else None


def spread(rank: int, num_ranks: int, case: Case) -> tuple[list[int], list[int]]:
    """Rows that came from each rank, as the recorder has their bytes, and as the handle has them."""
    with make_buffer(case) as buffer:
        inputs = inputs_of(case, rank, 0)
        output, _ = one_round(buffer, case, inputs, None)
        counts = output.handle.recv_offsets.view(-1, num_ranks)
        row_bytes = case.config.hidden * torch.bfloat16.itemsize
        return [each // row_bytes for each in buffer.metrics().received_bytes], _rows_by_rank(counts)


def _rows_by_rank(ends: torch.Tensor) -> list[int]:
    """Of sums by expert and rank."""
    flat = ends.reshape(-1)
    rows = torch.diff(flat, prepend=flat.new_zeros(1)).view(ends.shape)
    return [int(each) for each in rows.sum(0)]


def _slow_round(buffer: Any, case: Case, rank: int, late_s: float) -> float:
    """A round that a rank begins so many seconds after all others wait for it. What it takes then."""
    files = [path for other, path in enumerate(buffer._communicator.recorder.files) if other != rank]
    until(lambda: all(_waits_in_dispatch(path) for path in files))
    time.sleep(late_s)
    began = time.monotonic()
    one_round(buffer, case, inputs_of(case, rank, 0), None)
    return time.monotonic() - began


def _waits_in_dispatch(path: Path) -> bool:
    run = read_file(path).running
    return run is not None and (run.operator, run.step) == ("dispatch", "wait")


def slow(rank: int, num_ranks: int, case: Case, late: int) -> list[str]:
    """What a rank logs of another one that is late for every round."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("moe_triton.waits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "EVERY_S", 0.02)
        patch.setattr(recorder, "_looks", recorder.Looks())
        logger.addHandler(handler)
        try:
            with make_buffer(case) as buffer:
                rounds(buffer, case, rank, 2)
                inputs = inputs_of(case, rank, 0)
                late_s = 0.005
                for _ in range(60):
                    if rank == late:
                        # By more than others are for the combine, which a loaded machine draws out.
                        took_s = _slow_round(buffer, case, rank, late_s)
                        late_s = min(0.2, max(0.005, 2 * took_s, 0.9 * late_s))
                    else:
                        one_round(buffer, case, inputs, None)
                if rank != late:
                    until(lambda: any("was awaited longest" in line for line in lines))
        finally:
            logger.removeHandler(handler)
    return [line for line in lines if "was awaited longest" in line]
