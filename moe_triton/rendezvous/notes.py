"""Notes that ranks leave while they wait, so that others see that a missing rank is stuck itself.

They are kept in the group's store and no protocol depends on them: without a note an error only says less.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from moe_triton.core.threads import in_thread
from moe_triton.rendezvous.attempts import Store

REPEAT_S = 1.0
# The last note of a rank that has raised stays. Ranks that wait for each other raise within about this time.
FRESH_S = 5.0
# How long an error may be delayed to read notes.
LOOK_UP_S = 1.0


class Note(NamedTuple):
    """The wait of a rank.

    Attributes:
        call: operator and number.
        ranks: that it waits for.
        at: time of the note, by `time.monotonic`, which all ranks of a machine share.
    """

    call: str
    ranks: tuple[int, ...]
    at: float


class Notes:
    """One rank's notes, and its access to those of its peers.

    Args:
        open_store: returns the store of these ranks and this buffer.
        rank: this one's number.
        num_ranks: of the group.
    """

    def __init__(self, open_store: Callable[[], Store], rank: int, num_ranks: int) -> None:
        self._open_store, self._rank, self._num_ranks = open_store, rank, num_ranks
        self._latest: object = None

    def leave(self, call: str, ranks: Sequence[int], goes_on: Callable[[], bool]) -> None:
        """Leaves a note, and renews it until the wait has ended. Returns at once.

        Args:
            call: operator and number.
            ranks: that this rank waits for.
            goes_on: whether it still waits.
        """

        self._latest = mine = object()

        def run() -> None:
            store = self._open_store()
            while self._latest is mine and goes_on():
                store.set(str(self._rank), json.dumps([call, list(ranks), time.monotonic()]))
                time.sleep(REPEAT_S)

        in_thread(run, "note")  # its error is dropped: a store that is gone has no readers

    def gone(self, missing: Sequence[int]) -> tuple[list[int], str]:
        """The ranks that hold up the missing ones: missing ranks without a note, and those that the others
        wait for.

        Args:
            missing: ranks that this rank has timed out waiting for.

        Returns:
            The ranks, and a sentence about the ranks that are stuck themselves, or "".
        """
        # In a thread, since requests to a store whose host has stopped never return.
        try:
            return in_thread(lambda: self._follow(missing), "notes").result(LOOK_UP_S)
        except Exception:
            return list(missing), ""

    def _follow(self, missing: Sequence[int]) -> tuple[list[int], str]:
        store = self._open_store()
        gone: set[int] = set()
        stuck: dict[int, Note] = {}
        left = list(missing)
        while left:
            rank = left.pop()
            if rank in gone or rank in stuck or rank == self._rank:
                continue
            note = self._read(store, rank)
            if note is None:
                gone.add(rank)
            else:
                stuck[rank] = note
                left += note.ranks
        if not gone:  # they wait for each other
            return list(missing), _sentence(stuck)
        return sorted(gone), _sentence(stuck)

    def _read(self, store: Store, rank: int) -> Note | None:
        if not store.check([str(rank)]):
            return None
        try:
            call, ranks, at = json.loads(store.get(str(rank)))
            note = Note(str(call), tuple(int(each) for each in ranks), float(at))
        except (ValueError, TypeError, RecursionError):
            return None
        is_fresh = 0 <= time.monotonic() - note.at <= FRESH_S
        return note if is_fresh and all(0 <= each < self._num_ranks for each in note.ranks) else None


def _sentence(stuck: dict[int, Note]) -> str:
    said = [
        f"rank {rank} waited itself for rank(s) {list(note.ranks)} in {note.call}"
        for rank, note in sorted(stuck.items())
    ]
    return f"{'; '.join(said)}. " if said else ""
