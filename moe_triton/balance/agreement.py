"""How ranks agree on the step in which they change to a part of a move.

Where ranks see each other's memory at once, as on CPUs, no message is needed but what each has left there
(`InMemory`): a rank that begins step t has ended the dispatch of step t - 1, which waits for every rank to
have begun it. So it sees whatever a rank has left before its own dispatch of t - 1. Each rank says in which
step it had everything; the step after the last of these is the one.

Where hosts run ahead of their devices (`AtCheckpoints`), hosts know nothing of each other's steps. There each
leaves a text at every n-th step, a checkpoint, and what all have left at one decides for all at the next:
they read the same texts, so they decide alike.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from moe_triton.balance.stage import Memory
from moe_triton.core.errors import CommunicationTimeoutError, ConfigMismatchError
from moe_triton.core.threads import Deadline

KEPT = 2  # moves and parts whose words stay: a rank is one ahead of the slowest at most
# Where a rank's words begin.
MOVE, STEP, SWITCHED, PLACEMENTS = range(4)
HAD = PLACEMENTS + KEPT
NUM_WORDS = HAD + 2 * KEPT
# Checkpoints whose notes stay. Who has changed at one need not wait at the next, where a move begins, but at
# the one after that; and the slowest rank may still have to read what was said before the first of these.
NOTES = 3
PAUSE_S = 1e-3


class Agreement(Protocol):
    """What ranks say of moves, and when they change."""

    def begin(self, placement: int) -> None:
        """Begins a move, to a placement that a number stands for."""

    def readable(self) -> list[bool]:
        """By rank, whether its weights are those that this rank has changed to, and can be read.

        Raises:
            BufferStateError: the memory was given back.
            ConfigMismatchError: a rank moves to another placement, or counts its steps otherwise.
        """

    def arrive(self, step: int, has_all: bool) -> bool:
        """Begins a step while something moves, and tells whether the current part changes in it.

        Args:
            step: its number.
            has_all: whether this rank has all of the current part.

        Raises:
            BufferStateError: the memory was given back.
            ConfigMismatchError: a rank moves to another placement, or counts its steps otherwise.
            CommunicationTimeoutError: a rank has not said what it has.
        """

    def pass_step(self, step: int) -> None:
        """Begins a step in which nothing moves."""

    def changed(self, is_done: Callable[[], bool]) -> None:
        """Says that this rank has changed to the current part.

        Args:
            is_done: whether its device has, too.
        """


class Said(NamedTuple):
    """What a rank has left of itself: 64-bit words at the beginning of its memory, in this order.

    Attributes:
        move: number of its latest move, from 1; 0 before the first.
        step: one more than that which it has begun last; 0 before the first.
        switched: parts that it has changed to, of all moves.
        placements: of move m, at ``m % KEPT``, what stands for its placement: written before its number, so
            that who reads the number of the move before finds that one's.
        had: of part p, from 1, at ``2 * (p % KEPT)`` the number p, once it has all of that, and behind it the
            step in which it had.
    """

    move: int
    step: int
    switched: int
    placements: tuple[int, ...]
    had: tuple[int, ...]

    @staticmethod
    def of(words: list[int]) -> Said:
        """What stands in some words."""
        return Said(
            words[MOVE], words[STEP], words[SWITCHED], tuple(words[PLACEMENTS:HAD]), tuple(words[HAD:])
        )


class InMemory:
    """See `Agreement`: by words in the ranks' memory.

    Args:
        memory: of all ranks, zeros where the words are.
        rank: this one.
        num_ranks: W.
    """

    def __init__(self, memory: Memory, rank: int, num_ranks: int) -> None:
        self._memory, self._rank = memory, rank
        self._words_of = [memory.of(r)[: 8 * NUM_WORDS].view(torch.int64).numpy() for r in range(num_ranks)]
        self._words = self._words_of[rank]

    def begin(self, placement: int) -> None:
        """See `Agreement`."""
        number = int(self._words[MOVE]) + 1
        self._words[PLACEMENTS + number % KEPT] = placement
        self._words[MOVE] = number

    def readable(self) -> list[bool]:
        """See `Agreement`. Nobody is ahead of what this rank lacks."""
        return [each.switched >= self._words[SWITCHED] for each in self._all_said()]

    def pass_step(self, step: int) -> None:
        """See `Agreement`."""
        self._words[STEP] = step + 1

    def arrive(self, step: int, has_all: bool) -> bool:
        """See `Agreement`."""
        self.pass_step(step)
        said = self._all_said()
        part = int(self._words[SWITCHED]) + 1
        index = 2 * (part % KEPT)
        at = HAD + index
        if has_all and self._words[at] != part:
            self._words[at + 1] = step
            self._words[at] = part  # after its step: others look at the number first
            return False
        if any(each.had[index] != part for each in said):
            return False
        due = max(each.had[index + 1] for each in said) + 1
        if step > due:
            raise ConfigMismatchError(f"the ranks change weights in step {due}, and this one is in {step}")
        return step == due

    def changed(self, is_done: Callable[[], bool]) -> None:
        """See `Agreement`."""
        assert is_done()
        self._words[SWITCHED] += 1

    def _all_said(self) -> list[Said]:
        """What all ranks have left.

        Raises:
            ConfigMismatchError: one moves elsewhere, or counts its steps otherwise.
        """
        self._memory.of(self._rank)  # an error once it was given back
        said = [Said.of(words.tolist()) for words in self._words_of]
        mine = said[self._rank]
        numbered = list(enumerate(said))
        at = mine.move % KEPT
        _check_alike(
            [r for r, e in numbered if e.move == mine.move and e.placements[at] != mine.placements[at]],
            self._rank,
            mine.move,
        )
        far = {r: each.step - 1 for r, each in numbered if each.step and abs(each.step - mine.step) > 1}
        if far and mine.step:
            raise ConfigMismatchError(
                f"rank {self._rank} is in step {mine.step - 1}, and others, by rank, in {far}: ranks are "
                "never more than a step apart. Count steps alike on every rank."
            )
        return said


class Texts(Protocol):
    """Where ranks leave texts for each other: `moe_triton.EPBuffer`."""

    def leave(self, name: str, text: str) -> None:
        """Leaves one in place of this rank's last one."""

    def left(self, name: str) -> list[str]:
        """All ranks' last ones; "" of a rank that has left none."""


