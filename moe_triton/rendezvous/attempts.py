"""Exchanges of messages over a torch store, in numbered attempts that late ranks can join.

Ranks that meet begin an *attempt*, in which they exchange messages round by round. A rank that waits too long
gives its round up, and all later ranks meet in the next attempt, however late they are. So ranks that raised
and try again find each other, and messages left over from an earlier attempt are never read.

A rank that cannot take part *refuses* the round: it gives a reason and goes on at once. That ends the
attempt. Every other rank, including later ones, gets the reason once, and makes its next try in the following
attempt.

Keys in the store, under a prefix of the ranks that meet::

    open                       the attempt to join
    next/<rank>                the first attempt that a rank has not seen the end of
    here/<rank>                a rank's note that it is in an attempt's first round, or has given one up
    <attempt>/<round>/<rank>   a rank's message
    <attempt>/<round>/state    how the round ended: DONE; which rank gave it up and whom it named, "2 0,1";
                               or which rank refused it and why, 'refused 2 "reason"'
    <attempt>/<round>/left     number of ranks that have read all messages; the last one deletes them
    <attempt>/<round>/told     number of ranks that know of a refusal
    ended, ended/<i>           the rounds whose state is kept until all ranks are in a later attempt

A round ends once, by compare_set: either all messages are there and every rank reads them, or it is given up
or refused and no rank does. Keys are polled with `check` and never waited for: a store serves one caller at a
time, and its user's own calls would queue behind ours.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection

from moe_triton.core.threads import Deadline
from moe_triton.rendezvous.membership import Membership
from moe_triton.rendezvous.notes import ASK_S, PERIOD_S, Culprits, Inquiry, Note, State
from moe_triton.rendezvous.stores import Store, read_key

DONE, REFUSED = "done", "refused"
# Attempts are numbered one by one, and a rank goes through all that it has not seen the end of.
_MOST_DIGITS, _MOST_BEHIND = 9, 10_000
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02


class RoundGivenUpError(Exception):
    """A round ended without all of its messages.

    Attributes:
        by: the rank that gave it up.
        culprits: who has not come: ranks whose messages were not there, but for those that had come to an
            earlier attempt or are on their way to this one; or the rank that gave up, if it was interrupted.
    """

    def __init__(self, by: int, culprits: Culprits) -> None:
        self.by, self.culprits = by, culprits
        super().__init__(by, culprits)


class RefusedError(Exception):
    """A rank has ended a round: it cannot take part.

    Attributes:
        by: that rank.
        reason: that it gave.
    """

    def __init__(self, by: int, reason: str) -> None:
        self.by, self.reason = by, reason
        super().__init__(by, reason)


class MetElsewhereError(Exception):
    """Ranks that this one waits for meet without it, or with others."""


class BadStateError(Exception):
    """The store holds what no rank writes there.

    Attributes:
        key: under which prefix of the ranks it is found.
        value: what is there.
    """

    def __init__(self, key: str, value: str) -> None:
        self.key, self.value = key, value
        super().__init__(key, value)


class Attempt:
    """One rank's part in an attempt; joined by its first exchange.

    Args:
        store: used by no others than the ranks that meet.
        rank: this one's number among them.
        num_ranks: of them.
        membership: what it says to ranks that meet others; None to say nothing.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int, membership: Membership | None = None) -> None:
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._membership, self._elsewhere = membership, ""
        self._number, self._round = 0, 0
        self._is_over = False
        self._noted = float("-inf")
        self._inquiry = Inquiry(rank, num_ranks, {}, 0.0)
        self._asked: Deadline | None = None
        self._found = Culprits(())

    @property
    def number(self) -> int:
        """Number of the attempt, once it has been joined."""
        return self._number

    def exchange(
        self, message: bytes, deadline: Deadline, cancelled: threading.Event, lost: Collection[int] = ()
    ) -> list[bytes]:
        """Sends a message to every rank and returns all of them, by rank.

        Args:
            message: of this rank; all ranks must be in the same round.
            deadline: after which it gives up.
            cancelled: gives the round up when set.
            lost: ranks for want of which that is; none if this rank goes by itself.

        Raises:
            RoundGivenUpError: by this rank at its deadline, or for want of those that are lost; or by
                another, after the first round.
            RefusedError: by another rank.
            MetElsewhereError: in the first round.
            BadStateError: others write to these keys.
        """
        try:
            return self._exchange(message, deadline, cancelled, lost)
        except (RoundGivenUpError, RefusedError, MetElsewhereError):
            self._is_over = True
            raise
        except BadStateError:
            self._is_over = True
            if self._round == 0:  # so that ranks which come later know that this one was here
                self._say("raised")
            raise

    def refuse(self, reason: str) -> str:
        """Ends the round that the others are in, or will join, unless it has already ended.

        Args:
            reason: for the others.

        Returns:
            The round, for `told`; empty if it had already ended.
        """
        said = f"{REFUSED} {self._rank} {json.dumps(reason)}"
        while not self._is_over:
            is_first = self._round == 0
            try:
                if is_first:
                    if self._membership:
                        self._membership.fail()
                    self._number = self._join()
            except RefusedError:  # the others have another rank's reason
                break
            key = f"{self._number}/{self._round}"
            state = self._end(key, said)
            if state == said:
                self._note_end(key)
            if is_first:
                self._open_after(self._number)
            if state.startswith(REFUSED):
                self._is_over = True
                self._take_note(key, state)
                return key
            # If a first round was given up, the others join the next attempt.
            self._is_over = not is_first
        return ""

    def told(self, key: str) -> int:
        """Number of ranks that know of a refusal, this one included."""
        return self._add(f"{key}/told", 0)

    def _exchange(
        self, message: bytes, deadline: Deadline, cancelled: threading.Event, lost: Collection[int]
    ) -> list[bytes]:
        while True:
            is_first = self._round == 0
            if is_first:
                if self._membership:
                    self._membership.begin()
                self._number = self._join()
            key = f"{self._number}/{self._round}"
            messages = [f"{key}/{rank}" for rank in range(self._num_ranks)]
            if cancelled.is_set():  # while a store was made: others would take the message for a later one
                state = self._give_up_for(key, lost)
            else:
                self._store.set(messages[self._rank], message)
                if is_first and self._membership:
                    self._membership.wait()
                state = self._wait(key, messages, deadline, cancelled, lost)
            if state == DONE:
                if is_first and self._membership:
                    self._membership.met(self._number)
                received = [bytes(self._store.get(name)) for name in messages]
                self._round += 1
                self._leave(key, messages, is_first)
                return received
            self._store.delete_key(messages[self._rank])
            if state.startswith(REFUSED):
                raise self._take_note(key, state)
            if self._elsewhere:
                raise MetElsewhereError(self._elsewhere)
            if state:
                by, named = self._who_timed_out(key, state)
                if by == self._rank:
                    raise RoundGivenUpError(by, self._found)
                if not is_first:
                    raise RoundGivenUpError(by, Culprits(named))

    def _wait(
        self,
        key: str,
        messages: list[str],
        deadline: Deadline,
        cancelled: threading.Event,
        lost: Collection[int],
    ) -> str:
        """How the round ended; empty if its attempt is not the open one any more."""
        pause = _FIRST_PAUSE_S
        while True:
            if self._store.check(messages):
                return self._end(key, DONE)
            # In this order: the next attempt opens only after this one has ended. So if that is open, a
            # missing state was deleted, after all ranks, this one included, had read its messages.
            is_open = self._round > 0 or self._open() == self._number
            if (state := read_key(self._store, f"{key}/state")) or not is_open:
                return state
            if self._round == 0:
                self._note()
            left = deadline.left()
            if self._is_elsewhere(messages, left <= 0):
                self._found = Culprits(tuple(self._missing(messages)) or (self._rank,))
                return self._give_up(key, "raised")
            if left <= 0 and self._knows_who(messages):
                return self._give_up(key, "raised")
            if cancelled.wait(min(pause, left) if left > 0 else pause):
                return self._give_up_for(key, lost)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _is_elsewhere(self, messages: list[str], is_last: bool) -> bool:
        """Whether ranks whose messages are not there meet others; they may all be there by now."""
        if self._round > 0 or self._membership is None:
            return False
        self._elsewhere = self._membership.look(lambda: self._missing(messages), is_last)
        return self._elsewhere != ""

    def _missing(self, messages: list[str]) -> list[int]:
        return [rank for rank, name in enumerate(messages) if not self._store.check([name])]

    def _end(self, key: str, state: str) -> str:
        """Ends a round unless another rank has; returns how it ended."""
        return self._store.compare_set(f"{key}/state", "", state).decode(errors="replace")

    def _knows_who(self, messages: list[str]) -> bool:
        """Whether it is known who has not come; ranks have a little time left to come until then."""
        missing = self._missing(messages)
        if self._round > 0 or not missing:  # all were here; or all may have arrived by now
            self._found = Culprits(tuple(missing) or (self._rank,))
            return True
        self._asked = self._asked or Deadline(ASK_S)
        read = lambda rank: read_key(self._store, f"here/{rank}")  # noqa: E731
        knows = self._inquiry.look(missing, read, time.monotonic())
        self._found = self._inquiry.found()
        return knows or self._asked.left() <= 0

    def _give_up_for(self, key: str, lost: Collection[int]) -> str:
        """Gives up at once: for want of ranks that are lost, or if there are none because this one goes."""
        self._found = Culprits(tuple(sorted(lost)) or (self._rank,))
        return self._give_up(key, "raised" if lost else "left")

    def _give_up(self, key: str, why: State) -> str:
        said = f"{self._rank} {','.join(map(str, self._found.ranks))}"
        if self._round == 0:
            self._say(why)  # first, since the others go on to the next attempt at once
        state = self._end(key, said)
        if state == said:
            self._note_end(key)
        return state

    def _note(self) -> None:
        """Says that this rank has come, and still is here."""
        if time.monotonic() > self._noted + PERIOD_S:
            self._say("waits")

    def _say(self, state: State) -> None:
        self._noted = time.monotonic()
        call = "its construction was interrupted" if state == "left" else "a construction"
        self._store.set(f"here/{self._rank}", Note(state, call, ()).text(time.monotonic_ns()))

    def _note_end(self, key: str) -> None:
        self._store.set(f"ended/{self._add('ended', 1)}", key)

    def _take_note(self, key: str, state: str) -> RefusedError:
        """The error of a refusal, which this rank gets once."""
        if self._round == 0:
            self._store.delete_key(f"here/{self._rank}")
            self._store.set(f"next/{self._rank}", str(int(key.split("/")[0]) + 1))
        self._add(f"{key}/told", 1)
        return self._who_refused(key, state)

    def _who_refused(self, key: str, state: str) -> RefusedError:
        try:
            _, by, text = state.split(" ", 2)
            rank, reason = int(by), json.loads(text)
        except (ValueError, RecursionError):
            raise BadStateError(f"{key}/state", state) from None
        if not (isinstance(reason, str) and 0 <= rank < self._num_ranks):
            raise BadStateError(f"{key}/state", state)
        return RefusedError(rank, reason)

    def _who_timed_out(self, key: str, state: str) -> tuple[int, tuple[int, ...]]:
        """The rank that gave a round up, and those that it named."""
        try:
            by, named = state.split()
            ranks = int(by), *map(int, named.split(","))
        except ValueError:
            raise BadStateError(f"{key}/state", state) from None
        if not all(0 <= rank < self._num_ranks for rank in ranks):
            raise BadStateError(f"{key}/state", state)
        return ranks[0], ranks[1:]

    def _add(self, key: str, number: int) -> int:
        try:
            return self._store.add(key, number)
        except ValueError:  # of stores in this process: what is there is no number
            raise BadStateError(key, "no number") from None

    def _open(self) -> int:
        return _number("open", self._store.compare_set("open", "", "0").decode(errors="replace"))

    def _join(self) -> int:
        """The open attempt, or the next one if that has ended.

        Raises:
            RefusedError: an earlier attempt was refused, and this rank does not know yet.
        """
        key = f"next/{self._rank}"
        number = _number(key, read_key(self._store, key) or "0")
        if (open_number := self._open()) < number:
            self._open_after(number - 1)
        elif open_number > number + _MOST_BEHIND:
            raise BadStateError("open", str(open_number))
        while True:
            # In this order: see `_wait`.
            is_past = number < self._open()
            key = f"{number}/0"
            if (state := read_key(self._store, f"{key}/state")).startswith(REFUSED):
                raise self._take_note(key, state)
            if not state and not is_past:
                return number
            if not is_past:
                self._open_after(number)
            number += 1

    def _open_after(self, number: int) -> None:
        """Opens the next attempt. Ranks that still poll this one see that, and join the next one."""
        while (open_number := self._open()) <= number:  # far behind where the key was deleted by others
            self._store.compare_set("open", str(open_number), str(number + 1))

    def _leave(self, key: str, messages: list[str], is_first: bool) -> None:
        if is_first:
            self._store.delete_key(f"here/{self._rank}")
            self._store.set(f"next/{self._rank}", str(self._number + 1))
        if self._add(f"{key}/left", 1) < self._num_ranks:
            return
        if is_first:
            self._open_after(self._number)
            self._forget_ends()
        for name in (*messages, f"{key}/left", f"{key}/state"):
            self._store.delete_key(name)

    def _forget_ends(self) -> None:
        """Deletes the states of earlier attempts: every rank is in this one, and reads none of them."""
        # An attempt ends in one round. A larger number is not the ranks', whose messages would wait for it.
        for i in range(1, min(self._add("ended", 0), self._number + 1) + 1):
            key = read_key(self._store, f"ended/{i}")
            if key and _number(f"ended/{i}", key.split("/")[0]) < self._number:
                for name in (f"{key}/state", f"{key}/told", f"ended/{i}"):
                    self._store.delete_key(name)


def _number(key: str, value: str) -> int:
    """The number of an attempt."""
    if not value.isdecimal() or len(value) > _MOST_DIGITS:
        raise BadStateError(key, value)
    return int(value)
