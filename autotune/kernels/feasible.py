"""Whether the NPU's compiler makes of a candidate what it asks for."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.gate import compile_for_npu
from autotune.npu_compiler import cache
from autotune.npu_compiler.compile import compiled_for, content_of, npu_ir
from autotune.npu_compiler.socs import soc_named
from moe_triton.core.errors import ToolchainError
from moe_triton.core.kernel import TritonKernel
from moe_triton.core.soc import UB_BYTES

_VERSION = 1  # of what is kept of a report
KINDS = ("load", "store")


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a kernel.

    Attributes:
        reason: why there is nothing; empty if there is.
        ub_bytes: of the unified buffer in use.
        buffered: of copies of whole tiles by kind, double-buffered ones and all.
        switched_off: options that the compiler gave up to fit.
    """

    reason: str = ""
    ub_bytes: int = 0
    buffered: Mapping[str, tuple[int, int]] | None = None
    switched_off: tuple[str, ...] = ()

    def share(self, kind: str) -> float:
        """The share of a kind's copies that is double-buffered; 1 where there are none."""
        doubled, number = (self.buffered or {}).get(kind, (0, 0))
        return doubled / number if number else 1.0


@functools.lru_cache(maxsize=4096)
def compiled(kernel: TritonKernel, chip: str) -> Compiled:
    """What the compiler makes of a kernel, read from disk if it did so before."""
    try:
        content = content_of(npu_ir(kernel), compiled_for(kernel, soc_named(chip)))
    except ToolchainError as error:
        return Compiled(_line(error))
    made = cache.fetch(("feasible", _VERSION, *content), lambda: _report(kernel, chip))
    buffered = {kind: tuple(numbers) for kind, numbers in made["buffered"].items()}
    return Compiled(made["reason"], made["ub_bytes"], buffered, tuple(made["switched_off"]))


def why_not(kernel: TritonKernel, default: TritonKernel, chip: str) -> str:
    """Why a candidate cannot be had; empty if it can.

    Where it asks for double buffers it must get them, or as large a share of them as the default does.

    Args:
        kernel: the candidate.
        default: the kernel with its own settings.
        chip: that it is compiled for.
    """
    made = compiled(kernel, chip)
    if made.reason:
        return made.reason
    if made.ub_bytes > UB_BYTES:
        return f"{made.ub_bytes} bytes of the unified buffer, which has {UB_BYTES}"
    if made.switched_off:
        return f"the compiler gave up {', '.join(made.switched_off)} to fit the unified buffer"
    usual = compiled(default, chip)
    for kind in KINDS if kernel.multibuffer else ():
        if made.share(kind) < min(usual.share(kind), 1.0):
            doubled, number = (made.buffered or {})[kind]
            return f"double buffers asked for, but only {doubled} of {number} {kind}s have them"
    return ""


def _report(kernel: TritonKernel, chip: str) -> dict[str, Any]:
    try:
        report = compile_for_npu(kernel, chip)
    except ToolchainError as error:
        return {"reason": _line(error), "ub_bytes": 0, "buffered": {}, "switched_off": []}
    buffered = {"load": report.double_buffered("load"), "store": report.double_buffered("store")}
    switched_off = list(report.switched_off)
    return {"reason": "", "ub_bytes": report.ub_bytes, "buffered": buffered, "switched_off": switched_off}


def _line(error: ToolchainError) -> str:
    return str(error).partition("\n")[0]
