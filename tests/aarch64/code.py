"""Code of kernels that take most of a call: ``python -m tests.aarch64.code`` compiles them and names files.

A disassembler of the machine that is asked reads them: which instructions are of vectors, which keep a vector
on the stack and fetch it again, and what is called.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import NamedTuple

OBJDUMP = "aarch64-linux-gnu-objdump"
HIDDEN, TOPK = 7168, 8
# `add v0.4s, v1.4s, v2.4s`, `ldp q0, q1, [x2]`
_VECTOR = re.compile(r"\b(v\d+\.|q\d+\b)")
_ON_STACK = re.compile(r"^(?P<move>ldr|ldp|str|stp|ldur|stur)\s+q\d+.*\[sp\b")
_CALL = re.compile(r"^bl\s+\S+\s+<(?P<name>[^@+>]+)")
_INSTRUCTION = re.compile(r"^\s*[0-9a-f]+:\s+[0-9a-f]{8}\s+(?P<text>.+?)\s*$", re.MULTILINE)


class Code(NamedTuple):
    """One kernel's.

    Attributes:
        instructions: of it.
        vectors: those of NEON.
        stored, fetched: vectors that go to the stack, and that come from there.
        calls: of functions, by name.
    """

    instructions: int
    vectors: int
    stored: int
    fetched: int
    calls: dict[str, int]

    @classmethod
    def of_text(cls, text: str) -> Code:
        """What a disassembly says."""
        lines = [found["text"].replace("\t", " ") for found in _INSTRUCTION.finditer(text)]
        moves = Counter(found["move"][:2] for line in lines if (found := _ON_STACK.match(line)))
        calls = Counter(found["name"] for line in lines if (found := _CALL.match(line)))
        vectors = sum(bool(_VECTOR.search(line)) for line in lines)
        return cls(len(lines), vectors, moves["st"], moves["ld"], dict(sorted(calls.items())))

    def __str__(self) -> str:
        called = ", ".join(f"{name} {count}" for name, count in self.calls.items()) or "nothing"
        share = 100 * self.vectors // max(1, self.instructions)
        return (
            f"{self.instructions} instructions, {share}% NEON, {self.stored} vectors to the stack and "
            f"{self.fetched} from it; calls {called}"
        )


def read(path: Path) -> Code:
    """The code of a compiled kernel, without what the linker adds."""
    command = [OBJDUMP, "--disassemble", "--section=.text", str(path)]
    return Code.of_text(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def paths() -> dict[str, Path]:
    """Files of the kernels of a decode's dispatch and combine, by name, compiled on this machine."""
    import torch

    from moe_triton.backends.cpu.triton import load
    from moe_triton.kernels.arrange import arrange_kernel
    from moe_triton.kernels.pack import pack_kernel
    from moe_triton.kernels.route import route_kernel
    from moe_triton.kernels.route_pack import route_pack_kernel
    from moe_triton.kernels.weighted_sum import weighted_sum_kernel
    from moe_triton.layout import SlotLayout

    dtype = torch.bfloat16
    kernels = {
        "arrange": arrange_kernel(SlotLayout(HIDDEN, dtype.itemsize), has_weight=False),
        "weighted_sum": weighted_sum_kernel(dtype, HIDDEN, TOPK),
        "pack": pack_kernel(dtype, HIDDEN, TOPK),
        "route_pack": route_pack_kernel(dtype, HIDDEN, TOPK),
        "route": route_kernel(),
    }
    return {name: load(kernel).path for name, kernel in kernels.items()}


if __name__ == "__main__":
    for name, path in paths().items():
        print(name, path)
