"""Ranks of one group that meet as other members of it than their peers find out about each other.

The keys of a meeting are those of its members, so that ranks which disagree on who takes part never see each
other's messages. Each rank therefore says, under keys that all ranks of the group share, with whom it meets:

    members/<rank>    `Said` as JSON

A rank that waits reads what the missing ones say. Other members than its own are a disagreement if each of
the two waits for the other, both come from the same meeting, and neither has left one since: this is the same
construction for both. A rank that meets others without this one may come to this meeting next; and after a
failure one of them may still be in a construction that the other has given up already, and will follow it. So
both are waited for, and only said once the time is over.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from moe_triton.rendezvous.stores import Store, read_key

# A rank that waits looks at what others say, and says that it is still there.
FIRST_LOOK_S, LOOK_S = 0.25, 0.5
FRESH_S = 3.0  # how long a rank counts as there that was seen to say something
MOST_READ = 64  # missing ranks that one look reads
WAITS, LEFT, DONE = "waits", "left", "done"


SAME_SETTINGS = "ranks of one group must be constructed with the same settings, but these differ"


class Past:
    """What this process has met of a group.

    Attributes:
        last: which meeting all members came to last; empty for none.
        is_clean: whether none has failed since.
    """

    def __init__(self) -> None:
        self.last, self.is_clean = "", True


class Said(NamedTuple):
    """What a rank says of the meeting that it is in, or was in last.

    Attributes:
        last: which meeting it came from.
        is_clean: whether none has failed since.
        members: of it, ranks of the group.
        state: "waits"; "left", because others have other members; or "done".
        beat: raised while it waits.
    """

    last: str
    is_clean: bool
    members: tuple[int, ...]
    state: str
    beat: int


def by_value(values: Mapping[int, object]) -> str:
    """Which ranks have which value; empty if all have the same."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(repr(value), []).append(rank)
    return ", ".join(f"{value} on rank(s) {ranks}" for value, ranks in ranks_of.items() if len(ranks_of) > 1)


class Membership:
    """One rank's part in one meeting, until all have come for the first time.

    Args:
        store: shared by all ranks of the group.
        past: of this process in the group.
        rank: this one's number in the group.
        members: ranks of the group that it meets, itself included.
        size: of the group.
        argument: that says who they are not, for messages.
    """

    def __init__(
        self, store: Store, past: Past, rank: int, members: Sequence[int], size: int, argument: str
    ) -> None:
        self._store, self._past, self._rank = store, past, rank
        self._members, self._size, self._argument = tuple(members), size, argument
        self._was_clean: bool | None = None
        self._beat, self._next_look = 0, math.inf
        self._seen: dict[int, Said] = {}
        self._moved: dict[int, float] = {}

    def begin(self) -> None:
        """It is about to join. Again, after others have given up, is no other meeting."""
        if self._was_clean is None:
            self._was_clean, self._past.is_clean = self._past.is_clean, False

    def wait(self) -> None:
        """It has joined, and waits."""
        if self._next_look == math.inf:
            self._say(WAITS)
            self._next_look = time.monotonic() + FIRST_LOOK_S

    def met(self, attempt: int) -> None:
        """All members have come, in this attempt."""
        if len(self._members) < self._size:  # others may wait for this rank elsewhere
            self._say(DONE)
        self._past.last, self._past.is_clean = f"{attempt} of {self._members}", True

    def fail(self) -> None:
        """It refuses to take part."""
        self._past.is_clean = False

    def look(self, missing: Callable[[], Sequence[int]], is_last: bool) -> str:
        """How members differ from those of missing ranks, if they do and it is time to look; else empty.

        Args:
            missing: returns positions among the members.
            is_last: the time is over.
        """
        now = time.monotonic()
        if now < self._next_look and not is_last:
            return ""
        self._next_look = now + LOOK_S
        self._beat += 1
        self._say(WAITS)
        ranks = [self._members[rank] for rank in missing()[:MOST_READ]]
        # Whoever was to meet the same members and has left has found a disagreement.
        said = {rank: self._read(rank) for rank in ranks}
        is_known = is_last or any(self._has_left(each) for each in said.values())
        others = {rank: self._differing(rank, each, now, is_known) for rank, each in said.items()}
        views = {rank: members for rank, members in others.items() if members}
        if not views:
            return ""
        self._say(LEFT)
        views = dict(sorted({**views, self._rank: self._members}.items()))
        size = range(self._size)
        lost = {rank: [each for each in size if each not in members] for rank, members in views.items()}
        differ = by_value(lost) or f"in this order, {by_value(views)}"  # the same ranks, numbered otherwise
        return f"{SAME_SETTINGS}:\n  {self._argument}: {differ}"

    def _has_left(self, said: Said | None) -> bool:
        is_same = said is not None and (said.last, said.members) == (self._past.last, self._members)
        return bool(said and is_same and said.state == LEFT and said.is_clean and self._was_clean)

    def _differing(self, rank: int, said: Said | None, now: float, is_last: bool) -> tuple[int, ...]:
        """The members that a rank meets in place of this rank's; empty where that is not known."""
        if said is None or said.members == self._members:
            return ()
        before, self._seen[rank] = self._seen.get(rank), said
        if before is not None and before.beat != said.beat:
            self._moved[rank] = now
        is_there = now - self._moved.get(rank, -math.inf) < FRESH_S
        is_same = said.last == self._past.last
        # A rank that meets others without this one may come to this meeting next.
        is_certain = said.is_clean and self._was_clean and self._rank in said.members
        if is_same and (is_there or said.state != WAITS) and (is_last or is_certain):
            return said.members
        return said.members if is_there and is_last else ()

    def _say(self, state: str) -> None:
        said = Said(self._past.last, bool(self._was_clean), self._members, state, self._beat)
        self._store.set(f"members/{self._rank}", json.dumps(said))

    def _read(self, rank: int) -> Said | None:
        try:
            last, is_clean, members, state, beat = json.loads(read_key(self._store, f"members/{rank}"))
            ranks = tuple(int(each) for each in members)
            return Said(str(last), is_clean is True, ranks, str(state), int(beat))
        except (ValueError, TypeError, RecursionError):
            return None
