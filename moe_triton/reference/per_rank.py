"""Dispatch with one row for each token and rank (``do_expand=False``), and its combine, as `reference.buffer`
has the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_triton.core.config import Config
from moe_triton.core.row_formats import row_format_of
from moe_triton.reference.arithmetic import as_floats, quantize_row, rounded, through_blocks, weighted_sum


@dataclass(frozen=True)
class ReceivedPerRank:
    """What one rank receives, exactly the rows that exist: by source rank, then by the source's token.

    Attributes:
        tokens: (n, H), x's dtype or int8.
        scales: (n,) fp32 or, of rows with several, (n, m); or None.
        tokens_per_expert: (E,) int64, rows for each local expert.
        sources: (n, 2) int32: source rank, token.
        local_topk_idx: (n, K) int32, experts of this rank from 0, -1 for all others.
        local_topk_weights: (n, K) fp32, 0 where there is no expert; or None.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    tokens_per_expert: torch.Tensor
    sources: torch.Tensor
    local_topk_idx: torch.Tensor
    local_topk_weights: torch.Tensor | None


def dispatch_per_rank(
    config: Config,
    x: Sequence[torch.Tensor],
    topk_idx: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor] | None = None,
    *,
    quantize: str | None = None,
) -> list[ReceivedPerRank]:
    """What every rank receives.

    Args:
        config: the group's, without shared experts.
        x: (T, H) bf16 or fp16, per rank; T may differ.
        topk_idx: (T, K) int32, per rank.
        topk_weights: (T, K) fp32, per rank.
        quantize: as what, by the names that `EPBuffer.dispatch` takes.

    Examples:
        >>> config = Config(2, 64, 7168, 8, 32)
        >>> received = reference.dispatch_per_rank(config, [x, x], [topk_idx, topk_idx])
        >>> received[1].local_topk_idx.shape == (len(received[1].tokens), 8)
        True
    """
    row_format, everyone = row_format_of(quantize), []
    for rank in range(config.num_ranks):
        first, number = config.first_expert_on(rank), config.experts_on(rank)
        sources, ids, weights = [], [], []
        for source, experts in enumerate(topk_idx):
            is_local = (experts >= first) & (experts < first + number)
            tokens = is_local.any(dim=1).nonzero().flatten()
            sources.append(torch.stack([torch.full_like(tokens, source), tokens], 1).int())
            ids.append(torch.where(is_local, experts - first, -1)[tokens].int())
            if topk_weights is not None:
                weights.append(torch.where(is_local, topk_weights[source], 0)[tokens])
        of_rows, local = torch.cat(sources), torch.cat(ids)
        rows = torch.cat([each[of[:, 1].long()] for each, of in zip(x, sources, strict=True)])
        scales = None
        if row_format.is_quantized:
            packed = [quantize_row(row, row_format) for row in rows.float()]
            shape = row_format.scales_shape(len(rows), config.hidden)
            scales = torch.stack([scale for _, scale in packed]) if packed else torch.empty(shape)
            rows = torch.stack([q for q, _ in packed]) if packed else rows.to(torch.int8)
        everyone.append(
            ReceivedPerRank(
                tokens=rows,
                scales=scales,
                tokens_per_expert=local[local >= 0].long().bincount(minlength=number),
                sources=of_rows,
                local_topk_idx=local,
                local_topk_weights=torch.cat(weights) if topk_weights is not None else None,
            )
        )
    return everyone


def combine_per_rank(
    config: Config,
    y: Sequence[torch.Tensor],
    received: Sequence[ReceivedPerRank],
    num_tokens: Sequence[int],
    *,
    comm_quant_mode: int = 0,
) -> list[torch.Tensor]:
    """Every rank's sums of the rows that ranks have for its tokens: in fp32, by rank, ascending.

    Args:
        config: the group's.
        y: per rank, at least (n, H): of each received row one, weighted and summed over local experts.
        received: what `dispatch_per_rank` returned.
        num_tokens: T, per rank.
        comm_quant_mode: 0, or 2 where rows travel as int8 in blocks.

    Returns:
        (T, H) per rank, in y's dtype.

    Examples:
        >>> config = Config(2, 64, 7168, 8, 32)
        >>> received = reference.dispatch_per_rank(config, [x, x], [topk_idx, topk_idx])
        >>> y = [rank.tokens for rank in received]
        >>> out = reference.combine_per_rank(config, y, received, [len(x), len(x)])
    """
    sums = []
    for rank, tokens in enumerate(num_tokens):
        entries = []
        for rows, own in zip(y, received, strict=True):
            is_here = own.sources[:, 0] == rank
            results = rows[: len(own.sources)][is_here]
            if comm_quant_mode == 2:
                results = through_blocks(results)
            places = own.sources[is_here, 1].long()
            applies = torch.zeros(tokens, dtype=torch.bool)
            applies[places] = True
            values = torch.zeros(tokens, config.hidden)
            values[places] = torch.from_numpy(as_floats(results))
            entries.append((applies.numpy(), values.numpy(), None))
        sums.append(rounded(weighted_sum((tokens, config.hidden), entries), y[rank].dtype))
    return sums
