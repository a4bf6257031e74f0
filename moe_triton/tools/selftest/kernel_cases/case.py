"""One Triton kernel with data, and whether a back end does with it what its torch fallback does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moe_triton.backends.base import Backend, Executable
from moe_triton.core.ascendc import REPORT_WORDS
from moe_triton.core.kernel import TritonKernel
from moe_triton.core.plan import Hole, Plan, Value, launch
from moe_triton.tools.selftest.comparison import difference

TOPK, NUM_EXPERTS, NUM_RANKS = 8, 32, 4
CANARY = 0x5A  # in every byte that nobody has written yet
# Where an AI core sums a row in the order of its reduction instruction, the last bits are its own.
SUM_TOLERANCE = 2e-2


@dataclass(frozen=True)
class KernelCase:
    """One launch.

    Attributes:
        kernel: what is launched.
        variant: dtype or feature.
        memory: host tensors by name.
        values: by argument: a number, or a hole that is one of these tensors, or lies in it.
    """

    kernel: TritonKernel
    variant: str
    memory: Mapping[str, torch.Tensor]
    values: Mapping[str, Value]

    @property
    def sums_in_its_own_order(self) -> bool:
        """Whether the target sums a row in another order than the fallback."""
        return self.kernel.constants.get("LANES") == 0

    @property
    def bytes_moved(self) -> int | None:
        """Bytes read and written, where the kernel knows."""
        if self.kernel.bytes_moved is None:
            return None
        numbers = {name: value for name, value in self.values.items() if isinstance(value, int)}
        return self.kernel.bytes_moved(**numbers)


def make_case(kernel: TritonKernel, variant: str, **arguments: torch.Tensor | Hole | int) -> KernelCase:
    """A case from values by argument: a tensor of its own, a place in another argument's, or a number.

    Arguments that this variant of the kernel does not have are left out. A variant that looks its zone up
    gets what others get in the second of two zones.
    """
    wanted = [arg.name for arg in kernel.args]
    if "zone_stride" in wanted:
        arguments = in_second_zone(arguments, "slots" if "slots" in wanted else "header")
        variant += " zoned"
    values: dict[str, Value] = {}
    for name in wanted:
        value = arguments[name]
        values[name] = Hole(name) if isinstance(value, torch.Tensor) else value
    memory: dict[str, torch.Tensor] = {}
    for hole in values.values():
        if isinstance(hole, Hole):
            tensor = arguments[hole.name]
            assert isinstance(tensor, torch.Tensor)
            memory[hole.name] = tensor
    return KernelCase(kernel, variant, memory, values)


def in_second_zone(
    arguments: dict[str, torch.Tensor | Hole | int], window: str
) -> dict[str, torch.Tensor | Hole | int]:
    """The arguments with a zone of canaries before what is in the window, and the zone's cell."""
    memory = arguments[window]
    assert isinstance(memory, torch.Tensor)
    other = blank(*memory.shape, dtype=memory.dtype)
    return {
        **arguments,
        window: torch.cat([other, memory]),
        "zone": torch.ones(1, dtype=torch.int32),
        "zone_stride": memory.numel(),
    }


def blank(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Memory for an output, full of canaries."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.full((size,), CANARY, dtype=torch.uint8).view(dtype).view(shape)


@dataclass(frozen=True)
class ReadyCase:
    """A case on a device: call `executable.run(bindings)`."""

    executable: Executable
    bindings: dict[str, torch.Tensor]


def prepare(case: KernelCase, backend: Backend, blocks: int, launches: int = 1) -> ReadyCase:
    """Makes a plan of the launch, repeated as often as asked for, and a copy of the memory on the device."""
    step = launch(case.kernel.name, case.kernel, "compute", blocks, **case.values)
    report = torch.zeros(blocks, REPORT_WORDS, dtype=torch.int32, device=backend.device)
    executable = backend.compile(Plan("kernel", 0, (step,) * launches), report, {})
    bindings = {name: tensor.clone().to(backend.device) for name, tensor in case.memory.items()}
    return ReadyCase(executable, bindings)


def check_case(case: KernelCase, backend: Backend, blocks: int) -> list[str]:
    """Runs a case once.

    Returns:
        What differs from the fallback in any bit: outputs, or inputs and memory that must not change.
    """
    ready = prepare(case, backend, blocks)
    code = ready.executable.run(ready.bindings)
    backend.synchronize()
    if code:
        return [f"{case.kernel.name} ({case.variant}): it reported {code}"]
    expected = {name: tensor.clone() for name, tensor in case.memory.items()}
    run_fallback(case, expected, blocks)
    found = {name: tensor.cpu() for name, tensor in ready.bindings.items()}
    return [
        f"{case.kernel.name} ({case.variant}): {text}"
        for name in expected
        if (text := _difference(name, found[name], expected[name], case.sums_in_its_own_order))
    ]


def run_fallback(case: KernelCase, memory: Mapping[str, torch.Tensor], blocks: int) -> None:
    """Runs a kernel's torch fallback on host memory."""
    arguments: dict[str, torch.Tensor | int] = {}
    for arg in case.kernel.args:
        value = case.values[arg.name]
        if isinstance(value, Hole):
            flat = memory[value.name].view(-1).view(torch.uint8)
            arguments[arg.name] = flat[value.offset :].view(arg.dtype)
        else:
            assert isinstance(value, int)
            arguments[arg.name] = value
    case.kernel.fallback(blocks, **arguments, **case.kernel.constants)


def _difference(name: str, found: torch.Tensor, expected: torch.Tensor, tolerant: bool) -> str | None:
    if tolerant and expected.dtype.is_floating_point:
        if torch.allclose(found.float(), expected.float(), rtol=SUM_TOLERANCE, atol=SUM_TOLERANCE):
            return None
        return f"{name} is not close to the fallback's"
    return difference(name, found, expected)
