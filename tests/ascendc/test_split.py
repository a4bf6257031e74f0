"""Blocks share rows evenly, those for shared experts too, and every row arrives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_triton.core.ascendc import MAX_BLOCKS

from .case import Case
from .direct import DirectCase, DirectWorld
from .driver import World
from .library import Library
from .split import SplitCase, check_split

CASES = {
    "no_shared": SplitCase(tokens=(7, 1), topk=3, blocks=12),
    "one_shared": SplitCase(tokens=(7, 1, 1), topk=8, experts_per_rank=4, shared=(1, 1), blocks=24),
    "more_shared_than_routed": SplitCase(tokens=(5, 1, 1), topk=1, shared=(2, 2), blocks=18),
    "one_token": SplitCase(tokens=(1, 1, 1), topk=4, shared=(1, 1), experts_per_rank=2, blocks=8),
    "no_token": SplitCase(tokens=(0, 1, 1), shared=(1, 1), blocks=3),
    "row_per_result": SplitCase(tokens=(4, 1, 1), topk=2, shared=(1, 1), row_per_result=True, blocks=14),
    "inband": SplitCase(tokens=(7, 1, 1), topk=4, shared=(1, 1), inband=True, blocks=12),
    "direct": SplitCase(tokens=(5, 1, 1, 1), topk=3, shared=(2, 2), direct=True, blocks=12),
}

# Where blocks shared experts instead of rows, those with the K that have all rows would send everything.
HOT = {
    "slots": SplitCase(tokens=(7, 1), topk=3, experts_per_rank=8, skewed=True, blocks=12),
    "inband": SplitCase(tokens=(7, 1), topk=2, experts_per_rank=8, skewed=True, inband=True, blocks=12),
    "one_expert": SplitCase(tokens=(9, 1), topk=1, experts_per_rank=8, skewed=True, inband=True, blocks=12),
    "direct": SplitCase(tokens=(7, 1), topk=3, experts_per_rank=8, skewed=True, direct=True, blocks=12),
}

# Rows of several blocks, of routed and of shared experts, go to the same ranks.
DELIVERED = {
    "slots": Case(tokens=(5, 3, 4), topk=3, shared=(1, 1), rounds=1, hidden=32),
    "masked": Case(tokens=(5, 3, 4, 2), topk=3, shared=(2, 2), rounds=1, hidden=32, inactive=0.3, launches=2),
    "row_per_result": Case(tokens=(4, 5, 3), shared=(1, 1), rounds=1, hidden=32, row_per_result=True),
    "inband": Case(tokens=(5, 3, 4), topk=3, shared=(1, 1), rounds=1, hidden=250, inband=True),
    "direct": DirectCase(tokens=(5, 3, 4, 2), topk=3, shared=(2, 2), rounds=1, hidden=32, scaled=True),
    "many": Case(tokens=(150, 2, 2), topk=8, experts_per_rank=8, shared=(1, 1), rounds=1, hidden=32),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_block_has_more_than_its_share(library: Library, case: SplitCase) -> None:
    check_split(library, case)


@pytest.mark.parametrize("case", HOT.values(), ids=HOT)
def test_hot_experts_give_no_block_more_to_send(library: Library, case: SplitCase) -> None:
    """What is shared are the results (token, k), whichever expert they are for."""
    check_split(library, case)


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 13, MAX_BLOCKS])
@pytest.mark.parametrize("case", DELIVERED.values(), ids=DELIVERED)
def test_every_row_arrives(library: Library, case: Case, blocks: int) -> None:
    case = replace(case, blocks=blocks)
    world = DirectWorld(library, case) if isinstance(case, DirectCase) else World(library, case)
    world.run()
