"""A kernel's launch on a back end, compared with its model in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moe_triton.backends.base import Backend, Executable
from moe_triton.core.ascendc import REPORT_WORDS
from moe_triton.core.plan import Plan, launch
from moe_triton.kernels import Case, Sizes, kernel_cases
from moe_triton.tools.selftest.cases import difference

# An AI core sums a row in the order of its reduction instruction, so the last bits differ from the model's.
SUM_TOLERANCE = 2e-2
MANY_LAUNCHES = 33  # of a plan that shows what one more launch adds


def sums_in_its_own_order(case: Case) -> bool:
    """Whether the target sums a row in another order than the model."""
    return case.kernel.constants.get("LANES") == 0


@dataclass(frozen=True)
class ReadyCase:
    """A case on a device: call `executable.run(bindings)`."""

    executable: Executable
    bindings: dict[str, torch.Tensor]


def prepare(case: Case, backend: Backend, blocks: int, launches: int = 1) -> ReadyCase:
    """Compiles a plan of ``launches`` launches, and copies the memory to the device."""
    step = launch(case.kernel.name, case.kernel, "compute", blocks, **case.values)
    report = torch.zeros(blocks, REPORT_WORDS, dtype=torch.int32, device=backend.device)
    executable = backend.compile(Plan("kernel", 0, (step,) * launches), report, {})
    bindings = {name: tensor.clone().to(backend.device) for name, tensor in case.memory.items()}
    return ReadyCase(executable, bindings)


def tiny_plan(backend: Backend, launches: int) -> Callable[[], int]:
    """Runs a plan of launches of the kernel that moves the fewest bytes."""
    cases = kernel_cases(Sizes(), 0, backend.name)
    case = min((case for case in cases if case.bytes_moved), key=lambda case: case.bytes_moved or 0)
    ready = prepare(case, backend, 1, launches)
    return lambda: ready.executable.run(ready.bindings)


def check_case(case: Case, backend: Backend, blocks: int) -> list[str]:
    """Runs a case once.

    Returns:
        Differences from the model in any bit: of outputs, and of inputs and memory that must not change.
    """
    ready = prepare(case, backend, blocks)
    code = ready.executable.run(ready.bindings)
    backend.synchronize()
    name = f"{case.name} zoned" if "zone_stride" in case.values else case.name
    if code:
        return [f"{name}: it reported {code}"]
    actual = {memory: tensor.cpu() for memory, tensor in ready.bindings.items()}
    return [
        f"{name}: {text}"
        for memory, expected in case.model(blocks).items()
        if (text := _difference(memory, actual[memory], expected, sums_in_its_own_order(case)))
    ]


def _difference(name: str, actual: torch.Tensor, expected: torch.Tensor, tolerant: bool) -> str | None:
    if tolerant and expected.dtype.is_floating_point:
        if torch.allclose(actual.float(), expected.float(), rtol=SUM_TOLERANCE, atol=SUM_TOLERANCE):
            return None
        return f"{name} is not close to the fallback's"
    return difference(name, actual, expected)
