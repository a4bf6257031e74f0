"""Dispatch of a whole deployment: what every rank passes to what every rank gets.

Shapes: BS tokens of a rank, H hidden, K experts per token, S shared experts, M routed experts, EP ranks of
the expert-parallel group, localE experts on a rank, n rows that a rank receives from its own group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from moe_triton.core.row_formats import AS_THEY_ARE, INT8, RowFormat
from moe_triton.reference.arithmetic import QUANTIZERS, as_floats
from moe_triton.reference.deployment import Deployment

Entries = list[tuple[int, int]]  # (token, k)
Some = TypeVar("Some")


@dataclass(frozen=True, kw_only=True)
class DispatchInputs:
    """What one rank passes, by torch_npu's names.

    Attributes:
        x: (BS, H) bf16 or fp16.
        expert_ids: (BS, K) int32; -1 for no expert, ids from M on for special experts.
        scales: (S + M, H) fp32 smooth scales.
        x_active_mask: (BS,) bool with its True first, or (BS, K) bool.
        expert_scales: (BS, K) fp32.
    """

    x: torch.Tensor
    expert_ids: torch.Tensor
    scales: torch.Tensor | None = None
    x_active_mask: torch.Tensor | None = None
    expert_scales: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class DispatchReference:
    """What one rank gets: exactly the part of each output that is determined, and nothing behind it.

    Attributes:
        expand_x: (n, H), with the tensor-parallel peer's rows behind the own ones.
        dynamic_scales: the fp32 scales of these rows, or None where they are not quantised.
        assist_info: (n, 3) int32 of the own rows: source rank, token, k, as V2 returns them.
        expand_idx: (BS * K,) int32, as V1 and A2 return it.
        expert_token_nums: (localE,) int64.
        ep_recv_counts: (EP * localE,) int32, twice as long with a tensor-parallel peer.
        tp_recv_counts: (2,) int32, or None without a tensor-parallel peer.
        expand_scales: (n,) fp32 of the own rows, 0 for a shared expert's; None without expert_scales.
        performance_ranks: entries of performance_info that may be raised; the others stay as they were.
    """

    expand_x: torch.Tensor
    dynamic_scales: torch.Tensor | None
    assist_info: torch.Tensor
    expand_idx: torch.Tensor
    expert_token_nums: torch.Tensor
    ep_recv_counts: torch.Tensor
    tp_recv_counts: torch.Tensor | None
    expand_scales: torch.Tensor | None
    performance_ranks: tuple[int, ...]


def dispatch_all(
    deployment: Deployment,
    inputs: Sequence[DispatchInputs | None],
    *,
    row_format: RowFormat | None = None,
    expert_token_nums_type: int = 1,
) -> list[DispatchReference | None]:
    """What every process gets.

    Args:
        deployment: what all pass alike.
        inputs: by process (`Deployment`), None for ranks that are lost.
        row_format: how rows travel, None for as they are; as int8 in V1 wherever scales are given.
        expert_token_nums_type: 1 counts, 0 running totals.

    Returns:
        By process, None for ranks that are lost.

    Examples:
        >>> deployment = reference.Deployment(ep_world_size=2, moe_expert_num=32)
        >>> inputs = [reference.DispatchInputs(x=x, expert_ids=expert_ids)] * 2
        >>> received = reference.dispatch_all(deployment, inputs)
    """
    row_format = row_format or AS_THEY_ARE
    tp, left = deployment.num_tp_ranks, deployment.after_losses()
    own: dict[int, DispatchReference] = {}
    for tp_rank in range(tp):
        processes = [rank * tp + tp_rank for rank in deployment.survivors]
        group = [present(inputs[process]) for process in processes]
        for rank, process in enumerate(processes):
            received = _receive(left, group, rank, row_format, expert_token_nums_type)
            own[process] = replace(received, performance_ranks=deployment.survivors)
    if tp == 2:
        own = {process: _with_peer(own, process) for process in own}
    return [own.get(process) for process in range(len(inputs))]


def tokens_that_take_part(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """(BS,) bool: the tokens that the mask leaves. Shared experts get these, and combine writes them."""
    if mask is None:
        return torch.ones(len(ids), dtype=torch.bool)
    return mask if mask.dim() == 1 else mask.any(dim=1)


def ids_that_take_part(ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """(BS, K) int32: the ids that the mask leaves, -1 for the others."""
    if mask is None:
        return ids
    return ids.where(mask if mask.dim() == 2 else mask[:, None], -1)


def expand_index(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """``idx[i] = #{j < i : ids[j] == ids[i]}`` over the flattened ids; 0 where there is no routed expert.

    Examples:
        >>> reference.expand_index(torch.tensor([[0, 1], [1, 2]]), num_experts=4).tolist()
        [0, 0, 1, 0]
    """
    seen: dict[int, int] = {}
    index = []
    for expert in topk_idx.flatten().tolist():
        index.append(seen.get(expert, 0) if 0 <= expert < num_experts else 0)
        seen[expert] = seen.get(expert, 0) + 1
    return torch.tensor(index, dtype=torch.int32)


def _arrivals(source: DispatchInputs, expert: int) -> Entries:
    """What one rank sends to one routed expert, in token order."""
    ids = ids_that_take_part(source.expert_ids, source.x_active_mask)
    return [(token, k) for token, k in (ids == expert).nonzero().tolist()]


def _shared_arrivals(deployment: Deployment, source: DispatchInputs, source_rank: int, rank: int) -> Entries:
    """What one rank sends to a shared rank, in token order; k = K + s for shared expert s."""
    batch, topk = source.expert_ids.shape
    shared_expert = deployment.shared_expert_on(rank)
    taking_part = tokens_that_take_part(source.expert_ids, source.x_active_mask)
    return [
        (token, topk + shared_expert)
        for token in taking_part.nonzero().flatten().tolist()
        if deployment.shared_rank_of(shared_expert, source_rank, token, batch) == rank
    ]


def present(of_rank: Some | None) -> Some:
    """What a rank that takes part has passed, or been given."""
    assert of_rank is not None, "a rank that takes part has inputs, and has dispatched"
    return of_rank


def _receive(
    deployment: Deployment,
    group: Sequence[DispatchInputs],
    rank: int,
    row_format: RowFormat,
    expert_token_nums_type: int,
) -> DispatchReference:
    """The outputs of one rank of an expert-parallel group."""
    own, shared = group[rank], deployment.is_shared_rank(rank)
    first_expert, num_experts = deployment.first_expert_on(rank), deployment.experts_on(rank)
    rows, scales, weights, origins = [], [], [], []
    counts: list[int] = []
    # Whatever a rank has less than the one with most receives nothing.
    for local in range(1 if shared else deployment.num_local_experts):
        for source_rank, source in enumerate(group):
            if local >= num_experts:
                entries = []
            elif shared:
                entries = _shared_arrivals(deployment, source, source_rank, rank)
            else:
                entries = _arrivals(source, first_expert + local)
            counts.append(len(entries))
            tokens = torch.tensor([token for token, _ in entries], dtype=torch.int64)
            ks = torch.tensor([k for _, k in entries], dtype=torch.int64)
            x, x_scales = _travelled(deployment, source, tokens, ks, row_format)
            rows.append(x)
            scales.append(x_scales)
            weights.append(_weights(source, tokens, ks))
            origins.append(torch.stack([torch.full_like(tokens, source_rank), tokens, ks], dim=1).int())
    per_expert = torch.tensor(counts).view(-1, len(group)).sum(dim=1)[:num_experts]
    if shared and deployment.version == 1:
        counts = _reported_by_shared_rank(deployment, own, rank, counts)
    return DispatchReference(
        expand_x=torch.cat(rows),
        dynamic_scales=torch.cat(scales) if rows[0].dtype == torch.int8 else None,
        assist_info=torch.cat(origins),
        expand_idx=expand_index(
            ids_that_take_part(own.expert_ids, own.x_active_mask), deployment.moe_expert_num
        ),
        expert_token_nums=per_expert if expert_token_nums_type == 1 else per_expert.cumsum(0),
        ep_recv_counts=torch.tensor(counts).cumsum(0).int(),
        tp_recv_counts=None,
        expand_scales=torch.cat(weights) if own.expert_scales is not None else None,
        performance_ranks=(),
    )


def _travelled(
    deployment: Deployment,
    source: DispatchInputs,
    tokens: torch.Tensor,
    ks: torch.Tensor,
    row_format: RowFormat,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as they arrive, and their dynamic scales (without quantisation: none)."""
    rows = source.x[tokens]
    if deployment.version == 1 and source.scales is not None:
        row_format = INT8
    if not row_format.is_quantized:
        return rows, torch.empty(0)
    values = as_floats(rows)
    if source.scales is not None:
        topk, shared = source.expert_ids.shape[1], deployment.num_shared_experts
        experts = source.expert_ids[tokens, ks.clamp(max=topk - 1)].long()
        # Rows of the smooth scales: the shared experts' first, then the routed ones'.
        scale_rows = source.scales[torch.where(ks < topk, shared + experts, ks - topk)]
        with np.errstate(over="ignore"):
            values = values * scale_rows.numpy()
    q, scales = QUANTIZERS[row_format](values)
    return torch.from_numpy(q), torch.from_numpy(scales)


