"""Kernels that take rows from one place to another: quantised, copied or added to others on the way."""

from __future__ import annotations

import torch

from benchmarks.kernels.case import NUM_RANKS, TOPK, Case, Tensors, make_case
from moe_triton.kernels import (
    add_rows_kernel,
    append_kernel,
    arrange_kernel,
    block_quantize_kernel,
    pack_kernel,
)


def spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def slot_bytes(hidden: int, element_bytes: int = 1) -> int:
    return -(-(hidden * element_bytes + 44) // 512) * 512


def _quantized(rows: torch.Tensor) -> Tensors:
    peak = rows.abs().amax(1, keepdim=True)
    s = torch.full_like(peak, 127.0) / peak
    return torch.round(rows * s).to(torch.int8), (1.0 / s)[:, 0]


def pack_case(dtype: torch.dtype, hidden: int, tokens: int) -> Case:
    x = torch.randn(tokens, hidden).to(dtype)
    stride = slot_bytes(hidden)
    slots, other = (torch.zeros(tokens, stride, dtype=torch.int8) for _ in range(2))
    scales, other_words = slots.view(-1).view(torch.float32)[hidden // 4 :], other.view(torch.float32)

    def eager() -> Tensors:
        other[:, :hidden], other_words[:, hidden // 4] = _quantized(x.float())
        return (other,)

    numbers = [0, tokens, stride, stride // 4]
    return make_case(
        pack_kernel(dtype, hidden),
        [x, slots, scales, *numbers],
        [slots],
        eager,
        variant=spelled(dtype),
        tokens=tokens,
    )


def pack_smooth_case(dtype: torch.dtype, hidden: int, tokens: int) -> Case:
    x = torch.randn(tokens, hidden).to(dtype)
    ids = torch.stack([torch.randperm(32)[:TOPK] for _ in range(tokens)]).int()
    smooth = torch.rand(32, hidden) + 0.5
    stride = slot_bytes(hidden)
    slots, other = (torch.zeros(tokens * TOPK, stride, dtype=torch.int8) for _ in range(2))
    scales, other_words = slots.view(-1).view(torch.float32)[hidden // 4 :], other.view(torch.float32)
    flat = ids.flatten().long()

    def eager() -> Tensors:
        rows = x.float().repeat_interleave(TOPK, 0) * smooth[flat]
        other[:, :hidden], other_words[:, hidden // 4] = _quantized(rows)
        return (other,)

    numbers = [0, tokens, 0, 32, stride, stride // 4]
    return make_case(
        pack_kernel(dtype, hidden, TOPK, smooth=True),
        [x, ids, smooth, slots, scales, *numbers],
        [slots],
        eager,
        variant=spelled(dtype),
        tokens=tokens,
    )


def arrange_case(element_bytes: int, hidden: int, tokens: int) -> Case:
    """Every source's block holds some rows, as after a balanced dispatch, and has room for twice as many."""
    experts = 4
    row_words = hidden * element_bytes // 4
    slot_words = slot_bytes(hidden, element_bytes) // 4
    per_block = max(tokens // (experts * NUM_RANKS), 1)
    slots = torch.randint(0, 100, (NUM_RANKS, experts, 2 * per_block, slot_words), dtype=torch.int32)
    entries = NUM_RANKS * experts
    rows = entries * per_block
    ends = (torch.arange(entries, dtype=torch.int32) + 1) * per_block
    has_scale = element_bytes == 1
    out, scales = torch.empty(rows, row_words, dtype=torch.int32), torch.empty(rows * has_scale)
    triples = torch.empty(rows, 3, dtype=torch.int32)
    source, expert, slot, _ = slots.stride()
    views = [slots, slots.view(torch.float32), ends, out, scales, triples, torch.empty(0)]
    block = torch.arange(entries).view(NUM_RANKS, experts).T.reshape(-1, 1) * 2 * per_block
    index = (block + torch.arange(per_block)).view(-1)
    flat = slots.view(-1, slot_words)
    other, other_scales, other_triples = (torch.empty_like(t) for t in (out, scales, triples))

    def eager() -> Tensors:
        torch.index_select(flat[:, :row_words], 0, index, out=other)
        if has_scale:
            torch.index_select(flat.view(torch.float32)[:, row_words], 0, index, out=other_scales)
        torch.index_select(flat[:, row_words + 8 : row_words + 11], 0, index, out=other_triples)
        return other, other_scales, other_triples

    return make_case(
        arrange_kernel(row_words, row_words, row_words + 8, has_scale),
        [*views, entries, NUM_RANKS, -1, source, expert, slot],
        [out, scales, triples],
        eager,
        variant="int8" if has_scale else "bfloat16",
        tokens=rows,
        moved=rows * 2 * (4 * row_words + 12 + 4 * has_scale),
        computes=False,
    )


def append_case(element_bytes: int, hidden: int, tokens: int) -> Case:
    """As many rows come from the peer as this rank has itself."""
    row_words = hidden * element_bytes // 4
    slot_words = slot_bytes(hidden, element_bytes) // 4
    slots = torch.randint(0, 100, (tokens, slot_words), dtype=torch.int32)
    counts = torch.full((2,), tokens, dtype=torch.int32)
    has_scale = element_bytes == 1
    out, other = (torch.zeros(2 * tokens, row_words, dtype=torch.int32) for _ in range(2))
    scales, other_scales = (torch.zeros(2 * tokens) for _ in range(2))

    def eager() -> Tensors:
        other[tokens:] = slots[:, :row_words]
        if has_scale:
            other_scales[tokens:] = slots.view(torch.float32)[:, row_words]
        return other, other_scales

    return make_case(
        append_kernel(row_words, row_words, has_scale),
        [slots, slots.view(torch.float32), counts, out, scales, 0, tokens, slot_words],
        [out, scales],
        eager,
        variant="int8" if has_scale else "bfloat16",
        tokens=tokens,
        moved=tokens * 8 * (row_words + has_scale),
        computes=False,
    )


def add_rows_case(dtype: torch.dtype, hidden: int, tokens: int) -> Case:
    rows = torch.randn(tokens, hidden).to(dtype)
    slots = torch.randn(tokens, slot_bytes(hidden, 2) // 2).to(dtype)
    counts = torch.full((2,), tokens, dtype=torch.int32)
    out = torch.empty_like(rows)

    def eager() -> Tensors:
        return (rows + slots[:, :hidden],)  # in fp32, rounded once: the same bits

    return make_case(
        add_rows_kernel(dtype, hidden),
        [rows, slots, counts, out, 0, tokens, slots.stride(0)],
        [out],
        eager,
        variant=spelled(dtype),
        tokens=tokens,
        moved=tokens * 6 * hidden,
    )


def block_quantize_case(dtype: torch.dtype, hidden: int, tokens: int) -> Case:
    rows = torch.randn(tokens, hidden).to(dtype)
    stride = -(-hidden * 5 // 4 // 512) * 512
    packed, other = (torch.zeros(tokens, stride, dtype=torch.int8) for _ in range(2))
    scales, other_scales = (p.view(-1)[hidden:].view(dtype) for p in (packed, other))
    reciprocal = torch.tensor(1 / 127)

    def eager() -> Tensors:
        blocks = rows.float().view(tokens, -1, 8)
        s = blocks.abs().amax(2, keepdim=True) * reciprocal
        codes = torch.where(s > 0, blocks / s, 0.0).half().float().round().to(torch.int8)
        other[:, :hidden] = codes.view(tokens, hidden)
        other_scales.as_strided((tokens, hidden // 8), (stride // 2, 1)).copy_(s[..., 0])
        return (other,)

    count = torch.tensor([tokens], dtype=torch.int32)
    return make_case(
        block_quantize_kernel(dtype, hidden),
        [rows, count, packed, scales, 1, tokens, stride, stride // 2],
        [packed],
        eager,
        variant=spelled(dtype),
        tokens=tokens,
        moved=tokens * (3 * hidden + hidden // 4),
    )
