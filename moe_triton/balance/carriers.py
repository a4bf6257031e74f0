"""What carries a stage's bytes between two ranks: memory of both, queues, or memory and texts (`Carrier`).

In a rank's memory there are lines, each for one number of one other rank, and a ring for each other rank.
Between ranks that read each other's memory a rank writes to its own alone: the ring has what it has put in,
and the lines what it says. Where a queue leads to a rank, it posts to that one's ring and lines here.
"""

from __future__ import annotations

import copy
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from moe_triton.balance.stage import LINE, Carrier, Memory, Stage
from moe_triton.core.side_copies import View
from moe_triton.core.threads import Deadline

PUT, TAKEN, STATE = range(3)
"""What a line says: bytes that were put in, bytes that were taken out, how a rank is."""
KINDS = 3
WORDS_PER_LINE = LINE // 8
SAY_S, PAUSE_S = 5.0, 1e-3  # as long as a NIC has at its end
SLOTS = 16
"""Numbers on their way to a rank by its queue: what is posted is read until it has come."""


class Texts(Protocol):
    """Where ranks leave texts for each other: `moe_triton.EPBuffer`."""

    def leave(self, name: str, text: str) -> None:
        """Leaves one in place of this rank's last one."""

    def left(self, name: str) -> list[str]:
        """All ranks' last ones; "" of a rank that has left none."""


class Region(NamedTuple):
    """Where a stage lies in each rank's memory.

    Attributes:
        memory: of all ranks, zeros where the stage is.
        offset: a multiple of 64.
        rank: this one.
        num_ranks: W.
        ring_bytes: of each pair, a multiple of 64.
    """

    memory: Memory
    offset: int
    rank: int
    num_ranks: int
    ring_bytes: int

    @staticmethod
    def num_bytes(num_ranks: int, ring_bytes: int) -> int:
        """Of a rank's memory that it takes."""
        return num_ranks * (KINDS * LINE + ring_bytes)

    @staticmethod
    def out_bytes(num_ranks: int, ring_bytes: int) -> int:
        """Of the memory behind, from which a rank posts."""
        return num_ranks * (SLOTS * LINE + ring_bytes)

    def line_at(self, kind: int, other: int) -> int:
        """Where a line begins."""
        return self.offset + (kind * self.num_ranks + other) * LINE

    def ring_at(self, other: int) -> int:
        """Where a ring begins."""
        return self.offset + KINDS * LINE * self.num_ranks + other * self.ring_bytes

    def words(self, holder: int, kind: int) -> npt.NDArray[np.int64]:
        """One kind's words in a rank's memory, by rank."""
        start = self.line_at(kind, 0)
        lines = self.memory.of(holder)[start : start + LINE * self.num_ranks]
        words: npt.NDArray[np.int64] = lines.view(torch.int64).numpy()[::WORDS_PER_LINE]
        return words

    def ring(self, holder: int, other: int) -> View:
        """One in a rank's memory."""
        start = self.ring_at(other)
        return self.memory.copies.view(self.memory.of(holder)[start : start + self.ring_bytes])


class ByWords:
    """See `Carrier`: between ranks that read each other's memory, and whose copies are made at once.

    Args:
        region: of the stage.
    """

    def __init__(self, region: Region) -> None:
        memory, own = region.memory, region.rank
        reached = [rank for rank in range(region.num_ranks) if rank not in memory.queued]
        self._memory, self._rank, self._fence = memory, own, memory.copies.fence
        # All of these are looked at in each step, from cold caches.
        self._words = {rank: [region.words(rank, kind) for kind in range(KINDS)] for rank in reached}
        self._into = {rank: region.ring(own, rank) for rank in reached}
        self._out_of = {rank: region.ring(rank, own) for rank in reached}

    def refresh(self) -> None:
        """See `Carrier`. All is told at once."""
        self._memory.of(self._rank)

    def ring(self, rank: int, *, into: bool) -> View:
        """See `Carrier`."""
        return (self._into if into else self._out_of)[rank]

    def put_by(self, rank: int) -> int:
        """See `Carrier`. It is read before the bytes."""
        count = int(self._words[rank][PUT][self._rank])
        if self._fence is not None:
            self._fence()
        return count

    def taken_by(self, rank: int) -> int:
        """See `Carrier`. It is read before other bytes are put there."""
        count = int(self._words[rank][TAKEN][self._rank])
        if self._fence is not None:
            self._fence()
        return count

    def _write(self, rank: int, kind: int, count: int) -> None:
        """A number, behind the bytes that it is about."""
        if self._fence is not None:
            self._fence()
        self._words[self._rank][kind][rank] = count

    def has_put(self, rank: int, pieces: Sequence[tuple[int, int]], count: int) -> None:
        """See `Carrier`. It is behind the bytes: who receives looks at this first."""
        self._write(rank, PUT, count)

    def has_taken(self, rank: int, count: int) -> None:
        """See `Carrier`."""
        self._write(rank, TAKEN, count)

    def say(self, state: int) -> None:
        """See `Carrier`."""
        self._words[self._rank][STATE][self._rank] = state

    def state(self, rank: int) -> int:
        """See `Carrier`."""
        return int(self._words[rank][STATE][rank])

    def is_told(self) -> bool:
        """See `Carrier`."""
        return True


