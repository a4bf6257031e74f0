"""What ranks run where windows are made or cannot be; each function as ``f(rank, num_ranks, ...)``."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from moe_triton.backends.npu import steps, window
from moe_triton.core.errors import MoeTritonError
from tests.distributed.cases import Case, inputs_of
from tests.distributed.workers import make_buffer
from tests.npu import standin
from tests.npu.graph_workers import eager
from tests.npu.workers import start
from tests.patience import seconds


def attempt(case: Case, **options: Any) -> str:
    """What constructing a buffer says; empty if it works."""
    try:
        make_buffer(case, backend="npu", timeout_s=5.0, **options).close()
    except MoeTritonError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def unreachable(rank: int, num_ranks: int, case: Case) -> str:
    standin.install()
    standin.FakeMemory.unreachable = (1,) if rank == 0 else ()
    try:
        return attempt(case)
    finally:
        standin.FakeMemory.unreachable = ()


def servers(rank: int, num_ranks: int, case: Case, soc: str, boots: list[str], folder: str) -> str:
    """Ranks on the servers that these boot ids tell apart."""
    standin.install(soc=soc)
    file = Path(folder, f"boot-{rank}")
    file.write_text(boots[rank])
    usual, window.BOOT_ID = window.BOOT_ID, file
    try:
        return attempt(case)
    finally:
        window.BOOT_ID = usual


def limited(rank: int, num_ranks: int, case: Case, megabytes: str) -> str:
    standin.install()
    os.environ["HCCL_BUFFSIZE"] = megabytes
    try:
        return attempt(case)
    finally:
        del os.environ["HCCL_BUFFSIZE"]


def construct(rank: int, num_ranks: int, case: Case, options: dict[str, Any]) -> str:
    standin.install()
    return attempt(case, **options)


def several(rank: int, num_ranks: int, case: Case) -> tuple[list[bool], list[str]]:
    """Two buffers at a time, one after another; and the files that are left."""
    standin.install("random", seed=rank)
    good = []
    standin.FakeMemory.paths.clear()
    for _ in range(2):
        first, second = (make_buffer(case, backend="npu") for _ in range(2))
        good += [eager(first, case, 1), eager(second, case, 2), eager(first, case, 3)]
        assert first._communicator._windows[0].peers != second._communicator._windows[0].peers
        second.close()
        first.close()
        first.close()
    # Rank 0 removes them, after the last one has given its own up.
    return good, [path.name for path in standin.FakeMemory.paths if rank == 0 and path.exists()]


@contextmanager
def fake_shmem() -> Iterator[None]:
    """``shmem`` in the place of memfabric, over the same files."""
    state: dict[int, Any] = {}

    def init(*, uid: bytes, rank: int, nranks: int, mem_size: int, instance_id: int, **rest: str) -> None:
        assert rest == {"initializer_method": "uid"}
        assert instance_id not in state
        state[instance_id] = (uid.decode(), rank, nranks, mem_size)

    @contextmanager
    def multi_instance(number: int) -> Iterator[None]:
        state["current"] = number  # type: ignore[index]
        yield

    def align(alignment: int, size: int) -> Any:
        number = state["current"]  # type: ignore[index]
        uid, rank, num_ranks, mem_size = state[number]
        assert size < mem_size
        memory = standin.FakeMemory(standin.shared_file(uid, number), num_ranks, rank, size)
        return types.SimpleNamespace(memory=memory, size=size)

    core = types.ModuleType("shmem.core")
    core.get_unique_id = lambda: str(os.getpid()).encode()  # type: ignore[attr-defined]
    core.init, core.align, core.multi_instance = init, align, multi_instance  # type: ignore[attr-defined]
    core.get_peer_buffer = lambda buffer, rank: types.SimpleNamespace(  # type: ignore[attr-defined]
        addr=buffer.memory.gva + rank * buffer.size
    )
    core.free = lambda buffer: buffer.memory.destroy()  # type: ignore[attr-defined]
    core.finalize = lambda number: state.pop(number)  # type: ignore[attr-defined]
    shmem = types.ModuleType("shmem")
    shmem.core = core  # type: ignore[attr-defined]
    shmem.__spec__ = types.SimpleNamespace(name="shmem")  # type: ignore[assignment]
    memfabric = sys.modules["memfabric_hybrid"]
    sys.modules["memfabric_hybrid"] = None  # type: ignore[assignment]  # as if not installed
    sys.modules["shmem"], sys.modules["shmem.core"] = shmem, core
    try:
        yield
    finally:
        del sys.modules["shmem"], sys.modules["shmem.core"]
        sys.modules["memfabric_hybrid"] = memfabric


def over_shmem(rank: int, num_ranks: int, case: Case) -> list[bool]:
    """The same on CANN SHMEM."""
    standin.install("random", seed=rank)
    with fake_shmem(), make_buffer(case, backend="npu") as buffer:
        return [eager(buffer, case, number) for number in range(3)]


def without_libraries(rank: int, num_ranks: int, case: Case) -> str:
    standin.install()
    memfabric = sys.modules["memfabric_hybrid"]
    sys.modules["memfabric_hybrid"] = None  # type: ignore[assignment]  # as if not installed
    try:
        return attempt(case)
    finally:
        sys.modules["memfabric_hybrid"] = memfabric


def past_the_queue(rank: int, num_ranks: int, case: Case) -> list[str]:
    """Ascend C kernels launched without emptying torch_npu's queue first."""
    said = []
    _, buffer = start(case, "random", rank, timeout_s=seconds(4.0))
    eager(buffer, case, 1)
    steps.AscendCStep.is_direct = False
    try:
        inputs = inputs_of(case, rank, 2)
        output = buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, quantize="int8")
        buffer.synchronize()
        said.append(str(output.tokens_per_expert.tolist()))
    except MoeTritonError as error:
        said.append(type(error).__name__)
    finally:
        steps.AscendCStep.is_direct = True
    torch.npu.synchronize()  # type: ignore[attr-defined]
    return said
