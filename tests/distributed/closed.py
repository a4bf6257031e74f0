"""Buffers that are closed, or forked with their process, in use; called as ``f(rank, num_ranks, ...)``."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from moe_triton import torch_npu_ops as ops
from tests.distributed.cases import inputs_of, small_case
from tests.distributed.interrupted import (
    TIMEOUT_S,
    WAYS,
    WITHIN_S,
    Way,
    error_of,
    handled,
    later,
    prepared,
    send,
    torch_npu_call,
)
from tests.distributed.workers import make_buffer, one_round


def close_meanwhile(rank: int, num_ranks: int, way: Way, how: str) -> Any:
    """Rank 0 closes its buffer while it waits in a call: another thread does, or a signal's handler."""
    buffer, call = prepared(way, rank, num_ranks)
    said = None
    with handled(signal.SIGUSR1, lambda *_: buffer.close()):
        if rank == 0:
            actions: dict[str, Callable[[], object]] = {
                "thread": buffer.close,
                "handler": lambda: send(signal.SIGUSR1),
            }
            later(actions[how])
            said = error_of(call), error_of(call)
            closed = error_of(buffer.close)
            said = *said, closed, buffer._communicator._given_back
        dist.barrier()
    buffer.close()
    return said


def close_in_threads(rank: int, num_ranks: int) -> Any:
    """Several threads close while one waits; each returns when the memory is given back."""
    buffer, call = prepared(Way(), rank, num_ranks)
    given_back: list[bool] = []

    def close() -> None:
        buffer.close()
        given_back.append(buffer._communicator._given_back)

    said = None
    if rank == 0:
        for _ in range(3):
            later(close)
        said = error_of(call)
        buffer.close()
        deadline = time.monotonic() + WITHIN_S
        while len(given_back) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    dist.barrier()
    buffer.close()
    return said, given_back


def release_meanwhile(rank: int, num_ranks: int) -> Any:
    call = torch_npu_call(rank, num_ranks)
    said = None
    if rank == 0:
        later(lambda: ops.release(ops.group_name()))
        said = error_of(call)
    dist.barrier()
    ops.release(ops.group_name())
    return said


def close_while_compiling(rank: int, num_ranks: int) -> Any:
    """A first call takes long to compile; it is closed meanwhile and sends nothing."""
    case = small_case(num_ranks)
    buffer = make_buffer(case, timeout_s=TIMEOUT_S)
    executables = buffer._communicator._executables
    compile_plan = executables.compile

    def slowly(plan: Any, variant: Any) -> Any:
        time.sleep(1.0)
        return compile_plan(plan, variant)

    executables.compile = slowly  # type: ignore[method-assign]
    inputs = inputs_of(case, rank, 0)
    if rank == 0:
        later(buffer.close)
    said = None if rank else error_of(lambda: buffer.dispatch(inputs.x, inputs.topk_idx))
    dist.barrier()
    buffer.close()
    return said


def look_after_close(rank: int, num_ranks: int) -> bool:
    """Outputs of direct lie in the window, and outlive it."""
    way = Way(scheme="direct")
    case = way.case(num_ranks)
    buffer = make_buffer(case)
    for number in range(3):
        inputs = inputs_of(case, rank, number)
        output = buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)
        buffer.combine(output.tokens, output.handle, inputs.topk_weights)
    rows = output.tokens[: output.handle.num_received()]
    before = rows.clone()
    dist.barrier()
    buffer.close()
    del buffer
    dist.barrier()
    return torch.equal(rows, before)


def answer_of(child: int, reading: int) -> bytes:
    """What a child wrote to its pipe before it ended."""
    said = b""
    while part := os.read(reading, 1 << 16):
        said += part
    os.waitpid(child, 0)
    return said


def fork(rank: int, num_ranks: int, way: Way, trace: str) -> Any:
    """Rank 0 forks. What the child is told; and whether the parent goes on and writes its trace."""
    case = way.case(num_ranks)
    buffer, call = prepared(way, rank, num_ranks, trace=trace)
    said = b""
    if rank == 0:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                told = error_of(call), error_of(buffer.write_trace), error_of(buffer.close)
                os.write(writing, repr(told).encode())
            del call, buffer  # and what goes with it
            os._exit(0)
        os.close(writing)
        said = answer_of(child, reading)
    dist.barrier()
    one_round(buffer, case, inputs_of(case, rank, 1), None)
    buffer.close()
    return said.decode()


def fork_meanwhile(rank: int, num_ranks: int) -> Any:
    """Rank 0 forks while another thread is in a call, with the lock held. What the child is told."""
    buffer, call = prepared(Way(), rank, num_ranks)
    said = b""
    if rank == 0:
        thread = threading.Thread(target=error_of, args=(call,))
        thread.start()
        deadline = time.monotonic() + WITHIN_S
        while not buffer._communicator._lock.locked() and time.monotonic() < deadline:
            time.sleep(0.001)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                os.write(writing, repr((error_of(call), error_of(buffer.close))).encode())
            os._exit(0)
        os.close(writing)
        said = answer_of(child, reading)
        buffer.close()
        thread.join(WITHIN_S)
    dist.barrier()
    buffer.close()
    return said.decode()


def close_at_any_moment(rank: int, num_ranks: int, rounds: int) -> list[str]:
    """A thread closes at some moment of a run of calls; all of them return or say so."""
    wrong = []
    for number in range(rounds):
        way = WAYS[number % len(WAYS)]
        case = way.case(num_ranks)
        buffer = make_buffer(case, timeout_s=TIMEOUT_S)
        inputs = inputs_of(case, rank, number)
        later(buffer.close, 0.0007 * (number * (7 if rank else 5) % 97))
        deadline = time.monotonic() + WITHIN_S
        said = ("", "", True)
        while not said[0] and time.monotonic() < deadline:
            said = error_of(lambda b=buffer, c=case, i=inputs: one_round(b, c, i, None))  # type: ignore[misc]
        if said[0] != "BufferStateError" or "closed" not in said[1]:
            wrong.append(f"{way}: {said}")
        dist.barrier()
    return wrong
