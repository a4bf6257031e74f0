"""One launch of each kernel on tensors of any size: outputs are allocated, sizes and strides follow."""

from __future__ import annotations

import torch

from moe_triton.core.kernel import TritonKernel
from moe_triton.kernels.add_rows import add_rows_kernel
from moe_triton.kernels.append import append_kernel, gather_counts_kernel
from moe_triton.kernels.arrange import SLOT_WORDS, arrange_kernel
from moe_triton.kernels.block_quantize import block_quantize_kernel
from moe_triton.kernels.checks import Launch
from moe_triton.kernels.const_experts import const_alphas_kernel
from moe_triton.kernels.pack import pack_kernel
from moe_triton.kernels.returns import own_offsets_kernel, returns_kernel
from moe_triton.kernels.rms_norm import rms_norm_kernel
from moe_triton.kernels.route import route_kernel
from moe_triton.kernels.select import select_kernel
from moe_triton.kernels.share import share_kernel
from moe_triton.kernels.stamps import stamps_kernel
from moe_triton.kernels.waits import waits_of_combine_kernel, waits_of_dispatch_kernel
from moe_triton.kernels.weighted_sum import weighted_sum_kernel
from moe_triton.layout import WORD_BYTES, SlotLayout

I32, I64, F32 = torch.int32, torch.int64, torch.float32
Tensor = torch.Tensor


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=I32)


def call(launch: Launch, kernel: TritonKernel, programs: int = 1, **values: Tensor | int) -> None:
    """A launch by name; arguments that a variant does not have are left out."""
    launch(kernel, [values[arg.name] for arg in kernel.args], programs)


def route(topk_idx: Tensor, num_experts: int, launch: Launch) -> tuple[Tensor, Tensor]:
    """expand_idx (T*K,), counts (M,)"""
    index, counts = ints(topk_idx.numel()), ints(num_experts)
    launch(route_kernel(), [topk_idx, index, counts, topk_idx.numel(), num_experts], 1)
    return index, counts


def select(expert_ids: Tensor, mask: Tensor, launch: Launch) -> tuple[Tensor, Tensor, int]:
    """topk_idx (T, K), active (T,), how many take part"""
    num_tokens, topk = expert_ids.shape
    outputs = [ints(num_tokens, topk), ints(num_tokens), ints(1)]
    kernel = select_kernel(topk, mask.dim() == 2)
    launch(kernel, [expert_ids, mask.view(torch.int8), *outputs, num_tokens], 1)
    return outputs[0], outputs[1], int(outputs[2])


