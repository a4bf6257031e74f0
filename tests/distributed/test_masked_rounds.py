"""Calls in rounds, and with places, that lose a rank while they wait: others go on, by the same rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moe_triton.processes import RankFailedError, run_ranks
from tests.chaos import long_survivors
from tests.distributed.long_runs import Options
from tests.distributed.masked_rounds import LongChaos, calls_without
from tests.patience import UNTIL_MASKED_S, seconds

RANKS, VICTIM = 3, 1
# The victim has most tokens in the call in which it is lost, and the others need another number of rounds.
CALLS, AFTER = 3, 2
USUAL: Options = {}


def without(scheme: str, options: Options, dies_in: str, **changes: Any) -> list[str]:
    """What is wrong where a rank is lost before it runs a phase."""
    case = long_survivors.case_of(scheme, RANKS, changes.pop("quantize", None), changes.pop("num_blocks", 1))
    case = replace(case, **{"rounds": CALLS + 1 + AFTER, **changes.pop("of_case", {})})
    changes = {"calls": CALLS, **changes}
    of = LongChaos(case, VICTIM, 0.0, None, seconds(30.0), (options,), dies_in=dies_in, **changes)
    results = run_ranks(calls_without, RANKS, (of,), timeout_s=seconds(60.0), allow_failures=True)
    left = results.pop(VICTIM)
    assert left[2] == "away" if of.by_hand else isinstance(left, RankFailedError)
    return [str(result) for result in results if result != ([], [VICTIM], "")]


LOST = [
    # Rank 0 has not heard how many rounds there are, and rank 2 has.
    ("fullmesh_v1", {"num_recv_tokens": "exact"}, {"dies_in": "starts", "deaf": (0,), "runs": "recount"}),
    ("fullmesh", {"layout": "padded", "num_recv_tokens": "exact"}, {"dies_in": "round", "at": 2}),
    ("fullmesh_v2", {"do_expand": False, "num_recv_tokens": "exact"}, {"dies_in": "whole", "at": 2}),
]
MORE: list[tuple[str, Options, dict[str, Any]]] = [
    ("fullmesh_v1", USUAL, {"dies_in": "starts", "deaf": (0,), "runs": "mend"}),
    ("fullmesh_v2", USUAL, {"dies_in": "ring"}),
    ("fullmesh", {"num_recv_tokens": 300}, {"dies_in": "starts", "deaf": (0, 2)}),
    ("fullmesh_v1", {"num_recv_tokens": 300}, {"dies_in": "starts", "deaf": (2,), "quantize": "int8"}),
    ("fullmesh_v2", {"num_max_tokens_per_rank": 16}, {"dies_in": "round", "at": 1}),
    ("fullmesh_v1", {"expert_alignment": 4, "do_zero_padding": True}, {"dies_in": "fill"}),
    ("fullmesh_v1", USUAL, {"dies_in": "entries", "num_blocks": 2}),
    ("fullmesh_v2", USUAL, {"dies_in": "fill_ahead", "at": 2, "num_blocks": 2, "quantize": "int8"}),
    ("fullmesh", {"do_expand": False}, {"dies_in": "round", "deaf": (0,)}),
    ("fullmesh_v1", {"do_expand": False}, {"dies_in": "fill", "quantize": "int8"}),
    ("fullmesh", USUAL, {"dies_in": "gather", "at": 3}),
    ("fullmesh_v1", {"layout": "padded"}, {"dies_in": "whole", "at": 3}),
    ("fullmesh_v1", USUAL, {"dies_in": "ring", "by_hand": True}),
    ("fullmesh", {"num_recv_tokens": "exact"}, {"dies_in": "starts", "deaf": (2,), "by_hand": True}),
    ("fullmesh_v2", {"expert_alignment": 4}, {"dies_in": "round", "at": 2, "by_hand": True}),
]


@pytest.mark.parametrize(
    ("scheme", "options", "lost"),
    [*LOST, *(pytest.param(*each, marks=pytest.mark.long) for each in MORE)],
    ids=str,
)
def test_others_go_on_by_the_same_rounds(scheme: str, options: Options, lost: dict[str, Any]) -> None:
    assert without(scheme, options, **lost) == []


EXACT: Options = {"num_recv_tokens": "exact"}


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("fullmesh_v2", EXACT),
        pytest.param("fullmesh_v2", {"do_expand": False}, marks=pytest.mark.long),
        pytest.param("fullmesh_v1", EXACT, marks=pytest.mark.long),
        pytest.param("fullmesh_v1", {"do_expand": False}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_rows_that_have_come_are_taken_out_again(scheme: str, options: Options) -> None:
    """Of the lost rank all is said, and the rows of one part of a round are there."""
    of_case = {"kernels": "torch", "rounds": 2}
    lost: dict[str, Any] = {"dies_in": "send", "at": 2, "calls": 0, "quantize": "int8", "num_blocks": 2}
    assert without(scheme, options, of_case=of_case, **lost) == []


ONE_ROUND = {"tokens": (3, 4, 2)}


@pytest.mark.parametrize(
    ("scheme", "options", "dies_in"),
    [
        ("fullmesh_v1", {"layout": "padded"}, "ask"),
        pytest.param("fullmesh_v2", {"num_recv_tokens": "exact"}, "ask", marks=pytest.mark.long),
        pytest.param("fullmesh", {"expert_alignment": 4}, "place", marks=pytest.mark.long),
        # Rows of an ordinary call.
        pytest.param("fullmesh_v1", {"do_expand": False}, "whole", marks=pytest.mark.long),
        pytest.param("fullmesh_v2", {"do_expand": False}, "whole", marks=pytest.mark.long),
    ],
)
def test_a_call_of_one_round_goes_on(scheme: str, options: Options, dies_in: str) -> None:
    """Native code begins it on the others."""
    assert without(scheme, options, dies_in, by_hand=True, of_case=ONE_ROUND) == []


@pytest.mark.long
def test_who_was_told_of_rounds_by_the_lost_rank_alone_says_so() -> None:
    """Rank 0 was not told, and goes on with a call of one round."""
    case = replace(long_survivors.case_of("fullmesh_v1", RANKS), tokens=(3, 13, 2), rounds=CALLS + 1)
    at = {"dies_in": "starts", "deaf": (0,), "calls": CALLS}
    of = LongChaos(case, VICTIM, 0.0, None, seconds(1.0), (USUAL,), **at)  # type: ignore[arg-type]
    _, _, (_, _, said) = run_ranks(calls_without, RANKS, (of,), timeout_s=seconds(60.0), allow_failures=True)
    assert "may not have told all others" in said


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 4, 5, 6, 9, 20])
def test_survivors_of_chaos(seed: int) -> None:
    """Nobody is taken for lost that is only slow."""
    trial = long_survivors.trial(seed)
    stopped_s = trial.stopped_s and 3.0 * UNTIL_MASKED_S
    assert long_survivors.run(replace(trial, timeout_s=UNTIL_MASKED_S, stopped_s=stopped_s)) == []
