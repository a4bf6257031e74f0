"""The kernels around combine, and every feature of the sum, through the NPU compiler."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moe_triton.gate import SOC_OF_PRODUCT, compile_for_npu
from moe_triton.kernels import (
    SumFeatures,
    add_rows_kernel,
    block_quantize_kernel,
    const_alphas_kernel,
    rms_norm_kernel,
    weighted_sum_kernel,
)

SPELLING = {torch.bfloat16: "bf16", torch.float16: "f16"}

socs = pytest.mark.parametrize("soc", SOC_OF_PRODUCT.values(), ids=SOC_OF_PRODUCT.keys())
hiddens = pytest.mark.parametrize("hidden", [2048, 5120, 7168, 8192])
largest = pytest.mark.parametrize("hidden", [7168, 8192])
dtypes = pytest.mark.parametrize("dtype", SPELLING, ids=SPELLING.values())

# by token, by expert (V1) and by offset (direct); the latter two have neither masks nor special experts
FEATURES = [
    SumFeatures(masked=True),
    SumFeatures(shared_x=True),
    SumFeatures(special=True),
    SumFeatures(quantized=True),
    SumFeatures(fp32_out=True),
    SumFeatures(masked=True, shared_x=True),
    SumFeatures(masked=True, shared_x=True, special=True),
    SumFeatures(special=True, quantized=True),
    SumFeatures(quantized=True, fp32_out=True),
    SumFeatures(masked=True, shared_x=True, special=True, quantized=True),
    SumFeatures(masked=True, shared_x=True, special=True, quantized=True, fp32_out=True),
    SumFeatures(by_expert=True),
    SumFeatures(by_expert=True, quantized=True),
    SumFeatures(by_expert=True, fp32_out=True),
    SumFeatures(by_offset=True),
]


def names_of(features: SumFeatures) -> str:
    return "-".join(name for name, is_on in dataclasses.asdict(features).items() if is_on)


@socs
@hiddens
@pytest.mark.parametrize("masked", [False, True])
def test_rms_norm_overlaps_its_copies(soc: str, hidden: int, masked: bool) -> None:
    report = compile_for_npu(rms_norm_kernel(hidden, "npu", masked=masked), soc)
    assert report.fits, report.ub_bytes
    assert report.is_double_buffered("load", f"{hidden}xf32")
    assert report.is_double_buffered("load", f"{hidden}xbf16")
    assert report.is_double_buffered("store", f"{hidden}xbf16")


@socs
@hiddens
@dtypes
def test_add_rows_overlaps_its_copies(soc: str, hidden: int, dtype: torch.dtype) -> None:
    report = compile_for_npu(add_rows_kernel(dtype, hidden, "npu"), soc)
    assert report.fits, report.ub_bytes
    assert report.is_double_buffered("load", f"{hidden}x{SPELLING[dtype]}")
    assert report.is_double_buffered("store", f"{hidden}x{SPELLING[dtype]}")


@socs
@hiddens
@dtypes
def test_block_quantize_overlaps_its_copies(soc: str, hidden: int, dtype: torch.dtype) -> None:
    report = compile_for_npu(block_quantize_kernel(dtype, hidden, "npu"), soc)
    assert report.fits, report.ub_bytes
    assert report.is_double_buffered("load", f"{hidden // 8}x8x{SPELLING[dtype]}")
    assert report.is_double_buffered("store", f"{hidden // 8}x8xi8")
    assert report.is_double_buffered("store", f"{hidden // 8}x{SPELLING[dtype]}")


@socs
@largest
@dtypes
@pytest.mark.parametrize("topk", [1, 16])
@pytest.mark.parametrize("per_element", [False, True])
def test_const_alphas_fit(soc: str, hidden: int, dtype: torch.dtype, topk: int, per_element: bool) -> None:
    report = compile_for_npu(const_alphas_kernel(dtype, hidden, topk, per_element, "npu"), soc)
    assert report.fits, report.ub_bytes


@socs
@largest
@pytest.mark.parametrize("features", FEATURES, ids=names_of)
def test_weighted_sum_with_features_overlaps_loading_of_slots(
    soc: str, hidden: int, features: SumFeatures
) -> None:
    kernel = weighted_sum_kernel(torch.bfloat16, hidden, 8, 1, True, "npu", features=features)
    report = compile_for_npu(kernel, soc)
    assert report.fits, report.ub_bytes
    tile = kernel.constants["TILE"]
    assert report.is_double_buffered("load", f"{tile // 8}x8xi8" if features.quantized else f"{tile}xbf16")


@socs
@pytest.mark.parametrize("topk", [1, 16])
@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize(
    "features",
    [SumFeatures(special=True), SumFeatures(special=True, quantized=True, shared_x=True, masked=True)],
    ids=names_of,
)
def test_the_largest_sums_fit(soc: str, topk: int, has_weights: bool, features: SumFeatures) -> None:
    kernel = weighted_sum_kernel(torch.float16, 8192, topk, 4, has_weights, "npu", features=features)
    report = compile_for_npu(kernel, soc)
    assert report.fits, report.ub_bytes
