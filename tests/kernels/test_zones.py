"""Kernels that look their zone up: what they do in either zone is what they do where there is one only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from moe_triton.core.kernel import TritonKernel
from moe_triton.kernels.add_rows import add_rows, add_rows_kernel
from moe_triton.kernels.append import append, append_kernel, gather_counts, gather_counts_kernel
from moe_triton.kernels.arrange import arrange, arrange_kernel
from moe_triton.kernels.weighted_sum import SumFeatures, weighted_sum, weighted_sum_kernel
from moe_triton.kernels.zones import turn
from tests.kernels.routes import LAUNCHES, Launch, assert_same_bits

ZONES = [0, 1]
GARBAGE = 0x7B


def extent(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first one to its last one."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1


def in_zones(launch: Launch, kernel: TritonKernel, window: Sequence[str], zone: int) -> Launch:
    """Launches another kernel than asked for: with ``window`` copied to one of two zones full of garbage."""

    def launch_zoned(plain: TritonKernel, arguments: Sequence[torch.Tensor | int], programs: int) -> None:
        named = dict(zip([arg.name for arg in plain.args], arguments, strict=True))
        first = named[window[0]]
        assert isinstance(first, torch.Tensor)
        num_bytes = extent(first) * first.element_size()
        stride = -(-num_bytes // 512) * 512 + 512
        memory = torch.full((2 * stride,), GARBAGE, dtype=torch.uint8)
        flat = first.as_strided((extent(first),), (1,), first.storage_offset())
        memory[zone * stride : zone * stride + num_bytes] = flat.view(torch.uint8)
        for name in window:
            held = named[name]
            assert isinstance(held, torch.Tensor)
            ahead = held.data_ptr() - first.data_ptr()
            named[name] = memory[ahead : len(memory) - ahead].view(held.dtype)
        named["zone"] = torch.tensor([zone], dtype=torch.int32)
        named["zone_stride"] = stride // first.element_size()
        launch(kernel, [named[arg.name] for arg in kernel.args], programs)

    return launch_zoned


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def check(
    kernel: TritonKernel,
    window: Sequence[str],
    launch: Launch,
    zone: int,
    run: Callable[[Launch], Sequence[torch.Tensor]],
) -> None:
    want = run(launch)
    got = run(in_zones(launch, kernel, window, zone))
    for mine, theirs in zip(got, want, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_arrange(launch: Launch, zone: int) -> None:
    slots = torch.randint(-(2**31), 2**31 - 1, (2, 3, 4, 32), dtype=torch.int32)
    ends = torch.tensor([1, 3, 3, 7, 8, 10], dtype=torch.int32)
    kernel = arrange_kernel(16, 20, 24, True, True, zoned=True)
    check(
        kernel,
        ["slots", "slot_scales"],
        launch,
        zone,
        lambda using: arrange(
            slots,
            ends,
            using,
            row_words=16,
            scale_word=20,
            triple_word=24,
            has_scale=True,
            has_weight=True,
            programs=2,
        ),
    )


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_append(launch: Launch, zone: int) -> None:
    slots = torch.randint(-(2**31), 2**31 - 1, (5, 24), dtype=torch.int32)

    def run(using: Launch) -> list[torch.Tensor]:
        rows, scales = torch.zeros((10, 16), dtype=torch.int32), torch.zeros(10)
        append(slots, torch.tensor([2, 4], dtype=torch.int32), rows, scales, using, tp_rank=0, scale_word=16)
        return [rows, scales]

    check(append_kernel(16, 16, True, zoned=True), ["slots", "slot_scales"], launch, zone, run)


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_gather_counts(launch: Launch, zone: int) -> None:
    header = torch.tensor([1, 4, 9], dtype=torch.int32)

    def run(using: Launch) -> list[torch.Tensor]:
        total = torch.tensor([5], dtype=torch.int64)
        counts = torch.tensor([5, 9], dtype=torch.int32)
        return [gather_counts(header, counts, total, using, tp_rank=0, capacity=20), total]

    check(gather_counts_kernel(zoned=True), ["header"], launch, zone, run)


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_add_rows(launch: Launch, zone: int) -> None:
    rows, slots = randn(4, 64), randn(4, 96)[:, :64]
    counts = torch.tensor([3, 1], dtype=torch.int32)
    kernel = add_rows_kernel(torch.bfloat16, 64, zoned=True)
    check(kernel, ["slots"], launch, zone, lambda using: [add_rows(rows, slots, counts, 0, using)])


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_weighted_sum(launch: Launch, zone: int) -> None:
    slots, weights = randn(5, 3, 96)[:, :, :64], randn(5, 2, dtype=torch.float32)
    ids = torch.tensor([[0, 1], [2, -1], [3, 0], [-1, -1], [1, 2]], dtype=torch.int32)
    kernel = weighted_sum_kernel(torch.bfloat16, 64, 2, 1, True, features=SumFeatures(zoned=True))

    def run(using: Launch) -> list[torch.Tensor]:
        return [weighted_sum(slots, ids, weights, using, num_experts=4, programs=2)]

    check(kernel, ["slots"], launch, zone, run)


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_weighted_sum_of_quantized_rows(launch: Launch, zone: int) -> None:
    hidden, stride, tokens, topk = 64, 128, 3, 2
    memory = torch.randint(-127, 128, (tokens * topk * stride,), dtype=torch.int8)
    scales = memory.view(torch.bfloat16)[hidden // 2 :]
    scales.view(torch.uint8)[1::2] = 0x3F  # finite: a sum of NaNs would prove little
    ids = torch.tensor([[0, 1], [2, -1], [3, 0]], dtype=torch.int32)

    def kernel(zoned: bool) -> TritonKernel:
        features = SumFeatures(quantized=True, zoned=zoned)
        return weighted_sum_kernel(torch.bfloat16, hidden, topk, 0, False, features=features)

    def run(using: Launch) -> list[torch.Tensor]:
        out = torch.zeros((tokens, hidden), dtype=torch.bfloat16)
        sizes = [topk * stride, stride, 0, tokens, 4]
        using(kernel(False), [memory, scales, ids, torch.empty(0), out, *sizes], 2)
        return [out]

    assert run(launch)[0].isfinite().all()
    check(kernel(True), ["slots", "slot_scales"], launch, zone, run)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_turn_goes_to_the_other_zone_and_back(launch: Launch) -> None:
    cells = torch.tensor([7, 0, 7], dtype=torch.int32)
    for zone in (1, 0, 1):
        turn(cells[1:2], launch)
        assert cells.tolist() == [7, zone, 7]