def share(
    num_tokens: int,
    num_shared_ranks: int,
    rank: int,
    launch: Launch,
    *,
    num_shared_experts: int = 1,
    active_index: Tensor | None = None,
    by_position: bool = False,
    programs: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """shared_ranks (T, S), shared_slots (T,), shared_counts (R,)"""
    outputs = ints(num_tokens, num_shared_experts), ints(num_tokens), ints(num_shared_ranks)
    call(
        launch,
        share_kernel(by_position, active_index is not None),
        programs,
        active_index=0 if active_index is None else active_index,
        **dict(zip(("shared_ranks", "shared_slots", "shared_counts"), outputs, strict=True)),
        num_tokens=num_tokens,
        num_shared_experts=num_shared_experts,
        num_shared_ranks=num_shared_ranks,
        rank=rank,
    )
    return outputs


def pack(
    x: Tensor,
    launch: Launch,
    *,
    slot_stride: int,
    scale_offset: int,
    topk_idx: Tensor | None = None,
    smooth_scales: Tensor | None = None,
    scale_row_offset: int = 0,
    num_shared: int = 0,
    block: int = 0,
    programs: int = 1,
) -> Tensor:
    """(T*R, slot_stride) int8; zero where neither row nor scale is."""
    num_tokens, hidden = x.shape
    topk = 1 if topk_idx is None else topk_idx.shape[1]
    slots = torch.zeros((num_tokens * (topk + num_shared), slot_stride), dtype=torch.int8)
    numbers = [0, num_tokens]
    views: list[Tensor | int] = [slots, slots.view(-1).view(F32)[scale_offset // 4 :]]
    if topk_idx is not None and smooth_scales is not None:
        views = [topk_idx, smooth_scales, *views]
        numbers += [scale_row_offset, smooth_scales.shape[0]]
    kernel = pack_kernel(x.dtype, hidden, topk, topk_idx is not None, num_shared=num_shared, block=block)
    launch(kernel, [x, *views, *numbers, slot_stride, slot_stride // 4], programs)
    return slots


def arrange(slots: Tensor, slot: SlotLayout, launch: Launch) -> tuple[Tensor, Tensor]:
    """Every slot of (A, words) in turn, words a multiple of 8: rows (A, row words) and origins (A, 3)."""
    rows, words = slots.shape
    outputs = {"out_rows": ints(rows, slot.row_bytes // WORD_BYTES), "out_origins": ints(rows, 3)}
    call(
        launch,
        arrange_kernel(slot, has_weight=False),
        slots=slots,
        slot_scales=slots.view(F32),
        row_slots=torch.arange(rows, dtype=I32) * (words // SLOT_WORDS),
        num_rows=torch.tensor([rows], dtype=I32),
        entries=ints(0),
        **outputs,
        capacity=rows,
        num_entries=0,
    )
    return outputs["out_rows"], outputs["out_origins"]


def append(
    slots: Tensor,
    counts: Tensor,
    out_rows: Tensor,
    out_scales: Tensor | None,
    launch: Launch,
    *,
    tp_rank: int,
    scale_word: int = 0,
    programs: int = 1,
) -> None:
    kernel = append_kernel(out_rows.shape[1], scale_word, int(out_scales is not None))
    scales = torch.empty(0) if out_scales is None else out_scales
    sizes = [tp_rank, len(slots), slots.stride(0)]
    launch(kernel, [slots, slots.view(F32), counts, out_rows, scales, *sizes], programs)


def gather_counts(
    header: Tensor, counts: Tensor, tokens_per_expert: Tensor, launch: Launch, *, tp_rank: int, capacity: int
) -> Tensor:
    """The peer's ep_recv_counts (EP,)"""
    out = torch.empty_like(header)
    sizes = [header.numel(), tp_rank, capacity]
    launch(gather_counts_kernel(), [header, counts, out, tokens_per_expert, *sizes], 1)
    return out


def add_rows(
    rows: Tensor, slots: Tensor, counts: Tensor, tp_rank: int, launch: Launch, *, programs: int = 1
) -> Tensor:
    """(n, H)"""
    capacity, hidden = rows.shape
    out = torch.empty((min(max(int(counts[tp_rank]), 0), capacity), hidden), dtype=rows.dtype)
    kernel = add_rows_kernel(rows.dtype, hidden)
    launch(kernel, [rows, slots, counts, out, tp_rank, capacity, slots.stride(0)], programs)
    return out


def split_stamps(
    stamps: Tensor, num_rows: int, launch: Launch, *, programs: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """origins (A, 3), weights (A,), scales (A,)"""
    capacity = len(stamps)
    outputs = ints(capacity, 3), torch.empty(capacity), torch.empty(capacity)
    number = torch.tensor([num_rows], dtype=I32)
    launch(stamps_kernel(True, 1), [stamps, stamps.view(F32), number, *outputs, capacity], programs)
    return outputs


def block_quantize(
    rows: Tensor,
    launch: Launch,
    *,
    scale_offset: int | None = None,
    row_stride: int | None = None,
    programs: int = 1,
) -> Tensor:
    """(A, row_stride) int8: rows and, from scale_offset on, scales."""
    num_rows, hidden = rows.shape
    scale_offset = scale_offset or hidden
    row_stride = row_stride or scale_offset + hidden // 4
    packed = torch.zeros((num_rows, row_stride), dtype=torch.int8)
    if num_rows:
        scales, count = packed.view(-1)[scale_offset:].view(rows.dtype), torch.tensor([num_rows], dtype=I32)
        sizes = [1, num_rows, row_stride, row_stride // 2]
        launch(block_quantize_kernel(rows.dtype, hidden), [rows, count, packed, scales, *sizes], programs)
    return packed


def returns(
    recv_offsets: Tensor,
    num_ranks: int,
    capacity: int,
    launch: Launch,
    *,
    first_expert: int,
    programs: int = 1,
) -> Tensor:
    """origins (A, 3); zero past the last row."""
    origins = ints(capacity, 3)
    sizes = [recv_offsets.numel(), num_ranks, capacity, first_expert]
    launch(returns_kernel(shared=False), [recv_offsets, origins, *sizes], programs)
    return origins


def returns_shared(
    recv_offsets: Tensor, capacity: int, launch: Launch, *, programs: int = 1, **sizes: int
) -> Tensor:
    """origins (A, 3); zero past the last row."""
    origins = ints(capacity, 3)
    memory = {"recv_offsets": recv_offsets, "origins": origins}
    more = {"num_entries": recv_offsets.numel(), "capacity": capacity, **sizes}
    call(launch, returns_kernel(shared=True), programs, **memory, **more)
    return origins


def own_offsets(
    recv_offsets: Tensor, num_shared_ranks: int, rank: int, num_tokens: int, launch: Launch
) -> Tensor:
    """(EP,)"""
    out = torch.empty_like(recv_offsets)
    sizes = [recv_offsets.numel(), num_shared_ranks, rank, num_tokens]
    launch(own_offsets_kernel(), [recv_offsets, out, *sizes], 1)
    return out


def waits_of_dispatch(waited: Tensor, table: Tensor, performance_info: Tensor, launch: Launch) -> None:
    sizes = [waited.numel() // table.numel(), table.numel(), performance_info.numel()]
    launch(waits_of_dispatch_kernel(), [waited, table, performance_info, *sizes], 1)


def waits_of_combine(
    waited: Tensor,
    topk_idx: Tensor,
    table: Tensor,
    performance_info: Tensor,
    launch: Launch,
    *,
    num_experts: int,
    rank: int,
) -> None:
    """Without shared experts."""
    ranks = table.numel()
    (tokens, topk), entries = topk_idx.shape, performance_info.numel()
    sizes = [tokens, num_experts, num_experts // ranks, 0, 0, ranks, rank, entries]
    launch(waits_of_combine_kernel(topk), [waited, topk_idx, table, performance_info, *sizes], 1)


def const_alphas(
    x: Tensor,
    topk_idx: Tensor,
    alpha1: Tensor,
    alpha2: Tensor,
    first_const: int,
    launch: Launch,
    *,
    programs: int = 1,
) -> Tensor:
    """(T, K, 2)"""
    (tokens, hidden), topk = x.shape, topk_idx.shape[1]
    alphas = torch.empty((tokens, topk, 2))
    kernel = const_alphas_kernel(x.dtype, hidden, topk, alpha1.dim() == 2)
    launch(kernel, [x, topk_idx, alpha1, alpha2, alphas, 0, tokens, first_const, len(alpha1)], programs)
    return alphas


def weighted_sum(
    slots: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    launch: Launch,
    *,
    num_experts: int = 2**31 - 1,
    programs: int = 1,
) -> Tensor:
    """(T, H); slots are (T, K+S, H)."""
    tokens, num_slots, hidden = slots.shape
    topk = topk_idx.shape[1]
    kernel = weighted_sum_kernel(slots.dtype, hidden, topk, num_slots - topk, topk_weights is not None)
    out = torch.empty((tokens, hidden), dtype=slots.dtype)
    weights = torch.empty(0) if topk_weights is None else topk_weights
    sizes = [*slots.stride()[:2], 0, tokens, num_experts]
    launch(kernel, [slots, topk_idx, weights, out, *sizes], programs)
    return out


def rms_norm(
    acc: Tensor, residual: Tensor, gamma: Tensor, launch: Launch, *, norm_eps: float = 1e-6, programs: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """y (T, H), rstd (T,), x (T, H)"""
    tokens, hidden = acc.shape
    outputs = torch.empty_like(residual), torch.empty(tokens), torch.empty_like(residual)
    inputs = [acc, residual, gamma, torch.tensor([norm_eps])]
    launch(rms_norm_kernel(hidden), [*inputs, *outputs, 0, tokens], programs)
    return outputs
