"""What a candidate takes on this machine's NPU: by the device's own clock, against the default, in turns.

Rounds, stop rule and comparison of bits are those of a CPU (`autotune.kernels.measured`). Calls that are
timed together are captured in a graph, between two events of the device: what the host takes to launch them
is not in their time. Like the rest of the back end, it has run on a stand-in only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch

from autotune.kernels.measured import BATCH_S, MeasuredTask, Memory, digest_of_task
from autotune.kernels.tunables import Tunable
from moe_triton import __version__
from moe_triton.backends.npu import toolchain, triton_kernels
from moe_triton.backends.npu.runtime import Runtime
from moe_triton.core.errors import ArgumentError, ToolchainError
from moe_triton.core.kernel import TritonKernel
from moe_triton.core.plan import Placeholder
from moe_triton.core.soc import SOC_OF_PRODUCT, Soc, soc_of
from moe_triton.kernels import Case
from moe_triton.tables.installed import version_of

MOST_CALLS = 256  # in a graph
MS = 1e-3


class Device(NamedTuple):
    """The NPU of this process.

    Attributes:
        runtime: torch_npu.
        soc: the processor.
        source: what measured settings come from.
    """

    runtime: Runtime
    soc: Soc
    source: str


@functools.cache
def device_of(chip: str) -> Device:
    """The NPU that is current in this process.

    Args:
        chip: the processor of its product that tables are of.

    Raises:
        ArgumentError: there is none, or one of another product.
    """
    try:
        runtime = Runtime()
        soc, versions = soc_of(runtime.soc_name()), toolchain.check_versions()
    except ToolchainError as error:
        rule = f"an NPU is needed to measure on one ({error})"
        remedy = "Leave it out: the model prices candidates then."
        raise ArgumentError("--measure", chip, rule, remedy) from None
    if SOC_OF_PRODUCT[soc.product] != chip:
        remedy = f"Pass --soc {soc.product}, or leave --measure out: the model prices candidates then."
        raise ArgumentError("--measure", chip, f"this machine has an {soc.name}, an {soc.product}", remedy)
    cann = versions.cann.version.text if versions.cann.version else "unknown"
    made_by = f"moe_triton {__version__}, triton-ascend {version_of('triton-ascend')}, CANN {cann}"
    return Device(runtime, soc, f"measured on {soc.name}, {made_by}")


@dataclass(frozen=True)
class MeasuredOnNpuTask(MeasuredTask):
    """A kernel's settings, measured on an NPU. A value is the high end of the ratio to the default.

    Attributes:
        tunable: the kernel and its launches.
        chip: see `device_of`.
    """

    target: ClassVar[str] = "npu"
    chip: str = field(kw_only=True)

    def copy_of(self, memory: Mapping[str, torch.Tensor]) -> Memory:
        """Copies the memory of a case to the device."""
        device = device_of(self.chip).runtime.device
        return {name: tensor.clone().to(device) for name, tensor in memory.items()}

    def stop_watch(
        self, case: Case, kernel: TritonKernel, memory: Memory
    ) -> tuple[Callable[[], float], Memory]:
        """Returns what gives a call's seconds by the device's clock, and all memory after the first call."""
        runtime, soc, _ = device_of(self.chip)
        launch = triton_kernels.launcher(kernel)
        programs = min(soc.vector_cores, kernel.programs or soc.vector_cores)

        def call(memory: Memory, calls: int = 1) -> None:
            arguments = _arguments(case, kernel, memory)
            stream = runtime.handle(runtime.current_stream())
            for _ in range(calls):
                launch(programs, stream, arguments)

        first = self.copy_of(case.memory)
        call(first)
        after_first = {name: runtime.on_host(tensor) for name, tensor in first.items()}
        once = _timed(runtime, runtime.captured(lambda: call(memory)))
        once()  # the first run of a graph brings it to the device
        calls = min(MOST_CALLS, max(1, round(BATCH_S / max(once(), 1e-9))))
        several = _timed(runtime, runtime.captured(lambda: call(memory, calls)))
        several()
        return lambda: several() / calls, after_first


def _arguments(case: Case, kernel: TritonKernel, memory: Memory) -> list[int]:
    """Addresses and numbers, in the kernel's order."""
    values = (case.values[arg.name] for arg in kernel.args)
    return [memory[v.name].data_ptr() + v.offset if isinstance(v, Placeholder) else v for v in values]


def _timed(runtime: Runtime, run: Callable[[], None]) -> Callable[[], float]:
    """Runs something, and gives the device's seconds from its begin to its end."""
    begin, end = runtime.make_event(timed=True), runtime.make_event(timed=True)

    def seconds() -> float:
        stream = runtime.current_stream()
        begin.record(stream)
        run()
        end.record(stream)
        runtime.synchronize()
        return float(begin.elapsed_time(end)) * MS

    return seconds


def task_of(tunable: Tunable, chip: str) -> MeasuredOnNpuTask:
    """The task of a tunable, named by all that decides its outcomes.

    Raises:
        ArgumentError: see `device_of`.
    """
    kernel, source = tunable.kernel, device_of(chip).source
    assert kernel.space is not None
    digest = digest_of_task(kernel, source, kernel.multibuffer, kernel.programs)
    name = f"npu: {tunable.label} [{digest}]"
    return MeasuredOnNpuTask(name, kernel.space, kernel.settings, tunable=tunable, chip=chip)
