"""Ranks whose peers do not come, and what ends their waits. Each is called as ``f(rank, num_ranks, ...)``."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from moe_triton import CommunicationTimeoutError, EPBuffer
from moe_triton import torch_npu_ops as ops
from tests.distributed.cases import Case, inputs_of, small_case
from tests.distributed.workers import make_buffer, one_round, patient_buffer
from tests.patience import seconds
from tests.torch_npu_ops.setting import make_round

TIMEOUT_S = 60.0
WITHIN_S = 20.0  # at once, on a machine that has much to do; and not the whole time-out
SOON_S = 0.2
LONG_S = seconds(2.0)  # the time-out of a wait that lasts, and ends well


@dataclass(frozen=True)
class Way:
    """How a call is made.

    Attributes:
        name: "native", "python" or "torch" (in place of Triton).
        scheme: how tokens travel.
        operator: that waits until its deadline.
        num_blocks: of each kernel.
    """

    name: str = "native"
    scheme: str = "fullmesh_v1"
    operator: str = "dispatch"
    num_blocks: int = 1

    def __str__(self) -> str:
        return f"{self.name}-{self.scheme}-{self.operator}-{self.num_blocks}"

    def case(self, num_ranks: int) -> Case:
        kernels = "torch" if self.name == "torch" else "triton"
        return small_case(num_ranks, self.scheme, kernels=kernels, num_blocks=self.num_blocks)


WAYS = [
    Way(),
    Way(operator="combine"),
    Way(scheme="fullmesh_v2", operator="combine", num_blocks=2),
    Way(scheme="direct"),
    Way(scheme="direct", operator="combine"),
    Way(scheme="fullmesh"),
    Way(scheme="fullmesh", operator="combine", num_blocks=2),
    Way("python", num_blocks=2),
    Way("python", "fullmesh_v2"),
    Way("torch", operator="combine"),
    Way("torch", "direct"),
]


def prepared(way: Way, rank: int, num_ranks: int, **options: Any) -> tuple[EPBuffer, Callable[[], object]]:
    """A buffer, and the call that waits until the peers make it too. Collective."""
    case = way.case(num_ranks)
    buffer = make_buffer(case, **{"timeout_s": TIMEOUT_S, **options})
    if way.name == "python":
        buffer._calls = None
    inputs = inputs_of(case, rank, 0)
    # Rows for every rank, and from every rank.
    topk_idx = torch.arange(case.config.num_topk * 4).view(4, -1).int() % case.config.num_experts
    for _ in range(3):
        one_round(buffer, case, inputs, None)

    def dispatch() -> Any:
        return buffer.dispatch(inputs.x, topk_idx, inputs.topk_weights)

    if way.operator == "dispatch":
        return buffer, dispatch
    output = dispatch()
    return buffer, lambda: buffer.combine(output.tokens, output.handle, inputs.topk_weights)


def torch_npu_call(rank: int, num_ranks: int) -> Callable[[], object]:
    """The same with torch_npu's functions. Collective."""
    ops.configure(relaxed=True, timeout_s=TIMEOUT_S)
    r = make_round(rank, num_ranks)

    def dispatch() -> object:
        return ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *r.group)

    dispatch()
    return dispatch


@contextlib.contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def later(action: Callable[[], object], seconds: float = SOON_S) -> None:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def error_of(call: Callable[[], object]) -> tuple[str, str, bool]:
    """What a call raised, what that said, and whether it took no longer than it may."""
    start = time.monotonic()
    try:
        call()
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic() - start < WITHIN_S
    return "", "", time.monotonic() - start < WITHIN_S


@contextlib.contextmanager
def messages() -> Iterator[list[str]]:
    """What is logged meanwhile."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, handler = logging.getLogger("moe_triton"), Keep()
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def interrupt(rank: int, num_ranks: int, way: Way) -> Any:
    """Rank 0 gets Ctrl-C in a wait; then what the next call says."""
    buffer, call = prepared(way, rank, num_ranks)
    with buffer:
        said = None
        if rank == 0:
            later(lambda: send(signal.SIGINT))
            said = error_of(call), error_of(call)
        dist.barrier()
    return said


class Raised(Exception):  # noqa: N818
    """Of a test's handler."""


def raise_from_handler(*_: object) -> None:
    raise Raised("by a handler")


def raise_in_handlers(rank: int, num_ranks: int) -> Any:
    """Another signal than Ctrl-C's, with a handler that raises."""
    buffer, call = prepared(Way(), rank, num_ranks)
    said = None
    with buffer, handled(signal.SIGUSR1, raise_from_handler):
        if rank == 0:
            later(lambda: send(signal.SIGUSR1))
            said = error_of(call), error_of(call)
        dist.barrier()
    return said


