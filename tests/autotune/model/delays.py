"""Delays put into launches of the CPU back end: C code between a plan and its Triton kernels."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from moe_triton.backends.cpu.executable import NativeExecutable
from moe_triton.core.plan import device_launches
from tests.patience import seconds
from tests.surroundings import cxx

Delays = Mapping[tuple[str, str, int], float]
"""Seconds by operator, step, and how many launches of this step come before it."""

MOST = 16
SOURCE = """
#include <stdint.h>
#include <time.h>
typedef void (*Entry)(const uint64_t*, int32_t, int32_t);
static Entry entries[MOST];
static struct timespec delays[MOST];
static int used = 0;
#define LATE(n) static void late##n(const uint64_t* words, int32_t programs, int32_t program) { \\
    entries[n](words, programs, program); nanosleep(&delays[n], 0); }
LATE(0) LATE(1) LATE(2) LATE(3) LATE(4) LATE(5) LATE(6) LATE(7)
LATE(8) LATE(9) LATE(10) LATE(11) LATE(12) LATE(13) LATE(14) LATE(15)
static const Entry lates[MOST] = {late0, late1, late2, late3, late4, late5, late6, late7,
                                  late8, late9, late10, late11, late12, late13, late14, late15};
uint64_t delayed(uint64_t entry, int64_t nanoseconds) {
    if (used == MOST) return 0;
    entries[used] = (Entry)entry;
    delays[used].tv_sec = nanoseconds / 1000000000;
    delays[used].tv_nsec = nanoseconds % 1000000000;
    return (uint64_t)lates[used++];
}
"""


def build(folder: Path) -> Path:
    """The library that delays entries."""
    source, library = folder / "delays.c", folder / "delays.so"
    source.write_text(SOURCE)
    command = [*cxx(), "-xc", "-shared", "-fPIC", f"-DMOST={MOST}", str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=seconds(60))
    return library


@contextmanager
def delayed(library: Path, delays: Delays) -> Iterator[None]:
    """Every plan that is compiled in here has Triton launches that take longer."""
    lengthen = ctypes.CDLL(str(library)).delayed
    lengthen.restype, lengthen.argtypes = ctypes.c_uint64, (ctypes.c_uint64, ctypes.c_int64)
    make = NativeExecutable.__init__

    def make_late(self: NativeExecutable, *args: object, **kwargs: object) -> None:
        make(self, *args, **kwargs)  # type: ignore[arg-type]
        before: dict[str, int] = {}
        for struct, (launch, *others) in zip(
            self._launches, device_launches(self.plan.launches), strict=True
        ):
            number = before.get(launch.step, 0)
            before[launch.step] = number + 1
            seconds = delays.get((self.plan.operator, launch.step, number), 0)
            assert not (seconds and others), "only launches of Triton kernels can be delayed"
            if seconds:
                struct.entry = lengthen(struct.entry, int(seconds * 1e9))
                assert struct.entry, "more delays than there is room for"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeExecutable, "__init__", make_late)
        yield
