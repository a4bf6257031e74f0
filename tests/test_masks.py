"""What is known of masks while another thread changes them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from moe_triton.core.config import Config
from moe_triton.core.reach import CHANGES_SHIFT, KNOWN_WORD, NUM_CHANGES_WORDS
from moe_triton.runtime import masks as masks_of_a_window
from moe_triton.runtime.masks import Masks, Paths, State
from moe_triton.schemes.rank_context import OPERATORS
from tests.patience import seconds

RANKS = 4


class Watched:
    """A table of peers; another thread learns of a change as soon as kernels can see it."""

    def __init__(self) -> None:
        self._words = torch.zeros(RANKS + NUM_CHANGES_WORDS, dtype=torch.int64)
        self.device = self._words.device
        self.learned: list[State] = []
        self.unnoticed: list[int] = []
        self.thread = threading.Thread(target=lambda: self.learned.append(self.masks.learn()))
        self.masks: Masks

    def tolist(self) -> list[int]:
        return self._words.tolist()

    def __setitem__(self, place: int, word: Any) -> None:
        self._words[place] = word
        count, known = self._words[RANKS : RANKS + KNOWN_WORD + 1].tolist()
        if place < RANKS and count == known:
            self.unnoticed.append(place)
        if place == RANKS and count % 2**CHANGES_SHIFT > 0 and not self.learned:
            self.thread.start()
            self.thread.join(0.2)  # as much of it as can be now


def test_a_call_learns_of_a_mask_behind_all_who_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for faults behind a call that went on without a rank is to hear of it."""
    monkeypatch.setattr(masks_of_a_window, "TOLD_WITHIN_S", seconds(30.0))
    config = Config(RANKS, 4, 64, 2, 2 * RANKS, scheme="fullmesh_v1", relaxed=True)
    words = torch.zeros(RANKS + NUM_CHANGES_WORDS, dtype=torch.int64)
    masks = Masks(words, Paths(config, 0, False), dict.fromkeys(OPERATORS, 0), lambda: None)
    begun, goes_on, order = threading.Event(), threading.Event(), list[str]()

    def listen(rank: int, why: str) -> None:
        begun.set()
        goes_on.wait(seconds(10.0))
        order.append("told")

    def learn() -> None:
        masks.learn()
        order.append("learned")

    masks.on_masked.append(listen)
    masking, learning = threading.Thread(target=masks.update, args=(2, True)), threading.Thread(target=learn)
    masking.start()
    assert begun.wait(seconds(10.0))
    learning.start()
    learning.join(0.05)  # as much of it as can be now
    goes_on.set()
    for thread in (masking, learning):
        thread.join(seconds(10.0))
    assert order == ["told", "learned"]


def test_a_change_that_kernels_have_seen_is_learned() -> None:
    """A call whose kernels went on without a rank would otherwise take its results for summed."""
    config = Config(RANKS, 4, 64, 2, 2 * RANKS, scheme="fullmesh_v1", relaxed=True)
    words = Watched()
    words.masks = Masks(words, Paths(config, 0, False), dict.fromkeys(OPERATORS, 0), lambda: None)  # type: ignore[arg-type]
    words.masks.update(2, True)
    words.thread.join()
    assert words.learned == [words.masks.known]
    assert words.masks.known.masked == {2}
    # Kernels that saw a word of a rank have run in calls that stop, then and when one more is masked.
    words.masks.update(3, True)
    assert words.unnoticed == []
    words.masks.learn()
    assert words.masks.marked(torch.tensor([[0, 4], [5, 7]])).tolist() == [[0, -6], [-7, -9]]
