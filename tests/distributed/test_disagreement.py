"""Ranks whose calls differ: each of them is told in what, and by whom, before anything comes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_triton.processes import RankGroup
from tests.distributed.disagreement_workers import (
    differ,
    mask_on_one_rank,
    meet,
    smooth_on_one_rank,
)

Groups = Callable[[int], RankGroup]
SCHEMES = [
    ("buffer", "fullmesh_v1"),
    ("buffer", "fullmesh_v2"),
    ("buffer", "direct"),
    ("buffer", "fullmesh"),
    ("operators", "fullmesh_v1"),
    ("operators", "fullmesh_v2"),
    ("operators", "fullmesh"),
    ("operators", "version 1"),
]
BY_SCHEME = pytest.mark.parametrize(("api", "scheme"), SCHEMES, ids=[" ".join(s) for s in SCHEMES])
# Far from the time-out of 300 s, and from what compiling takes on a loaded machine.
SOON_S = 120.0

# Field, the last rank's value, and what is said: what differs, and how.
DISPATCHES: list[tuple[str, object, str, str, str]] = [
    ("int8", True, "row format", "bf16", "int8"),
    ("dtype", torch.float16, "row format", "bf16", "fp16"),
    ("weights", True, "weights", "no", "yes"),
]


def _check(results: list[Any], line: str) -> None:
    for (kind, text, seconds), after in results:
        assert kind == "ConfigMismatchError", text
        assert "ranks made different calls" in text
        assert text.split("\n")[1:-1] == [f"  {line}"]
        assert seconds < SOON_S
        assert after.startswith("BufferStateError: the buffer")
        assert "ranks made different calls" in after


def _line(title: str, num_ranks: int, usual: str, other: str) -> str:
    return f"{title}: {usual} on rank(s) {list(range(num_ranks - 1))}, {other} on rank(s) [{num_ranks - 1}]"


@BY_SCHEME
@pytest.mark.parametrize("what", DISPATCHES, ids=lambda what: what[0])
def test_dispatches_that_differ(ranks: Groups, api: str, scheme: str, what: Any) -> None:
    field, value, title, usual, other = what
    results = ranks(2).run(differ, api, scheme, "dispatch", field, value, 0, {})
    _check(results, _line(title, 2, usual, other))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "fullmesh"])
def test_one_rank_sends_a_row_for_each_rank(ranks: Groups, scheme: str, num_ranks: int) -> None:
    results = ranks(num_ranks).run(differ, "buffer", scheme, "dispatch", "do_expand", False, 4, {})
    _check(results, _line("do_expand", num_ranks, "yes", "no"))


@BY_SCHEME
def test_dispatches_that_differ_among_four_in_native_calls(ranks: Groups, api: str, scheme: str) -> None:
    results = ranks(4).run(differ, api, scheme, "dispatch", "int8", True, 4, {})
    _check(results, _line("row format", 4, "bf16", "int8"))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_elastic_info_on_one_rank(ranks: Groups, num_ranks: int) -> None:
    """fullmesh_v2 has none."""
    results = ranks(num_ranks).run(differ, "operators", "fullmesh_v1", "dispatch", "elastic", True, 0, {})
    _check(results, _line("elastic_info", num_ranks, "no", "yes"))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("scheme", "suffix"),
    [
        ("fullmesh_v1", " of the combine before"),
        ("fullmesh_v2", " of the combine before"),
        ("version 1", ""),  # its combine waits for every rank's entry
    ],
)
def test_combines_that_differ(ranks: Groups, scheme: str, suffix: str, num_ranks: int) -> None:
    results = ranks(num_ranks).run(differ, "operators", scheme, "combine", "comm_quant_mode", 2, 1, {})
    _check(results, _line(f"comm_quant_mode{suffix}", num_ranks, "0", "2"))


@pytest.mark.parametrize(
    ("scheme", "suffix"),
    [
        ("fullmesh_v1", " of the combine before"),
        ("fullmesh_v2", " of the combine before"),
        ("direct", ""),
        ("fullmesh", ""),
    ],
)
def test_results_of_another_dtype(ranks: Groups, scheme: str, suffix: str) -> None:
    """All rows travel as int8, and the odd rank's tokens, so its experts' results too, are fp16."""
    results = ranks(2).run(dtype_of_results, scheme)
    _check(results, _line(f"row format{suffix}", 2, "bf16", "fp16"))


def dtype_of_results(rank: int, num_ranks: int, scheme: str) -> Any:
    dtype = torch.float16 if rank == num_ranks - 1 else torch.bfloat16
    return differ(
        rank, num_ranks, "buffer", scheme, "combine", "int8", True, 0, {"int8": True, "dtype": dtype}
    )


def _check_meeting(said: Any, operator: str, missing: list[int], other: str) -> None:
    kind, text, _ = said
    assert kind == "CommunicationTimeoutError", text
    assert text.startswith(f"{operator} number ")
    assert f"waiting for rank(s) {missing}" in text
    assert f"rank(s) {missing} posted flags of a {other}: every rank has to make the same calls" in text


MEETINGS = [("dispatch", "combine"), ("barrier", "dispatch"), ("barrier", "combine")]
QUICK_MEETINGS = (("fullmesh_v1", MEETINGS[0]), ("direct", MEETINGS[1]))
ALL_MEETINGS = [
    pytest.param(api, scheme, *pair, marks=[] if (scheme, pair) in QUICK_MEETINGS else [pytest.mark.long])
    for api, scheme in SCHEMES
    if scheme != "fullmesh"  # see test_two_operators_that_meet_in_the_same_blocks
    if api == "buffer" or scheme == "version 1"
    for pair in MEETINGS
    if api == "buffer" or "barrier" not in pair  # the group's barrier has a buffer of its own
]


@pytest.mark.parametrize(("api", "scheme", "mine", "others"), ALL_MEETINGS)
def test_two_operators_that_meet(ranks: Groups, api: str, scheme: str, mine: str, others: str) -> None:
    first, second = ranks(2).run(meet, api, scheme, mine, others, 1)
    _check_meeting(first, others, [1], mine)
    _check_meeting(second, mine, [0], others)


@pytest.mark.parametrize(("mine", "others"), [("dispatch", "combine"), ("combine", "dispatch")])
def test_two_operators_that_meet_in_the_same_blocks(ranks: Groups, mine: str, others: str) -> None:
    """They find each other's call words at once."""
    for kind, text, seconds in ranks(3).run(meet, "buffer", "fullmesh", mine, others, 1):
        assert kind == "ConfigMismatchError", text
        assert f"operator: {others} on rank(s) [0, 1], {mine} on rank(s) [2]" in text
        assert seconds < SOON_S