class Noted(NamedTuple):
    """What a rank says at a checkpoint.

    Attributes:
        checkpoint: its number.
        move, placement: as in `Said`.
        had: parts that it has all of, and its device too.
        settled: parts that its device has changed to.
    """

    checkpoint: int
    move: int
    placement: int
    had: int
    settled: int


class AtCheckpoints:
    """See `Agreement`: by texts, at every n-th step.

    Args:
        memory: of all ranks; it is not read.
        texts: of the ranks.
        name: under which they are left.
        rank: this one.
        num_ranks: W.
        every: n.
        timeout_s: that a checkpoint waits for another rank's text.
    """

    def __init__(
        self, memory: Memory, texts: Texts, name: str, rank: int, num_ranks: int, every: int, timeout_s: float
    ) -> None:
        self._memory, self._texts, self._name = memory, texts, name
        self._rank, self._every, self._timeout_s = rank, every, timeout_s
        self._move = self._placement = self._switched = 0
        self._settling: list[Callable[[], bool]] = []  # of parts whose change the device may not have made
        self._settled = [0] * num_ranks  # parts that devices have changed to, as far as is known
        self._noted: list[Noted] = []

    def begin(self, placement: int) -> None:
        """See `Agreement`."""
        self._move, self._placement = self._move + 1, placement

    def readable(self) -> list[bool]:
        """See `Agreement`."""
        self._memory.of(self._rank)
        return [each >= self._switched for each in self._settled]

    def pass_step(self, step: int) -> None:
        """See `Agreement`."""

    def arrive(self, step: int, has_all: bool) -> bool:
        """See `Agreement`."""
        self._memory.of(self._rank)
        if step % self._every:
            return False
        checkpoint = step // self._every
        while self._settling and self._settling[0]():
            self._settling.pop(0)
        before, changes = self._noted[-1] if self._noted else None, False
        if before and before.checkpoint == checkpoint - 1 and before.move == self._move:
            # Before this rank leaves what it has now: or it could be so far ahead that others no longer find
            # what they have yet to read.
            said = self._all_at(before)
            _check_alike(
                [r for r, e in enumerate(said) if e[1:3] != (before.move, before.placement)],
                self._rank,
                before.move,
            )
            self._settled = [each.settled for each in said]
            changes = all(each.had > self._switched for each in said)
        had, settled = self._switched + has_all, self._switched - len(self._settling)
        self._noted.append(Noted(checkpoint, self._move, self._placement, had, settled))
        self._noted = self._noted[-NOTES:]
        self._texts.leave(self._name, json.dumps(self._noted))
        return changes

    def changed(self, is_done: Callable[[], bool]) -> None:
        """See `Agreement`."""
        self._switched += 1
        self._settling.append(is_done)

    def _all_at(self, noted: Noted) -> list[Noted]:
        """What all ranks have said at the checkpoint of this rank's note."""
        deadline = Deadline(self._timeout_s)
        while True:
            notes = [_at(noted.checkpoint, text) for text in self._texts.left(self._name)]
            missing = [rank for rank, note in enumerate(notes) if note is None]
            if not missing:
                return [note for note in notes if note is not None]
            if deadline.left() <= 0:
                rule = "they move nothing, count steps otherwise, or have stopped"
                raise CommunicationTimeoutError("moving weights", noted.checkpoint, 0, missing, rule)
            time.sleep(PAUSE_S)


def _at(checkpoint: int, text: str) -> Noted | None:
    """What a text says of a checkpoint: nothing from a peer is trusted."""
    try:
        said: Any = json.loads(text) if text else []
        notes = [Noted(*map(int, each)) for each in said]
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    return next((note for note in notes if note.checkpoint == checkpoint), None)


def _check_alike(others: list[int], rank: int, move: int) -> None:
    """Raises for ranks that move to another placement."""
    if others:
        raise ConfigMismatchError(
            f"rank(s) {others} move to another placement than rank {rank} in move {move}. "
            "Pass the same placement on every rank."
        )
