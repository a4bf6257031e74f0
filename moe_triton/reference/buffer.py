"""The model in the words of `moe_triton.buffer`: one `Config`, and a list with an entry per rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_triton.core.config import Config
from moe_triton.core.row_formats import row_format_of
from moe_triton.reference.arithmetic import rounded, through_blocks
from moe_triton.reference.combine import CombineInputs, results_of, weighted_sums
from moe_triton.reference.deployment import Deployment
from moe_triton.reference.dispatch import DispatchInputs, dispatch_all, present
from moe_triton.reference.hierarchy import sums_by_servers

OWN_SUMS = {"hierarchy": sums_by_servers}
"""By scheme, functions that sum in another order (`moe_triton.schemes.scheme.Scheme.sums_alike`)."""


@dataclass(frozen=True)
class Received:
    """What one rank's experts receive, exactly the rows that exist.

    Attributes:
        tokens: (rows, H), x's dtype or int8.
        scales: (rows,) fp32 or, of rows with several, (rows, n); or None.
        weights: (rows,) fp32, or None.
        origins: (rows, 3) int32: source rank, token, k.
        recv_offsets: (E * EP,) int32, inclusive prefix sums, expert by expert, source by source; with
            experts_per_rank E is that of the rank with most.
        tokens_per_expert: (E,) int64.
        expand_idx: (T * K,) int32 of the rank's own routing.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    weights: torch.Tensor | None
    origins: torch.Tensor
    recv_offsets: torch.Tensor
    tokens_per_expert: torch.Tensor
    expand_idx: torch.Tensor


def deployment_of(config: Config) -> Deployment:
    """A buffer's settings as the model takes them."""
    return Deployment(
        ep_world_size=config.num_ranks,
        moe_expert_num=config.num_experts,
        shared_expert_num=config.num_shared_experts,
        shared_expert_rank_num=config.num_shared_ranks,
        version=config.version,
        experts_per_rank=config.experts_per_rank,
    )


def dispatch(
    config: Config,
    x: Sequence[torch.Tensor],
    topk_idx: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor] | None = None,
    *,
    quantize: str | None = None,
    smooth_scales: torch.Tensor | None = None,
) -> list[Received]:
    """What every rank receives.

    Args:
        config: the group's.
        x: (T, H) bf16 or fp16, per rank; T may differ.
        topk_idx: (T, K) int32, per rank.
        topk_weights: (T, K) fp32, per rank.
        quantize: as what, by the names that `EPBuffer.dispatch` takes.
        smooth_scales: (S + M, H) fp32, shared experts first.

    Examples:
        >>> config = Config(2, 64, 7168, 8, 32)
        >>> received = reference.dispatch(config, [x, x], [topk_idx, topk_idx])
        >>> sum(len(rank.tokens) for rank in received)
        256
    """
    row_format = row_format_of(quantize)
    inputs = [
        DispatchInputs(
            x=x[rank],
            expert_ids=topk_idx[rank],
            scales=smooth_scales if row_format.is_quantized else None,
            expert_scales=topk_weights[rank] if topk_weights is not None else None,
        )
        for rank in range(config.num_ranks)
    ]
    return [
        Received(
            tokens=own.expand_x,
            scales=own.dynamic_scales,
            weights=own.expand_scales,
            origins=own.assist_info,
            recv_offsets=own.ep_recv_counts,
            tokens_per_expert=own.expert_token_nums,
            expand_idx=own.expand_idx,
        )
        for own in map(present, dispatch_all(deployment_of(config), inputs, row_format=row_format))
    ]


def combine(
    config: Config,
    y: Sequence[torch.Tensor],
    received: Sequence[Received],
    topk_idx: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor] | None,
    *,
    comm_quant_mode: int = 0,
) -> list[torch.Tensor]:
    """Every rank's sums, in the stated order: k ascending, then shared experts ascending; with a scheme that
    has `OWN_SUMS`, as hierarchy, those.

    Args:
        config: the group's.
        y: per rank, at least (rows, H): outputs for `Received.tokens`.
        received: what `dispatch` returned.
        topk_idx: (T, K) int32, per rank.
        topk_weights: (T, K) fp32, per rank, or None for no weighting.
        comm_quant_mode: 0, or 2 where results travel as int8 in blocks.

    Returns:
        (T, H) per rank, in y's dtype.

    Examples:
        >>> config = Config(2, 64, 7168, 8, 32)
        >>> received = reference.dispatch(config, [x, x], [topk_idx, topk_idx])
        >>> results = [rank.tokens for rank in received]
        >>> out = reference.combine(config, results, received, [topk_idx] * 2, [topk_weights] * 2)
    """
    deployment = deployment_of(config)
    origins = [own.origins for own in received]
    own_sums = OWN_SUMS.get(config.scheme)
    if own_sums is not None:
        assert topk_weights is not None, f"{config.scheme} needs weights"
        summed = own_sums(config, y, origins, topk_idx, topk_weights, comm_quant_mode=comm_quant_mode)
        return [rounded(values, own.dtype) for values, own in zip(summed, y, strict=True)]
    rows = [outputs[: len(of_rank)] for outputs, of_rank in zip(y, origins, strict=True)]
    if comm_quant_mode == 2:
        rows = [through_blocks(each) for each in rows]
    sums = []
    for rank, ids in enumerate(topk_idx):
        results = results_of(rank, origins, rows, ids.shape, deployment.num_shared_experts)
        weights = topk_weights[rank] if topk_weights is not None else None
        inputs = CombineInputs(expand_x=y[rank], expert_ids=ids, expert_scales=weights)
        sums.append(rounded(weighted_sums(deployment, inputs, results)[1], y[rank].dtype))
    return sums