def _weights(source: DispatchInputs, tokens: torch.Tensor, ks: torch.Tensor) -> torch.Tensor:
    if source.expert_scales is None:
        return torch.zeros(len(tokens))
    topk = source.expert_scales.shape[1]
    return torch.where(ks < topk, source.expert_scales[tokens, ks.clamp(max=topk - 1)], 0.0)


def _reported_by_shared_rank(
    deployment: Deployment, own: DispatchInputs, rank: int, counts: list[int]
) -> list[int]:
    """V1: a shared rank's own tokens, reported as if the shared ranks had sent a run of them each."""
    batch = len(own.expert_ids)
    pieces = np.array([deployment.piece_of(rank, token, batch) for token in range(batch)])
    shared_ranks = deployment.shared_expert_rank_num
    runs = [int((pieces == piece).sum()) for piece in range(shared_ranks)]
    return runs + counts[shared_ranks:]


def _with_peer(own: dict[int, DispatchReference], process: int) -> DispatchReference:
    """With a tensor-parallel peer: the peer's rows and counts behind the own ones."""
    mine, peers = own[process], own[process ^ 1]
    totals = [int(own[pair].ep_recv_counts[-1]) for pair in (process & ~1, process | 1)]
    scales = None
    if mine.dynamic_scales is not None and peers.dynamic_scales is not None:
        scales = torch.cat([mine.dynamic_scales, peers.dynamic_scales])
    return replace(
        mine,
        expand_x=torch.cat([mine.expand_x, peers.expand_x]),
        dynamic_scales=scales,
        expert_token_nums=mine.expert_token_nums + peers.expert_token_nums,
        ep_recv_counts=torch.cat([mine.ep_recv_counts, peers.ep_recv_counts]),
        tp_recv_counts=torch.tensor(totals, dtype=torch.int32),
    )
