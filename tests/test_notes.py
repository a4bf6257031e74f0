"""Ranks that are missing because they are stuck themselves."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from moe_triton.rendezvous import notes as notes_module
from moe_triton.rendezvous.notes import Notes

RANKS = 4
WITHIN_S = 20.0


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()  # type: ignore[attr-defined]


def leave(store: dist.Store, rank: int, call: str, ranks: list[int]) -> None:
    """Leaves a note once, as a wait does that ends at once in an error."""
    Notes(lambda: store, rank, RANKS).leave(call, ranks, iter([True, False]).__next__)  # type: ignore[arg-type, return-value]
    deadline = time.monotonic() + WITHIN_S
    while not store.check([str(rank)]) and time.monotonic() < deadline:
        time.sleep(0.001)


def test_who_left_no_note_is_gone(store: dist.Store) -> None:
    assert Notes(lambda: store, 0, RANKS).gone([1, 2]) == ([1, 2], "")  # type: ignore[arg-type, return-value]


def test_a_rank_that_is_stuck_is_not_gone(store: dist.Store) -> None:
    leave(store, 1, "combine number 7", [3])
    gone = Notes(lambda: store, 0, RANKS).gone  # type: ignore[arg-type, return-value]
    said = "rank 1 waited itself for rank(s) [3] in combine number 7. "
    assert gone([1]) == ([3], said)
    assert gone([1, 2]) == ([2, 3], said)
    leave(store, 3, "dispatch number 8", [2])
    assert gone([1])[0] == [2]


def test_ranks_that_wait_for_each_other_are_all_named(store: dist.Store) -> None:
    leave(store, 1, "combine number 7", [0])
    missing, said = Notes(lambda: store, 0, RANKS).gone([1])  # type: ignore[arg-type, return-value]
    assert missing == [1]
    assert "rank 1 waited itself for rank(s) [0]" in said


@pytest.mark.parametrize(
    "text", ["", "{", "7", '["call", [1], "never"]', '["call", [9], 1e9]', '["call", [-1], 0]', "[" * 9999]
)
def test_what_is_no_note_is_passed_by(store: dist.Store, text: str) -> None:
    store.set("1", text)
    assert Notes(lambda: store, 0, RANKS).gone([1]) == ([1], "")  # type: ignore[arg-type, return-value]


def test_old_notes_do_not_count(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(store, 1, "combine number 7", [3])
    monkeypatch.setattr(notes_module, "FRESH_S", 0.0)
    assert Notes(lambda: store, 0, RANKS).gone([1]) == ([1], "")  # type: ignore[arg-type, return-value]


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes_module, "LOOK_UP_S", 0.05)
    answered = threading.Event()

    def hang() -> dist.Store:
        answered.wait(WITHIN_S)
        raise RuntimeError

    notes = Notes(hang, 0, RANKS)  # type: ignore[arg-type]
    notes.leave("dispatch number 1", [2], lambda: True)
    begin = time.monotonic()
    assert notes.gone([1, 2]) == ([1, 2], "")
    assert time.monotonic() - begin < WITHIN_S / 2
    answered.set()