def test_a_barrier_among_dispatches_by_blocks(ranks: Groups) -> None:
    first, second = ranks(2).run(meet, "buffer", "fullmesh", "barrier", "dispatch", 1)
    _check_meeting(first, "dispatch", [1], "barrier")
    assert second[0] == "CommunicationTimeoutError"


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "direct"])
def test_a_combine_among_three_dispatches(ranks: Groups, scheme: str) -> None:
    """And the other way round, where whose flags a combine's are does not always show."""
    for said in ranks(4).run(meet, "buffer", scheme, "combine", "dispatch", 0)[:3]:
        _check_meeting(said, "dispatch", [3], "combine")
    *several, one = ranks(4).run(meet, "buffer", scheme, "dispatch", "combine", 0)
    for said in several:
        _check_meeting(said, "combine", [3], "dispatch")
    if scheme == "direct":
        _check_meeting(one, "dispatch", [0, 1, 2], "combine")
    else:
        assert "one of ranks [0, 1, 2] posted flags of a combine: every rank" in one[1]


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "direct", "fullmesh"])
def test_smooth_scales_may_differ(ranks: Groups, scheme: str) -> None:
    assert ranks(2).run(smooth_on_one_rank, scheme) == [[], []]


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "fullmesh"])
def test_masks_may_differ(ranks: Groups, scheme: str) -> None:
    assert ranks(2).run(mask_on_one_rank, scheme) == [True, True]
