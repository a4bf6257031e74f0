"""The kernels of fullmesh between servers: what arrives is what was sent, in whatever order it comes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .library import Library
from .posts import PostingCase, PostingWorld

CASES = {
    "two_ranks": PostingCase(tokens=(3, 2), blocks=1, topk=1),
    "two_and_two": PostingCase(tokens=(3, 2, 4, 1), servers=(2, 2), blocks=3, topk=3, timed=True),
    "three_and_one": PostingCase(tokens=(3, 0, 2, 5), servers=(3, 1), topk=4, scaled=True, absent=0.3),
    "each_by_itself": PostingCase(tokens=(2, 1, 3), servers=(1, 1, 1), blocks=5, experts_per_rank=3),
    "special_ids": PostingCase(tokens=(3, 4), topk=4, experts_per_rank=3, special=0.4, absent=0.1),
    "masked_tokens": PostingCase(tokens=(5, 4, 3), servers=(1, 2), inactive=0.4, shared=(1, 1), timed=True),
    "nothing_at_all": PostingCase(tokens=(0, 0, 0), servers=(2, 1), schedule="DCC"),
    "skewed": PostingCase(tokens=(2, 3, 1, 2), servers=(2, 2), blocks=4, skewed=True, ring_items=1),
    "shared": PostingCase(tokens=(3, 2, 4, 1), servers=(1, 3), blocks=3, topk=3, shared=(1, 2), inactive=0.2),
    "two_shared": PostingCase(tokens=(2, 3, 2, 2), servers=(3, 1), shared=(2, 2), row_per_result=True),
    "stragglers": PostingCase(tokens=(3, 3), straggle=0.5, rounds=4),
    "dispatch_only": PostingCase(tokens=(2, 3, 2), servers=(2, 1), straggle=0.4, rounds=5, schedule="D"),
    "two_combines": PostingCase(tokens=(3, 2), straggle=0.4, rounds=3, schedule="DCC"),
    "two_dispatches": PostingCase(tokens=(2, 3), straggle=0.4, rounds=3, schedule="DDC"),
    "full_wait": PostingCase(tokens=(3, 2, 1), servers=(2, 1), full_wait=True, schedule="DCCC", straggle=0.4),
    "several_scales": PostingCase(tokens=(3, 4), topk=3, scaled=True, num_scales=9, hidden=96),
    "long_row": PostingCase(tokens=(1, 2), blocks=1, hidden=512 * 7),
}
# More than one load of a table of counts or origins, one piece of a row.
LARGE_CASES = {
    "many_tokens": PostingCase(tokens=(300, 200), topk=8, experts_per_rank=8, hidden=32, rounds=1),
    "many_experts": PostingCase(tokens=(2, 3), blocks=1, experts_per_rank=1024, hidden=32),
    "row_in_pieces": PostingCase(tokens=(2, 1), hidden=48 * 1024),
}


def _by_name(cases: dict[str, PostingCase]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", list(cases.values()), ids=list(cases))


@pytest.mark.parametrize("keeps_order", [True, False])
@_by_name(CASES)
def test_strict(strict: Library, case: PostingCase, keeps_order: bool) -> None:
    for seed in range(4):
        PostingWorld(strict, replace(case, keeps_order=keeps_order), seed).run()


@_by_name(CASES)
def test_fast(fast: Library, case: PostingCase) -> None:
    for seed in range(4):
        PostingWorld(fast, case, seed).run()


@_by_name(LARGE_CASES)
def test_large(library: Library, case: PostingCase) -> None:
    PostingWorld(library, case).run()
