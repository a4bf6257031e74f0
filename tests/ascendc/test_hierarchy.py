"""The kernels of the hierarchy: what comes by two hops is what was sent, in whatever order it comes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .hierarchy import HierarchyWorld
from .hierarchy_case import HierarchyCase
from .hierarchy_hostile import (
    CHANGES,
    GoneCase,
    HostileRailCase,
    OddCase,
    check_gone,
    check_hostile_rail,
    check_odd,
)
from .hierarchy_words import HostileWordsCase, Place, check_hostile_words
from .library import Library

CASES = {
    "two_and_two": HierarchyCase(tokens=(3, 2, 4, 1), blocks=3, topk=3, absent=0.2),
    "each_by_itself": HierarchyCase(
        tokens=(2, 1, 3), servers=(1, 1, 1), blocks=5, experts_per_rank=3, topk=3
    ),
    "one_block": HierarchyCase(tokens=(3, 3, 2, 0), blocks=1, topk=4),
    "three_servers": HierarchyCase(
        tokens=(2, 3, 1, 4, 0, 2), servers=(2, 2, 2), blocks=4, topk=4, absent=0.3
    ),
    "wide_servers": HierarchyCase(tokens=(2, 3, 1, 2, 4, 1), servers=(3, 3), blocks=2, topk=5, straggle=0.3),
    "scaled": HierarchyCase(tokens=(3, 2, 4, 1), scaled=True, topk=2, rounds=3),
    "several_scales": HierarchyCase(tokens=(3, 2, 4, 1), scaled=True, num_scales=9, hidden=96),
    "special_ids": HierarchyCase(tokens=(3, 4, 2, 2), topk=4, experts_per_rank=3, special=0.3, absent=0.2),
    "nothing_at_all": HierarchyCase(tokens=(0, 0, 0, 0), schedule="DCC"),
    "skewed": HierarchyCase(tokens=(2, 3, 1, 2), blocks=4, skewed=True, ring_items=1),
    "many_tokens": HierarchyCase(tokens=(13, 20, 9, 17), topk=2, rounds=1, hidden=32, ring_items=8),
    "dispatch_only": HierarchyCase(tokens=(2, 3, 2, 3), straggle=0.4, rounds=5, schedule="D"),
    "two_combines": HierarchyCase(tokens=(3, 2, 2, 3), straggle=0.4, rounds=3, schedule="DCC"),
    "two_dispatches": HierarchyCase(tokens=(2, 3, 2, 3), straggle=0.4, rounds=3, schedule="DDC"),
    "last_number": HierarchyCase(tokens=(2, 3, 1, 2), first_number=2**31 - 3, rounds=3),
    "long_row": HierarchyCase(tokens=(1, 2, 1, 2), blocks=1, hidden=512 * 7, rounds=1),
}
_CASES = pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
# Tokens of a message, 0 for all of a server; pieces in which results are returned, and parts in which tokens
# are made.
_STAGES = pytest.mark.parametrize(
    ("message_tokens", "pieces", "parts"),
    [(1, 1, 1), (0, 1, 1), (3, 2, 2), (2, 8, 3)],
    ids=["by_token", "at_once", "by_threes_in_two", "by_twos_by_server"],
)
_MESSAGES = pytest.mark.parametrize("message_tokens", [1, 0, 2])


@_STAGES
@_CASES
def test_strict(strict: Library, case: HierarchyCase, message_tokens: int, pieces: int, parts: int) -> None:
    case = replace(case, message_tokens=message_tokens, pieces=pieces, parts=parts)
    for seed in range(4):
        HierarchyWorld(strict, replace(case, keeps_order=seed == 3), seed).run()


@_STAGES
@_CASES
def test_fast(fast: Library, case: HierarchyCase, message_tokens: int, pieces: int, parts: int) -> None:
    case = replace(case, message_tokens=message_tokens, pieces=pieces, parts=parts)
    for seed in range(3):
        HierarchyWorld(fast, case, seed).run()


@pytest.mark.parametrize("message_tokens", [1, 0])
def test_one_server_has_nobody_to_post_to(strict: Library, message_tokens: int) -> None:
    """A machine of A3, all of whose ranks relay their own tokens."""
    case = HierarchyCase(tokens=(3, 2, 4, 1), servers=(4,), blocks=3, topk=3, absent=0.2)
    for seed in range(3):
        HierarchyWorld(strict, replace(case, message_tokens=message_tokens), seed).run()


@_MESSAGES
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_peer_writes_is_not_trusted(library: Library, change: str, message_tokens: int) -> None:
    check_hostile_rail(library, HostileRailCase(change=change, message_tokens=message_tokens), 0)


@pytest.mark.parametrize("place", ["entry", "return", "partial end"])
def test_words_that_cannot_be_are_reported(library: Library, place: Place) -> None:
    check_hostile_words(library, HostileWordsCase(place=place), 0)


@pytest.mark.parametrize("gone", [0, 3])
@_MESSAGES
@pytest.mark.parametrize(("in_combine", "late"), [(False, False), (True, False), (True, True)])
def test_who_is_gone_is_named_across_two_hops(
    library: Library, gone: int, message_tokens: int, in_combine: bool, late: bool
) -> None:
    case = GoneCase(gone=gone, message_tokens=message_tokens, in_combine=in_combine, is_said_late=late)
    check_gone(library, case, 0)


@pytest.mark.parametrize("odd", [0, 3])
@_MESSAGES
@pytest.mark.parametrize("late", [False, True])
def test_who_makes_another_combine_is_named_across_two_hops(
    library: Library, odd: int, message_tokens: int, late: bool
) -> None:
    check_odd(library, OddCase(odd=odd, message_tokens=message_tokens, is_said_late=late), 0)


@pytest.mark.parametrize("in_combine", [False, True])
def test_no_post_is_given_up_by_a_short_deadline(library: Library, in_combine: bool) -> None:
    """A slow NIC leaves a queue full for a while, and what is to be looked at is what never comes."""
    for seed in range(10):
        check_gone(library, GoneCase(in_combine=in_combine, timeout_us=1), seed)
