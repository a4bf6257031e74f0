"""Memory between guards, and the regions that only these tests lay out."""

from __future__ import annotations

import numpy as np

from moe_triton.core.config import Config
from moe_triton.core.region import Dim, Region, packed, region_of
from moe_triton.layout import (
    BLOCK_BYTES,
    BLOCK_DATA_BYTES,
    NUM_ZONES,
    STATUS_ENTRY_BYTES,
)
from moe_triton.schemes.fullmesh.layout import STATE_BYTES, STATE_ZONE_STRIDE

from .case import Case, WrongResultError
from .library import address

GUARD_BYTES = 4096
GARBAGE = 0xA5
CACHE_LINE_BYTES = 64
PEER_STATUS_BASE = 400 * 1024


class Guarded:
    """An array that a kernel writes, between bytes that it must not touch, full of garbage at first."""

    def __init__(self, shape: tuple[int, ...], dtype: type = np.uint8, align: int = 1) -> None:
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = np.full(num_bytes + 2 * GUARD_BYTES + align, GARBAGE, dtype=np.uint8)
        start = -address(raw) % align
        self._all = raw[start : start + num_bytes + 2 * GUARD_BYTES]
        self.array = self._all[GUARD_BYTES : GUARD_BYTES + num_bytes].view(dtype).reshape(shape)

    def check_guards(self) -> None:
        guards = (self._all[:GUARD_BYTES], self._all[-GUARD_BYTES:])
        if any((guard != GARBAGE).any() for guard in guards):
            raise WrongResultError("bytes outside of an array were written")


def across_lines(values: list[int]) -> np.ndarray:
    """An int64 array whose first word is the last one of a cache line; zeros behind it (`changes_behind`)."""
    memory = np.zeros(len(values) + 16, dtype=np.int64)
    first = (56 - address(memory)) % CACHE_LINE_BYTES // 8
    memory[first : first + len(values)] = values
    return memory[first : first + len(values)]


def changes_behind(peers: np.ndarray) -> np.ndarray:
    """The word behind a table of peers that is `across_lines`, which says how its masks have changed."""
    return word_behind(peers, 0)


def word_behind(peers: np.ndarray, number: int) -> np.ndarray:
    """One of the words behind such a table (`moe_triton.core.reach`)."""
    memory = peers.base
    assert memory is not None
    at = (address(peers) - address(memory)) // peers.itemsize + len(peers) + number
    word: np.ndarray = memory[at : at + 1]
    return word


class Window:
    """One rank's memory: a layout's window, behind it slots with flags in band where there are any."""

    def __init__(self, num_bytes: int, inband_base: int) -> None:
        self._memory = Guarded((num_bytes,), align=512)
        self.bytes = self._memory.array
        self.check_guards = self._memory.check_guards
        self._inband = self.bytes[inband_base:].reshape(-1, BLOCK_BYTES)
        self.bytes[:STATE_BYTES] = 0
        self.inband_flags[:] = 0

    @property
    def inband_flags(self) -> np.ndarray:
        """(blocks, bytes of a flag)"""
        return self._inband[:, BLOCK_DATA_BYTES:]


def inband_blocks(case: Case) -> int:
    """Blocks of a slot."""
    return -(-case.slot.packed_bytes // BLOCK_DATA_BYTES)


def inband_slots(case: Case, base: int) -> Region:
    """Slots with flags in band, from a byte on."""
    c = case.config
    stride = inband_blocks(case) * BLOCK_BYTES
    extents = NUM_ZONES, c.num_local_experts, c.num_ranks, c.num_max_tokens_per_rank
    zone, expert, source, index = packed(stride, *extents)
    return region_of("dispatch_slots", base, stride, zone, source, expert, index, rotation=1)


def peer_status(config: Config) -> Region:
    """One entry per rank."""
    ranks, entry = config.num_ranks, STATUS_ENTRY_BYTES
    return Region(
        "peer_status",
        PEER_STATUS_BASE,
        entry,
        (
            Dim("zone", NUM_ZONES, STATE_ZONE_STRIDE),
            Dim("expert", 1, ranks * entry),
            Dim("source", ranks, entry),
        ),
    )


def without_extents(region: Region) -> Region:
    """The same region with room for nothing."""
    return Region(
        region.name, region.base, region.item_bytes, tuple(Dim(d.name, 0, d.stride) for d in region.dims)
    )
