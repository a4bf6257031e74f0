"""Ranks of one group whose calls go to different windows find out about each other.

Calls of other sizes have a window of their own, and a rank that waits in one sees nothing of a peer that
waits in another. A rank whose wait lasts, or that makes a window, therefore says in the group's store how
many calls it has made in each window, this one included, and reads what the others say. Ranks that make the
same calls in the same order go through the same tallies, so that of any two one is nowhere behind the other.
Where each is ahead of the other in some window, their calls differ, whenever the one or the other was said.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from threading import Event
from typing import Any, NamedTuple

import torch.distributed as dist

from moe_triton.core.config import Config
from moe_triton.core.group_sizes import RANKS_PER_SERVER
from moe_triton.core.threads import in_thread
from moe_triton.rendezvous.meeting import shared_store_of
from moe_triton.rendezvous.membership import by_value
from moe_triton.rendezvous.stores import Store, read_key
from moe_triton.torch_npu_ops.names import NAMES, SIZES

LOOK_S = 0.5
MOST_READ = 64  # ranks that one look reads
_NAMES = NAMES | SIZES | {"scheme": "comm_alg", "num_max_tokens_per_rank": "global_bs / ep_world_size"}
_OPERATOR = "operator"

Fields = dict[str, Any]
Counts = dict[str, int]


class Tally(NamedTuple):
    """What a rank says.

    Attributes:
        since: the meeting for the first window of these.
        counts: of calls, by window: a digest of its fields.
        window: that it is in.
        fields: of this window, by name; and the operator.
    """

    since: str
    counts: Counts
    window: str
    fields: Fields


def fields_of(config: Config, members: Sequence[int] | None, has_tp: bool) -> Fields:
    """What decides which window a call goes to, as torch_npu's functions name it, of JSON's types."""
    values = dataclasses.asdict(config) | {RANKS_PER_SERVER: config.topology.sizes}
    fields = {_NAMES.get(name, name): value for name, value in values.items()}
    fields |= {"ranks of elastic_info": members, "tp_world_size": 1 + has_tp}
    return dict(json.loads(json.dumps(fields)))


def _digest(fields: Fields) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


class Tallies:
    """The calls of one group since its windows were given back, and what its ranks say of theirs.

    Args:
        group: of all ranks.

    Attributes:
        since: see `Tally`; empty until there is a window.
        is_sound: whether no call has failed: ranks may have failed in different ones.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Weak: the threads that look may outlive the group.
        self._group, self._rank, self._size = weakref.ref(group), group.rank(), group.size()
        self.since, self.is_sound = "", True
        self._fields: dict[str, Fields] = {}
        self._former: Counter[str] = Counter()
        self._latest: object = None
        self._next = 0

    def retire(self, fields: Fields, calls: int) -> None:
        """A window is given back that has served so many calls, its making included."""
        self._former[self._known(fields)] += calls

    def watch(
        self,
        windows: Iterable[tuple[Fields, int]],
        fields: Fields,
        operator: str,
        members: Sequence[int] | None,
        pending: Callable[[], bool],
        stop: Callable[[str], None],
        ended: Event | None = None,
        holds: Callable[[], bool] = lambda: True,
    ) -> None:
        """Says this rank's tally, and looks for others that contradict it, in a thread while a wait goes on.

        Args:
            windows: fields and number of calls of each that there is, this call included.
            fields: of the window that this rank is in.
            operator: that it is called for; empty while the window is made.
            members: ranks of the group that take part, None for all.
            pending: whether it still waits.
            stop: ends the wait, with what is to be said of it.
            ended: set at the end of the wait, where there is somebody to do so.
            holds: whether what is said here still does then; it is taken back otherwise.
        """
        if not self.since or not self.is_sound:
            return
        counts = self._former.copy()
        for each, calls in windows:
            counts[self._known(each)] += calls
        said = Tally(self.since, dict(counts), self._known(fields), {_OPERATOR: operator} | fields)
        self._latest = mine = object()
        others: list[int] = [rank for rank in members or range(self._size) if rank != self._rank]
        pause = ended or Event()

        def run() -> None:
            store = self._store()
            store.set(self._key(self._rank), json.dumps(said))
            while self._latest is mine and pending():
                if why := self._differing(store, said, others):
                    self.is_sound = False
                    stop(why)
                    return
                pause.wait(LOOK_S)
            if not holds():
                store.delete_key(self._key(self._rank))

        in_thread(run, "tallies")  # its error is dropped: then the wait ends at its time

    def _store(self) -> Store:
        group = self._group()
        if group is None:
            raise RuntimeError("the process group is destroyed")
        return shared_store_of(group)

    def _known(self, fields: Fields) -> str:
        window = _digest(fields)
        self._fields[window] = fields
        return window

    def _differing(self, store: Store, own: Tally, others: list[int]) -> str:
        """Lines about what ranks differ in; empty if that cannot be said."""
        begin = self._next % max(len(others), 1)
        self._next = begin + MOST_READ
        said = {rank: self._read(store, rank) for rank in (others[begin:] + others[:begin])[:MOST_READ]}
        values: dict[int, Fields] = {}
        for rank, tally in said.items():
            if tally is None or tally.since != own.since:
                continue
            ahead, behind = _ahead(own.counts, tally.counts), _ahead(tally.counts, own.counts)
            if ahead and behind:
                values[self._rank] = self._fields_in(own, ahead)
                values[rank] = self._fields_in(tally, behind)
        if not values:
            return ""
        # What a rank said when it had made other calls was of an earlier one.
        same = {rank: tally.fields for rank, tally in said.items() if tally and tally[:3] == own[:3]}
        values = dict(sorted({**same, **values}.items()))
        lines = []
        for name in dict.fromkeys(name for fields in values.values() for name in fields):
            given = {rank: fields[name] for rank, fields in values.items() if fields.get(name, "") != ""}
            lines += [f"\n  {name}: {line}"] if (line := by_value(given)) else []
        return "".join(lines)

    def _fields_in(self, tally: Tally, ahead: Sequence[str]) -> Fields:
        """The fields of a window in which a rank is ahead: of the one that it is in, if it is ahead there."""
        if tally.window in ahead:
            return tally.fields
        return next((self._fields[window] for window in ahead if window in self._fields), tally.fields)

    def _key(self, rank: int) -> str:
        return f"tallies/{rank}"

    def _read(self, store: Store, rank: int) -> Tally | None:
        try:
            since, counts, window, fields = json.loads(read_key(store, self._key(rank)))
            counted = {str(name): int(count) for name, count in counts.items()}
            return Tally(str(since), counted, str(window), dict(fields))
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None


def _ahead(ours: Counts, theirs: Counts) -> list[str]:
    return [window for window, count in ours.items() if count > theirs.get(window, 0)]
