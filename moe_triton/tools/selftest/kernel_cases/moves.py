"""Kernels that take rows from one place to another: quantised, copied or added to others on the way."""

from __future__ import annotations

import torch

from moe_triton.core.plan import Hole
from moe_triton.kernels import (
    add_rows_kernel,
    append_kernel,
    arrange_kernel,
    block_quantize_kernel,
    keep_kernel,
    pack_kernel,
)
from moe_triton.layout import SLOT_ALIGN, SlotLayout, align
from moe_triton.tools.selftest.kernel_cases.case import (
    NUM_EXPERTS,
    NUM_RANKS,
    TOPK,
    KernelCase,
    blank,
    make_case,
)
from moe_triton.tools.selftest.kernel_cases.tables import LOCAL, Routing

I32, F32, I8 = torch.int32, torch.float32, torch.int8
DTYPES = (torch.bfloat16, torch.float16)
NUM_SHARED = 2


def spelled(dtype: torch.dtype) -> str:
    """A dtype as it is written."""
    return str(dtype).removeprefix("torch.")


def move_cases(seed: int, tokens: int, hidden: int, target: str) -> list[KernelCase]:
    """Cases whose rows have H elements."""
    r = Routing(seed, tokens)
    cases = [_arrange(r, hidden, itemsize) for itemsize in (1, 2)]
    cases += [_append(r, hidden, itemsize) for itemsize in (1, 2)]
    cases += [_arrange(r, hidden, 1, zoned=True), _append(r, hidden, 1, zoned=True)]
    cases.append(_add_rows(r, DTYPES[0], hidden, target, zoned=True))
    cases += [_keep(r, hidden, itemsize) for itemsize in (1, 2)]
    for dtype in DTYPES:
        cases += pack_cases(r, dtype, hidden, target)
        cases += [_block_quantize(r, dtype, hidden, target), _add_rows(r, dtype, hidden, target)]
    return cases