def go_on_after_handlers(rank: int, num_ranks: int, way: Way) -> Any:
    """Handlers that do not raise run while a wait goes on, one signal after the other: pending ones merge."""
    buffer, call = prepared(way, rank, num_ranks)
    store: Any = dist.distributed_c10d._get_default_store()
    seen: list[int] = []

    def note(*_: object) -> None:
        seen.append(len(seen))
        store.add(f"handled {way}", 1)
        if len(seen) < 3:
            later(lambda: send(signal.SIGUSR1), 0.2)

    with buffer, handled(signal.SIGUSR1, note):
        if rank == 0:
            later(lambda: send(signal.SIGUSR1), 0.2)
        else:
            # What rank 0 waits for comes after they have run: in the wait, not behind it.
            deadline = time.monotonic() + WITHIN_S
            while store.add(f"handled {way}", 0) < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
        call()
        one_round(buffer, way.case(num_ranks), inputs_of(way.case(num_ranks), rank, 1), None)
    return len(seen) == 3


def interrupt_elsewhere(rank: int, num_ranks: int) -> Any:
    """Ctrl-C belongs to the main thread. What waits on another one waits on, until it is closed."""
    buffer, call = prepared(Way(), rank, num_ranks)
    said: list[Any] = []
    if rank == 0:
        ended = threading.Event()
        threading.Thread(target=lambda: (said.append(error_of(call)), ended.set())).start()
        try:
            later(lambda: send(signal.SIGINT))
            ended.wait(WITHIN_S)
        except KeyboardInterrupt:
            said.append(("main thread", ended.is_set()))
        buffer.close()
        ended.wait(WITHIN_S)
    dist.barrier()
    buffer.close()
    return said


def interrupt_torch_npu(rank: int, num_ranks: int) -> Any:
    call = torch_npu_call(rank, num_ranks)
    said = None
    if rank == 0:
        later(lambda: send(signal.SIGINT))
        said = error_of(call), error_of(call)
    dist.barrier()
    ops.release(ops.group_name())
    return said


def barrier_interrupted(rank: int, num_ranks: int) -> Any:
    buffer, _ = prepared(Way(), rank, num_ranks)
    said = None
    with buffer:
        if rank == 0:
            later(lambda: send(signal.SIGINT))
            said = error_of(buffer._communicator.barrier), error_of(buffer._communicator.barrier)
        dist.barrier()
    return said


def interrupt_between_rounds(rank: int, num_ranks: int) -> Any:
    """Of a rank that waits for nobody and is signalled: what it says, whether it ends, what comes then."""
    # As many that a thread which is late by tenths of a second still comes in the middle of them.
    size, rounds = 16, 32_768
    sizes: dict[str, Any] = {"hidden": 64, "num_topk": 1, "num_experts": 4 * num_ranks}
    x = torch.zeros(size * rounds, 64, dtype=torch.bfloat16)
    ids = torch.arange(len(x), dtype=torch.int32)[:, None] % sizes["num_experts"]
    with EPBuffer(num_max_tokens_per_rank=size, comm_alg="fullmesh_v1", **sizes) as buffer:
        for _ in range(3):
            buffer.dispatch(x[: 3 * size], ids[: 3 * size])
        counts = buffer._communicator.counts
        before, deadline = counts["dispatch"], time.monotonic() + seconds(60.0)

        def interrupt_once_it_runs() -> None:
            while counts["dispatch"] < before + 9 and time.monotonic() < deadline:
                time.sleep(0.001)
            send(signal.SIGINT)

        watch = threading.Thread(target=interrupt_once_it_runs)
        watch.start()
        said = error_of(lambda: buffer.dispatch(x, ids))[:2]
        watch.join()
        made = counts["dispatch"] - before
        then = error_of(lambda: buffer.dispatch(x, ids))[1]
    return said, made < rounds, then.replace(f"number {before + made - 1} ", "number of the last ")


def wait_long(rank: int, num_ranks: int, way: Way) -> list[str]:
    """What is logged while ranks 1 and 3 keep the others waiting."""
    buffer, call = prepared(way, rank, num_ranks, timeout_s=LONG_S)
    with buffer, messages() as said:
        if rank in (1, 3):
            time.sleep(0.7 * LONG_S)
        call()
    return said


def wait_behind(rank: int, num_ranks: int) -> Any:
    """Rank 2 does not combine. Rank 1 waits for it there; rank 0 waits for both in the next dispatch."""
    case = small_case(num_ranks)
    buffer = patient_buffer(case, timeout_s=seconds(3.0))
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    weights = torch.ones(4, 2)
    # Only rank 1 has tokens for an expert on rank 2.
    ids = torch.tensor([[0, 4 if rank == 1 else 1]] * 4, dtype=torch.int32)
    output = buffer.dispatch(x, ids)
    said = None
    if rank < 2:
        try:
            buffer.combine(output.tokens, output.handle, weights)
            buffer.dispatch(x, ids)
        except CommunicationTimeoutError as error:
            said = error.operator, error.missing_ranks, str(error)
    dist.barrier()
    buffer.close()
    return said
