"""How ranks agree on the step in which they change to a part of a move.

Where ranks see each other's memory at once, as on CPUs, no message is needed but what each has left there
(`InMemory`): a rank that begins step t has ended the dispatch of step t - 1, which waits for every rank to
have begun it. So it sees whatever a rank has left before its own dispatch of t - 1. Each rank says in which
step it had everything; the step after the last of these is the one.

Where hosts run ahead of their devices, or queues lie between ranks (`AtCheckpoints`), words in memory say
nothing of the steps of others. There each leaves a text at every n-th step, a checkpoint, and what all have
left at one decides for all at the next: they read the same texts, so they decide alike.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from moe_triton.balance.carriers import Texts
from moe_triton.balance.stage import Memory
from moe_triton.core.errors import BufferStateError, CommunicationTimeoutError, ConfigMismatchError
from moe_triton.core.threads import Deadline

KEPT = 2  # moves and parts whose words stay
KEPT_STEPS = 4  # a rank may go on by a step or two while another one reads its words
# Where a rank's words begin.
MOVE, STEP, SWITCHED, BROKEN, PLACEMENTS = range(5)
DISPATCHES = PLACEMENTS + KEPT
HAD = DISPATCHES + KEPT_STEPS
HAD_WORDS = 3  # of a part: its number, in which step, and what it leads to
NUM_WORDS = HAD + HAD_WORDS * KEPT
NUMBERS = (MOVE, STEP, SWITCHED, BROKEN, *range(HAD, NUM_WORDS, HAD_WORDS))
"""Words that are written behind those that they are the numbers of."""
LATE_STEPS = 1000
"""So many steps after this rank a rank that has not begun the same move is named."""
# Checkpoints whose notes stay. Who has changed at one need not wait at the next, where a move begins, but at
# the one after that; and the slowest rank may still have to read what was said before the first of these.
NOTES = 3
PAUSE_S = 1e-3


class Agreement(Protocol):
    """What ranks say of moves, and when they change. Once it has raised it is of no more use.

    All raise BufferStateError where the memory was given back, or another rank has given up, and
    ConfigMismatchError where a rank moves to another placement, or counts its steps otherwise.
    """

    def enter(self, is_filled: Callable[[], bool]) -> None:
        """Says that this rank's weights are there.

        Args:
            is_filled: whether its device has them, too.
        """

    def begin(self, placement: int) -> None:
        """Begins a move, to a placement that a number stands for."""

    def readable(self) -> list[bool]:
        """By rank, whether its weights are those that this rank has changed to, and can be read."""

    def arrive(self, step: int, has_all: bool, target: int) -> bool:
        """Begins a step while something moves, and tells whether the current part changes in it.

        Args:
            step: its number.
            has_all: whether this rank has all of the current part.
            target: stands for the placement that the part leads to.

        Raises:
            CommunicationTimeoutError: a rank has not said what it has.
        """

    def pass_step(self, step: int) -> None:
        """Begins a step in which nothing moves."""

    def changed(self, is_done: Callable[[], bool]) -> None:
        """Says that this rank has changed to the current part.

        Args:
            is_done: whether its device has, too.
        """

    def give_up(self) -> None:
        """Says that this rank takes no part any more."""


class Said(NamedTuple):
    """What a rank has left of itself: 64-bit words at the beginning of its memory, in this order.

    Attributes:
        move: number of its latest move, from 1; 0 before the first.
        step: one more than that which it has begun last; 0 before the first.
        switched: parts that it has changed to, of all moves.
        broken: 1 once it has given up.
        placements: of move m, at ``m % KEPT``, what stands for its placement: written before its number, so
            that who reads the number of the move before finds that one's.
        dispatches: of step s, at ``s % KEPT_STEPS``, how many dispatches there were before it.
        had: of part p, from 1, at ``p % KEPT`` the number p, once it has all of that, behind it the step in
            which it had, and what stands for the placement that the part leads to.
    """

    move: int
    step: int
    switched: int
    broken: int
    placements: tuple[int, ...]
    dispatches: tuple[int, ...]
    had: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(words: list[int]) -> Said:
        """What stands in some words."""
        had = [tuple(words[at : at + HAD_WORDS]) for at in range(HAD, NUM_WORDS, HAD_WORDS)]
        placements, dispatches = words[PLACEMENTS:DISPATCHES], words[DISPATCHES:HAD]
        move, step, switched, broken = words[:PLACEMENTS]
        return Said(move, step, switched, broken, tuple(placements), tuple(dispatches), tuple(had))


class InMemory:
    """See `Agreement`: by words in the ranks' memory.

    Args:
        memory: of all ranks, zeros where the words are.
        rank: this one.
        num_ranks: W.
    """

    def __init__(self, memory: Memory, rank: int, num_ranks: int) -> None:
        self._memory, self._rank, self._fence = memory, rank, memory.copies.fence
        heads = [memory.of(r)[: 8 * NUM_WORDS].view(torch.int64).numpy() for r in range(num_ranks)]
        self._words_of = [words.data for words in heads]  # whose words cost less one by one
        self._words = self._words_of[rank]
        self._first_step: int | None = None
        self._begun = 0  # in which step

    def enter(self, is_filled: Callable[[], bool]) -> None:
        """See `Agreement`. Its first step says so."""
        assert is_filled()

    def begin(self, placement: int) -> None:
        """See `Agreement`."""
        self._memory.of(self._rank)
        number = int(self._words[MOVE]) + 1
        self._words[PLACEMENTS + number % KEPT] = placement
        self._put(MOVE, number)
        self._begun = int(self._words[STEP])

    def readable(self) -> list[bool]:
        """See `Agreement`. Nobody is ahead of what this rank lacks."""
        said = self._all_said()
        mine = said[self._rank][SWITCHED]
        return [words[STEP] > 0 and words[SWITCHED] >= mine for words in said]

    def pass_step(self, step: int) -> None:
        """See `Agreement`."""
        self._memory.of(self._rank)  # an error once it was given back
        if self._first_step is None:
            self._first_step = step
        self._words[DISPATCHES + step % KEPT_STEPS] = self._memory.num_dispatches()
        self._put(STEP, step + 1)

    def arrive(self, step: int, has_all: bool, target: int) -> bool:
        """See `Agreement`."""
        self.pass_step(step)
        said = self._all_said()
        mine = said[self._rank]
        part = mine[SWITCHED] + 1
        at = HAD + HAD_WORDS * (part % KEPT)
        if has_all and mine[at] != part:
            self._words[at + 1], self._words[at + 2] = step, target
            self._put(at, part)
            return False
        for words in said:
            if words[at] != part:
                self._look_for_the_late(said)
                return False
        _check_alike([rank for rank, words in enumerate(said) if words[at + 2] != target], self._rank)
        due = max(words[at + 1] for words in said) + 1
        if step > due:
            raise ConfigMismatchError(f"the ranks change weights in step {due}, and this one is in {step}")
        return step == due

    def changed(self, is_done: Callable[[], bool]) -> None:
        """See `Agreement`."""
        assert is_done()
        self._put(SWITCHED, self._words[SWITCHED] + 1)

    def give_up(self) -> None:
        """See `Agreement`."""
        self._memory.of(self._rank)
        self._words[BROKEN] = 1

    def _put(self, at: int, number: int) -> None:
        """Leaves a number behind the rest, and the weights: others look at the number first."""
        if self._fence is not None:
            self._fence()
        self._words[at] = number

    def _read(self) -> list[list[int]]:
        """All ranks' words, those that are numbers first: what they are the numbers of is there by then."""
        first = [words.tolist() for words in self._words_of]
        if self._fence is None:
            return first
        self._fence()
        said = [words.tolist() for words in self._words_of]
        for each, before in zip(said, first, strict=True):
            for at in NUMBERS:
                each[at] = before[at]
        return said

    def _all_said(self) -> list[list[int]]:
        """What all ranks have left.

        Raises:
            BufferStateError: one has given up.
            ConfigMismatchError: one moves elsewhere, or counts its steps otherwise.
        """
        said = self._read()
        mine = said[self._rank]
        for words in said:
            if not _is_alike(words, mine):
                self._check([Said.of(each) for each in said])
                break
        return said

    def _check(self, said: list[Said]) -> None:
        """Looks for what is wrong, if anything is."""
        mine = said[self._rank]
        numbered = list(enumerate(said))
        _check_here([r for r, each in numbered if each.broken])
        at = mine.move % KEPT
        _check_alike(
            [r for r, e in numbered if e.move == mine.move and e.placements[at] != mine.placements[at]],
            self._rank,
        )
        self._check_steps(numbered, mine)

    def _check_steps(self, numbered: list[tuple[int, Said]], mine: Said) -> None:
        """Checks that ranks are at most a step apart, and that a step is the same one for all."""
        # Who has begun two steps has seen a dispatch of the first end, for which all had begun that.
        has_passed = self._first_step is not None and mine.step - 1 > self._first_step + 1
        far = {
            r: each.step - 1
            for r, each in numbered
            if (each.step or has_passed) and mine.step and abs(each.step - mine.step) > 1
        }
        if far:
            raise ConfigMismatchError(
                f"rank {self._rank} is in step {mine.step - 1}, and others, by rank, in {far} (-1: in none): "
                "ranks are never more than a step apart. Call switch in each step, and count alike."
            )
        for rank, each in numbered:
            for step in {each.step - 1, each.step - 2} & {mine.step - 1, mine.step - 2}:
                # A step before a rank's first one has left no count.
                if step < max(self._first_step or 0, 0) or not each.step:
                    continue
                at = step % KEPT_STEPS
                counts = each.dispatches[at], mine.dispatches[at]
                if counts[0] != counts[1] and 0 not in counts:
                    raise ConfigMismatchError(
                        f"before step {step} rank {rank} has begun {counts[0]} dispatches, and rank "
                        f"{self._rank} {counts[1]}: it is not the same step. Count steps alike on every rank."
                    )

    def _look_for_the_late(self, said: list[list[int]]) -> None:
        mine = said[self._rank]
        if mine[STEP] - self._begun <= LATE_STEPS:
            return
        if late := [rank for rank, words in enumerate(said) if words[MOVE] < mine[MOVE]]:
            raise ConfigMismatchError(
                f"rank(s) {late} have not begun move {mine[MOVE]} of rank {self._rank}, {LATE_STEPS} steps "
                "after it. Begin the same moves on every rank."
            )


