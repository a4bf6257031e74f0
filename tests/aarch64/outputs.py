"""What every Triton kernel writes, on one machine and on another: ``python -m tests.aarch64.outputs``.

``write FILE`` runs all cases here and keeps inputs and outputs; ``compare FILE`` runs them on the machine
that it is called on, with the same inputs, and names outputs of which a bit differs. Generators of random
numbers compute with vectors that differ between machines, so inputs travel.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from moe_triton.backends import make_backend
from moe_triton.kernels import Case, Sizes, kernel_cases
from moe_triton.tools.selftest.cases import difference
from moe_triton.tools.selftest.kernel_cases import prepare

# Of back ends, and hidden sizes; 0 for kernels that have none. An NPU's forms are compiled for the CPU, too.
FORMS = (("cpu", 0), ("cpu", 512), ("npu", 0))
BLOCKS = 1  # on this thread: qemu has hung in forks of a process that has others, and compilers are forked
Tensors = dict[str, torch.Tensor]


def cases() -> Iterator[tuple[str, Case]]:
    """All of them, by names that tell them apart."""
    for target, hidden in FORMS:
        for number, case in enumerate(kernel_cases(Sizes(), hidden, target)):
            yield f"{target} {hidden} {number} {case.name}", case


def outputs_of(case: Case, memory: Tensors) -> Tensors:
    """What a case writes, given its memory."""
    ready = prepare(case, make_backend("cpu", "triton", None), BLOCKS)
    for name, tensor in memory.items():
        ready.bindings[name].copy_(tensor)
    code = ready.executable.run(ready.bindings)
    if code:
        raise RuntimeError(f"{case.name} reported {code}")
    return {name: ready.bindings[name] for name in case.outputs}


def write(path: Path) -> int:
    """Keeps inputs and outputs of all cases."""
    kept: dict[str, dict[str, Tensors]] = {}
    for name, case in cases():
        memory = {of: tensor.clone() for of, tensor in case.memory.items()}
        kept[name] = {"memory": memory, "outputs": outputs_of(case, memory)}
    torch.save(kept, path)
    return len(kept)


def compare(path: Path) -> tuple[int, list[str]]:
    """How many outputs are the same to the bit, a NaN being like any other; and those that are not."""
    kept: dict[str, Any] = torch.load(path, weights_only=True)
    same, wrong = 0, []
    for name, case in cases():
        expected = kept.pop(name)
        for of, tensor in outputs_of(case, expected["memory"]).items():
            text = difference(of, _with_one_nan(tensor), _with_one_nan(expected["outputs"][of]))
            same += text is None
            wrong += [f"{name}: {text}"] if text else []
    return same, [*wrong, *(f"{name} was not run" for name in kept)]


def _with_one_nan(tensor: torch.Tensor) -> torch.Tensor:
    """The same with all NaNs alike: one that is made of numbers has a sign on x86-64, and none on aarch64."""
    if not tensor.is_floating_point():
        return tensor
    return torch.where(tensor.isnan(), torch.full((), torch.nan, dtype=tensor.dtype), tensor)


def main(task: str, path: str) -> int:
    """Does what the command line says."""
    if task == "write":
        print(f"{write(Path(path))} cases")
        return 0
    same, wrong = compare(Path(path))
    print(f"{same} outputs are the same to the bit")
    print("\n".join(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
