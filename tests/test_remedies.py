"""What errors of a buffer tell its caller to do: in one process, without a group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moe_triton import ArgumentError, EPBuffer
from moe_triton import torch_npu_ops as ops
from tests.test_limits_choice import SIZES

X = torch.ones(3, 64, dtype=torch.bfloat16)
WEIGHTS, IDS = torch.rand(3, 16).topk(2, dim=1)


@pytest.fixture(scope="module")
def buffer() -> Iterator[EPBuffer]:
    with EPBuffer(**SIZES, comm_alg="fullmesh_v1") as made:
        yield made


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"comm_alg": "ato"}, "Use 'auto', '', 'fullmesh_v1', 'fullmesh_v2', 'direct' or 'hierarchy'."),
        ({"comm_alg": "fullmesh"}, "Use 'auto', '', 'fullmesh_v1', 'fullmesh_v2', 'direct' or 'hierarchy'."),
        ({"comm_alg": "direct", "product": "A2"}, "Use 'auto', '', 'fullmesh' or 'hierarchy'."),
        ({"num_experts": 0}, "Pass 1 or more."),
        ({"num_experts": 2049}, "Use fewer routed experts."),
        ({"num_shared_experts": -1}, "Pass 0 or more."),
        ({"num_shared_ranks": -1}, "Pass 0 for none."),
        ({"num_shared_ranks": 1}, "Use fewer shared ranks."),
        ({"num_shared_ranks": -1, "product": "A2"}, "Pass 0."),
        ({"hidden": 0}, "Pass 1 or more."),
        ({"hidden": 8193, "relaxed": False}, "Use a smaller hidden dimension."),
        ({"outputs": "ours"}, "Pass one of them."),
    ],
)
def test_settings(options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        EPBuffer(**{**SIZES, **options})
    assert caught.value.argument == next(iter(options))
    assert caught.value.remedy == remedy


def test_torch_npu_offers_what_it_takes() -> None:
    with pytest.raises(ArgumentError) as caught:
        ops.npu_moe_distribute_dispatch_v2(X, IDS.int(), "no such group", 4, 0, 8, comm_alg="auto")
    assert caught.value.remedy == "Use '', 'fullmesh_v1', 'fullmesh_v2' or 'hierarchy'."


@pytest.mark.parametrize("given", [WEIGHTS, None, (X, IDS)])
def test_a_handle_is_a_field_of_the_output(buffer: EPBuffer, given: object) -> None:
    buffer.dispatch(X, IDS)
    with pytest.raises(ArgumentError) as caught:
        buffer.combine(X, given)  # type: ignore[call-overload]
    assert caught.value.argument == "handle"
    fields = "tokens, scales, tokens_per_expert, weights, handle"
    assert caught.value.remedy.startswith(f"Pass output.handle, the last of the fields {fields} of")


@pytest.mark.parametrize("weights", [IDS, IDS.int()])
def test_ids_and_weights_in_each_others_places(buffer: EPBuffer, weights: torch.Tensor) -> None:
    with pytest.raises(ArgumentError) as caught:
        buffer.dispatch(X, WEIGHTS, weights)
    assert caught.value.argument == "topk_idx"
    assert caught.value.remedy == "The order is dispatch(x, topk_idx, topk_weights)."


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_ids_of_another_dtype_are_converted(buffer: EPBuffer, weights: torch.Tensor | None) -> None:
    with pytest.raises(ArgumentError) as caught:
        buffer.dispatch(X, WEIGHTS, weights)
    assert caught.value.remedy == "Convert it: topk_idx.to(torch.int32)."


def test_fp8_has_its_counterparts(buffer: EPBuffer) -> None:
    with pytest.raises(ArgumentError) as caught:
        buffer.dispatch(X, IDS, quantize="fp8")
    assert "'int8_128' (one for every 128 elements): A2 and A3 have no fp8" in caught.value.remedy


def test_a_scheme_that_auto_has_chosen_can_be_avoided() -> None:
    with EPBuffer(**SIZES, comm_alg="direct") as made, pytest.raises(ArgumentError) as caught:
        made.dispatch(X, IDS, active_mask=torch.tensor([True, True, False]))
    assert "or outputs='own' where 'auto' has chosen 'direct'" in caught.value.remedy