class ByPosts:
    """See `Carrier`: to ranks that only queues reach.

    Args:
        region: of the stage, and behind the memory what is posted from.
        peers: ranks that the queues lead to.
    """

    def __init__(self, region: Region, peers: Sequence[int]) -> None:
        self._region, self._memory, self._rank = region, region.memory, region.rank
        self._to = {rank: _Queue(region, rank) for rank in peers}

    def refresh(self) -> None:
        """See `Carrier`."""
        for queue in self._to.values():
            queue.post()

    def ring(self, rank: int, *, into: bool) -> View:
        """See `Carrier`. What goes is posted from behind the memory, what came is in this rank's own."""
        if not into:
            return self._region.ring(self._rank, rank)
        start = self._to[rank].ring_at
        memory = self._memory.of(self._rank)
        return self._memory.copies.view(memory[start : start + self._region.ring_bytes])

    def put_by(self, rank: int) -> int:
        """See `Carrier`. The word is a message behind those of the bytes, so they are there."""
        return self._read(rank, PUT)

    def taken_by(self, rank: int) -> int:
        """See `Carrier`."""
        return self._read(rank, TAKEN)

    def _read(self, rank: int, kind: int) -> int:
        """A number, before any of the bytes that it is about."""
        count = int(self._region.words(self._rank, kind)[rank])
        if self._memory.copies.fence is not None:
            self._memory.copies.fence()
        return count

    def has_put(self, rank: int, pieces: Sequence[tuple[int, int]], count: int) -> None:
        """See `Carrier`."""
        queue = self._to[rank]
        for start, size in pieces:
            queue.items.append((queue.ring_at + start, self._region.ring_at(self._rank) + start, size))
        queue.told[PUT] = count
        queue.post()

    def has_taken(self, rank: int, count: int) -> None:
        """See `Carrier`."""
        self._to[rank].told[TAKEN] = count
        self._to[rank].post()

    def say(self, state: int) -> None:
        """See `Carrier`. It goes before anything else, and waits a while for queues that are full."""
        deadline = Deadline(SAY_S)
        for queue in self._to.values():
            queue.drop()
            queue.told[STATE] = state
            queue.post()
            while not queue.is_told() and deadline.left() > 0:
                time.sleep(PAUSE_S)
                queue.post()

    def state(self, rank: int) -> int:
        """See `Carrier`."""
        return int(self._region.words(self._rank, STATE)[rank])

    def is_told(self) -> bool:
        """See `Carrier`."""
        return all(queue.is_told() for queue in self._to.values())


class _Queue:
    """What goes to a rank: bytes of the ring, and behind them numbers.

    Args:
        region: of the stage.
        rank: whom to.

    Attributes:
        ring_at: where the ring begins that is posted from.
        items: of it what is still to be posted: where it lies here and there, and its bytes.
        told: the numbers as they are now, by kind.
    """

    def __init__(self, region: Region, rank: int) -> None:
        self._region, self._memory, self._rank = region, region.memory, rank
        first = region.memory.num_bytes
        self._slots_at = first + rank * SLOTS * LINE
        self.ring_at = first + region.num_ranks * SLOTS * LINE + rank * region.ring_bytes
        self.items: deque[tuple[int, int, int]] = deque()
        self.told = [0] * KINDS
        self._posted_words = [0] * KINDS
        self._posted = 0
        self._free_from = deque(
            [0] * SLOTS
        )  # posts that are delivered once a slot is free, oldest slot first
        self._slot = 0

    def is_told(self) -> bool:
        """Whether all is posted."""
        return not self.items and self.told == self._posted_words

    def drop(self) -> None:
        """Forgets what is not posted yet: nobody will want it."""
        self.items.clear()
        self.told[PUT] = self._posted_words[PUT]

    def post(self) -> None:
        """Posts as much as the queue takes."""
        while self.items:
            if not self._memory.post(self._rank, *self.items[0]):
                return
            self.items.popleft()
            self._posted += 1
        for kind in range(KINDS):
            if self.told[kind] != self._posted_words[kind] and not self._post_word(kind):
                return

    def _post_word(self, kind: int) -> bool:
        if self._memory.delivered(self._rank) < self._free_from[0]:
            return False
        at = self._slots_at + self._slot * LINE
        slot = self._memory.of(self._region.rank)[at : at + 8]
        slot.view(torch.int64)[0] = self.told[kind]
        if not self._memory.post(self._rank, at, self._region.line_at(kind, self._region.rank), 8):
            return False
        self._posted += 1
        self._posted_words[kind] = self.told[kind]
        self._free_from.popleft()
        self._free_from.append(self._posted)
        self._slot = (self._slot + 1) % SLOTS
        return True


