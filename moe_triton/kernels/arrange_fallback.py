"""`moe_triton.kernels.arrange` in plain torch."""

from __future__ import annotations

from typing import Any

import torch

from moe_triton.core.records import STATUS_ENTRY
from moe_triton.kernels.own_rows import own_rows
from moe_triton.kernels.zones import in_zone, turn_cell
from moe_triton.layout import ORIGIN, UB_ALIGN, WORD_BYTES

SLOT_WORDS = UB_ALIGN // WORD_BYTES  # of a unit of `row_slots`


def _copy_rows(
    source: torch.Tensor, at: torch.Tensor, stride: int, out: torch.Tensor, to: torch.Tensor, words: int
) -> None:
    """Row ``at[i]`` of ``words`` words, rows being ``stride`` words apart, is ``out``'s row ``to[i]``."""
    if len(at):
        out.unfold(0, words, words)[to] = source.unfold(0, words, stride)[at]


def arrange_fallback(
    programs: int,
    *,
    slots: torch.Tensor,
    slot_scales: torch.Tensor,
    row_slots: torch.Tensor,
    num_rows: torch.Tensor,
    entries: torch.Tensor,
    out_rows: torch.Tensor,
    out_origins: torch.Tensor,
    capacity: int,
    num_entries: int,
    ROW_WORDS: int,
    SCALE_WORD: int,
    ORIGIN_WORD: int,
    WEIGHT_WORD: int,
    NUM_SCALES: int,
    out_scales: torch.Tensor | None = None,
    out_weights: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    rows_taken: torch.Tensor | None = None,
    kept_zone: torch.Tensor | None = None,
    zone: torch.Tensor | None = None,
    zone_stride: int = 0,
    **own: Any,
) -> None:
    """Copies received rows to expert order, as `moe_triton.kernels.arrange.arrange_kernel` describes it."""
    in_zone(entries, kept_zone, zone_stride)[: num_entries * STATUS_ENTRY.num_words] = 0
    received = max(0, min(int(num_rows[0]), capacity))
    table = row_slots[:received].long()
    to = (table >= 0).nonzero()[:, 0] if rows_taken is None else _taken_rows(received, rows_taken, **own)
    at = table[to]
    _copy_rows(slots, at, SLOT_WORDS, out_rows, to, ROW_WORDS)
    _copy_rows(slots[ORIGIN_WORD:], at, SLOT_WORDS, out_origins, to, ORIGIN.num_words)
    if out_scales is not None:
        _copy_rows(slot_scales[SCALE_WORD:], at, SLOT_WORDS, out_scales, to, NUM_SCALES)
    if out_weights is not None:
        _copy_rows(slot_scales[WEIGHT_WORD:], at, SLOT_WORDS, out_weights, to, 1)
    if rows is not None:
        outputs = (out_rows, out_origins, out_scales, out_weights)
        _arrange_own_rows(received, rows, outputs, ROW_WORDS, NUM_SCALES, **own)
    turn_cell(kept_zone, zone)


def _taken_rows(
    received: int,
    rows_taken: torch.Tensor,
    *,
    rows_before: torch.Tensor,
    recv_offsets: torch.Tensor,
    num_local_experts: int,
    num_ranks: int,
    **_: object,
) -> torch.Tensor:
    """(n,) the rows that a part takes, in their order."""
    before, taken = (
        table.view(num_ranks, num_local_experts).T.flatten().long() for table in (rows_before, rows_taken)
    )
    starts = torch.cat([recv_offsets.new_zeros(1), recv_offsets[:-1]]).long()
    found = [torch.arange(int(a), int(b)) for a, b in zip(starts + before, starts + taken, strict=True)]
    rows = torch.cat(found)
    return rows[rows < received]


def _arrange_own_rows(
    received: int,
    rows: torch.Tensor,
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    row_words: int,
    num_scales: int,
    *,
    topk_idx: torch.Tensor,
    expand_idx: torch.Tensor,
    recv_offsets: torch.Tensor,
    row_stride: int,
    first_expert: int,
    num_local_experts: int,
    num_ranks: int,
    rank: int,
    num_tokens: int,
    TOPK: int,
    ROWS_PER_TOKEN: int,
    first_token: int = 0,
    scales: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    **_: object,
) -> None:
    out_rows, out_origins, out_scales, out_weights = outputs
    before, end = first_token * TOPK, (first_token + num_tokens) * TOPK
    ids, indices = (table[before:end] for table in (topk_idx, expand_idx))
    flat, to = own_rows(ids, indices, recv_offsets, first_expert, num_local_experts, num_ranks, rank)
    flat, to = flat[to < received] + before, to[to < received]
    token, k = flat // TOPK, flat % TOPK
    source = token * ROWS_PER_TOKEN + k if ROWS_PER_TOKEN > 1 else token
    _copy_rows(rows, source, row_stride, out_rows, to, row_words)
    if len(to):
        origins = torch.stack([torch.full_like(token, rank), token, k], 1)
        out_origins.unfold(0, ORIGIN.num_words, ORIGIN.num_words)[to] = origins.int()
    if out_scales is not None and scales is not None:
        _copy_rows(scales, source, row_stride, out_scales, to, num_scales)
    if out_weights is not None and topk_weights is not None:
        out_weights[to] = topk_weights[flat]
