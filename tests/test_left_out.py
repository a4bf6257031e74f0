"""Masked ranks whose results a relay's sums are without: when that is decided, and how it is said."""

from __future__ import annotations

import pytest
import torch

from moe_triton.backends import CAPABILITIES
from moe_triton.core.config import Config
from moe_triton.core.plan import Launch, Phases
from moe_triton.core.records import MAX_LEFT_OUT
from moe_triton.core.tuning import Tuning
from moe_triton.operators.variants import CombineVariant
from moe_triton.schemes import make_scheme
from moe_triton.schemes.hierarchy.left_out import open_places, ranks_of, word_of
from moe_triton.schemes.hierarchy.scheme import Hierarchy
from moe_triton.schemes.rank_context import RankContext

SERVERS, CARDS = 4, 3


def config_of(servers: int, cards: int) -> Config:
    ranks = servers * cards
    sizes = {"product": "A3", "scheme": "hierarchy", "relaxed": True, "ranks_per_server": cards}
    return Config(ranks, 4, 64, 2, ranks, **sizes)  # type: ignore[arg-type]


def launches(pieces: int) -> list[Phases]:
    at = 5, 2, 1_000_000, CAPABILITIES["cpu"], None, Tuning(return_pieces=pieces)
    plan = make_scheme(RankContext(config_of(SERVERS, CARDS), *at)).whole(
        CombineVariant(torch.bfloat16, weights=True), 0
    )
    made: list[list[Launch]] = []
    for launch in plan.launches:
        if launch.joined:
            made[-1].append(launch)
        else:
            made.append([launch])
    return list(made)


@pytest.mark.parametrize("pieces", [1, 2, 3, 4])
def test_a_piece_is_decided_once_its_wait_is_over(pieces: int) -> None:
    """Which the launch behind it says: a wait that has just ended may have gone on without a rank."""
    all_ = launches(pieces)
    waits = [n for n, phases in enumerate(all_) if any(each.step == "wait for returned" for each in phases)]
    assert len(waits) == pieces
    sizes = [len(open_places(SERVERS, all_[:number])) for number in range(len(all_) + 1)]
    # All until the launch behind the first wait, and after the last one none.
    for number, wait in enumerate(waits):
        assert sizes[wait + 1] > sizes[wait + 2]
        assert sizes[wait + 1] == (SERVERS if number == 0 else sizes[waits[number - 1] + 2])
    assert sizes[-1] == 0
    # What is open includes the own server, place 0, to the end: it comes last.
    assert all(0 in open_places(SERVERS, all_[:number]) for number in range(waits[-1] + 2))


@pytest.mark.parametrize("masked", [(), (0,), (1, 2, 5), tuple(range(9))])
def test_ranks_are_those_that_were_left_out(masked: tuple[int, ...]) -> None:
    config = config_of(3, 3)
    words = [word_of(config, first, masked.__contains__) for first in (1, 4, 7)]
    assert sorted(ranks_of(config, words)) == list(masked)


def test_a_word_has_room_for_the_largest_server() -> None:
    config = config_of(2, MAX_LEFT_OUT)
    last = MAX_LEFT_OUT - 1
    words = [word_of(config, 0, {last}.__contains__), 0]
    assert words[0] == -(2**31)
    assert list(ranks_of(config, words)) == [last]


def test_larger_servers_cannot_go_on() -> None:
    assert not Hierarchy.no_masks(config_of(2, MAX_LEFT_OUT))
    assert f"at most {MAX_LEFT_OUT}" in Hierarchy.no_masks(config_of(2, MAX_LEFT_OUT + 1))
