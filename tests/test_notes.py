"""Ranks that are missing because they are stuck themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch.distributed as dist

from moe_triton.rendezvous import notes as notes_module
from moe_triton.rendezvous.notes import (
    EACH_OTHER,
    IN_TIME,
    LAST_WORD_S,
    NO_STORE,
    NOT_SEEN,
    NOTED_AFTER_S,
    PERIOD_S,
    SILENT_S,
    Culprits,
    Inquiry,
    Note,
    Notes,
)
from moe_triton.rendezvous.stores import read_key
from tests.patience import seconds

RANKS = 4
WITHIN_S = seconds(20.0)
ABSENT_AFTER_S = NOTED_AFTER_S + PERIOD_S
CALL = "combine number 7"


def waits(*ranks: int, beat: int = 0) -> str:
    return Note("waits", CALL, ranks).text(beat)


def over(*ranks: int) -> str:
    return Note("over", CALL, ranks).text(0)


class Asked:
    """An inquiry of rank 0, by a clock of its own.

    Args:
        missing: ranks that it misses.
        before: notes when its wait began.
    """

    def __init__(
        self, *missing: int, before: dict[int, tuple[str, float]] | None = None, sees_waits: bool = True
    ) -> None:
        self._inquiry = Inquiry(0, RANKS, before or {}, ABSENT_AFTER_S if sees_waits else None)
        self._missing, self._now = missing, 100.0

    def look(self, notes: dict[int, str], after_s: float = 0.0) -> bool:
        self._now += after_s
        return self._inquiry.look(self._missing, lambda rank: notes.get(rank, ""), self._now)

    def looks_for(self, notes: dict[int, str], for_s: float) -> bool:
        """Looks as often as ranks do, which never pauses for long."""
        steps = round(for_s / 0.05)
        return [self.look(notes, 0.05) for _ in range(steps)][-1]

    @property
    def found(self) -> Culprits:
        return self._inquiry.found()


def test_who_leaves_no_note_is_gone_once_a_wait_would_have_left_one() -> None:
    asked = Asked(1, 2)
    assert not asked.look({})
    assert not asked.looks_for({}, ABSENT_AFTER_S - 0.1)
    assert asked.looks_for({}, 0.2)
    assert asked.found == Culprits((1, 2))


def test_a_note_excuses_while_it_is_renewed() -> None:
    asked = Asked(1)
    assert not asked.look({1: waits(3)})
    assert not asked.look({1: waits(3, beat=1)}, 0.05)  # rank 3 may still leave one
    assert asked.looks_for({1: waits(3, beat=1)}, ABSENT_AFTER_S + 0.05)
    said = "rank 1 waited itself for rank(s) [3] in combine number 7. "
    assert asked.found == Culprits((3,), said=said)


def test_a_note_that_is_renewed_no_more_excuses_nobody() -> None:
    """Its rank waited for a slow one, then died: the slow one has come since."""
    asked = Asked(1)
    asked.look({1: waits(3)})
    assert asked.looks_for({1: waits(3)}, SILENT_S + 0.05)
    said = "rank 1 began to wait in combine number 7 and has not run since. "
    assert asked.found == Culprits((1,), said=said)


def test_a_wait_that_has_ended_excuses_nobody() -> None:
    asked = Asked(1, before={1: (over(3), 100.0 - SILENT_S)})
    asked.look({1: over(3)})
    assert asked.looks_for({1: over(3)}, ABSENT_AFTER_S + 0.05)
    assert asked.found == Culprits((1,))


def test_whose_wait_has_only_just_ended_is_named_with_a_doubt() -> None:
    asked = Asked(1, 2, before={1: (over(3), 100.1 - SILENT_S)})
    asked.look({1: over(3)})
    assert asked.looks_for({1: over(3)}, ABSENT_AFTER_S + 0.05)
    assert asked.found.ranks == (1, 2)
    assert asked.found.uncertain == (1,)
    assert "rank 1 has itself waited for rank(s) [3]" in asked.found.why
    assert asked.found.why in asked.found.said


def test_last_words_excuse_for_good_or_not_at_all() -> None:
    raised, left = Note("raised", CALL, (2,)).text(5), Note("left", "dispatch number 3 ended", ()).text(6)
    asked = Asked(1)
    assert asked.look({1: raised, 2: left})
    said = (
        "rank 1 waited itself for rank(s) [2] in combine number 7; rank 2 has left: dispatch number 3 ended. "
    )
    assert asked.found == Culprits((2,), said=said)


def test_ranks_that_wait_for_each_other_are_all_named_with_a_doubt() -> None:
    asked = Asked(1)
    assert asked.look({1: Note("raised", CALL, (0, 2)).text(1), 2: Note("raised", CALL, (1,)).text(1)})
    assert (asked.found.ranks, asked.found.uncertain, asked.found.why) == ((1,), (1,), EACH_OTHER)


def test_who_waits_for_this_rank_only_after_its_deadline_has_come_too_late() -> None:
    asked = Asked(1)
    asked.look({})
    assert asked.look({1: waits(0)}, 0.5)
    said = "rank 1 waited itself for rank(s) [0] in combine number 7. "
    assert asked.found == Culprits((1,), said=said)


def test_a_rank_that_has_not_run_itself_looks_as_long_again() -> None:
    asked = Asked(1)
    asked.look({1: waits(3)})
    assert not asked.look({1: waits(3)}, 60.0)
    assert asked.looks_for({1: waits(3)}, SILENT_S + 0.05)
    assert asked.found.ranks == (1,)


def test_where_waits_are_not_seen_only_last_words_are_certain() -> None:
    asked = Asked(1, 2, sees_waits=False)
    assert asked.look({2: Note("left", "it", ()).text(0)})
    assert (asked.found.ranks, asked.found.uncertain, asked.found.why) == ((1, 2), (1,), NOT_SEEN)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "7",
        '["waits", "call", [1], "never"]x',
        '["waits", "call", [9], 1]',
        '["waits", "call", [-1], 0]',
        '["gone", "call", [1], 0]',
        '[[], "call", [1], 0]',
        '["waits", [], [1], 0',
        "[" * 9999,
    ],
)
def test_what_is_no_note_is_passed_by(text: str) -> None:
    asked = Asked(1)
    asked.look({1: text})
    asked.looks_for({1: text}, ABSENT_AFTER_S + 0.05)
    assert asked.found == Culprits((1,))


def until(is_so: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(WITHIN_S / 0.01)):
        if is_so():
            return
        pause.wait(0.01)
    raise AssertionError("it has never been so")


def states(store: dist.Store, rank: int) -> str:
    note = Note.read(read_key(store, str(rank)), RANKS)  # type: ignore[arg-type]
    return note.state if note else ""


def test_a_note_ends_with_its_wait_and_a_last_word_is_the_last() -> None:
    store, going = dist.HashStore(), threading.Event()
    notes = Notes(lambda: store, 1, RANKS)  # type: ignore[arg-type, return-value]
    notes.leave(CALL, [3], lambda: not going.is_set())
    until(lambda: states(store, 1) == "waits")
    first = read_key(store, "1")  # type: ignore[arg-type]
    until(lambda: read_key(store, "1") != first)  # type: ignore[arg-type]
    assert states(store, 1) == "waits"
    going.set()
    until(lambda: states(store, 1) == "over")
    going.clear()
    notes.leave(CALL, [2], lambda: not going.is_set())
    until(lambda: states(store, 1) == "waits")
    notes.say("left", "it was interrupted", ())
    going.set()
    notes.last_word("raised", CALL, [2])
    until(lambda: states(store, 1) == "raised")
    notes.last_word("left", "again")
    assert states(store, 1) == "raised"


@pytest.mark.parametrize(("silent_s", "waits_s"), [(0.0, LAST_WORD_S), (1.0, 0.0)])
def test_nobody_waits_for_the_last_word_where_the_store_owes_an_answer(
    monkeypatch: pytest.MonkeyPatch, silent_s: float, waits_s: float
) -> None:
    now, asked, answers, saying = [100.0], threading.Event(), threading.Event(), mock.Mock()

    def keep(key: str, value: str) -> None:
        asked.set()
        answers.wait(seconds(30.0))

    store = mock.Mock(set=keep)
    notes = Notes(lambda: store, 1, RANKS, clock=lambda: now[0])
    waiting = threading.Thread(target=lambda: next(notes.renewing(CALL, [], lambda: True)))
    waiting.start()
    assert asked.wait(seconds(10.0))
    now[0] += silent_s
    monkeypatch.setattr(notes_module, "in_thread", lambda call, name: saying)
    notes.last_word("raised", CALL, [2])
    saying.result.assert_called_once_with(waits_s)
    answers.set()
    waiting.join(seconds(10.0))
    assert not waiting.is_alive()


def test_who_is_stuck_is_asked_for_in_the_store() -> None:
    store = dist.HashStore()
    Notes(lambda: store, 1, RANKS).say("raised", CALL, (3,))  # type: ignore[arg-type, return-value]
    Notes(lambda: store, 3, RANKS).say("left", "it was closed", ())  # type: ignore[arg-type, return-value]
    found = Notes(lambda: store, 0, RANKS).culprits(CALL, [1])  # type: ignore[arg-type, return-value]
    assert (found.ranks, found.uncertain) == ((3,), ())
    assert states(store, 0) == "raised"


class Watched:
    """What rank 0 says of the ranks it misses, while it waits, by a clock of its own."""

    PATIENCE_S = 8.0

    def __init__(self, *missing: int) -> None:
        self.store, self.now, self._missing, is_over = dist.HashStore(), 100.0, missing, [False]
        self._notes = Notes(lambda: self.store, 0, RANKS, clock=lambda: self.now)  # type: ignore[arg-type, return-value]
        self._renewing = self._notes.renewing(CALL, missing, lambda: not is_over[0])

    def after(self, seconds: float, notes: dict[int, str], cleared: Sequence[int] = ()) -> list[int]:
        """Who holds it up, once a while has gone by with these notes, which waits renew."""
        for beat in range(round(seconds / PERIOD_S)):
            for rank, text in notes.items():
                note = Note.read(text, RANKS)
                self.store.set(str(rank), note.text(beat) if note and note.state == "waits" else text)
            self.now += PERIOD_S
            next(self._renewing)
        return self._notes.holding_up(self._missing, self.PATIENCE_S, cleared)


def test_who_does_not_wait_holds_others_up() -> None:
    watched = Watched(1, 2)
    assert watched.after(8.0, {1: waits(3), 2: waits(0)}) == [2]
    assert watched.after(1.0, {1: waits(3)}) == [2]


def test_who_has_been_stuck_until_now_is_missed_a_time_out_later() -> None:
    """It goes on only now that the one it waited for is masked."""
    watched = Watched(1)
    assert watched.after(8.0, {1: waits(3)}) == []
    assert watched.after(0.5, {1: over(3)}) == []
    assert watched.after(7.0, {1: over(3)}) == []
    assert watched.after(1.0, {1: over(3)}) == [1]


def test_a_wait_that_was_over_before_excuses_nobody_who_holds_others_up() -> None:
    watched = Watched(1)
    assert watched.after(8.0, {1: over(3)}) == [1]


def test_a_wait_that_nobody_has_watched_excuses_while_its_ranks_have_just_been_masked() -> None:
    watched = Watched(*range(1, RANKS))
    said = dict.fromkeys(range(1, RANKS), over(3, 2))
    assert watched.after(8.0, said, cleared=[2]) == []
    assert watched.after(8.0, said, cleared=[]) == [1, 2, 3]


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes_module, "ASK_S", 0.01)
    monkeypatch.setattr(notes_module, "GRACE_S", 0.01)
    answered = threading.Event()

    def hang() -> dist.Store:
        answered.wait(WITHIN_S)
        raise RuntimeError

    notes = Notes(hang, 0, RANKS)  # type: ignore[arg-type]
    notes.leave("dispatch number 1", [2], lambda: True)
    found = notes.culprits(CALL, [1, 2])
    assert not answered.is_set()
    answered.set()
    assert (found.ranks, found.uncertain, found.why) == ((1, 2), (1, 2), NO_STORE)
    assert NO_STORE in found.said


def test_notes_that_take_too_long_leave_a_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes_module, "ASK_S", 0.0)
    store = dist.HashStore()
    found = Notes(lambda: store, 0, RANKS).culprits(CALL, [1])  # type: ignore[arg-type, return-value]
    assert (found.ranks, found.uncertain, found.why) == ((1,), (1,), IN_TIME)


def test_a_thread_that_cannot_start_leaves_a_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    found = Notes(lambda: dist.HashStore(), 0, RANKS).culprits(CALL, [1])  # type: ignore[arg-type, return-value]
    assert found.uncertain == (1,)
    assert "can't start new thread" in found.why
