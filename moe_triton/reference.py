"""The reference model: dispatch and combine of a whole group in one process, plainly.

NumPy and torch, one loop per sentence of operators.md; no windows, no flags, no kernels. The library is
bit-equal to it. Shapes as in `moe_triton.buffer`; a list has one entry per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moe_triton.config import Config


@dataclass(frozen=True)
class Received:
    """What one rank's experts receive, exactly the rows that exist.

    Attributes:
        tokens: (rows, H), x's dtype or int8.
        scales: (rows,) fp32, or None.
        weights: (rows,) fp32, or None.
        triples: (rows, 3) int32: source rank, token, k.
        recv_offsets: (E * EP,) int32, inclusive prefix sums, expert by expert, source by source.
        tokens_per_expert: (E,) int64.
        expand_idx: (T * K,) int32 of the rank's own routing.
    """

    tokens: torch.Tensor
    scales: torch.Tensor | None
    weights: torch.Tensor | None
    triples: torch.Tensor
    recv_offsets: torch.Tensor
    tokens_per_expert: torch.Tensor
    expand_idx: torch.Tensor


def quantize_row(row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One row to int8 and its dynamic scale (operators.md, section 5, quant_mode 2).

    ``s = 127 / max|x|; q = rint(x * s); scale = 1 / s``, each step rounded to fp32. A row whose maximum
    is 0 or so small that s overflows gives q = 0, scale = 0. A row with a NaN gives scale NaN, one with
    an infinity scale inf; q is then 0.

    Args:
        row: (H,) fp32.

    Returns:
        (H,) int8 and () fp32.
    """
    x = row.numpy()
    largest = np.max(np.abs(x))  # NaN if there is one
    if not np.isfinite(largest):
        return torch.zeros(x.size, dtype=torch.int8), torch.tensor(largest)
    with np.errstate(divide="ignore", over="ignore"):
        s = np.float32(127) / largest
    if np.isinf(s):
        return torch.zeros(x.size, dtype=torch.int8), torch.tensor(np.float32(0))
    q = np.rint(x * s).astype(np.int8)
    return torch.from_numpy(q), torch.tensor(np.float32(1) / s)


def expand_index(topk_idx: torch.Tensor) -> torch.Tensor:
    """``idx[i] = #{j < i : ids[j] == ids[i]}`` over the flattened ids; 0 where there is no expert."""
    seen: dict[int, int] = {}
    index = []
    for expert in topk_idx.flatten().tolist():
        index.append(seen.get(expert, 0) if expert >= 0 else 0)
        seen[expert] = seen.get(expert, 0) + 1
    return torch.tensor(index, dtype=torch.int32)


def dispatch(
    config: Config,
    x: Sequence[torch.Tensor],
    topk_idx: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor] | None = None,
    *,
    quantize: bool = False,
    smooth_scales: torch.Tensor | None = None,
) -> list[Received]:
    """What every rank receives.

    Args:
        config: the group's.
        x: (T, H) bf16 or fp16, per rank; T may differ.
        topk_idx: (T, K) int32, per rank.
        topk_weights: (T, K) fp32, per rank.
        quantize: as int8.
        smooth_scales: (M, H) fp32, by routed expert.
    """
    received = []
    for rank in range(config.num_ranks):
        rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        triples: list[tuple[int, int, int]] = []
        weights: list[float] = []
        counts: list[int] = []
        for expert in range(config.experts_on(rank)):
            for source in range(config.num_ranks):
                arrivals = list(_arrivals(config, rank, expert, source, topk_idx[source]))
                counts.append(len(arrivals))
                for token, k in arrivals:
                    row = x[source][token]
                    if quantize:
                        xf = row.float()
                        if smooth_scales is not None:
                            xf = xf * smooth_scales[int(topk_idx[source][token, k])]
                        rows.append(quantize_row(xf))
                    else:
                        rows.append((row, torch.tensor(0.0)))
                    triples.append((source, token, k))
                    routed = topk_weights is not None and k < config.num_topk
                    weights.append(float(topk_weights[source][token, k]) if routed and topk_weights else 0.0)
        dtype = torch.int8 if quantize else x[rank].dtype
        by_expert = torch.tensor(counts, dtype=torch.int64).view(-1, config.num_ranks)
        received.append(
            Received(
                tokens=torch.stack([r for r, _ in rows])
                if rows
                else torch.empty(0, config.hidden, dtype=dtype),
                scales=torch.stack([s for _, s in rows]) if rows else torch.empty(0),
                weights=torch.tensor(weights, dtype=torch.float32),
                triples=torch.tensor(triples, dtype=torch.int32).view(-1, 3),
                recv_offsets=torch.tensor(counts).cumsum(0).int(),
                tokens_per_expert=by_expert.sum(dim=1),
                expand_idx=expand_index(topk_idx[rank]),
            )
        )
    return received


def _arrivals(
    config: Config, rank: int, expert: int, source: int, topk_idx: torch.Tensor
) -> list[tuple[int, int]]:
    """(token, k) of what ``source`` sends to a rank's local expert, in token order."""
    if config.is_shared_rank(rank):
        replicas = config.num_shared_ranks // config.num_shared_experts
        shared_expert = rank // replicas
        if config.rank_of_shared_expert(shared_expert, source) != rank:
            return []
        return [(token, config.num_topk + shared_expert) for token in range(topk_idx.shape[0])]
    wanted = (rank - config.num_shared_ranks) * config.num_local_experts + expert
    return [(token, k) for token, k in (topk_idx == wanted).nonzero().tolist()]


def combine(
    config: Config,
    y: Sequence[torch.Tensor],
    received: Sequence[Received],
    topk_idx: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor] | None,
) -> list[torch.Tensor]:
    """Every rank's sums, in the stated order: k ascending, then shared experts ascending.

    Args:
        config: the group's.
        y: per rank, at least (rows, H): outputs for `Received.tokens`.
        received: what `dispatch` returned.
        topk_idx: (T, K) int32, per rank.
        topk_weights: (T, K) fp32, per rank, or None for no weighting.

    Returns:
        (T, H) per rank, in y's dtype.
    """
    results: dict[tuple[int, int, int], torch.Tensor] = {}
    for rank in range(config.num_ranks):
        for row, triple in enumerate(received[rank].triples.tolist()):
            results[tuple(triple)] = y[rank][row]
    sums = []
    for rank in range(config.num_ranks):
        num_tokens = topk_idx[rank].shape[0]
        out = torch.zeros(num_tokens, config.hidden, dtype=torch.float32)
        for token in range(num_tokens):
            for k in range(config.num_topk):
                if topk_idx[rank][token, k] >= 0:
                    term = results[rank, token, k].float()
                    # Two statements, two roundings: no fused multiply-add.
                    if topk_weights is not None:
                        term = term * topk_weights[rank][token, k]
                    out[token] = out[token] + term
            for s in range(config.num_shared_experts):
                out[token] = out[token] + results[rank, token, config.num_topk + s].float()
        sums.append(out.to(y[rank].dtype))
    return sums
