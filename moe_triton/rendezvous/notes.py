"""Notes that ranks leave while they wait, so that an error names the rank that all others are stuck behind.

They are kept in the group's store, one for each rank; no protocol depends on them. A note excuses the rank
that has left it only while it is renewed, or as its last word. Whoever has run out of time looks at the notes
of the ranks it misses, and of those that these wait for (`Inquiry`), until it knows of each: it is stuck
itself, or it is not.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar, cast

from moe_triton.core.errors import ThreadError
from moe_triton.core.threads import Deadline, in_thread
from moe_triton.rendezvous.stores import Store, read_key

Result = TypeVar("Result")
State = Literal["waits", "over", "raised", "left"]

PERIOD_S = 0.5
# A note that has not been renewed for so long is one of a rank that does not run.
SILENT_S = 2 * PERIOD_S
# A wait that has lasted this long has left its note, one period later at most.
NOTED_AFTER_S = 0.5
# Ranks whose notes are read while this one waits: no store is to be asked for those of all by all.
MOST_WATCHED = 8
# How long an error may be delayed to read notes, and after that by a store that does not answer.
ASK_S, GRACE_S = 2.0, 1.0
# For the last word of a rank whose caller waits for its own error.
LAST_WORD_S = 0.2
_LOOK_S, _PAUSE_S = 0.1, 0.05

NO_STORE = (
    "the group's store does not answer, so that notes of others cannot be read: the process that hosts it, "
    "usually that of rank 0, is stopped or gone"
)
NOT_SEEN = "waits on this device are not seen by hosts, so that ranks leave no notes while they wait"
IN_TIME = "notes of others could not be read in time"
EACH_OTHER = "they wait, or have waited, for others themselves"


def noted_after_s(timeout_s: float) -> float:
    """Seconds after which a wait leaves its note."""
    return min(NOTED_AFTER_S, timeout_s / 4)


class Note(NamedTuple):
    """What a rank has said of itself.

    Attributes:
        state: it waits; its wait has ended well; it has given up, for want of others' data; or it has left
            by itself, and nothing more will come.
        call: operator and number, or why it has left.
        ranks: that it waits, or has waited, for.
    """

    state: State
    call: str
    ranks: tuple[int, ...]

    def text(self, beat: int) -> str:
        """As it is kept; the number tells a renewed note from an old one."""
        return json.dumps([self.state, self.call, list(self.ranks), beat])

    @staticmethod
    def read(text: str, num_ranks: int) -> Note | None:
        """The note, or None: nothing from a peer is trusted."""
        try:
            state, call, ranks, _ = json.loads(text)
            note = Note(state, str(call), tuple(int(each) for each in ranks))
        except (ValueError, TypeError, RecursionError):
            return None
        is_known = isinstance(state, str) and state in ("waits", "over", "raised", "left")
        return note if is_known and all(0 <= each < num_ranks for each in note.ranks) else None


class Culprits(NamedTuple):
    """Who holds up a wait.

    Attributes:
        ranks: in order.
        uncertain: those of them that may only be stuck behind others.
        why: they may; empty if there are none.
        said: sentences for the error, each with a space behind it: who is stuck, and what is uncertain.
    """

    ranks: tuple[int, ...]
    uncertain: tuple[int, ...] = ()
    why: str = ""
    said: str = ""

    @staticmethod
    def unknown(ranks: Sequence[int], why: str, said: str = "") -> Culprits:
        """They may all be stuck, for this reason."""
        return Culprits(tuple(ranks), tuple(ranks), why, said + _doubt(ranks, why))


class _Seen(NamedTuple):
    text: str
    since: float
    is_new: bool


class Inquiry:
    """Looks for the ranks that hold up others, in the notes of all.

    Args:
        rank: that asks.
        num_ranks: of the group.
        before: notes that it has seen while it waited, and since when they have been the same.
        absent_after_s: after which a rank without a note is none that waits; None if waits leave no notes.
    """

    def __init__(
        self, rank: int, num_ranks: int, before: Mapping[int, tuple[str, float]], absent_after_s: float | None
    ) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._before, self._absent_after_s = before, absent_after_s
        self._missing: tuple[int, ...] = ()
        self._began = self._looked = float("inf")
        self._was_stopped = False
        self._seen: dict[int, _Seen] = {}
        # Ranks that waited when their notes were seen first, or just before.
        self._waited_before: set[int] = set()
        self._forget()

    def _forget(self) -> None:
        self._open: set[int] = set()
        self._stuck: dict[int, Note] = {}
        self._gone: dict[int, str] = {}  # with what their error says of them
        self._late: dict[int, str] = {}

    def look(self, missing: Sequence[int], read: Callable[[int], str], now: float) -> bool:
        """Reads the notes of all ranks that count, once.

        Args:
            missing: ranks that this one has run out of time waiting for.
            read: returns a rank's note, or "".
            now: time of the look, in seconds.

        Returns:
            Whether everything is decided.
        """
        if now - self._looked > PERIOD_S and not self._was_stopped:
            # This rank has not run itself, and others may not have either: they get as long again, once.
            self._was_stopped = True
            self._seen.clear()
        self._began, self._looked = min(self._began, now), now
        self._forget()
        self._missing = tuple(missing)
        left, known = list(missing), {self._rank}
        while left:
            rank = left.pop()
            if rank in known:
                continue
            known.add(rank)
            left += self._judge(rank, read(rank), now)
        return not self._open

    def _judge(self, rank: int, text: str, now: float) -> Collection[int]:
        """Sorts a rank in; returns those that it waits for."""
        seen = self._seen.get(rank)
        if seen is None or seen.text != text:
            seen = self._seen[rank] = _Seen(text, now, seen is not None)
        for_s = now - seen.since
        note = Note.read(text, self._num_ranks)
        # Since when it has been late by itself, if its wait is over.
        text_before, since = self._before.get(rank, ("", now))
        is_late = text_before == text and self._began - since >= SILENT_S
        if note and not seen.is_new and not (note.state == "over" and is_late):
            self._waited_before.add(rank)
        if note is None:
            if self._absent_after_s is None:
                self._late[rank] = NOT_SEEN
            else:
                self._settle(rank, for_s >= self._absent_after_s, self._gone, "")
            return ()
        if note.state == "left":
            self._gone[rank] = f"rank {rank} has left: {note.call}"
            return ()
        if note.state == "raised" or (note.state == "waits" and seen.is_new):
            self._stuck[rank] = note
            return note.ranks
        if note.state == "waits":
            said = f"rank {rank} began to wait in {note.call} and has not run since"
            self._settle(rank, for_s >= SILENT_S, self._gone, said)
            return note.ranks if rank in self._open else ()
        kind = self._gone if is_late else self._late
        said = "" if is_late else f"rank {rank} has itself waited {_for(note)}, until a moment ago"
        self._settle(rank, for_s >= (self._absent_after_s or 0.0), kind, said)
        return ()

    def _settle(self, rank: int, is_decided: bool, kind: dict[int, str], said: str) -> None:
        if is_decided:
            kind[rank] = said
        else:
            self._open.add(rank)

    def found(self) -> Culprits:
        """What the last look has found."""
        said = [f"rank {rank} waited itself {_for(note)}" for rank, note in sorted(self._stuck.items())]
        said += [text for _, text in sorted(self._gone.items()) if text]
        told = f"{'; '.join(said)}. " if said else ""
        named = sorted({*self._gone, *self._late, *self._open})
        if not named:
            # Who began to wait for this rank only now, when this one has sent everything, has come too late.
            if came := sorted({*self._missing} - self._waited_before):
                return Culprits(tuple(came), said=told)
            return Culprits.unknown(self._missing, EACH_OTHER, told)
        doubtful = sorted({*self._late, *self._open})
        if not doubtful:
            return Culprits(tuple(named), said=told)
        reasons = [text for _, text in sorted(self._late.items())] + [IN_TIME] * bool(self._open)
        why = "; ".join(dict.fromkeys(reasons))
        return Culprits(tuple(named), tuple(doubtful), why, told + _doubt(doubtful, why))


class Notes:
    """One rank's notes, and its access to those of its peers.

    Args:
        open_store: returns the store of these ranks and this buffer.
        rank: this one's number.
        num_ranks: of the group.
        sees_waits: whether ranks see their own waits last; without it nobody can leave notes of them.
        clock: seconds.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        rank: int,
        num_ranks: int,
        sees_waits: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_store, self._rank, self._num_ranks = open_store, rank, num_ranks
        self._sees_waits, self._clock = sees_waits, clock
        self._beats = itertools.count()
        self._latest: object = None
        self._before: dict[int, tuple[str, float]] = {}
        # Ranks that have waited for others during this one's wait, and when that was seen last.
        self._waited: dict[int, float] = {}
        self._has_last_word = False
        self._writing = threading.Lock()
        self._written_at: float | None = None  # since when the store has not answered to a note

    def leave(self, call: str, ranks: Sequence[int], pending: Callable[[], bool]) -> None:
        """Leaves a note, renews it while the wait goes on, and takes it back then. Returns at once.

        Args:
            call: operator and number.
            ranks: that this rank waits for.
            pending: whether it still waits.
        """
        # Its error is dropped: a store that is gone has no readers.
        in_thread(lambda: _run(self.renewing(call, ranks, pending)), "note")

    def renewing(
        self, call: str, ranks: Sequence[int], pending: Callable[[], bool]
    ) -> Generator[float, None, None]:
        """What `leave` does, with a pause of some seconds at each step."""
        self._latest = mine = object()
        note, store = Note("waits", call, tuple(ranks)), self._open_store()
        self._before, self._waited = {}, {}
        while self._write(store, note, mine):
            renewed = self._clock()
            for rank in ranks[:MOST_WATCHED]:
                text = read_key(store, str(rank))
                if self._before.get(rank, ("", 0.0))[0] != text:
                    self._before[rank] = text, renewed
                    self._sees_stuck(rank, text, renewed)
            while pending() and self._clock() < renewed + PERIOD_S:
                yield _LOOK_S
            if not pending():
                self._write(store, note._replace(state="over"), mine)
                return

    def _write(self, store: Store, note: Note, mine: object) -> bool:
        with self._writing:
            is_latest = self._latest is mine
            if is_latest:
                self._written_at = self._clock()
                try:
                    store.set(str(self._rank), note.text(next(self._beats)))
                finally:
                    self._written_at = None
        return is_latest

    def given_up(self, ranks: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Those of some ranks whose last word there is, and for whom each has waited.

        It asks the store, and waits for its answer.
        """
        store = self._open_store()
        read = {rank: Note.read(read_key(store, str(rank)), self._num_ranks) for rank in ranks[:MOST_WATCHED]}
        return {rank: note.ranks for rank, note in read.items() if note and note.state in ("raised", "left")}

    def last_word(self, state: State, call: str, ranks: Sequence[int] = ()) -> None:
        """Says why nothing more will come from this rank. Only the first one counts.

        Args:
            state: "raised" or "left".
            call: operator and number, or why it has left.
            ranks: that it has waited for.
        """
        if self._has_last_word:
            return
        self._has_last_word = True
        written_at = self._written_at
        is_silent = written_at is not None and self._clock() - written_at > LAST_WORD_S
        with contextlib.suppress(Exception):  # a store that is gone has no readers
            saying = in_thread(lambda: self.say(state, call, ranks), "last word")
            saying.result(0.0 if is_silent else LAST_WORD_S)

    def say(self, state: State, call: str, ranks: Sequence[int]) -> None:
        """What `last_word` does."""
        self._latest = mine = object()
        self._write(self._open_store(), Note(state, call, tuple(ranks)), mine)

    def culprits(self, call: str, missing: Sequence[int]) -> Culprits:
        """The ranks that hold up the missing ones, and this one's last word.

        Args:
            call: operator and number.
            missing: ranks that this rank has run out of time waiting for.
        """
        # First, since ranks that run out of time together ask for each other's.
        self.last_word("raised", call, missing)
        # In a thread, since requests to a store whose host has stopped never return.
        asking = in_thread(lambda: _run(self.asking(missing)), "notes")
        try:
            return asking.result(2 * ASK_S + GRACE_S)
        except ThreadError as error:
            return Culprits.unknown(missing, f"notes of others cannot be read here ({error})")
        except Exception:
            return Culprits.unknown(missing, NO_STORE)

    def holding_up(
        self, missing: Sequence[int], patience_s: float, cleared: Collection[int] = ()
    ) -> list[int]:
        """Those of the missing ranks that are not stuck behind others themselves, as far as is known at once.

        Args:
            missing: ranks that this rank waits for.
            patience_s: for so long one is not to be missed that has been stuck until then.
            cleared: ranks that nobody has had to wait for since, at most for as long.
        """
        store, now = self._open_store(), self._clock()

        def is_stuck(rank: int) -> bool:
            text = read_key(store, str(rank))
            return self._sees_stuck(rank, text, now) or self._was_stuck(rank, text, now - patience_s, cleared)

        return [rank for rank in missing if not is_stuck(rank)]

    def _sees_stuck(self, rank: int, text: str, now: float) -> bool:
        """Whether a rank waits for others: its note is there, and has been renewed a moment ago."""
        note, (before, since) = Note.read(text, self._num_ranks), self._before.get(rank, ("", now))
        if note is None or note.state not in ("waits", "raised") or set(note.ranks) <= {self._rank}:
            return False
        is_new = text != before or now - since < SILENT_S
        if is_new:
            self._waited[rank] = now
        return is_new

    def _was_stuck(self, rank: int, text: str, after: float, cleared: Collection[int]) -> bool:
        """Whether a rank has waited for others until a time from which on it may take as long as any."""
        note = Note.read(text, self._num_ranks)
        if note is None or note.state != "over":
            return False
        return self._waited.get(rank, after) > after or not {*note.ranks}.isdisjoint(cleared)

    def asking(self, missing: Sequence[int]) -> Generator[float, None, Culprits]:
        """The ranks that hold up the missing ones, with a pause of some seconds at each step.

        Args:
            missing: ranks that this rank has run out of time waiting for.
        """
        absent_after_s = NOTED_AFTER_S + PERIOD_S if self._sees_waits else None
        inquiry = Inquiry(self._rank, self._num_ranks, dict(self._before), absent_after_s)
        store, deadline = self._open_store(), Deadline(ASK_S, self._clock)
        while not inquiry.look(missing, lambda rank: read_key(store, str(rank)), self._clock()):
            if deadline.left() <= 0:
                break
            yield _PAUSE_S
        return inquiry.found()


def _run(steps: Generator[float, None, Result]) -> Result:
    """Takes the steps, and returns what they do."""
    while True:
        try:
            time.sleep(next(steps))
        except StopIteration as end:
            return cast(Result, end.value)


def _for(note: Note) -> str:
    return f"for rank(s) {list(note.ranks)} in {note.call}" if note.ranks else f"in {note.call}"


def _doubt(ranks: Sequence[int], why: str) -> str:
    return f"Rank(s) {list(ranks)} may only be stuck behind others: {why}. "