def rows_of(r: Routing, number: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """(number, H) of every magnitude that tokens have; one row is zeros."""
    rows = torch.randn(number, hidden, generator=r.generator)
    rows *= 10.0 ** r.integers(-4, 4, number, 1).float()
    rows[1] = 0
    return rows.clamp(-60000, 60000).to(dtype)


def pack_cases(r: Routing, dtype: torch.dtype, hidden: int, target: str) -> list[KernelCase]:
    """Quantise and pack: plain, and with smooth scales and shared experts."""
    slot = SlotLayout(hidden, 1)
    stride, experts_per_token = slot.packed_bytes, TOPK + NUM_SHARED
    common: dict[str, torch.Tensor | Hole | int] = {
        "x": rows_of(r, r.tokens, hidden, dtype),
        "topk_idx": r.ids,
        "smooth_scales": torch.rand(NUM_EXPERTS + NUM_SHARED, hidden, generator=r.generator) + 0.5,
        "scales": Hole("rows", slot.scale_offset),
        "first_token": 1,
        "num_tokens": r.tokens - 1,
        "scale_row_offset": NUM_SHARED,
        "num_scale_rows": NUM_EXPERTS + NUM_SHARED,
        "row_stride": stride,
        "scale_stride": stride // 4,
    }
    smooth = pack_kernel(dtype, hidden, TOPK, True, target, NUM_SHARED)
    return [
        make_case(
            pack_kernel(dtype, hidden, target=target),
            spelled(dtype),
            rows=blank(r.tokens, stride, dtype=I8),
            **common,
        ),
        make_case(
            smooth, spelled(dtype), rows=blank(r.tokens * experts_per_token, stride, dtype=I8), **common
        ),
    ]


def _block_quantize(r: Routing, dtype: torch.dtype, hidden: int, target: str) -> KernelCase:
    stride = align(hidden * 5 // 4, SLOT_ALIGN)
    return make_case(
        block_quantize_kernel(dtype, hidden, target),
        spelled(dtype),
        rows=rows_of(r, r.tokens, hidden, dtype),
        recv_offsets=torch.tensor([1, r.tokens - 1], dtype=I32),
        packed=blank(r.tokens, stride, dtype=I8),
        packed_scales=Hole("packed", hidden),
        num_entries=2,
        capacity=r.tokens,
        row_stride=stride,
        scale_stride=stride // 2,
    )


def _add_rows(r: Routing, dtype: torch.dtype, hidden: int, target: str, zoned: bool = False) -> KernelCase:
    return make_case(
        add_rows_kernel(dtype, hidden, target, zoned),
        spelled(dtype),
        rows=rows_of(r, r.tokens, hidden, dtype),
        slots=rows_of(r, r.tokens, hidden + 256, dtype),
        counts=torch.tensor([r.tokens - 1, 3], dtype=I32),
        out=blank(r.tokens, hidden, dtype=dtype),
        tp_rank=0,
        capacity=r.tokens,
        slot_stride=hidden + 256,
    )


def _arrange(r: Routing, hidden: int, itemsize: int, zoned: bool = False) -> KernelCase:
    slot, has_scale = SlotLayout(hidden, itemsize), itemsize == 1
    words = align(slot.packed_bytes, SLOT_ALIGN) // 4
    per_block = 4
    rows = int(r.ends[-1])
    return make_case(
        arrange_kernel(
            slot.row_bytes // 4, slot.scale_offset // 4, slot.stamp_offset // 4, has_scale, True, zoned
        ),
        "int8" if has_scale else "16 bits",
        slots=r.integers(-(2**31), 2**31, NUM_RANKS, LOCAL, per_block, words),
        slot_scales=Hole("slots"),
        recv_offsets=r.ends,
        out_rows=blank(rows, slot.row_bytes // 4),
        out_scales=blank(rows, dtype=F32),
        out_triples=blank(rows, 3),
        out_weights=blank(rows, dtype=F32),
        num_entries=LOCAL * NUM_RANKS,
        num_ranks=NUM_RANKS,
        kept_rank=2,
        src_stride=LOCAL * per_block * words,
        expert_stride=per_block * words,
        slot_stride=words,
    )


def _append(r: Routing, hidden: int, itemsize: int, zoned: bool = False) -> KernelCase:
    slot, has_scale = SlotLayout(hidden, itemsize), itemsize == 1
    words = align(slot.packed_bytes, SLOT_ALIGN) // 4
    return make_case(
        append_kernel(slot.row_bytes // 4, slot.scale_offset // 4, has_scale, zoned),
        "int8" if has_scale else "16 bits",
        slots=r.integers(-(2**31), 2**31, r.tokens, words),
        slot_scales=Hole("slots"),
        counts=torch.tensor([3, r.tokens - 1], dtype=I32),
        out_rows=blank(2 * r.tokens, slot.row_bytes // 4),
        out_scales=blank(2 * r.tokens, dtype=F32),
        tp_rank=0,
        capacity=r.tokens,
        slot_stride=words,
    )


def _keep(r: Routing, hidden: int, itemsize: int) -> KernelCase:
    """Rows to this rank's own experts: their numbers are true ones, so that no two have one place."""
    first, rank, has_scale = LOCAL, 1, itemsize == 1
    slot = SlotLayout(hidden, itemsize)
    words = slot.packed_bytes // 4
    expand_idx, counts = torch.zeros(r.tokens * TOPK, dtype=I32), [0] * NUM_EXPERTS
    for entry, expert in enumerate(r.ids.flatten().tolist()):
        if expert >= 0:
            expand_idx[entry] = counts[expert]
            counts[expert] += 1
    received = r.integers(0, 4, LOCAL, NUM_RANKS)
    received[:, rank] = torch.tensor(counts[first : first + LOCAL], dtype=I32)
    ends = received.flatten().cumsum(0, dtype=I32)
    rows = int(ends[-1])
    return make_case(
        keep_kernel(slot.row_bytes // 4, TOPK, has_scale, True),
        "int8" if has_scale else "16 bits",
        rows=r.integers(-(2**31), 2**31, r.tokens, words),
        scales=Hole("rows", slot.scale_offset),
        topk_idx=r.ids,
        topk_weights=torch.rand(r.tokens, TOPK, generator=r.generator),
        expand_idx=expand_idx,
        recv_offsets=ends,
        out_rows=blank(rows, slot.row_bytes // 4),
        out_scales=blank(rows, dtype=F32),
        out_triples=blank(rows, 3),
        out_weights=blank(rows, dtype=F32),
        row_stride=words,
        first_expert=first,
        num_local_experts=LOCAL,
        num_ranks=NUM_RANKS,
        rank=rank,
        num_tokens=r.tokens,
    )
