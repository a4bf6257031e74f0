"""`Steps`: what the blocks of a launch did, and what follows from it on every machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autotune.model.kernel_costs.counted.library import LOOKS, ROWS, Did
from moe_triton.core import ascendc
from moe_triton.core.reach import TOKEN_SHIFT
from moe_triton.layout import STAMP_BYTES

ENTRY_BYTES = 512
"""A store of fewer bytes, in the step that posts flags, is of entries and no row."""


@dataclass(frozen=True, eq=False)
class Steps:
    """A launch.

    Attributes:
        records: (N,) what its blocks did, block after block
            (`autotune.model.kernel_costs.counted.library.RECORD`).
        ends: (blocks,) where each block's records end.
        rank: on which it ran.
        num_ranks: EP.
    """

    records: np.ndarray
    ends: np.ndarray
    rank: int
    num_ranks: int

    @property
    def blocks(self) -> int:
        """How many."""
        return len(self.ends)

    @cached_property
    def begins(self) -> np.ndarray:
        """(blocks,) where each block's records begin."""
        return np.asarray(np.r_[0, self.ends[:-1]])

    @cached_property
    def block(self) -> np.ndarray:
        """(N,) the block of each record."""
        return np.repeat(np.arange(self.blocks), self.ends - self.begins)

    @cached_property
    def takes_what_comes(self) -> bool:
        """Whether it takes rows as they come, between looks for what is still missing."""
        flags = self.records["flags"]
        return bool(((flags & LOOKS != 0) & (flags & ROWS != 0) & (self.records["did"] == Did.LOAD)).any())

    @cached_property
    def marks(self) -> np.ndarray:
        """(N + 1,) the kind of step that begins before each record; -1 where none does.

        Where a kernel marks none, its first copy to another device begins one that its last one ends; and
        what takes rows as they come does so from its first look on.
        """
        did = self.records["did"]
        kinds = np.full(len(did) + 1, -1)
        is_mark = did == Did.MARK
        kinds[1:][is_mark] = self.records["amount"][is_mark]
        marked = np.r_[0, np.cumsum(is_mark)]
        first, last = _firsts_and_lasts(np.flatnonzero(self.peer >= 0), self.block)
        is_bare = marked[last] == marked[self.begins[self.block[last]]]
        kinds[first[is_bare]] = ascendc.TRACE_WRITE
        kinds[last[is_bare] + 1] = ascendc.TRACE_BLOCK
        if self.takes_what_comes:
            looks, _ = _firsts_and_lasts(np.flatnonzero(self.records["flags"] & LOOKS), self.block)
            kinds[looks] = ascendc.TRACE_POLL
        kinds[self.begins] = np.where(kinds[self.begins] < 0, ascendc.TRACE_BLOCK, kinds[self.begins])
        return kinds

    @cached_property
    def step(self) -> np.ndarray:
        """(N,) the kind of step that each record is in."""
        marks = self.marks[:-1]
        last = np.maximum.accumulate(np.where(marks >= 0, np.arange(len(marks)), 0))
        return np.asarray(marks[last])

    @cached_property
    def owner(self) -> np.ndarray:
        """(N,) whose window a copy goes to, or comes from; -1 for other memory, and for all else."""
        owner = (self.records["address"] >> TOKEN_SHIFT).astype(np.int64) - 1
        return np.where(self.is_copy & (owner < self.num_ranks), owner, -1)

    @cached_property
    def peer(self) -> np.ndarray:
        """(N,) the same of other ranks' windows: -1 for this device's memory."""
        return np.where(self.owner != self.rank, self.owner, -1)

    @cached_property
    def is_copy(self) -> np.ndarray:
        """(N,) whether each is a copy."""
        did = self.records["did"]
        return np.asarray((did == Did.LOAD) | (did == Did.STORE))

    @cached_property
    def is_short(self) -> np.ndarray:
        """(N,) whether each is a stamp, a flag or entries, and no row."""
        amount = self.records["amount"]
        return np.asarray(
            (amount <= STAMP_BYTES) | ((amount < ENTRY_BYTES) & (self.step == ascendc.TRACE_FLAG))
        )

    @cached_property
    def is_trip(self) -> np.ndarray:
        """(N,) whether each is a copy to or from another device that is on its way by itself.

        What continues a longer store of the same core is on its way with that; and so is a stamp or a flag
        with a row before it, to the same rank, that has none yet.
        """
        remote = np.flatnonzero(self.peer >= 0)
        records, block = self.records[remote], self.block[remote]
        amount, first = records["amount"].astype(np.int64), records["address"].astype(np.int64)
        pair = block * self.num_ranks + self.peer[remote]
        is_trip = np.zeros(len(self.records), bool)
        is_trip[remote] = ~(_continues(block, first, amount) | _belongs(pair, self.is_short[remote]))
        return is_trip

    @cached_property
    def share(self) -> np.ndarray:
        """(N,) the part of its block's trips that is done with each record; 1 where there are none."""
        done = np.cumsum(self.is_trip)
        before = np.r_[0, done][self.begins]
        each = np.r_[0, done][self.ends] - before
        return np.where(
            each[self.block] > 0, (done - before[self.block]) / np.maximum(each[self.block], 1), 1.0
        )

    def share_of_step(self, kind: int) -> float:
        """The largest of them in a kind of step; 1 where there is none."""
        return self._share_of_steps.get(kind, 1.0)

    @cached_property
    def _share_of_steps(self) -> dict[int, float]:
        return {kind: float(self.share[self.step == kind].max()) for kind in np.unique(self.step).tolist()}

    def num_bytes(self, did: Did) -> int:
        """Bytes of all copies of a kind."""
        return int(self.records["amount"][self.records["did"] == did].sum(dtype=np.int64))

    @cached_property
    def num_bytes_sent(self) -> int:
        """Bytes of all copies to other devices, or from them."""
        return int(self.records["amount"][self.peer >= 0].sum(dtype=np.int64))

    @property
    def meetings(self) -> int:
        """How often its blocks meet (SyncAll)."""
        return int((self.records["did"] == Did.SYNC).sum()) // self.blocks

    @cached_property
    def posting(self) -> tuple[int, ...]:
        """Blocks that post."""
        return tuple(np.unique(self.block[self.records["did"] == Did.POST]).tolist())

    def posts_of(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Ranks and bytes of what a block posts, in its order."""
        records = self.records[self.begins[block] : self.ends[block]]
        posts = records[records["did"] == Did.POST]
        return (posts["address"] >> TOKEN_SHIFT).astype(np.int64) - 1, posts["amount"].astype(np.int64)

    def from_looks_on(self) -> Steps:
        """The same without what is before the first look of each block."""
        looks = self.records["flags"] & LOOKS != 0
        numbers = np.bincount(self.block[looks], minlength=self.blocks)
        return Steps(self.records[looks], np.cumsum(numbers), self.rank, self.num_ranks)


def _firsts_and_lasts(places: np.ndarray, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places of the first and of the last record of each block, among some records in order."""
    of = block[places]
    return places[np.diff(of, prepend=-1) != 0], places[np.diff(of, append=-1) != 0]


def _continues(block: np.ndarray, first: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """(N,) whether each store begins where a longer one of the same block ends that came before it."""
    if not len(block):
        return np.zeros(0, bool)
    pairs = [("block", np.int64), ("address", np.int64)]
    begins, ends = np.empty(len(block), pairs), np.empty(len(block), pairs)
    begins["block"] = ends["block"] = block
    begins["address"], ends["address"] = first, first + amount
    order = np.argsort(ends, kind="stable", order=("block", "address"))
    place = np.minimum(np.searchsorted(ends[order], begins), len(order) - 1)
    before = order[place]
    return np.asarray((ends[before] == begins) & (before < np.arange(len(block))) & (amount < amount[before]))


def _belongs(pair: np.ndarray, is_short: np.ndarray) -> np.ndarray:
    """(N,) whether each short store has a long one of the same pair before it that no other has."""
    order = np.argsort(pair, kind="stable")
    is_first = np.diff(pair[order], prepend=-1) != 0
    step = np.where(is_short[order], -1, 1)
    after = np.cumsum(step)
    before = after - step
    # Long ones that wait for a short one: a walk of each pair that does not go below nothing.
    group = np.cumsum(is_first) - 1
    base = before[is_first][group]
    apart = group * (len(pair) + 1)  # what came before in other pairs is above all of this one
    lowest = np.minimum.accumulate(np.minimum(before - base, 0) - apart) + apart
    follows = np.zeros(len(pair), bool)
    follows[order] = is_short[order] & (after - base >= lowest)
    return follows
