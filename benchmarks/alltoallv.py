"""The usual route: sort by expert, exchange counts, all-to-all-v of rows, and back. In torch over gloo.

The local work is the same as ours (quantise, reorder, weighted sum), written as a torch user writes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Sent:
    """What the way back needs."""

    order: torch.Tensor
    send_splits: list[int]
    receive_splits: list[int]
    to_expert_order: torch.Tensor


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows to int8 with a scale each."""
    xf = x.float()
    s = torch.full((x.shape[0], 1), 127.0) / xf.abs().amax(dim=1, keepdim=True)
    return (xf * s).round_().to(torch.int8), 1.0 / s.squeeze(1)


def dispatch(
    x: torch.Tensor, topk_idx: torch.Tensor, num_experts: int, num_ranks: int, quantized: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, Sent]:
    """Tokens in expert order, scales, tokens per expert, and what combine needs."""
    topk = topk_idx.shape[1]
    local_experts = num_experts // num_ranks
    flat = topk_idx.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts)
    send_splits = counts.view(num_ranks, -1).sum(1).tolist()
    by_source = received.view(num_ranks, local_experts)
    receive_splits = by_source.sum(1).tolist()
    total = sum(receive_splits)
    tokens = order // topk
    if quantized:
        q, scale = quantize(x)
        rows, scales = q[tokens], scale[tokens]
    else:
        rows, scales = x[tokens], None
    out = torch.empty(total, x.shape[1], dtype=rows.dtype)
    dist.all_to_all_single(out.view(torch.int8), rows.view(torch.int8), receive_splits, send_splits)
    expert_of_row = torch.arange(local_experts).repeat(num_ranks).repeat_interleave(by_source.flatten())
    to_expert_order = expert_of_row.argsort(stable=True)
    received_scales = None
    if scales is not None:
        received_scales = torch.empty(total)
        dist.all_to_all_single(received_scales, scales, receive_splits, send_splits)
        received_scales = received_scales[to_expert_order]
    sent = Sent(order, send_splits, receive_splits, to_expert_order)
    return out[to_expert_order], received_scales, by_source.sum(0), sent


def combine(y: torch.Tensor, topk_weights: torch.Tensor, sent: Sent) -> torch.Tensor:
    """Rows back to their tokens, summed by weight with k ascending."""
    by_source = torch.empty_like(y)
    by_source[sent.to_expert_order] = y
    returned = torch.empty(sum(sent.send_splits), y.shape[1], dtype=y.dtype)
    dist.all_to_all_single(
        returned.view(torch.int8), by_source.view(torch.int8), sent.send_splits, sent.receive_splits
    )
    num_tokens, topk = topk_weights.shape
    rows = torch.empty_like(returned)
    rows[sent.order] = returned
    rows = rows.view(num_tokens, topk, -1)
    out = torch.zeros(num_tokens, y.shape[1])
    for k in range(topk):
        out += rows[:, k].float() * topk_weights[:, k, None]
    return out.to(y.dtype)
