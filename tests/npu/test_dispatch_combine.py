"""The npu back end's own Python through dispatch and combine; kernels run when their stream does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from moe_triton.core.config import Config
from moe_triton.core.row_formats import QUANTIZED, ROW_FORMATS
from moe_triton.core.tuning import Tuning
from moe_triton.operators.variants import Mask
from moe_triton.processes import RankGroup
from moe_triton.schemes import product_of
from tests.distributed.cases import Case
from tests.npu import workers
from tests.npu.device import POLICIES


def config(num_ranks: int = 2, scheme: str = "fullmesh_v1", **sizes: int) -> Config:
    given = {"num_max_tokens_per_rank": 8, "hidden": 64, "num_topk": 2, "num_experts": 4, **sizes}
    product = product_of(scheme)
    return Config(num_ranks, product=product, scheme=scheme, relaxed=True, **given).normalized()


Ranks = Callable[[int], RankGroup]


def check(ranks: Ranks, case: Case, policy: str, tuning: Tuning | None = None) -> None:
    group = ranks(case.config.num_ranks)
    for wrong in group.run(workers.compare_rounds, case, policy, tuning):
        assert wrong == []


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("quantize", ROW_FORMATS)
@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "direct", "fullmesh"])
def test_bits_are_the_references(ranks: Ranks, scheme: str, quantize: str | None, policy: str) -> None:
    case = Case(config(scheme=scheme, hidden=384), 3, "sparse", (5, 8), quantize, rounds=3, num_blocks=2)
    check(ranks, case, policy)


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "direct", "fullmesh"])
@pytest.mark.parametrize("quantize", ROW_FORMATS)
def test_rows_that_are_padded(ranks: Ranks, scheme: str, quantize: str | None) -> None:
    """Their copies are queued between kernels."""
    case = Case(config(scheme=scheme, hidden=301), 3, "sparse", (5, 8), quantize, rounds=3, num_blocks=2)
    check(ranks, case, "random")


@pytest.mark.parametrize("uneven", [False, True], ids=["", "own numbers"])
@pytest.mark.parametrize("hidden", [64, 301])
def test_outputs_are_written_over(ranks: Ranks, hidden: int, uneven: bool) -> None:
    sizes = replace(config(hidden=hidden), experts_per_rank=(3, 1) if uneven else None)
    case = Case(sizes, 3, "sparse", (5, 8), "int8", rounds=4, num_blocks=2)
    for wrong in ranks(2).run(workers.compare_rounds, case, "random", None, True):
        assert wrong == []


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "direct", "fullmesh"])
def test_different_numbers_of_experts(ranks: Ranks, scheme: str) -> None:
    """Their ids are mapped by a kernel, whatever they are."""
    uneven = replace(config(3, scheme, hidden=45, num_experts=5), experts_per_rank=(4, 0, 1))
    smooth = scheme != "fullmesh"
    check(
        ranks, Case(uneven, 3, "sparse", (5, 8, 0), "int8", smooth=smooth, rounds=3, num_blocks=2), "random"
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("quantize", [None, "int8", "int8_128"])
def test_blocks_that_receive_give_the_same_bits(ranks: Ranks, quantize: str | None, policy: str) -> None:
    case = Case(config(hidden=384), 3, "sparse", (5, 8), quantize, rounds=3, num_blocks=3)
    check(ranks, case, policy, Tuning(receiving_blocks=2))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("parts", [1, 3])
def test_two_streams_give_the_same_bits(ranks: Ranks, parts: int, policy: str) -> None:
    """Rows are packed beside the sending of those before them, on a stream of its own."""
    tuning = Tuning(dispatch_tokens=parts, combine_tokens=parts, communication_blocks=1)
    case = Case(config(), 5, "uniform", (8, 7), "int8", rounds=3, num_blocks=2)
    check(ranks, case, policy, tuning)


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2"])
@pytest.mark.parametrize("quantize", QUANTIZED)
def test_shared_experts_and_smooth_scales(ranks: Ranks, scheme: str, quantize: str) -> None:
    sizes = {"hidden": 128, "num_experts": 4, "num_shared_experts": 1, "num_shared_ranks": 1}
    case = Case(
        config(3, scheme, **sizes), 7, "skewed", (4, 0, 8), quantize, smooth=True, rounds=2, num_blocks=2
    )
    check(ranks, case, "random")


def test_fp16_without_weights(ranks: Ranks) -> None:
    case = Case(config(), 9, "uniform", (8, 8), weights=False, dtype=torch.float16, num_blocks=2)
    check(ranks, case, "random")


@pytest.mark.parametrize("mask", ["none", "tokens", "entries"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_callers_may_write_over_ids_once_dispatch_has_run(
    ranks: Ranks, dtype: torch.dtype, mask: Mask
) -> None:
    """The first kernel copies them, as what the mask leaves; combine reads the copy."""
    case = Case(config(), 3, "sparse", (8, 6), None, num_blocks=2)
    assert ranks(2).run(workers.copied_ids, case, dtype, mask) == [[], []]
