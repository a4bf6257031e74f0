"""torch_npu's operators on real processes against the reference, bit for bit, over a matrix of features."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_triton.processes import RankGroup
from tests.distributed.operator_cases import FEATURES, OperatorCase, is_valid
from tests.distributed.operator_runs import check, run_rank
from tests.distributed.pairs import pairs_in, pairwise
from tests.patience import seconds

Groups = Callable[[int], RankGroup]
# What the short matrix leaves to the long one: sizes that only compile more kernels, and many processes.
SHORT: dict[str, tuple[Any, ...]] = {"ranks": (4, 2), "hidden": (64,), "kernels": ("triton",)}
# By name: the values in place of those in `FEATURES`.
LONG: dict[str, dict[str, tuple[Any, ...]]] = {
    "EP 2": {"ranks": (2,)},
    "EP 4": {"ranks": (4,)},
    "EP 8": {"ranks": (8,), "tp": (0, 1), "hidden": (64, 160)},
    "EP 3 and 6": {"ranks": (3, 6), "hidden": (64,)},
    "EP 8 x TP 2": {"ranks": (8,), "tp": (2,), "experts_per_rank": (1,), "hidden": (64,)},
}
SEEDS = (1, 2)  # each has every pair of features


def described(case: OperatorCase) -> str:
    """Where a case differs from the plain one."""
    return ", ".join(
        f"{f.name}={getattr(case, f.name)}" for f in fields(case) if getattr(case, f.name) != f.default
    )


def run_all(ranks: Groups, cases: Sequence[OperatorCase]) -> dict[str, list[str]]:
    """What differs from the reference, by case."""
    wrong = {}
    for case in cases:
        found = check(case, ranks(case.num_processes).run(run_rank, case, timeout_s=seconds(120)))
        if found:
            wrong[described(case)] = found
    return wrong


@pytest.mark.parametrize("part", range(6))
def test_every_pair_of_features(ranks: Groups, part: int) -> None:
    assert run_all(ranks, pairwise(**SHORT)[part::6]) == {}


@pytest.mark.parametrize("part", range(3))
def test_native_calls_give_the_same(ranks: Groups, part: int) -> None:
    """From the third round on a call goes to native code, where it is as usual."""
    wrong = {}
    for case in pairwise(**SHORT)[part::5]:
        longer = replace(case, rounds=5)
        run = functools.partial(run_rank, canaries=False)
        found = check(
            longer, ranks(case.num_processes).run(run, longer, timeout_s=seconds(120)), canaries=False
        )
        if found:
            wrong[described(longer)] = found
    assert wrong == {}


LARGE = [
    OperatorCase(ranks=8, shared=(2, 4), quantize="smooth", mask="entries", stragglers=True),
    OperatorCase(ranks=8, comm_alg="fullmesh_v2", quantize="dynamic", comm_quant_mode=2, values="extreme"),
    OperatorCase(ranks=8, version=1, shared=(1, 2), batch=9, quantize="scales only"),
    OperatorCase(ranks=8, special="all", alphas="rows", tokens="variable", elastic="routed"),
    OperatorCase(ranks=8, tp=2, experts_per_rank=1, quantize="dynamic", norm=True, stragglers=True),
    OperatorCase(ranks=8, tp=2, experts_per_rank=1, version=1, shared=(1, 2), tokens="equal"),
    OperatorCase(ranks=8, tp=2, experts_per_rank=1, shared=(2, 4), mask="tokens", values="extreme"),
]


@pytest.mark.parametrize("case", LARGE, ids=described)
def test_eight_ranks_and_eight_pairs(ranks: Groups, case: OperatorCase) -> None:
    assert is_valid(case)
    assert run_all(ranks, [case]) == {}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", LONG)
def test_every_pair_of_features_at_full_size(ranks: Groups, name: str, seed: int) -> None:
    assert run_all(ranks, pairwise(seed, **LONG[name])) == {}


def test_the_matrix_has_every_value_and_no_case_twice() -> None:
    cases = pairwise(**SHORT)
    for name, values in (FEATURES | SHORT).items():
        possible = [v for v in values if name != "shared" or v[1] < 4]  # of at most four ranks
        assert [v for v in possible if not any(getattr(c, name) == v for c in cases)] == [], name
    assert all(is_valid(case) for case in cases)
    assert len(set(cases)) == len(cases) < 100
    # of two features without rules between them nothing is left out
    covered = {pair for case in cases for pair in pairs_in(case, ("dtype", "routing"))}
    assert len(covered) == len(FEATURES["dtype"]) * len(FEATURES["routing"])


@pytest.mark.parametrize("shared", [(1, 0), (1, 1), (1, 2), (2, 2)])
@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**20),
    routing=st.sampled_from(FEATURES["routing"]),
    mask=st.sampled_from(FEATURES["mask"]),
    special=st.sampled_from(FEATURES["special"]),
    batch=st.integers(1, 12),
    topk=st.integers(1, 6),
    stragglers=st.booleans(),
)
def test_any_routing_and_mask(ranks: Groups, shared: tuple[int, int], **chosen: Any) -> None:
    case = OperatorCase(ranks=3, experts_per_rank=6, rounds=3, shared=shared, **chosen)
    assert is_valid(case)
    assert run_all(ranks, [case]) == {}


ALIKE = [
    {},
    {"quantize": "smooth", "shared": (1, 2)},
    {"comm_alg": "fullmesh_v2", "comm_quant_mode": 2},
    {"version": 1, "shared": (1, 2)},
    {"mask": "entries", "special": "all", "norm": True},
    {"tp": 2, "experts_per_rank": 1},
]


@pytest.mark.parametrize("options", ALIKE, ids=str)
def test_the_order_of_arrival_changes_no_bit(ranks: Groups, options: dict[str, Any]) -> None:
    """The same inputs five times over, ranks being late by chance."""
    case = OperatorCase(stragglers=True, rounds=1, **options)
    group = ranks(case.num_processes)
    first, *others = (group.run(run_rank, case, delays, timeout_s=seconds(120)) for delays in range(5))
    assert all(other == first for other in others)
    assert check(case, first) == []


def poisoned(process: int, num_processes: int, case: OperatorCase, poison: float) -> list[bytes]:
    """Answers of clean inputs, and of those with one element of process 0's token 1 replaced."""
    return [run_rank(process, num_processes, case), run_rank(process, num_processes, case, poison=poison)]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", ALIKE, ids=str)
def test_what_is_no_number_stays_in_its_token(ranks: Groups, options: dict[str, Any], poison: float) -> None:
    # every token goes to experts that look at it
    case = OperatorCase(rounds=1, **{**options, "mask": "none", "special": "none"})
    answers = ranks(case.num_processes).run(poisoned, case, poison, timeout_s=seconds(120))
    for process, (clean, other) in enumerate(answers):
        (before,), (after,) = (torch.load(io.BytesIO(saved)) for saved in (clean, other))
        rows = before["x"].flatten(1).view(torch.int16) == after["x"].flatten(1).view(torch.int16)
        same = rows.all(1)
        if process == 0:
            assert not same[1]
            same[1] = True
        assert same.all(), process
