"""What Triton kernels are compiled for: one description for each kind of processor."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from moe_triton.core.errors import ToolchainError

_FALLBACK = 'Choose the torch fallback by name: kernels="torch".'


@dataclass(frozen=True)
class Target:
    """A level of an architecture.

    Attributes:
        name: of the level, which goes into the keys of compiled kernels.
        machines: what `platform.machine` calls the architecture.
        triple: LLVM's.
        processor: LLVM's, which has the level's instructions and no others.
        features: LLVM's, besides those of the processor.
        needs: flags that a processor of this level has, as `cpu_flags` tells them.
        vector_bits: that loops are to have, where LLVM would take fewer; 0 for what it takes.
        fp16_lanes: of loops that convert fp16, where LLVM would take fewer; 0 for what it takes.
        tile_elements: 32-bit numbers that a loop over short rows works on at once, and has in registers.
        streams: whether there are stores that bypass the caches, and somebody has measured that they gain.
    """

    name: str
    machines: tuple[str, ...]
    triple: str
    processor: str
    features: str
    needs: frozenset[str]
    vector_bits: int
    fp16_lanes: int
    tile_elements: int
    streams: bool = False

    @property
    def architecture(self) -> str:
        """Its name."""
        return self.machines[0]


_X86 = {
    "machines": ("x86_64", "AMD64"),
    "triple": "x86_64-unknown-linux-gnu",
    # Asking for a line to write is no part of any level, and means nothing to a processor without it.
    "features": "+prfchw",
    # LLVM's default for x86-64-v4 is 256 bits, half the lanes of these loops.
    "vector_bits": 512,
    # LLVM's cost table charges a conversion of 16 lanes as if it were taken apart, and settles for 4 lanes,
    # although F16C and AVX-512 convert 8 and 16 in one instruction.
    "fp16_lanes": 16,
    "tile_elements": 64,  # four vectors of fp32 at 512 bits
    "streams": True,
}
_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
TARGETS = (
    Target("x86-64-v4", processor="x86-64-v4", needs=_V3 | _V4, **_X86),  # type: ignore[arg-type]
    Target("x86-64-v3", processor="x86-64-v3", needs=_V3, **_X86),  # type: ignore[arg-type]
    # Kunpeng 920, with which Ascend cards are sold, and every later server processor. What newer ones have
    # besides, SVE and bf16 instructions, nobody could measure here.
    Target(
        "armv8.2-a+fp16+dotprod",
        machines=("aarch64", "arm64"),
        triple="aarch64-unknown-linux-gnu",
        processor="tsv110",
        features="",
        needs=frozenset({"atomics", "asimd", "fphp", "asimdhp", "asimddp"}),
        vector_bits=0,
        fp16_lanes=0,
        tile_elements=32,  # eight of 32 vectors; 64 spill
    ),
)
_AT_HWCAP = 16
# Bits of AT_HWCAP, by Linux's names of them (arch/arm64/include/uapi/asm/hwcap.h).
_HWCAP = {"asimd": 1, "atomics": 8, "fphp": 9, "asimdhp": 10, "asimddp": 20}


@functools.cache
def cpu_flags() -> frozenset[str]:
    """What this processor has, by Linux's names.

    On Arm the kernel is asked: under an emulator /proc/cpuinfo is the host's.
    """
    if platform.machine() in TARGETS[-1].machines:
        getauxval = ctypes.CDLL(None).getauxval
        getauxval.argtypes, getauxval.restype = (ctypes.c_ulong,), ctypes.c_ulong
        bits = getauxval(_AT_HWCAP)
        return frozenset(name for name, bit in _HWCAP.items() if bits >> bit & 1)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def this_target() -> Target:
    """The highest level that this processor has.

    Raises:
        ToolchainError: it has none.
    """
    return choose_target(platform.machine(), cpu_flags())


def choose_target(machine: str, flags: Iterable[str]) -> Target:
    """The highest level of an architecture that a processor has.

    Args:
        machine: what `platform.machine` calls the architecture.
        flags: of the processor.

    Raises:
        ToolchainError: there is none.
    """
    levels = [target for target in TARGETS if machine in target.machines]
    if not levels:
        known = " and ".join(dict.fromkeys(target.architecture for target in TARGETS))
        raise ToolchainError(
            f"the Triton CPU runtime generates code for {known} and this CPU is {machine}. {_FALLBACK}"
        )
    has = frozenset(flags)
    for target in levels:
        if target.needs <= has:
            return target
    least = levels[-1]
    missing = ", ".join(sorted(least.needs - has))
    raise ToolchainError(
        f"the Triton CPU runtime needs {least.name} on {least.architecture}; this CPU lacks {missing}. "
        f"{_FALLBACK}"
    )


def target_named(name: str) -> Target:
    """A level by its name, of this machine's architecture: LLVM as Triton brings it knows no other.

    Raises:
        ToolchainError: there is none of that name; or it is another machine's, which would end the process.
    """
    found = {target.name: target for target in TARGETS}.get(name)
    if found is None:
        raise ToolchainError(f"there is no level {name!r}; there are {', '.join(t.name for t in TARGETS)}")
    if platform.machine() not in found.machines:
        raise ToolchainError(
            f"{name} is of {found.architecture} and this CPU is {platform.machine()}: Triton's LLVM has the "
            "code generator of its own machine only. Compile on such a machine."
        )
    return found
