"""Puts `tests.npu.device` in the place of torch_npu, triton-ascend, the built kernels and memfabric."""

from __future__ import annotations

import ctypes
import mmap
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, ClassVar

import torch

from moe_triton.backends.base import Bindings
from moe_triton.backends.cpu import native
from moe_triton.backends.cpu.triton import load
from moe_triton.backends.npu import (
    backend,
    executable,
    library,
    memfabric,
    runtime,
    toolchain,
    triton_kernels,
)
from moe_triton.core.abi import first_words, struct_words
from moe_triton.core.errors import ToolchainError
from moe_triton.core.kernel import TritonKernel
from moe_triton.core.soc import soc_of
from moe_triton.reference.arithmetic import LANES
from moe_triton.schemes.ascendc import FUSED, KERNELS
from tests import surroundings
from tests.npu import posts
from tests.npu.device import Device, FakeCapture, FakeEvent, FakeGraph, FakeStream, Work

SHM = Path("/dev/shm")
RUN = executable.NpuExecutable.run
ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)


def shared_file(store: str, number: int) -> Path:
    """A window's file: of this run alone, since ports and process ids come again."""
    return SHM / f"moe_triton-standin-{surroundings.run_name()}-{store}-{number}"


class FakeMemory:
    """``memfabric_hybrid.shm``'s objects: files that every rank maps."""

    unreachable: tuple[int, ...] = ()
    paths: ClassVar[list[Path]] = []

    def __init__(self, path: Path, num_ranks: int, rank: int, num_bytes: int) -> None:
        self._path, self._is_first = path, rank == 0
        self.paths.append(path)
        # For ranks that end without giving their windows back.
        Finalize(None, path.unlink, (True,), exitpriority=1)
        with path.open("a+b") as file:
            path.chmod(0o600)
            file.truncate(num_ranks * num_bytes)
            self._mapping = mmap.mmap(file.fileno(), num_ranks * num_bytes)
        self._view = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._view[rank * num_bytes : (rank + 1) * num_bytes] = 0xA5  # what a former owner left
        self.gva = self._view.data_ptr()

    def topology_can_reach(self, rank: int, info: int) -> int:
        return -1 if rank in self.unreachable else 0

    def destroy(self, flags: int = 0) -> int:
        if self._is_first:
            self._path.unlink(missing_ok=True)
        self._view = self._view[:0]
        return 0


class FakeLibrary:
    """The kernels' launchers: they take note, and the emulated kernel runs when its turn comes."""

    def __init__(self, device: Device) -> None:
        self._device = device
        sizes = {kernel.name: struct_words(kernel) for kernel in KERNELS}
        sizes |= {kernel.name: first_words(kernel)[-1] for kernel in FUSED}
        for name, words in sizes.items():
            setattr(self, f"moe_{name}", self._launcher(name, words))

    def _launcher(self, name: str, num_words: int) -> Callable[[int, int, int], int]:
        device, function = self._device, getattr(native.library(), f"moe_{name}")

        def launch(blocks: int, handle: int, address: int) -> int:
            words = (ctypes.c_uint64 * num_words).from_address(address)
            copied = (ctypes.c_uint64 * num_words)(*words)

            def run() -> None:
                with posts.in_use():
                    assert function(ctypes.c_uint32(blocks), None, ctypes.byref(copied)) == 0, (
                        native.last_error()
                    )

            stream = device.streams[handle - 0x1000]
            device.at_once(Work("launch", name, stream, run, words=(blocks, *copied)))
            return 0

        return launch


def _load(kernel: TritonKernel) -> Any:
    """The kernel in the form that an NPU gets; in the CPU's where that cannot be lowered for a CPU.

    And of a norm, which would otherwise add in another order than the reference.
    """
    if kernel.name == "rms_norm":
        kernel = replace(kernel, constants={**kernel.constants, "LANES": LANES})
    try:
        return load(kernel)
    except ToolchainError:
        constants = {**kernel.constants, "UNROLL": True, "TILE": kernel.constants["HIDDEN"]}
        return load(replace(kernel, constants=constants))


def triton_launcher(device: Device) -> Callable[[TritonKernel], triton_kernels.TritonLauncher]:
    """What `moe_triton.backends.npu.triton_kernels.launcher` gives, of kernels compiled for the CPU."""

    def launcher(kernel: TritonKernel) -> triton_kernels.TritonLauncher:
        entry = ENTRY(_load(kernel).entry)

        def launch(programs: int, handle: int, arguments: Sequence[int]) -> None:
            assert len(arguments) == len(kernel.args)
            words = [word % (1 << 64) for word in arguments]
            packed = (ctypes.c_uint64 * len(words))(*words)

            def run() -> None:
                for program in range(programs):
                    entry(ctypes.addressof(packed), programs, program)

            stream = device.streams[handle - 0x1000]
            device.by_queue(Work("launch", kernel.name, stream, run, words=(programs, *words)))

        return launch

    return launcher


