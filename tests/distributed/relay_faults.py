"""What goes wrong on a rank that relays; each function is called as ``f(rank, num_ranks, ...)``."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from moe_triton import CommunicationTimeoutError, EPBuffer, Tuning
from moe_triton.core.tuning import Posts
from tests.distributed.cases import experts_of
from tests.distributed.hierarchy_runs import Relayed, one_round
from tests.distributed.workers import patient_buffer
from tests.patience import seconds

LEAVES, LATE = 0, {"dispatch": 2, "combine": 1}
"""Who leaves, and for whom it waits: in a dispatch for one of its rail, in a combine for its neighbour."""
SOON_S = seconds(60)
NEVER_S = 10 * SOON_S


class Said(NamedTuple):
    """How a rank's calls ended.

    Attributes:
        kind: of error; "" for none.
        missing: ranks that it names.
        text: of it.
        waited_s: that the call took which raised.
    """

    kind: str
    missing: tuple[int, ...]
    text: str
    waited_s: float


def ending_of(calls: list[Callable[[], object]]) -> Said:
    """Makes calls until one raises."""
    for call in calls:
        began = time.monotonic()
        try:
            call()
        except BaseException as error:
            missing = error.missing_ranks if isinstance(error, CommunicationTimeoutError) else ()
            return Said(type(error).__name__, missing, str(error), time.monotonic() - began)
    return Said("", (), "", 0.0)


def make(of: Relayed, posts: Posts, timeout_s: float) -> EPBuffer:
    """A buffer whose kernels are compiled. Collective."""
    buffer = patient_buffer(of.case, tuning=Tuning(posts=posts), timeout_s=timeout_s)
    for _ in range(3):  # a plan for either zone
        one_round(buffer, of, of.inputs(buffer.rank, 0))
    dist.barrier()
    return buffer


def leave(
    rank: int, num_ranks: int, of: Relayed, posts: Posts, operator: str, how: str, timeout_s: float
) -> Said:
    """Rank `LEAVES` closes, or gets Ctrl-C, while it waits for a rank that comes after that."""
    store: Any = dist.distributed_c10d._get_default_store()
    left = f"left {operator} {how} {posts}"
    with of.device(rank), make(of, posts, timeout_s) as buffer:
        inputs = of.inputs(rank, 0)
        calls = [lambda: one_round(buffer, of, inputs)] * 2
        if operator == "combine":
            output = buffer.dispatch(*vars(inputs).values())
            y = experts_of(of.case, rank, output.tokens)
            calls.insert(0, lambda: buffer.combine(y, output.handle, inputs.topk_weights))
        dist.barrier()
        if rank == LEAVES:
            actions: dict[str, Callable[[], object]] = {
                "close": buffer.close,
                "ctrl-c": lambda: os.kill(os.getpid(), signal.SIGINT),
            }
            threading.Thread(target=_in_a_wait, args=(buffer, actions[how]), daemon=True).start()
        elif rank == LATE[operator]:
            store.wait([left], timedelta(seconds=SOON_S))
        said = ending_of(calls)
        if rank == LEAVES:
            store.set(left, "")
        dist.barrier()
        return said


def _in_a_wait(buffer: EPBuffer, action: Callable[[], object]) -> None:
    waits: Any = buffer._communicator._waits
    until = time.monotonic() + SOON_S
    while not (waits._struct.holder and waits._struct.began_ns) and time.monotonic() < until:
        time.sleep(0.001)
    action()


def differ(rank: int, num_ranks: int, of: Relayed, posts: Posts, odd: int, operator: str) -> Said:
    """One rank quantises what it dispatches, or what it sums for others."""
    with of.device(rank), make(of, posts, NEVER_S) as buffer:
        x, ids, weights = vars(of.inputs(rank, 0)).values()
        is_odd = rank == odd
        if operator == "dispatch":
            how = "int8" if is_odd else None
            calls: list[Callable[[], object]] = [lambda: buffer.dispatch(x, ids, weights, quantize=how)]  # type: ignore[call-overload]
        else:
            output = buffer.dispatch(x, ids, weights)
            y, how = experts_of(of.case, rank, output.tokens), "int8" if is_odd else None
            calls = [lambda: buffer.combine(y, output.handle, weights, comm_quantize=how)]  # type: ignore[call-overload]
        said = ending_of(calls)
        dist.barrier()
        return said
