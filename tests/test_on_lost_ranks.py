"""Whom a buffer goes on without: what it asks the group's store, and what waits end with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from moe_triton.backends.waits import Waits
from moe_triton.core.errors import CommunicationTimeoutError
from moe_triton.core.logs import FIELDS
from moe_triton.core.threads import in_thread
from moe_triton.rendezvous.masked_sets import MaskedSets
from moe_triton.runtime import on_lost
from moe_triton.runtime.on_lost import OnLostRanks
from tests.lost_rules import KnownMasks, MemoryStore
from tests.patience import seconds

RANKS = 3


class GoneStore:
    """A store whose host is gone."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """As torch's stores."""
        raise TimeoutError


def rank_0(
    store: Any,
    masks: KnownMasks,
    waits: Waits,
    timeout_s: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
) -> OnLostRanks:
    """What rank 0 does about lost ranks, as far as it is asked to."""
    with mock.patch.object(on_lost, "in_thread"):  # nothing runs by itself here
        sets = MaskedSets(lambda: store, RANKS, 0)
        context, notes = mock.Mock(rank=0, config=mock.Mock(num_ranks=RANKS)), mock.Mock()
        of_waits = notes, waits, timeout_s, {"dispatch": 4}, clock
        return OnLostRanks(context, masks, sets, *of_waits)  # type: ignore[arg-type]


def test_who_is_said_to_be_masked_is_looked_up_at_once() -> None:
    masks = KnownMasks(())
    rank_0(MemoryStore([0b010, 0b110]), masks, Waits()).hear({1})
    assert masks.masked == {1, 2}


def test_a_mask_is_said_with_its_rank_and_round(caplog: pytest.LogCaptureFixture) -> None:
    rank_0(MemoryStore([0b010]), KnownMasks(()), Waits()).hear({1})
    why = "rank 1 is masked from now on (as another rank has said), and the others go on without it"
    assert caplog.messages == [f"rank 0 of 3: dispatch number 4: {why}"]
    fields = {name: getattr(caplog.records[0], name) for name in FIELDS}
    assert fields == {"rank": 0, "num_ranks": 3, "group": "", "operator": "dispatch", "round": 4}


def test_who_is_masked_already_is_not_looked_up() -> None:
    store = mock.Mock()
    rank_0(store, KnownMasks([1]), Waits()).hear({1})
    store.compare_set.assert_not_called()


def test_a_store_that_is_gone_has_nothing_to_say() -> None:
    masks = KnownMasks(())
    rank_0(GoneStore(), masks, Waits()).hear({1})
    assert masks.masked == set()


def test_a_store_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_lost, "STORE_ANSWERS_S", 0.01)
    answers, asked = threading.Event(), threading.Semaphore(0)

    def compare_set(*_: str) -> bytes:
        asked.release()
        answers.wait(seconds(30.0))
        return b""

    rank = rank_0(mock.Mock(compare_set=compare_set), KnownMasks(()), Waits())
    rank.hear({1})
    rank.hear({1})
    assert asked.acquire(timeout=seconds(10.0))
    assert not asked.acquire(blocking=False)
    answers.set()


@pytest.mark.parametrize(
    ("timeout_s", "owed_s", "patience_s"),
    [
        (1.0, None, 1.0),
        (1.0, 0.125, 0.875),
        (1.0, 0.9, 0.25),
        (1.0, 60.0, 0.25),  # this process may have been stopped with the store's host
        (60.0, 0.5, 0.5),
        (60.0, 30.0, 0.2),
    ],
)
def test_what_the_store_owes_counts_for_its_time_to_answer(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float, owed_s: float | None, patience_s: float
) -> None:
    now, answers, asked, given = [100.0], threading.Event(), threading.Event(), []

    def compare_set(*_: str) -> bytes:
        asked.set()
        answers.wait(seconds(30.0))
        return b""

    def answer_of(asking: object, patience_s: float) -> None:
        given.append(patience_s)
        raise TimeoutError

    monkeypatch.setattr(on_lost, "FOLLOWED_S", 0.0)
    monkeypatch.setattr(on_lost, "_answer_of", answer_of)
    store = mock.Mock(compare_set=compare_set)
    rank = rank_0(store, KnownMasks(()), Waits(), timeout_s, lambda: now[0])
    following = threading.Thread(target=rank._follow)
    if owed_s is not None:
        following.start()
        assert asked.wait(seconds(10.0))
        now[0] += owed_s
    with pytest.raises(CommunicationTimeoutError, match="store does not answer"):
        rank.missing_ranks([1], "dispatch", 0)
    assert given == [pytest.approx(patience_s)]
    answers.set()
    rank.close()
    if owed_s is not None:
        following.join(seconds(10.0))
        assert not following.is_alive()


def test_each_call_gets_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was raised holds the frames of its call, and these the window: nobody keeps it."""
    monkeypatch.setattr(on_lost, "awaited_ranks", lambda *_: [1])
    monkeypatch.setattr(on_lost, "group_of", lambda *_: "")
    monkeypatch.setattr(on_lost, "in_thread", in_thread)
    waits, waiting = Waits(), mock.Mock()
    waiting.plan.operator, waiting.plan.zone, waiting.plan.phase = "combine", 1, ""
    rank_0(GoneStore(), KnownMasks(()), waits).missing(waiting)
    raised = []
    for _ in range(2):
        with pytest.raises(CommunicationTimeoutError, match=r"does not answer \(TimeoutError\)") as caught:
            waits.raise_stopped("combine")
        raised.append(caught.value)
    first, second = raised
    assert first is not second
    assert first.uncertain_ranks == second.uncertain_ranks == (1,)
    assert first.__cause__ is first.__context__ is None
