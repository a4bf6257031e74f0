"""Plans are found by types as well as values, and calls with fake tensors are traced."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from moe_triton import torch_npu_ops as ops
from moe_triton.core.errors import ArgumentError
from moe_triton.processes import RankGroup
from moe_triton.torch_npu_ops.operators import exactly
from tests.torch_npu_ops.setting import experts_of, fresh, make_round

Groups = Callable[[int], RankGroup]


class Mode(IntEnum):
    QUANTIZED = 2


scalars = st.one_of(
    st.integers(-3, 300), st.booleans(), st.floats(-2, 20), st.sampled_from(["", "2", "a" * 300])
)


@given(st.lists(scalars, max_size=6), st.lists(scalars, max_size=6))
def test_bytes_tell_types_apart(one: list[Any], other: list[Any]) -> None:
    same = [(type(value), repr(value)) for value in one] == [(type(value), repr(value)) for value in other]
    assert (exactly(tuple(one)) == exactly(tuple(other))) is same


def equal_values(rank: int, num_ranks: int, is_cached: bool) -> None:
    """What is equal to an integer is refused or converted, before there is a plan and after."""
    r = make_round(rank, num_ranks)
    name, size, _, experts = r.group
    dispatch = ops.npu_moe_distribute_dispatch_v2
    with fresh():
        expected = dispatch(r.x, r.ids, *r.group, quant_mode=2) if is_cached else None
        for bad in (
            (name, float(size), rank, experts),
            (name, size, float(rank), experts),
            (name, size, rank, np.float32(experts)),
            (name, size, bool(rank), experts),
            (name, size, rank, complex(experts)),
            (name, size, rank, torch.tensor(experts)),
            (name.encode(), size, rank, experts),
        ):
            with pytest.raises(ArgumentError):
                dispatch(r.x, r.ids, *bad, quant_mode=2)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="quant_mode"):
            dispatch(r.x, r.ids, *r.group, quant_mode=2.0)  # type: ignore[arg-type]
        for good in (2, Mode.QUANTIZED, np.int8(2), np.uint64(2)):
            out = dispatch(
                r.x,
                r.ids,
                str.__new__(type("Name", (str,), {}), name),
                np.int64(size),
                np.int32(rank),
                np.uint16(experts),
                quant_mode=good,  # type: ignore[arg-type]
            )
            expected = out if expected is None else expected
            rows = int(expected[4][-1])
            assert torch.equal(out[0][:rows], expected[0][:rows])
            answers = experts_of(out[0], out[1])
            ops.npu_moe_distribute_combine_v2(answers, r.ids, out[2], out[4], r.weights, *r.group)


@pytest.mark.parametrize("is_cached", [False, True])
def test_what_equals_an_integer_finds_no_plan(ranks: Groups, is_cached: bool) -> None:
    ranks(2).run(equal_values, is_cached)


def fake_in_each_place(rank: int, num_ranks: int) -> None:
    r = make_round(rank, num_ranks)
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return mode.from_tensor(tensor)

    with fresh():
        out = ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *r.group)
        given: dict[str, torch.Tensor] = {
            "expand_x": experts_of(out[0]),
            "expert_ids": r.ids,
            "assist_info_for_combine": out[2],
            "ep_send_counts": out[4],
            "expert_scales": r.weights,
        }
        names = ("group_ep", "ep_world_size", "ep_rank_id", "moe_expert_num")
        group: dict[str, Any] = dict(zip(names, r.group, strict=True))
        options = {
            "elastic_info": torch.zeros(4 + 2 * num_ranks, dtype=torch.int32),
            "x_active_mask": torch.ones(len(r.x), dtype=torch.bool),
            "expand_scales": out[6],
        }
        combine = ops.npu_moe_distribute_combine_v2
        for name in (*given, *options):
            every = {**given, **options}
            every[name] = fake(every[name])
            assert isinstance(combine(**every, **group), FakeTensor)  # type: ignore[arg-type]
            positional = [every.pop(argument) for argument in given]
            assert isinstance(combine(*positional, **every, **group), FakeTensor)  # type: ignore[arg-type]
        # None of them has sent anything.
        combine(**given, **group)  # type: ignore[arg-type]


def test_a_fake_tensor_anywhere_makes_a_traced_call(ranks: Groups) -> None:
    ranks(2).run(fake_in_each_place)
