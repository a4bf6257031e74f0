"""The kernels of fullmesh between servers: what arrives is what was sent, in whatever order it comes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moe_triton.core.ascendc import REPORT_BAD_ROW
from moe_triton.core.records import TRAFFIC
from moe_triton.layout import STATUS_ENTRY_BYTES

from .library import Library, Phase
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
    "apart": PostingCase(tokens=(4, 5), experts_per_rank=1, topk=2, scaled=True, apart=True),
    "apart_without_scales": PostingCase(tokens=(5, 3, 4), servers=(1, 2), experts_per_rank=2, apart=True),
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


# Numbers of peers and of callers: none becomes an address unchecked.


def _launch(world: PostingWorld, phase: Phase, rank: int = 0) -> np.ndarray:
    """The report of one launch, when all that it posted is delivered. The world's queues are closed."""
    world.nics.use(rank)
    try:
        return world.library.launch(phase[0], world.case.blocks, **phase[1])
    finally:
        world.nics.close()


@pytest.mark.parametrize("count", [-1, 4, 2**31 - 1])
def test_counts_beyond_the_slots_are_not_posted(library: Library, count: int) -> None:
    world = PostingWorld(library, PostingCase(tokens=(2, 3), blocks=1))
    counts = np.array([0, 0, count, 0], np.int32)  # the first expert of rank 1
    before = world.windows[1].bytes.copy()
    report = _launch(world, world.dispatch_post(0, 0, 0, counts=counts))
    assert report[0, :3].tolist() == [REPORT_BAD_ROW, 0, count]
    assert np.array_equal(world.windows[1].bytes, before)
    assert not world.traffic[0].array[0, : len(TRAFFIC.fields)].any()


@pytest.mark.parametrize("column", [0, 1, 2])
@pytest.mark.parametrize("value", [-1, 1000, 2**31 - 1, -(2**31)])
def test_origins_beyond_the_slots_are_not_posted(library: Library, column: int, value: int) -> None:
    world = PostingWorld(library, PostingCase(tokens=(2, 3), blocks=1))
    layout = world.layout
    origins = np.array([[1, 0, 0], [1, 1, 1]], np.int32)  # rank, token, k
    origins[0, column] = value
    sends = {
        "origins": origins,
        "recv_offsets": np.full(4, len(origins), np.int32),
        "num_entries": 4,
        "capacity": len(origins),
        "num_ranks": 2,
        "row_bytes": world.case.result_bytes,
        "flag_rows": 1,
        "numbers": np.zeros(2, np.int32),
        "out_rows": layout.out_rows,
        "slots": layout.combine_slots,
        "status": layout.combine_status,
    }
    before = world.windows[1].bytes.copy()
    _launch(world, world.combine_post(0, ("combine_send", sends), 0))
    posts = world.traffic[0].array[0, TRAFFIC.word("posts_between")]
    assert posts == 2  # the other row, and its flag
    changed = np.flatnonzero(world.windows[1].bytes != before)
    slot = layout.combine_slots.offset(zone=0, token=1, k=1)
    flag = layout.combine_status.offset(zone=0, token=1, k=1)
    for at in changed:
        in_slot = slot <= at < slot + world.case.result_bytes
        assert in_slot or flag <= at < flag + STATUS_ENTRY_BYTES
