"""What ranks settle of a call of which a masked rank has told some of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from moe_triton.core.config import Config
from moe_triton.core.errors import BufferStateError, CommunicationTimeoutError
from moe_triton.core.reach import NUM_CHANGES_WORDS
from moe_triton.runtime.masks import Masks, Paths
from moe_triton.runtime.settled_calls import SettledCalls, Verdict
from moe_triton.schemes.rank_context import OPERATORS
from tests.patience import seconds

RANKS, LOST = 4, 3
OTHERS = range(RANKS - 1)


class Rank:
    """One of them, with masks and the dispatches that it has ended."""

    def __init__(self, rank: int, store: Any, timeout_s: float = 30.0) -> None:
        self.is_rung = False
        self.counts = dict.fromkeys(OPERATORS, 0) | {"dispatch": 7}
        config = Config(RANKS, 4, 64, 2, 2 * RANKS, product="A3", scheme="fullmesh_v1", relaxed=True)
        words = torch.zeros(RANKS + NUM_CHANGES_WORDS, dtype=torch.int64)
        self.masks = Masks(words, Paths(config, rank, False), self.counts, lambda: None)
        self.calls = SettledCalls(lambda: store, rank, RANKS, self.masks, timeout_s, self.ended)
        self.masks.on_masked.append(self.calls.note)

    def ended(self) -> tuple[int, bool]:
        return self.counts["dispatch"], self.is_rung

    def settle(self, rounds: int, number: int = 7) -> Verdict:
        return self.calls.settle(number, lambda: Verdict(rounds, None), None)


@pytest.fixture
def store() -> Any:
    store = HashStore()
    store.set_timeout(timedelta(seconds=seconds(30.0)))
    return store


def together(*calls: Callable[[], Verdict]) -> list[Verdict]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result(seconds(60.0)) for each in [pool.submit(call) for call in calls]]


def test_nobody_asks_where_nobody_is_masked(store: Any) -> None:
    ranks = [Rank(rank, store) for rank in range(RANKS)]
    assert [each.settle(2) for each in ranks] == [Verdict(2, None)] * RANKS
    assert store.num_keys() <= 1  # its own


@pytest.mark.parametrize("heard", [0, 1, 2])
def test_all_go_by_who_has_heard_the_lost_one(store: Any, heard: int) -> None:
    ranks = [Rank(rank, store) for rank in OTHERS]
    assert ranks[heard].settle(5).rounds == 5  # it has decided before it masks anybody
    for each in ranks:
        each.masks.update(LOST, True)
    settled = together(*(partial(each.settle, 2) for each in ranks if each is not ranks[heard]))
    assert [each.rounds for each in settled] == [5, 5]


def test_who_has_heard_it_says_so_once_it_masks(store: Any) -> None:
    """The others wait for that."""
    ranks = [Rank(rank, store) for rank in OTHERS]
    ranks[1].settle(5)
    for each in (ranks[0], ranks[2]):
        each.masks.update(LOST, True)
    threading.Timer(0.1, ranks[1].masks.update, (LOST, True)).start()
    assert [each.rounds for each in together(*(partial(ranks[r].settle, 2) for r in (0, 2)))] == [5, 5]


def test_what_native_code_has_run_had_one_round(store: Any) -> None:
    """Python has decided nothing of it."""
    ranks = [Rank(rank, store) for rank in OTHERS]
    ranks[1].counts["dispatch"] = 8
    for each in ranks:
        each.masks.update(LOST, True)
    assert together(*(partial(ranks[r].settle, 1) for r in (0, 2))) == [Verdict(1, None)] * 2


def test_whoever_was_rung_has_not_decided_yet(store: Any) -> None:
    ranks = [Rank(rank, store) for rank in OTHERS]
    ranks[1].counts["dispatch"], ranks[1].is_rung = 8, True
    for each in ranks:
        each.masks.update(LOST, True)
    assert [each.rounds for each in together(*(partial(each.settle, 3) for each in ranks))] == [3] * 3


def test_where_nobody_has_all_go_without_it(store: Any) -> None:
    ranks = [Rank(rank, store) for rank in OTHERS]
    for each in ranks:
        each.masks.update(LOST, True)
    assert together(*(partial(each.settle, 2) for each in ranks)) == [Verdict(2, None, (LOST,))] * 3


def test_who_masks_more_than_others_settles_it_for_all(store: Any) -> None:
    ranks = [Rank(rank, store) for rank in OTHERS]
    for each in ranks:
        each.masks.update(LOST, True)
    ranks[0].masks.update(2, True)
    store.set("calls/7/1", "?")
    assert ranks[0].settle(2) == Verdict(2, None, (2, LOST))
    assert ranks[1].settle(4) == Verdict(2, None, (2, LOST))


def test_who_has_masked_it_long_ago_says_what_others_may_ask_for(store: Any) -> None:
    ranks = [Rank(rank, store) for rank in OTHERS]
    for each in ranks[:2]:
        each.masks.update(LOST, True)
        each.counts["dispatch"] = 9
    ranks[2].counts["dispatch"] = 9
    ranks[2].masks.update(LOST, True)
    assert [each.settle(2, 9).rounds for each in ranks] == [2] * 3
    # From then on it has been silent for all of them.
    assert ranks[0].settle(2, 11).rounds == 2
    assert store.check(["calls/9/0", "calls/9/2"])
    assert not store.check(["calls/11/0"])


def test_a_refusal_is_everybodys(store: Any) -> None:
    ranks = [Rank(rank, store) for rank in OTHERS]
    refused = Verdict(1, ("num_recv_tokens", "rank 3 has room for 1", "Pass more."))
    assert ranks[0].calls.settle(7, lambda: refused, None) == refused
    for each in ranks:
        each.masks.update(LOST, True)
    assert ranks[1].settle(2) == refused


def test_who_says_nothing_is_named(store: Any) -> None:
    rank = Rank(0, store, timeout_s=0.1)
    rank.masks.update(LOST, True)
    with pytest.raises(CommunicationTimeoutError, match="cannot agree on how many rounds") as caught:
        rank.settle(2)
    assert caught.value.missing_ranks == (1, 2)


def test_a_store_that_is_gone_is_named() -> None:
    def gone() -> Any:
        raise ConnectionError("its host is gone")

    rank = Rank(0, None)
    rank.calls._open_store = gone
    assert rank.settle(2) == Verdict(2, None)  # nobody asks it
    rank.masks.update(LOST, True)
    with pytest.raises(CommunicationTimeoutError, match=r"cannot agree .*its host is gone"):
        rank.settle(2)


@pytest.mark.parametrize("text", ["{", "[1]", '["x", null, []]', "[1, 2, []]", "[[]]" * 3])
def test_what_is_no_verdict_is_refused(store: Any, text: str) -> None:
    rank = Rank(0, store)
    rank.masks.update(LOST, True)
    store.set("calls/7/settled", text)
    with pytest.raises(BufferStateError, match="no text of theirs"):
        rank.settle(2)
