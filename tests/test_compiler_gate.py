"""Every Triton kernel through the NPU compiler, for both products, up to the step that needs CANN."""

from __future__ import annotations

import pytest
import torch

from moe_triton.errors import ToolchainError
from moe_triton.gate import SOC_OF_PRODUCT, UB_BYTES, compile_for_npu, planned_ub_bytes
from moe_triton.kernel import Arg, TritonKernel
from moe_triton.kernels import (
    arrange_kernel,
    offsets_kernel,
    pack_kernel,
    route_kernel,
    weighted_sum_kernel,
)
from moe_triton.kernels.language import tl, triton

HIDDEN = [2048, 5120, 7168, 8192]
SPELLING = {torch.bfloat16: "bf16", torch.float16: "f16"}

socs = pytest.mark.parametrize("soc", SOC_OF_PRODUCT.values(), ids=SOC_OF_PRODUCT.keys())
hiddens = pytest.mark.parametrize("hidden", HIDDEN)
dtypes = pytest.mark.parametrize("dtype", SPELLING, ids=SPELLING.values())
topks = pytest.mark.parametrize("topk", [1, 8])


@socs
@hiddens
@dtypes
def test_pack_overlaps_both_directions(soc: str, hidden: int, dtype: torch.dtype) -> None:
    report = compile_for_npu(pack_kernel(dtype, hidden, target="npu"), soc)
    assert report.fits, report.ub_bytes
    assert report.is_double_buffered("load", f"{hidden}x{SPELLING[dtype]}")
    assert report.is_double_buffered("store", f"{hidden}xi8")


@socs
@hiddens
@dtypes
@topks
def test_pack_smooth_overlaps_loading_of_tokens(soc: str, hidden: int, dtype: torch.dtype, topk: int) -> None:
    report = compile_for_npu(pack_kernel(dtype, hidden, topk, smooth=True, target="npu"), soc)
    assert report.fits, report.ub_bytes
    assert report.is_double_buffered("load", f"{hidden}x{SPELLING[dtype]}")


@socs
@hiddens
@pytest.mark.parametrize("element_bytes", [1, 2])
def test_arrange_overlaps_its_copies(soc: str, hidden: int, element_bytes: int) -> None:
    words = hidden * element_bytes // 4
    report = compile_for_npu(arrange_kernel(words, words, words + 8, element_bytes == 1), soc)
    assert report.fits, report.ub_bytes
    assert report.is_double_buffered("load", f"{words}xi32")


@socs
@hiddens
@dtypes
@topks
@pytest.mark.parametrize("num_shared", [0, 1])
def test_weighted_sum_overlaps_loading_of_slots(
    soc: str, hidden: int, dtype: torch.dtype, topk: int, num_shared: int
) -> None:
    report = compile_for_npu(weighted_sum_kernel(dtype, hidden, topk, num_shared, target="npu"), soc)
    assert report.fits, report.ub_bytes
    loads = [t for t in report.transfers if (t.kind, t.tile) == ("load", f"{hidden}x{SPELLING[dtype]}")]
    assert loads[0].double_buffered  # the K loop's; the shared slot is loaded once a token


@socs
@pytest.mark.parametrize("factory", [route_kernel, offsets_kernel])
def test_counting_kernels_fit(soc: str, factory: type[TritonKernel]) -> None:
    assert compile_for_npu(factory("npu"), soc).fits


@triton.jit
def _too_wide(x, y, WIDTH: tl.constexpr):  # noqa: N803
    columns = tl.arange(0, WIDTH)
    row = tl.load(x + columns)
    tl.store(y + columns, row / tl.max(row, 0))


def test_a_row_wider_than_the_unified_buffer_is_rejected() -> None:
    arguments = (Arg("x", "*fp32", "in"), Arg("y", "*fp32", "out"))
    kernel = TritonKernel("too_wide", _too_wide, arguments, {"WIDTH": UB_BYTES}, fallback=lambda *_: None)
    with pytest.raises(ToolchainError, match=r"too_wide|memory plan"):
        compile_for_npu(kernel)


def test_planned_bytes_are_the_highest_end() -> None:
    plan = (
        '{"Record": [{"error_info": "", "memory_info_array": ['
        '{"extent": 256, "offset": [0, 64]}, {"extent": 800, "offset": [32]}]}]}'
    )
    assert planned_ub_bytes(plan) == 132
