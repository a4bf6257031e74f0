"""A masked rank that lives may write when its places are other ranks': then they have other memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_triton.processes import run_ranks
from tests.distributed.cases import Case, small_case
from tests.distributed.late_writes import late_in_a_combine, stopped_in_a_combine
from tests.distributed.masked import Masked

SCHEMES = "fullmesh_v1", "fullmesh_v2"


def case_of(scheme: str) -> Case:
    case = small_case(4, scheme, weights=True)
    return replace(case, config=replace(case.config, num_max_tokens_per_rank=16), tokens=(16,) * 4)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_who_was_stopped_between_two_writes_of_a_combine_harms_nobody_three_rounds_later(
    scheme: str, is_whole: bool
) -> None:
    of = Masked(case_of(scheme), (3,), before=0, in_between=True)
    assert run_ranks(stopped_in_a_combine, 4, (of, True, is_whole)) == [[]] * 4


def direct_case(kernels: str) -> Case:
    return small_case(4, "direct", weights=True, kernels=kernels)


@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_who_reads_results_when_others_have_long_gone_on_raises(kernels: str) -> None:
    of = Masked(direct_case(kernels), (3,), before=0, in_between=True)
    *others, said = run_ranks(late_in_a_combine, 4, (of, True))
    assert others == [[]] * 3
    assert said[0].startswith("rank 3 is masked by rank(s) [0, 1, 2]")


def test_without_a_look_at_masks_it_would_sum_later_results() -> None:
    of = Masked(direct_case("triton"), (3,), before=0, in_between=True)
    *others, said = run_ranks(late_in_a_combine, 4, (of, False))
    assert others == [[]] * 3
    assert said[0].startswith("combined differs")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_without_other_memory_sums_would_be_wrong(scheme: str) -> None:
    of = Masked(case_of(scheme), (3,), before=0, in_between=True)
    wrong = run_ranks(stopped_in_a_combine, 4, (of, False, False))
    assert wrong[1:] == [[]] * 3
    assert len(wrong[0]) == 1
    assert wrong[0][0].startswith("round 2: combined")