def fake_torch_npu(device: Device, soc: str) -> tuple[types.ModuleType, types.ModuleType]:
    """``torch_npu`` and ``torch.npu``."""
    npu = types.ModuleType("torch.npu")
    npu.is_available = lambda: True  # type: ignore[attr-defined]
    npu.device_count = lambda: 1  # type: ignore[attr-defined]
    npu.current_stream = lambda *_: device.user_stream  # type: ignore[attr-defined]
    npu.get_device_name = lambda *_: soc  # type: ignore[attr-defined]
    npu.set_device = lambda index: device.log.append(f"device {index}")  # type: ignore[attr-defined]
    npu.Stream = lambda: FakeStream(device)  # type: ignore[attr-defined]
    npu.Event = lambda enable_timing=False: FakeEvent(device, enable_timing)  # type: ignore[attr-defined]
    npu.NPUGraph = lambda: FakeGraph(device)  # type: ignore[attr-defined]
    npu.graph = FakeCapture  # type: ignore[attr-defined]
    npu.is_current_stream_capturing = lambda: device.graph is not None  # type: ignore[attr-defined]
    npu.synchronize = lambda _=None: device.synchronize()  # type: ignore[attr-defined]
    c = types.ModuleType("torch_npu._C")
    c._construct_storage_from_data_pointer = lambda *given: given  # type: ignore[attr-defined]
    c._construct_NPU_Tensor_From_Storage_And_Metadata = _tensor_at  # type: ignore[attr-defined]
    torch_npu = types.ModuleType("torch_npu")
    torch_npu._C, torch_npu.npu = c, npu  # type: ignore[attr-defined]
    return torch_npu, npu


def _tensor_at(metadata: dict[str, Any], storage: tuple[int, torch.device, int]) -> torch.Tensor:
    address, _, num_bytes = storage
    assert (metadata["data_ptr"], metadata["nbytes"]) == (address, num_bytes)
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


def fake_memfabric() -> types.ModuleType:
    """``memfabric_hybrid``."""
    module, shm = types.ModuleType("memfabric_hybrid"), types.ModuleType("shm")
    state: dict[str, Any] = {}

    def initialize(url: str, world_size: int, rank: int, device: int, config: Any) -> int:
        assert url.startswith("tcp://")
        assert "url" not in state, "initialised twice"
        assert config.start_store == (rank == 0)
        state["url"] = url
        return 0

    def create(number: int, num_ranks: int, rank: int, num_bytes: int, kind: str) -> FakeMemory:
        assert num_bytes % (2 << 20) == 0
        assert 0 <= number < 64
        # Its device functions post from the object 0.
        assert kind == "MTE" or (kind, number) == ("RDMA", 0)
        port = state["url"].rsplit(":", 1)[1]
        return FakeMemory(shared_file(port, number), num_ranks, rank, num_bytes)

    shm.initialize, shm.create = initialize, create  # type: ignore[attr-defined]
    shm.ShmConfig = types.SimpleNamespace  # type: ignore[attr-defined]
    shm.ShmDataOpType = types.SimpleNamespace(MTE="MTE", RDMA="RDMA")  # type: ignore[attr-defined]
    module.shm = shm  # type: ignore[attr-defined]
    module.initialize = lambda flags=0: 0  # type: ignore[attr-defined]
    module.get_last_err_msg = lambda: "a message of memfabric's"  # type: ignore[attr-defined]
    module.__spec__ = types.SimpleNamespace(name="memfabric_hybrid")  # type: ignore[assignment]
    return module


def fake_versions(soc: str) -> toolchain.Versions:
    """What a machine with this processor would say."""
    version = toolchain.Version((9, 0), "9.0.0")
    cann = toolchain.Cann(Path("/cann"), version, Path("/cann/bin/bisheng"))
    return toolchain.Versions(cann, toolchain.Version((25, 5), "25.5.0"), soc_of(soc))


def install(policy: str = "random", seed: int = 0, soc: str = "Ascend910_9391") -> Device:
    """Puts the stand-in in its place, for as long as this process lives."""
    device = Device(policy, seed)
    torch_npu, npu = fake_torch_npu(device, soc)
    sys.modules["torch_npu"], sys.modules["torch.npu"] = torch_npu, npu
    torch.npu = npu  # type: ignore[attr-defined]
    sys.modules["memfabric_hybrid"] = fake_memfabric()
    memfabric._members = None
    memfabric._used_ids.clear()
    memfabric._reserved_ids.clear()
    fake = FakeLibrary(device)
    fake.moe_schedule_mode = fake.moe_posts = lambda: 1  # type: ignore[attr-defined]
    library._loaded = lambda: (fake, native._loaded()[1])  # type: ignore[assignment, return-value]
    triton_kernels.launcher = triton_launcher(device)  # type: ignore[assignment]
    backend.make_window = posts.make_window
    toolchain.check_versions = lambda *_: fake_versions(soc)  # type: ignore[assignment]
    runtime.Runtime.host_copy = lambda self, tensor: torch.zeros_like(tensor)  # type: ignore[method-assign]

    def copy(
        self: runtime.Runtime, to: torch.Tensor, source: torch.Tensor, stream: FakeStream | None = None
    ) -> None:
        def run() -> None:
            with torch.inference_mode():  # a device's copies know nothing of it
                to.copy_(source)

        device.by_queue(Work("copy", "", stream or device.user_stream, run))

    def on_host(self: runtime.Runtime, tensor: torch.Tensor) -> torch.Tensor:
        device.synchronize()
        return tensor

    def run(self: executable.NpuExecutable, bindings: Bindings) -> int:
        device.hold((self, list(bindings.values())))
        return RUN(self, bindings)

    executable.NpuExecutable.run = run  # type: ignore[method-assign]
    runtime.Runtime.copy = copy  # type: ignore[method-assign]
    runtime.Runtime.on_host = on_host  # type: ignore[method-assign]
    return device
