"""The baseline of a kernel's benchmark computes what the kernel does."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels.eager import eager_of
from moe_triton.kernels import Case, Sizes, kernel_cases

SIZES = Sizes(16, num_experts=16, num_ranks=4, unrouted=0, first_token=0)
LISTED = [case for hidden in (0, 256) for case in kernel_cases(SIZES, hidden, "cpu")]
CASES = {case.name: case for case in LISTED if eager_of(case)}


def placed(case: Case, model: dict[str, torch.Tensor], name: str, like: torch.Tensor) -> torch.Tensor:
    """An argument's contents, where the kernel has one row of it in each slot."""
    found = case.arguments(model)[name]
    assert isinstance(found, torch.Tensor)
    if case.family.name in ("pack", "pack_smooth", "block_quantize"):
        name = {"packed": "row_stride", "rows": "row_stride"}.get(name, "scale_stride")
        num_scales = case.shape.slot.num_scales or 1
        flat = like.reshape(-1, like.shape[-1] if name == "row_stride" else num_scales)
        stride = case.values[name]
        assert isinstance(stride, int)
        return torch.as_strided(found, flat.shape, (stride, 1)).reshape(like.shape)
    return found.view(like.shape)


@pytest.mark.parametrize("name", CASES)
def test_what_torch_computes_is_what_the_model_does(name: str) -> None:
    case = CASES[name]
    eager = eager_of(case)
    assert eager is not None
    model = case.model()
    outputs = eager(case)
    if case.family.name == "block_quantize":  # scales lie one behind the other
        outputs = {"packed": outputs["rows"].flatten(1)}
    for argument, found in outputs.items():
        expected = placed(case, model, argument, found)
        rows = slice(case.model()["recv_offsets"][-1] if case.family.name == "block_quantize" else None)
        tolerance = 1.0 if found.dtype == torch.int8 else 2e-2
        finite = torch.isfinite(found[rows].float()) & torch.isfinite(expected[rows].float())
        torch.testing.assert_close(
            found[rows].float()[finite], expected[rows].float()[finite], rtol=2e-2, atol=tolerance
        )


def test_there_is_a_baseline_for_what_computes_most() -> None:
    families = {name.partition("/")[0] for name in CASES}
    assert families >= {"pack", "weighted_sum", "rms_norm", "block_quantize"}
