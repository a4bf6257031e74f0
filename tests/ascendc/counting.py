"""A build of the kernels that counts what each block of a launch does."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .library import Library, Patch, address, build

NAMES = (
    "loads",
    "load_bytes",
    "stores",
    "store_bytes",
    "sent_bytes",
    "scalar_local",
    "scalar_global",
    "lines",
    "dropped",
    "vector",
    "barriers",
)
MOST_BLOCKS = 48
MOST_WINDOWS = 64

TYPES, CORE, CACHE = "emulation/types.h", "emulation/strict_core.h", "emulation/scalar_cache.h"
OPERATIONS, TENSORS, LAUNCHERS = "emulation/operations.h", "emulation/tensors.h", "launch/moe_kernels.asc"

EXPORTED = """
extern "C" void moe_counting_begin(const uint64_t* others, uint64_t number) {
    auto& counting = moe::emulation::TheCounting();
    counting = {};
    counting.num_others = number;
    for (uint64_t i = 0; i < number; ++i) counting.others[i] = {others[2 * i], others[2 * i + 1]};
}

extern "C" uint32_t moe_counting_end(uint64_t* numbers) {
    for (const auto& block : moe::emulation::TheCounting().blocks) {
        for (const uint64_t number : block) *numbers++ = number;
    }
    return moe::emulation::NUM_COUNTERS;
}
"""


# Parts are made at the first look that counts.
AWAIT_PART = """
    __aicore__ inline bool IsMade(int64_t part) {
        emulation::IsCounting() = false;
        for (uint32_t attempt = 0; !IsMadeNow(part); ++attempt) PollPause(attempt, 0, 1);
        emulation::IsCounting() = true;
        return IsMadeNow(part);
    }

    __aicore__ inline bool IsMadeNow(int64_t part) {"""


def before(file: str, place: str, statement: str) -> Patch:
    """Puts something before a piece of a source."""
    return Patch(file, place, f"{statement} {place}")


def after(file: str, place: str, statement: str) -> Patch:
    """Puts something after a piece of a source."""
    return Patch(file, place, f"{place} {statement}")


def patches() -> tuple[Patch, ...]:
    """Of the strict emulation: every place where a pipe is given something to do."""
    header = Path(__file__).with_name("counting.h").read_text(encoding="utf-8")
    return (
        before(TYPES, "namespace moe::emulation {\n\n// An address inside UB", f"\n{header}\n"),
        Patch("include/block_posts.h", "    __aicore__ inline bool IsMade(int64_t part) {", AWAIT_PART),
        *_copies(),
        *_scalar_accesses(),
        after(
            CORE,
            "void Issue(pipe_t pipe, Effect effect) {",
            "Count(block, VECTOR, pipe == PIPE_V ? 1 : 0);",
        ),
        after(CORE, "void Barrier(pipe_t pipe) {", "Count(block, BARRIERS);"),
        after(LAUNCHERS, "    moe::emulation::Seed() = seed;\n}\n", EXPORTED),
    )


def _copies() -> tuple[Patch, ...]:
    """Instructions where kernels call them, bytes where a core moves them."""
    load, store = (_count(name) for name in ("LOADS", "STORES"))
    copy_in = "void CopyIn(UbAddress to, const uint8_t* from, uint64_t bytes) {"
    copy_out = "void CopyOut(uint8_t* to, UbAddress from, uint64_t bytes) {"
    blocks_out = "const uint8_t* source = ub_ + from.offset;\n        std::vector<Piece> pieces;"
    return (
        after(CORE, copy_in, "Count(block, LOAD_BYTES, bytes);"),
        after(CORE, copy_out, "CountStored(block, to, bytes);"),
        before(CORE, blocks_out, "CountStored(this->block, to, uint64_t{blocks} * block.bytes);"),
        before(OPERATIONS, "detail::Core().CopyIn(dst.GetPhyAddr(), detail::Bytes(src), bytes);", load),
        before(OPERATIONS, "detail::CheckPad(dst, src, p,", load),
        before(OPERATIONS, "detail::Core().CopyOut(detail::Bytes(dst), src.GetPhyAddr(), bytes);", store),
        before(OPERATIONS, "detail::CheckPad(src, dst, p,", store),
        before(OPERATIONS, "ThisCore().CopyBlocksOut(", store),
    )


def _scalar_accesses() -> tuple[Patch, ...]:
    is_full = "bool IsFull(const void* address) { return LineOf(address).held == ALL; }\n    "
    load = "Count(block, SCALAR_GLOBAL); Count(block, LINES, cache_.IsFull(from) ? 0 : 1);"
    store = "Count(block, SCALAR_GLOBAL); Count(block, LINES, cache_.IsFull(to) ? 0 : 1);"
    return (
        before(CACHE, "template <typename T>\n    T Load(", is_full),
        before(CORE, "return cache_.Load(from);", load),
        before(CORE, "cache_.Store(to, value);", store),
        before(CORE, "cache_.CleanAndInvalidate(address);", "Count(block, DROPPED);"),
        before(TENSORS, "core.DrainScalar();", _count("SCALAR_LOCAL")),
        before(
            TENSORS, "uint8_t* at = Host() + index * sizeof(T);\n        core.Issue(", _count("SCALAR_LOCAL")
        ),
    )


def _count(counter: str) -> str:
    return f"moe::emulation::Count(moe::emulation::ThisCore().block, moe::emulation::{counter});"


@dataclass(frozen=True)
class Launched:
    """One launch that was counted.

    Attributes:
        kernel: its name.
        blocks: on how many cores.
        arguments: as they were passed.
        numbers: (blocks,) by name, as `autotune.model.bodies.counts.Counts` has them.
    """

    kernel: str
    blocks: int
    arguments: Mapping[str, object]
    numbers: Mapping[str, np.ndarray]


class CountingLibrary(Library):
    """Launches one at a time, each counted.

    Attributes:
        launched: all launches so far.
    """

    def __init__(self) -> None:
        super().__init__(build(strict=True, patches=patches()))
        self._library.moe_counting_begin.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
        self._library.moe_counting_begin.restype = None
        self._library.moe_counting_end.argtypes = (ctypes.c_void_p,)
        self._others = np.zeros((0, 2), np.uint64)
        self.launched: list[Launched] = []

    def run_on(self, rank: int, windows: Sequence[np.ndarray]) -> None:
        """Says on which rank the launches from now on run, and where all windows are."""
        others = [w for other, w in enumerate(windows) if other != rank]
        assert len(others) <= MOST_WINDOWS
        bounds = [(address(w), address(w) + w.nbytes) for w in others]
        self._others = np.array(bounds, np.uint64).reshape(-1, 2)

    def _run(self, name: str, blocks: int, arguments: dict[str, object]) -> None:
        self._library.moe_counting_begin(address(self._others), len(self._others))
        super()._run(name, blocks, arguments)
        numbers = np.zeros((MOST_BLOCKS, len(NAMES)), np.uint64)
        assert self._library.moe_counting_end(address(numbers)) == len(NAMES)
        by_name = dict(zip(NAMES, numbers[:blocks].astype(np.int64).T, strict=True))
        self.launched.append(Launched(name, blocks, arguments, by_name))
