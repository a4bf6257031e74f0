"""The kernels around dispatch that move no token arithmetic, through the NPU compiler."""

from __future__ import annotations

import pytest
import torch

from moe_triton.gate import SOC_OF_PRODUCT, compile_for_npu
from moe_triton.kernel import TritonKernel
from moe_triton.kernels.append import append_kernel, gather_counts_kernel
from moe_triton.kernels.pack import pack_kernel
from moe_triton.kernels.places import places_kernel, starts_kernel
from moe_triton.kernels.returns import own_offsets_kernel, returns_kernel
from moe_triton.kernels.route import offsets_kernel
from moe_triton.kernels.select import select_kernel
from moe_triton.kernels.share import share_kernel
from moe_triton.kernels.stamps import stamps_kernel
from moe_triton.kernels.waits import waits_of_combine_kernel, waits_of_dispatch_kernel

socs = pytest.mark.parametrize("soc", SOC_OF_PRODUCT.values(), ids=SOC_OF_PRODUCT.keys())
hiddens = pytest.mark.parametrize("hidden", [2048, 5120, 7168, 8192])

TABLES = [
    offsets_kernel("npu", cumulative=True),
    *(share_kernel(False, masked, "npu") for masked in (False, True)),
    share_kernel(True, False, "npu"),
    *(returns_kernel(shared, "npu") for shared in (False, True)),
    own_offsets_kernel("npu"),
    gather_counts_kernel("npu"),
    waits_of_dispatch_kernel("npu"),
    waits_of_combine_kernel("npu"),
    starts_kernel("npu"),
    *(places_kernel(topk, num_shared) for topk in (1, 8, 16) for num_shared in (0, 4)),
    *(stamps_kernel(has_weight, has_scale) for has_weight in (False, True) for has_scale in (False, True)),
]


@socs
@pytest.mark.parametrize("kernel", TABLES, ids=lambda kernel: kernel.name)
def test_tables_fit(soc: str, kernel: TritonKernel) -> None:
    report = compile_for_npu(kernel, soc)
    assert report.fits, report.ub_bytes


@socs
@pytest.mark.parametrize("per_entry", [False, True])
@pytest.mark.parametrize("topk", range(1, 17))
def test_select_fits(soc: str, per_entry: bool, topk: int) -> None:
    report = compile_for_npu(select_kernel(topk, per_entry, "npu"), soc)
    assert report.fits, report.ub_bytes


@socs
@hiddens
@pytest.mark.parametrize("num_shared", [1, 4])
@pytest.mark.parametrize(("dtype", "spelling"), [(torch.bfloat16, "bf16"), (torch.float16, "f16")])
def test_pack_for_shared_experts_overlaps_loading_of_tokens(
    soc: str, hidden: int, num_shared: int, dtype: torch.dtype, spelling: str
) -> None:
    report = compile_for_npu(pack_kernel(dtype, hidden, 8, True, "npu", num_shared), soc)
    assert report.fits, report.ub_bytes
    assert report.is_double_buffered("load", f"{hidden}x{spelling}")


@socs
@hiddens
@pytest.mark.parametrize("element_bytes", [1, 2])
def test_append_overlaps_its_copies(soc: str, hidden: int, element_bytes: int) -> None:
    words = hidden * element_bytes // 4
    report = compile_for_npu(append_kernel(words, words, element_bytes == 1), soc)
    assert report.fits, report.ub_bytes
    assert report.is_double_buffered("load", f"{words}xi32")
    assert report.is_double_buffered("store", f"{words}xi32")
