from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_triton.backends.cpu.triton import launch
from moe_triton.kernels.pack import pack_kernel
from moe_triton.reference.arithmetic import quantize_in_blocks
from tests.kernels.calls import pack
from tests.kernels.routes import DTYPES, LAUNCHES, Launch, assert_same_bits, kernel_settings

SIZES = [32, 96, 2880]
MAGNITUDES = [1.0, 1e-3, 1e4, 3e-5, 0.0]
MONSTERS = [float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 6e-8, 65504.0]


def slot_of(hidden: int) -> dict[str, int]:
    return {
        "scale_offset": hidden,
        "slot_stride": -(-(hidden + hidden // 32 + 44) // 512) * 512,
    }


def check_slots(slots: torch.Tensor, rows: torch.Tensor, hidden: int, block: int = 0) -> None:
    """Slots hold these fp32 rows quantised, each block as a row by itself is, and nothing else."""
    payloads, scales = quantize_in_blocks(rows.numpy(), block or hidden)
    assert_same_bits(slots[:, :hidden], torch.from_numpy(payloads).view(len(rows), hidden))
    end = hidden + 4 * -(-hidden // (block or hidden))
    got = slots[:, hidden:end].contiguous().view(torch.float32)
    assert_same_bits(got, torch.from_numpy(scales).view(len(rows), -1))
    assert not slots[:, end:].any()


def draw_tokens(data: st.DataObject, tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    x = torch.randn((tokens, hidden), generator=generator)
    x *= torch.tensor(data.draw(st.lists(st.sampled_from(MAGNITUDES), min_size=tokens, max_size=tokens)))[
        :, None
    ]
    x = x.to(dtype)
    monsters = data.draw(
        st.lists(
            st.tuples(st.integers(0, tokens - 1), st.integers(0, hidden - 1), st.sampled_from(MONSTERS)),
            max_size=3,
        )
    )
    for token, column, value in monsters:
        x[token, column] = value
    return x


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [96, 128, 896, 1056])
@kernel_settings
@given(data=st.data(), tokens=st.integers(1, 5), programs=st.integers(1, 3), smooth=st.booleans())
def test_pack_in_blocks(
    launch: Launch,
    dtype: torch.dtype,
    hidden: int,
    data: st.DataObject,
    tokens: int,
    programs: int,
    smooth: bool,
) -> None:
    """A scale for every 128 elements, of rows that differ in magnitude from one block to the next.

    The last block may be short.
    """
    x = draw_tokens(data, tokens, hidden, dtype)
    x *= 10.0 ** torch.arange(hidden).div(128, rounding_mode="floor").remainder(5).sub(3).to(dtype)
    rows, how = x.float(), {}
    if smooth:
        scales, ids = torch.rand((4, hidden)) * 3 - 1, torch.randint(0, 4, (tokens, 2), dtype=torch.int32)
        rows = rows.repeat_interleave(2, 0) * scales[ids.flatten().long()]
        how = {"topk_idx": ids, "smooth_scales": scales}
    slots = pack(x, launch, **slot_of(hidden), programs=programs, block=128, **how)  # type: ignore[arg-type]
    check_slots(slots, rows, hidden, 128)


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", SIZES)
@kernel_settings
@given(data=st.data(), tokens=st.integers(1, 9), programs=st.integers(1, 4))
def test_pack(
    launch: Launch, dtype: torch.dtype, hidden: int, data: st.DataObject, tokens: int, programs: int
) -> None:
    x = draw_tokens(data, tokens, hidden, dtype)
    slots = pack(x, launch, **slot_of(hidden), programs=programs)
    check_slots(slots, x.float(), hidden)


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("hidden", "topk"), [(32, 1), (96, 3), (2880, 8)])
@kernel_settings
@given(data=st.data(), tokens=st.integers(1, 5), offset=st.integers(0, 2), programs=st.integers(1, 3))
def test_pack_smooth(
    launch: Launch,
    dtype: torch.dtype,
    hidden: int,
    topk: int,
    data: st.DataObject,
    tokens: int,
    offset: int,
    programs: int,
) -> None:
    x = draw_tokens(data, tokens, hidden, dtype)
    num_experts = 6
    smooth = torch.rand((num_experts + offset, hidden)) * 3 - 1
    ids = torch.randint(-1, num_experts, (tokens, topk), dtype=torch.int32)
    slots = pack(
        x,
        launch,
        **slot_of(hidden),
        topk_idx=ids,
        smooth_scales=smooth,
        scale_row_offset=offset,
        programs=programs,
    )
    chosen = torch.where(ids.flatten() >= 0, ids.flatten() + offset, 0).long()
    rows = x.float().repeat_interleave(topk, 0) * smooth[chosen]
    check_slots(slots, rows, hidden)


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("hidden", "topk", "num_shared"), [(32, 1, 1), (96, 3, 4), (2880, 8, 1)])
@kernel_settings
@given(data=st.data(), tokens=st.integers(1, 5), programs=st.integers(1, 3))
def test_pack_smooth_with_shared_experts(
    launch: Launch,
    dtype: torch.dtype,
    hidden: int,
    topk: int,
    num_shared: int,
    data: st.DataObject,
    tokens: int,
    programs: int,
) -> None:
    x = draw_tokens(data, tokens, hidden, dtype)
    num_experts = 6
    smooth = torch.rand((num_shared + num_experts, hidden)) * 3 - 1
    ids = torch.randint(0, num_experts, (tokens, topk), dtype=torch.int32)
    slots = pack(
        x,
        launch,
        **slot_of(hidden),
        topk_idx=ids,
        smooth_scales=smooth,
        scale_row_offset=num_shared,
        num_shared=num_shared,
        programs=programs,
    )
    rows = []
    for t in range(tokens):
        for j in range(topk + num_shared):
            scale_row = num_shared + int(ids[t, j]) if j < topk else j - topk
            rows.append(x[t].float() * smooth[scale_row])
    check_slots(slots, torch.stack(rows), hidden)


def test_the_smooth_form_for_the_npu_agrees() -> None:
    """On finite rows: it takes the maximum of floats."""
    x, ids = torch.randn((5, 96)).bfloat16(), torch.randint(0, 6, (5, 3), dtype=torch.int32)
    smooth = torch.rand((8, 96)) + 0.5
    results = []
    for target in ("cpu", "npu"):
        slots = torch.zeros((25, 512), dtype=torch.int8)
        views = [slots, slots.view(-1).view(torch.float32)[24:]]
        kernel = pack_kernel(torch.bfloat16, 96, 3, True, target, 2)
        launch(kernel, [x, ids, smooth, *views, 0, 5, 2, 8, 512, 128], 2)
        results.append(slots)
    assert torch.equal(results[0], results[1])


@settings(kernel_settings, max_examples=10)
@given(hidden=st.integers(1, 256).map(lambda n: 32 * n), dtype=st.sampled_from(DTYPES))
def test_any_hidden_size(hidden: int, dtype: torch.dtype) -> None:
    x = torch.randn((3, hidden), generator=torch.Generator().manual_seed(hidden)).to(dtype)
    slots = pack(x, launch, **slot_of(hidden))
    check_slots(slots, x.float(), hidden)


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bad_row_leaves_its_neighbours_alone(launch: Launch, dtype: torch.dtype) -> None:
    x = torch.randn((4, 96)).to(dtype)
    clean = pack(x, launch, **slot_of(96))
    x[1, 7] = float("nan")
    x[2, 8] = -float("inf")
    slots = pack(x, launch, **slot_of(96))
    scales = slots[:, 96:100].contiguous().view(torch.float32)[:, 0]
    assert scales[1].isnan()
    assert scales[2].isinf()
    assert not slots[1:3, :96].any()
    assert torch.equal(slots[[0, 3]], clean[[0, 3]])


@pytest.mark.parametrize("launch", LAUNCHES)
def test_tiny_rows_vanish_and_the_smallest_that_do_not_are_exact(launch: Launch) -> None:
    x = torch.zeros((4, 32), dtype=torch.bfloat16)
    x[1, 0] = 1e-40  # a denormal
    x[2, 0] = 3.6e-37  # 127 / x overflows
    x[3, 0] = 3.8e-37  # 127 / x does not
    slots = pack(x, launch, **slot_of(32))
    scales = slots[:, 32:36].contiguous().view(torch.float32)[:, 0]
    assert scales[:3].tolist() == [0, 0, 0]
    assert scales[3] > 0
    assert slots[:, 0].tolist() == [0, 0, 0, 127]


@pytest.mark.parametrize("launch", LAUNCHES)
def test_smooth_ids_outside_the_table_never_become_addresses(launch: Launch) -> None:
    x = torch.ones((1, 32), dtype=torch.bfloat16)
    ids = torch.tensor([[2**31 - 1, -(2**31), 3, 2]], dtype=torch.int32)
    smooth = torch.ones((3, 32))
    slots = pack(x, launch, **slot_of(32), topk_idx=ids, smooth_scales=smooth, scale_row_offset=0)
    assert (slots[:, :32] == 127).all()


@pytest.mark.parametrize("launch", LAUNCHES)
def test_smooth_ids_outside_the_experts_stay_inside_the_table(launch: Launch) -> None:
    """Two shared experts and three others: rows of ids that are none take row 0 and are never sent."""
    x = torch.ones((1, 32), dtype=torch.bfloat16)
    ids = torch.tensor([[2**31 - 1, -(2**31), -1, 3, 2]], dtype=torch.int32)
    smooth = torch.arange(1.0, 6.0)[:, None].repeat(1, 32)
    options = {"topk_idx": ids, "smooth_scales": smooth, "scale_row_offset": 2, "num_shared": 2}
    slots = pack(x, launch, **slot_of(32), **options)
    scales = slots[:, 32:36].contiguous().view(torch.float32)[:, 0] * 127
    assert scales.round().tolist() == [1, 1, 1, 1, 5, 1, 2]


@pytest.mark.parametrize("launch", LAUNCHES)
def test_chunks_of_rows_for_shared_experts_cover_their_own_tokens_only(launch: Launch) -> None:
    x, ids = torch.randn((7, 96)).bfloat16(), torch.randint(0, 6, (7, 3), dtype=torch.int32)
    smooth = torch.rand((8, 96)) + 0.5
    options = {"topk_idx": ids, "smooth_scales": smooth, "scale_row_offset": 2, "num_shared": 2}
    whole = pack(x, launch, **slot_of(96), **options)
    chunked = torch.zeros_like(whole)
    views = [chunked, chunked.view(-1).view(torch.float32)[24:]]
    kernel = pack_kernel(torch.bfloat16, 96, 3, smooth=True, num_shared=2)
    for first, count in ((4, 3), (0, 4)):
        launch(kernel, [x, ids, smooth, *views, first, count, 2, 8, 512, 128], 2)
        if first:
            assert not chunked[: first * 5].any()
    assert torch.equal(chunked, whole)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_chunks_cover_their_own_tokens_only(launch: Launch) -> None:
    hidden, tokens, stride = 96, 7, 512
    x = torch.randn((tokens, hidden)).bfloat16()
    whole = pack(x, launch, **slot_of(hidden))
    chunked = torch.zeros_like(whole)
    views = [chunked, chunked.view(-1).view(torch.float32)[hidden // 4 :]]
    for first, count in ((4, 3), (0, 4)):
        arguments = [x, *views, first, count, stride, stride // 4]
        launch(pack_kernel(torch.bfloat16, hidden), arguments, 2)
        if first:
            assert not chunked[:first].any()
    assert torch.equal(chunked, whole)
