"""Kernels that move rows bring all scales of each format, whatever the sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.core.row_formats import QUANTIZED
from moe_triton.kernels import Case, Shape, Sizes, families
from tests.kernels.routes import LAUNCHES, Launch, assert_same_bits, kernel_settings

MOVING = ("arrange", "arrange_own", "append", "stamps")


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize("row_format", QUANTIZED)
@kernel_settings
@given(
    hidden=st.sampled_from([64, 128, 640, 1056]),
    seed=st.integers(0, 2**20),
    programs=st.integers(1, 3),
    more=st.sampled_from([(), ("weights",)]),
)
def test_every_scale_arrives(
    launch: Launch, name: str, row_format: str, hidden: int, seed: int, programs: int, more: tuple[str, ...]
) -> None:
    family = families()[name]
    features = frozenset({row_format, *more}) & frozenset(family.features)
    case = Case(family, Shape("bf16", hidden, 2, 0, features, "cpu", False), Sizes(9, 8, 4, seed=seed))
    found, expected = case.run(launch, programs), case.model()
    per_row = case.shape.slot.num_scales
    assert case.memory["out_scales"].shape[-1] == per_row == QUANTIZED[row_format].num_scales(hidden)
    for memory in case.outputs:
        assert_same_bits(found[memory], expected[memory])