class Noted(NamedTuple):
    """What a rank says at a checkpoint.

    Attributes:
        checkpoint: its number.
        move, placement: as in `Said`.
        had: parts that it has all of, and its device too.
        settled: parts that its device has changed to; -1 until it has the first weights.
        dispatches: that it had begun before.
        is_broken: 1 once it has given up.
    """

    checkpoint: int
    move: int
    placement: int
    had: int
    settled: int
    dispatches: int
    is_broken: int


def _is_alike(words: list[int], mine: list[int]) -> bool:
    """Whether nothing can be wrong with what a rank has left, as in nearly every step."""
    low = min(words[STEP], mine[STEP])
    placement = PLACEMENTS + mine[MOVE] % KEPT
    last, before = DISPATCHES + (low - 1) % KEPT_STEPS, DISPATCHES + (low - 2) % KEPT_STEPS
    return (
        not words[BROKEN]
        and low > 1
        and max(words[STEP], mine[STEP]) - low <= 1
        and (words[MOVE] != mine[MOVE] or words[placement] == mine[placement])
        and words[last] == mine[last]
        and words[before] == mine[before]
    )


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
        self._settled = [-1] * num_ranks  # parts that devices have changed to, as far as is known
        self._noted: list[Noted] = []

    def enter(self, is_filled: Callable[[], bool]) -> None:
        """See `Agreement`."""
        self._settling.append(is_filled)

    def begin(self, placement: int) -> None:
        """See `Agreement`."""
        self._memory.of(self._rank)
        self._move, self._placement = self._move + 1, placement

    def readable(self) -> list[bool]:
        """See `Agreement`."""
        self._memory.of(self._rank)
        return [each >= self._switched for each in self._settled]

    def pass_step(self, step: int) -> None:
        """See `Agreement`."""

    def arrive(self, step: int, has_all: bool, target: int) -> bool:
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
            self._settled = [each.settled for each in said]
            changes = all(each.had > self._switched for each in said)
        else:
            _check_given_up(self._texts.left(self._name))
        had, settled = self._switched + has_all, self._switched - len(self._settling)
        dispatches = self._memory.num_dispatches()
        self._noted.append(Noted(checkpoint, self._move, self._placement, had, settled, dispatches, 0))
        self._leave()
        return changes

    def give_up(self) -> None:
        """See `Agreement`. The others see it at the next checkpoint in which something moves."""
        self._memory.of(self._rank)
        last = self._noted[-1] if self._noted else Noted(0, 0, 0, 0, 0, 0, 0)
        self._noted.append(last._replace(is_broken=1))
        self._leave()

    def _leave(self) -> None:
        self._noted = self._noted[-NOTES:]
        self._texts.leave(self._name, json.dumps(self._noted))

    def changed(self, is_done: Callable[[], bool]) -> None:
        """See `Agreement`."""
        self._switched += 1
        self._settling.append(is_done)

    def _all_at(self, mine: Noted) -> list[Noted]:
        """What all ranks have said at the checkpoint of this rank's note.

        Raises:
            BufferStateError: one has given up.
            ConfigMismatchError: one moves elsewhere, or counts its steps otherwise.
            CommunicationTimeoutError: one has said nothing of it.
        """
        deadline = Deadline(self._timeout_s)
        while True:
            texts = self._texts.left(self._name)
            _check_given_up(texts)
            notes = [_at(mine.checkpoint, text) for text in texts]
            said = [note for note in notes if note is not None]
            _check_alike(
                [
                    r
                    for r, n in enumerate(notes)
                    if n and (n.move, n.placement) != (mine.move, mine.placement)
                ],
                self._rank,
            )
            others = {r: n.dispatches for r, n in enumerate(notes) if n and n.dispatches != mine.dispatches}
            if others:
                raise ConfigMismatchError(
                    f"before step {mine.checkpoint * self._every} rank {self._rank} has begun "
                    f"{mine.dispatches} dispatches, and others, by rank, {others}: it is not the same step. "
                    "Count steps alike on every rank."
                )
            if len(said) == len(notes):
                return said
            if deadline.left() <= 0:
                missing = [rank for rank, note in enumerate(notes) if note is None]
                rule = "they have not begun the same move since the checkpoint before, or have stopped"
                raise CommunicationTimeoutError("moving weights", mine.checkpoint, 0, missing, rule)
            time.sleep(PAUSE_S)


def _notes_of(text: str) -> list[Noted]:
    """What a text says: nothing from a peer is trusted."""
    try:
        said: Any = json.loads(text) if text else []
        return [Noted(*map(int, each)) for each in said]
    except (ValueError, TypeError, OverflowError, RecursionError):
        return []


def _at(checkpoint: int, text: str) -> Noted | None:
    """What a text says of a checkpoint."""
    return next((note for note in _notes_of(text) if note.checkpoint == checkpoint), None)


def _check_given_up(texts: list[str]) -> None:
    """Raises for ranks that say so at any checkpoint."""
    _check_here([r for r, text in enumerate(texts) if any(note.is_broken for note in _notes_of(text))])


def _check_here(gone: list[int]) -> None:
    """Raises for ranks that take no part any more."""
    if gone:
        raise BufferStateError(f"rank(s) {gone} have given up moving weights, or given theirs back.")


def _check_alike(others: list[int], rank: int) -> None:
    """Raises for ranks that move to another placement."""
    if others:
        raise ConfigMismatchError(
            f"rank(s) {others} move to another placement than rank {rank}. Begin the same moves on all ranks."
        )