class ByTexts:
    """See `Carrier`: by memory that all ranks read, and texts: where devices are behind their hosts.

    Args:
        region: of the stage.
        texts: of the ranks.
        name: under which they are left.
        every: as many calls of `refresh` as there are to one look at the other ranks' texts.
    """

    def __init__(self, region: Region, texts: Texts, name: str, every: int = 1) -> None:
        self._region, self._rank, self._texts, self._name = region, region.rank, texts, name
        self._every, self._calls = every, 0
        nothing = [[0] * region.num_ranks, [0] * region.num_ranks, [0]]
        self._mine, self._told = copy.deepcopy(nothing), nothing
        self._heard = [nothing for _ in range(region.num_ranks)]
        # What may be said once the device has done what it is about.
        self._due: deque[tuple[Callable[[], bool], list[list[int]]]] = deque()

    def refresh(self) -> None:
        """See `Carrier`."""
        self._region.memory.of(self._rank)  # an error once it was given back
        before = self._told
        while self._due and self._due[0][0]():
            self._told = self._due.popleft()[1]
        if self._told is not before:
            self._leave()
        if self._calls % self._every == 0:
            for rank, text in enumerate(self._texts.left(self._name)):
                self._heard[rank] = _numbers(text, self._region.num_ranks) or self._heard[rank]
        self._calls += 1

    def ring(self, rank: int, *, into: bool) -> View:
        """See `Carrier`."""
        return self._region.ring(*((self._rank, rank) if into else (rank, self._rank)))

    def put_by(self, rank: int) -> int:
        """See `Carrier`."""
        return self._heard[rank][PUT][self._rank]

    def taken_by(self, rank: int) -> int:
        """See `Carrier`."""
        return self._heard[rank][TAKEN][self._rank]

    def has_put(self, rank: int, pieces: Sequence[tuple[int, int]], count: int) -> None:
        """See `Carrier`."""
        self._mine[PUT][rank] = count
        self._tell()

    def has_taken(self, rank: int, count: int) -> None:
        """See `Carrier`."""
        self._mine[TAKEN][rank] = count
        self._tell()

    def say(self, state: int) -> None:
        """See `Carrier`. It does not wait for the device."""
        self._mine[STATE][0] = state
        self._leave()

    def state(self, rank: int) -> int:
        """See `Carrier`."""
        return self._heard[rank][STATE][0]

    def is_told(self) -> bool:
        """See `Carrier`."""
        return not self._due

    def _tell(self) -> None:
        self._due.append((self._region.memory.copies.mark(), copy.deepcopy(self._mine)))

    def _leave(self) -> None:
        self._texts.leave(self._name, json.dumps([*self._told[:STATE], self._mine[STATE]]))


def _numbers(text: str, num_ranks: int) -> list[list[int]] | None:
    """What a text says: nothing from a peer is trusted."""
    try:
        said: Any = json.loads(text) if text else None
        lists = [[int(number) for number in each] for each in said]
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    return lists if [len(each) for each in lists] == [num_ranks, num_ranks, 1] else None


def make_stage(region: Region, texts: Texts, name: str, every: int = 1) -> Stage:
    """The stage of some memory, by what reaches each rank there.

    Args:
        region: where it lies.
        texts: of the ranks.
        name: under which they are left, where they are needed.
        every: see `ByTexts`.
    """
    memory = region.memory
    mapped: Carrier = (
        ByTexts(region, texts, name, every) if memory.copies.is_asynchronous else ByWords(region)
    )
    posted = ByPosts(region, sorted(memory.queued)) if memory.queued else mapped
    carriers = [posted if rank in memory.queued else mapped for rank in range(region.num_ranks)]
    return Stage(carriers, region.ring_bytes, memory.copies)
