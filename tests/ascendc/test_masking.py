"""Masked ranks: nothing is sent to them, nothing awaited from them, and the others' calls are whole."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from .direct_masking import MaskedLaterCase, When, check_masked_later
from .library import Library
from .masking import (
    MaskedBlocksCase,
    MaskedBlocksWorld,
    MaskedCase,
    MaskedDirectCase,
    MaskedDirectWorld,
    MaskedReceivingCase,
    check_masked,
    check_masked_receiving,
)
from .masking_rails import (
    DirectEntriesCase,
    MaskedMeanwhileCase,
    MaskedRailCase,
    check_direct_entries,
    check_masked_meanwhile,
    check_masked_rail,
)
from .orders import orders
from .standing_in import StandingInCase, check_standing_in

ALL_SEND = (4, 3, 3)
CASES = {
    "before": MaskedCase(blocks=1, timed=True),
    "before_straggling": MaskedCase(topk=3, straggle=0.3, absent=0.2, special=0.2, rounds=4),
    "before_many_blocks": MaskedCase(tokens=(3, 0, 2, 4), blocks=5, topk=3, schedule="DCC"),
    "before_shared": MaskedCase(tokens=(2, 3, 0, 1), topk=3, shared=(1, 1), inactive=0.2, gone=2),
    "before_taken": MaskedCase(tokens=(9, 0, 8), takes=3, hidden=64, timed=True),
    "before_inband": MaskedCase(inband=True, scaled=True, topk=3),
    "before_parts": MaskedCase(tokens=(7, 0, 5), part_tokens=2, topk=3),
    "between": MaskedCase(tokens=ALL_SEND, topk=3, when="between"),
    "entries": MaskedCase(tokens=(4, 0, 3, 0), when="entries", timed=True),
    "rows": MaskedCase(tokens=ALL_SEND, topk=3, when="rows"),
    "rows_taken": MaskedCase(tokens=ALL_SEND, topk=3, takes=2, when="rows"),
    "rows_inband": MaskedCase(tokens=ALL_SEND, topk=3, inband=True, when="rows", hidden=300),
    "results": MaskedCase(tokens=ALL_SEND, topk=3, when="results"),
    "results_in_parts": MaskedCase(tokens=ALL_SEND, topk=3, part_tokens=2, when="results"),
    "results_shared": MaskedCase(tokens=(4, 3, 3, 2), topk=3, shared=(1, 1), gone=2, when="results"),
}


@orders(4, 40)
@pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
def test_strict(strict: Library, case: MaskedCase, seeds: range) -> None:
    for seed in seeds:
        check_masked(strict, case, seed)


@pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
def test_fast(fast: Library, case: MaskedCase) -> None:
    for seed in range(4):
        check_masked(fast, case, seed)


@orders(4, 40)
@pytest.mark.parametrize("library", ["strict", "fast"], indirect=True)
def test_direct(library: Library, seeds: range) -> None:
    for seed in seeds:
        MaskedDirectWorld(
            library, MaskedDirectCase(topk=3, straggle=0.3, rounds=3, schedule="DCC"), seed
        ).run()


@orders(4, 40)
@pytest.mark.parametrize("when", get_args(When))
def test_direct_later(library: Library, seeds: range, when: When) -> None:
    for seed in seeds:
        check_masked_later(library, MaskedLaterCase(topk=3, blocks=1 + seed % 3, when=when), seed)


@orders(4, 40)
@pytest.mark.parametrize("inband", [False, True])
@pytest.mark.parametrize("blocks", [2, 5])
def test_receiving(strict: Library, seeds: range, inband: bool, blocks: int) -> None:
    for seed in seeds:
        check_masked_receiving(strict, MaskedReceivingCase(topk=3, inband=inband, blocks=blocks), seed)


@orders(4, 40)
@pytest.mark.parametrize("servers", [(), (2, 1)])
def test_blocks(strict: Library, seeds: range, servers: tuple[int, ...]) -> None:
    for seed in seeds:
        MaskedBlocksWorld(strict, MaskedBlocksCase(topk=3, rounds=3, servers=servers), seed).run()


@orders(4, 40)
@pytest.mark.parametrize("message_tokens", [0, 1])
@pytest.mark.parametrize("lost", [2, 3])
def test_rails(strict: Library, seeds: range, message_tokens: int, lost: int) -> None:
    tokens = tuple(0 if rank == lost else 3 for rank in range(6))
    for seed in seeds:
        check_masked_rail(
            strict, MaskedRailCase(tokens=tokens, message_tokens=message_tokens, lost=lost), seed
        )


@orders(4, 40)
@pytest.mark.parametrize("during", ["relay", "returned", "partials"])
@pytest.mark.parametrize("blocks", [1, 3])
def test_rails_meanwhile(strict: Library, seeds: range, during: Any, blocks: int) -> None:
    for seed in seeds:
        check_masked_meanwhile(strict, MaskedMeanwhileCase(blocks=blocks, during=during), seed)


@orders(4, 40)
@pytest.mark.parametrize("message_tokens", [0, 1])
@pytest.mark.parametrize("lost", [2, 3])
def test_rails_with_a_stand_in(strict: Library, seeds: range, message_tokens: int, lost: int) -> None:
    tokens = tuple(0 if rank == lost else 3 for rank in range(6))
    for seed in seeds:
        check_standing_in(
            strict, StandingInCase(tokens=tokens, message_tokens=message_tokens, lost=lost), seed
        )


def test_what_ranks_say_themselves_is_waited_for(strict: Library) -> None:
    check_direct_entries(strict, DirectEntriesCase())
