from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_triton.backends.cpu.triton import launch
from moe_triton.core.errors import ArgumentError
from moe_triton.kernels.block_quantize import block_quantize_kernel
from moe_triton.reference.arithmetic import dequantize_blocks, quantize_blocks
from tests.kernels.calls import block_quantize
from tests.kernels.routes import (
    CANARY,
    DTYPES,
    FORMS,
    LAUNCHES,
    Guarded,
    Launch,
    assert_same_bits,
    kernel_settings,
)

MAGNITUDES = [1.0, 1e-3, 3e4, 3e-5, 1e-38, 0.0]
MONSTERS = [float("nan"), float("inf"), -float("inf")]
ODDITIES = [-0.0, 1e-40, 6e-8, 65504.0]


def split(
    packed: torch.Tensor, hidden: int, scale_offset: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Payload and scales of packed rows."""
    end = scale_offset + hidden // 4
    return packed[:, :hidden], packed[:, scale_offset:end].contiguous().view(dtype)


def draw(
    seed: int, num_rows: int, hidden: int, dtype: torch.dtype, oddities: list[float] | None = None
) -> torch.Tensor:
    """Rows whose blocks are of all magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn((num_rows, hidden), generator=generator)
    chosen = torch.randint(0, len(MAGNITUDES), (num_rows, hidden // 8), generator=generator)
    rows *= torch.tensor(MAGNITUDES)[chosen].repeat_interleave(8, 1)
    rows = rows.to(dtype)
    for n, value in enumerate(oddities or []):
        if num_rows:
            rows.view(-1)[(seed + 61 * n) % rows.numel()] = value
    return rows


@pytest.mark.parametrize(("launch", "target"), FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [32, 96, 2880])
@kernel_settings
@given(
    data=st.data(), seed=st.integers(0, 2**31), capacity=st.integers(0, 5), count=st.integers(-1, 7),
    entries=st.integers(1, 4), programs=st.integers(1, 4), gaps=st.tuples(*[st.sampled_from([0, 32])] * 2),
)  # fmt: skip
def test_rows_up_to_the_count_are_quantised(
    launch: Launch,
    target: str,
    dtype: torch.dtype,
    hidden: int,
    data: st.DataObject,
    seed: int,
    capacity: int,
    count: int,
    entries: int,
    programs: int,
    gaps: tuple[int, int],
) -> None:
    # the form for the NPU takes the maximum of floats: what it makes of a NaN is the NPU's matter
    choice = ODDITIES if target == "npu" else ODDITIES + MONSTERS
    # one row more than there is room for: who goes too far is found out there
    rows = draw(seed, capacity + 1, hidden, dtype, data.draw(st.lists(st.sampled_from(choice), max_size=4)))
    scale_offset = hidden + gaps[0]
    row_stride = scale_offset + hidden // 4 + gaps[1]
    offsets = torch.full((entries + 1,), 10**6, dtype=torch.int32)
    offsets[entries - 1] = count
    packed = Guarded((capacity + 1, row_stride), torch.int8)
    scales = packed.tensor.view(-1)[scale_offset:].view(dtype)
    arguments = [rows, offsets, packed.tensor, scales, entries, capacity, row_stride, row_stride // 2]
    launch(block_quantize_kernel(dtype, hidden, target), arguments, programs)
    written = min(max(count, 0), capacity)
    for got, want in zip(
        split(packed.check(), hidden, scale_offset, dtype), quantize_blocks(rows), strict=True
    ):
        assert_same_bits(got[:written], want[:written])
    assert (packed.tensor[written:] == CANARY).all()
    assert (packed.tensor[:, hidden:scale_offset] == CANARY).all()
    assert (packed.tensor[:, scale_offset + hidden // 4 :] == CANARY).all()


@pytest.mark.parametrize(("launch", "target"), FORMS)
@kernel_settings
@given(
    seed=st.integers(0, 2**31),
    tokens=st.lists(st.integers(-2, 6), min_size=1, max_size=7),
    first=st.integers(0, 6),
    count=st.integers(0, 6),
    programs=st.integers(1, 4),
)
def test_a_part_has_the_rows_of_its_tokens(
    launch: Launch, target: str, seed: int, tokens: list[int], first: int, count: int, programs: int
) -> None:
    rows = draw(seed, len(tokens), 96, torch.bfloat16)
    origins = torch.tensor([[9, token, 9] for token in tokens], dtype=torch.int32)
    packed = Guarded((len(tokens), 128), torch.int8)
    scales, ends = (
        packed.tensor.view(-1)[96:].view(rows.dtype),
        torch.tensor([len(tokens)], dtype=torch.int32),
    )
    sizes = [1, len(tokens), 128, 64, first, first + count]
    kernel = block_quantize_kernel(rows.dtype, 96, target, parted=True)
    launch(kernel, [rows, origins, ends, packed.tensor, scales, *sizes], programs)
    is_of_part = torch.tensor([first <= token < first + count for token in tokens])
    for got, want in zip(split(packed.check(), 96, 96, rows.dtype), quantize_blocks(rows), strict=True):
        assert_same_bits(got[is_of_part], want[is_of_part])
    assert (packed.tensor[~is_of_part] == CANARY).all()


@settings(kernel_settings, max_examples=10)
@given(hidden=st.integers(1, 256).map(lambda n: 32 * n), dtype=st.sampled_from(DTYPES))
def test_any_hidden_size(hidden: int, dtype: torch.dtype) -> None:
    rows = draw(hidden, 2, hidden, dtype)
    packed = block_quantize(rows, launch, programs=2)
    for got, want in zip(split(packed, hidden, hidden, dtype), quantize_blocks(rows), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_quotients_go_through_half(launch: Launch) -> None:
    """What lies just below a tie becomes the tie in fp16, and may so round to another code."""
    rows = draw(1, 4, 2880, torch.float16)
    blocks = rows.float().view(4, -1, 8)
    s = blocks.abs().amax(2, keepdim=True) * torch.tensor(1 / 127)
    quotients = torch.where(s > 0, blocks / s, 0)
    payload = split(block_quantize(rows, launch), 2880, 2880, rows.dtype)[0]
    assert torch.equal(payload.view(4, -1, 8), quotients.half().float().round().to(torch.int8))
    assert not torch.equal(payload.view(4, -1, 8), quotients.round().to(torch.int8))


@pytest.mark.parametrize("launch", LAUNCHES)
def test_codes_are_of_the_scale_before_it_is_rounded(launch: Launch) -> None:
    rows = draw(2, 4, 2880, torch.bfloat16)
    payload, scales = split(block_quantize(rows, launch), 2880, 2880, rows.dtype)
    of_stored = rows.float().view(4, -1, 8) / scales.float()[:, :, None]
    of_stored = torch.where(of_stored.isnan(), 0, of_stored).half().float().round()
    assert not torch.equal(payload.view(4, -1, 8).float(), of_stored.clamp(-128, 127))
    peaks = payload.view(4, -1, 8).abs().amax(2)
    assert set(peaks.unique().tolist()) == {0, 127}


def _codes_of_quotients(rows: torch.Tensor) -> torch.Tensor:
    """Codes by the formula, with a division of each element."""
    blocks = rows.float().view(-1, 8)
    s = blocks.abs().amax(1, keepdim=True) * torch.tensor(1 / 127, dtype=torch.float32)
    return (blocks / s).half().float().round().to(torch.int8).view(rows.shape)


@pytest.mark.parametrize("target", ["cpu", "npu"])
@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 7), (torch.float16, 10)], ids=str)
def test_every_element_under_every_maximum(target: str, dtype: torch.dtype, bits: int) -> None:
    """The kernel multiplies where the formula divides: no pair of significands may show it.

    A quotient below 1/2 has code 0, so that nine octaves below the maximum are all. Significands below the
    maximum's are of its own octave, the others one below; both signs take turns.
    """
    size = 1 << bits
    significands = torch.arange(size, 2 * size) / size
    hidden = 2048
    kernel = block_quantize_kernel(dtype, hidden, target)
    peaks = significands.repeat_interleave(-(-size // 7))
    for octave in range(9):
        x = torch.cat([significands, significands.new_zeros(-size % 7)]) * 2.0**-octave
        x = x.repeat(size, 1)
        x = torch.where(x > significands[:, None], x / 2, x)
        x[:, 1::2] *= -1
        blocks = torch.cat([peaks[:, None], x.view(-1, 7)], 1)
        flat = torch.cat([blocks.view(-1), torch.ones(-blocks.numel() % hidden)])
        rows = flat.to(dtype).view(-1, hidden)
        assert torch.equal(rows.float().view(-1), flat)  # nothing was rounded away
        num_rows = len(rows)
        stride = hidden + hidden // 4
        packed = torch.zeros((num_rows, stride), dtype=torch.int8)
        scales = packed.view(-1)[hidden:].view(dtype)
        count = torch.tensor([num_rows], dtype=torch.int32)
        launch(kernel, [rows, count, packed, scales, 1, num_rows, stride, stride // 2])
        assert torch.equal(packed[:, :hidden], _codes_of_quotients(rows))


def test_every_element_where_scales_are_no_normal_numbers() -> None:
    """bf16 from its smallest number to where the scale has all its bits."""
    numbers = torch.arange(0x480, dtype=torch.int16).view(torch.bfloat16)
    x = numbers[: len(numbers) // 7 * 7].view(1, -1, 7).repeat(len(numbers), 1, 1)
    peaks = numbers[:, None, None].expand(-1, x.shape[1], 1)
    blocks = torch.cat([peaks, torch.minimum(x, peaks)], 2)[1:]  # a block of zeros has no quotient
    rows = torch.nn.functional.pad(blocks.flatten(1), (0, -blocks[0].numel() % 32), value=1.0)
    payload = block_quantize(rows, launch)[:, : rows.shape[1]]
    assert torch.equal(payload, _codes_of_quotients(rows))


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize(("dtype", "infinity"), [(torch.bfloat16, 0x7F80), (torch.float16, 0x7C00)], ids=str)
def test_every_nan_has_code_0(launch: Launch, dtype: torch.dtype, infinity: int) -> None:
    """Whatever its other bits, in rows of plain magnitudes and beside blocks of none or of small ones."""
    bits = torch.arange(infinity + 1, 0x8000, dtype=torch.int32)
    nans = torch.cat([bits, bits - 0x8000]).to(torch.int16).view(dtype)
    rows = torch.ones(len(nans), 32, dtype=dtype)
    rows[:, 0] = -0.0
    rows[:, 3] = nans
    rows[:, 24:] = torch.tensor([1e-38, 0.0]).to(dtype).repeat(len(nans) // 2)[:, None]
    payload, scales = split(block_quantize(rows, launch), 32, 32, dtype)
    assert scales[:, 0].isnan().all()
    assert not payload[:, :8].any()
    assert (payload[:, 8:24] == 127).all()


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bad_block_leaves_its_neighbours_alone(launch: Launch, dtype: torch.dtype) -> None:
    rows = torch.randn((3, 32), generator=torch.Generator().manual_seed(3)).to(dtype)
    clean = split(block_quantize(rows, launch), 32, 32, dtype)
    rows[1, 3] = float("nan")
    rows[1, 4] = float("inf")
    rows[1, 17] = -float("inf")
    payload, scales = split(block_quantize(rows, launch), 32, 32, dtype)
    assert scales[1, 0].isnan()
    assert scales[1, 2] == float("inf")
    assert not payload[1, :8].any()
    assert not payload[1, 16:24].any()
    for got, before in zip((payload.unflatten(1, (4, 8)), scales), clean, strict=True):
        kept = before.view(got.shape)
        assert torch.equal(got[[0, 2]], kept[[0, 2]])
        assert torch.equal(got[1, [1, 3]], kept[1, [1, 3]])


@pytest.mark.parametrize("launch", LAUNCHES)
def test_block_quantize(launch: Launch) -> None:
    rows = torch.zeros((2, 32), dtype=torch.bfloat16)
    rows[0, :8] = torch.tensor([127.0, -127.0, 1.0, 0.5, 1.5, -2.5, 0.25, 0.0])
    rows[1, 8] = -3.0
    packed = block_quantize(rows, launch, scale_offset=64, row_stride=128)
    assert packed.shape == (2, 128)
    payload, scales = split(packed, 32, 64, rows.dtype)
    assert payload[0].tolist() == [127, -127, 1, 0, 2, -2, 0, 0] + [0] * 24
    assert scales[0].tolist() == [1, 0, 0, 0]
    assert payload[1].tolist() == [0] * 8 + [-127] + [0] * 23
    assert scales[1, 1] == torch.tensor(3 / 127).bfloat16()
    assert not packed[:, 32:64].any()
    assert not packed[:, 72:].any()
    assert block_quantize(rows[:0], launch).shape == (0, 40)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantised_rows_are_products_rounded_once(dtype: torch.dtype) -> None:
    q = torch.arange(-128, 128, dtype=torch.int8)[None].repeat(3, 1)
    scales = torch.rand((3, 32), generator=torch.Generator().manual_seed(4)).to(dtype)
    got = dequantize_blocks(q, scales)
    products = q.numpy().astype(np.float32) * np.repeat(scales.float().numpy(), 8, axis=1)
    assert_same_bits(got, torch.from_numpy(products).to(dtype))
    assert dequantize_blocks(q[:0], scales[:0]).shape == (0, 256)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_round_trip_stays_within_half_a_code(dtype: torch.dtype) -> None:
    rows = torch.randn((8, 512), generator=torch.Generator().manual_seed(5)).to(dtype)
    restored = dequantize_blocks(*split(block_quantize(rows, launch), 512, 512, dtype))
    error = (restored.float() - rows.float()).abs().view(8, -1, 8)
    peak = rows.float().abs().view(8, -1, 8).amax(2, keepdim=True)
    # half a code, the rounding of the quotient, and that of scale and product to 16 bits
    assert (error <= peak * (0.5 / 127 + 2.0**-11 + 2 * torch.finfo(dtype).eps)).all()


def test_block_quantize_refuses_sizes_that_no_kernel_has() -> None:
    with pytest.raises(ArgumentError, match="dtype"):
        block_quantize_kernel(torch.float32, 32)


@pytest.mark.parametrize(("launch", "target"), FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [8, 16])
@kernel_settings
@given(seed=st.integers(0, 2**31), rows=st.integers(0, 6), programs=st.integers(1, 4))
def test_rows_that_are_active_are_quantised_in_blocks_of_any_size(
    launch: Launch, target: str, dtype: torch.dtype, block: int, seed: int, rows: int, programs: int
) -> None:
    hidden = 96
    oddities = ODDITIES + (MONSTERS if target == "cpu" else [])
    values = draw(seed, rows, hidden, dtype, oddities)
    active_index = torch.where(
        torch.rand(rows, generator=torch.Generator().manual_seed(seed)) < 0.7, 0, -1
    ).int()
    stride = hidden + 2 * hidden // block
    packed = Guarded((rows, stride), torch.int8)
    scales = packed.tensor.view(-1)[hidden:].view(dtype) if rows else torch.zeros(1, dtype=dtype)
    kernel = block_quantize_kernel(dtype, hidden, target, masked=True, block=block)
    numbers = [rows, stride, stride // 2]
    launch(kernel, [values, active_index, packed.tensor, scales, *numbers], programs)
    found = packed.check()
    is_active = active_index >= 0
    assert (found[~is_active] == CANARY).all()
    q, s = quantize_blocks(values[is_active], block)
    assert torch.equal(found[is_active][:, :hidden], q)
    assert_same_bits(found[is_active][:, hidden:].contiguous().view(dtype), s)
