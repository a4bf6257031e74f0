"""How many launches dispatch and combine take on an NPU: each costs microseconds there, whatever it does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_triton.backends import CAPABILITIES
from moe_triton.core.config import Config
from moe_triton.core.plan import device_launches
from moe_triton.core.row_formats import ROW_FORMATS
from moe_triton.core.tuning import Tuning
from moe_triton.operators.variants import CombineVariant, DispatchVariant, Variant
from moe_triton.schemes import make_scheme
from moe_triton.schemes.rank_context import RankContext
from moe_triton.schemes.scheme import Scheme, SplitScheme

FULLMESH = "fullmesh_v1", "fullmesh_v2"
DISPATCH, COMBINE = DispatchVariant(torch.bfloat16, ROW_FORMATS["int8"]), CombineVariant(torch.bfloat16, True)
PLAIN: tuple[Variant, Variant] = DISPATCH, COMBINE


def scheme(comm_alg: str, version: int = 2, receiving: int = 0, shared: int = 0) -> Scheme:
    """Of 16 ranks with 48 cores each."""
    experts = 16 - shared if shared else 256
    sizes = 16, 64, 7168, 8, experts, shared and 1, shared
    config = Config(*sizes, scheme=comm_alg, version=version, relaxed=True)
    tuning = Tuning(receiving_blocks=receiving)
    return make_scheme(RankContext(config, 0, 48, 60_000_000, CAPABILITIES["npu"], tuning=tuning))


def counts(built: Scheme, variants: tuple[Variant, Variant] = PLAIN, parts: int = 1) -> tuple[int, ...]:
    """Of dispatch and combine."""
    return tuple(len(device_launches(built.whole(variant, 0, parts).launches)) for variant in variants)


@pytest.mark.parametrize(
    ("comm_alg", "version", "most"),
    [
        ("fullmesh_v1", 2, (3, 2)),
        ("fullmesh_v2", 2, (3, 2)),
        ("fullmesh_v1", 1, (4, 3)),
        ("direct", 2, (5, 2)),
    ],
)
@pytest.mark.parametrize("rows", [None, "int8"])
@pytest.mark.parametrize("ids", [None, torch.int32, torch.int64])
@pytest.mark.parametrize("shared", [0, 2])
def test_usual_calls(
    comm_alg: str, version: int, most: tuple[int, int], rows: str | None, ids: torch.dtype | None, shared: int
) -> None:
    """Shared experts on ranks of their own take one more."""
    dispatch = replace(DISPATCH, row_format=ROW_FORMATS[rows], given_ids=ids)
    found = counts(scheme(comm_alg, version, shared=shared), (dispatch, COMBINE))
    assert all(number <= limit + bool(shared) for number, limit in zip(found, most, strict=True)), found


@pytest.mark.parametrize("comm_alg", FULLMESH)
def test_cores_that_receive_take_the_place_of_a_launch(comm_alg: str) -> None:
    assert counts(scheme(comm_alg, receiving=24)) == (2, 2)
    assert counts(scheme(comm_alg)) == (3, 2)


@pytest.mark.parametrize("comm_alg", FULLMESH)
def test_halves(comm_alg: str) -> None:
    built = scheme(comm_alg)
    assert isinstance(built, SplitScheme)
    for variant, most in ((DISPATCH, (2, 2)), (COMBINE, (1, 2))):
        for half, number in zip((built.setup, built.teardown), most, strict=True):
            assert len(device_launches(half(variant, 0).launches)) <= number


@pytest.mark.parametrize("comm_alg", FULLMESH)
@pytest.mark.parametrize("parts", [2, 3, 5])
def test_each_further_part_takes_two_more(comm_alg: str, parts: int) -> None:
    built = scheme(comm_alg)
    assert counts(built, parts=parts) == (3 + 2 * (parts - 1), 2 + 2 * (parts - 1))


FEATURES: dict[str, tuple[Variant, Variant]] = {
    "mask of tokens": (replace(DISPATCH, mask="tokens"), replace(COMBINE, mask="tokens")),
    "mask of entries": (replace(DISPATCH, mask="entries"), replace(COMBINE, mask="entries")),
    "waits": (replace(DISPATCH, waits=True), replace(COMBINE, waits=True)),
    "smooth": (replace(DISPATCH, smooth=True), COMBINE),
    "weights": (replace(DISPATCH, weights=True), COMBINE),
    "statistics": (replace(DISPATCH, recv_stats=True, cumulative=True), COMBINE),
    "special experts": (DISPATCH, replace(COMBINE, special=(1, 1, 1))),
    "caller's shared expert": (DISPATCH, replace(COMBINE, shared_x=True)),
    "int8 results": (DISPATCH, replace(COMBINE, block_quantize=True)),
}


@pytest.mark.parametrize("comm_alg", FULLMESH)
@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_takes_one_more_at_most(comm_alg: str, name: str) -> None:
    built = scheme(comm_alg)
    added = [a - b for a, b in zip(counts(built, FEATURES[name]), counts(built), strict=True)]
    assert max(added) <= 1
