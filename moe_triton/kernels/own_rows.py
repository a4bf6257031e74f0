"""Rows of this rank for its own experts: which they are among all that it receives.

Shape symbols:
    W   ranks
    E   experts of this rank, the first of them ``first_expert``

This rank's rows for its own expert e begin in its output where those of the sources before it end::

    start[e] = recv_offsets[(e - first_expert) * W + rank - 1]

and result (t, k) is row ``start[e] + expand_idx[t, k]``. The offsets come from counts that peers can write: a
row that is not among those of its own entry is none, so that nothing is read or written for it.
"""

from __future__ import annotations

import torch

from moe_triton.kernels.language import tl, triton


@triton.jit
def own_row(expert, index, recv_offsets, first_expert, num_local_experts, num_ranks, rank):
    """The row of a result of an own expert; below 0 for any other, and for one that has no room."""
    is_own = (expert >= first_expert) & (expert < first_expert + num_local_experts)
    # of any other, entry 0 is looked up: a branch would be guessed wrong as often as right
    entry = tl.where(is_own, (expert - first_expert) * num_ranks + rank, 0)
    start = tl.where(entry > 0, tl.load(recv_offsets + tl.maximum(entry - 1, 0)), 0)
    has_room = is_own & (start + index < tl.load(recv_offsets + entry))
    return tl.where(has_room, start + index, -1).to(tl.int64)


def own_rows(
    topk_idx: torch.Tensor,
    expand_idx: torch.Tensor,
    recv_offsets: torch.Tensor,
    first_expert: int,
    num_local_experts: int,
    num_ranks: int,
    rank: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`own_row`, for fallbacks: which flat results stay here, and their rows."""
    kept = ((topk_idx >= first_expert) & (topk_idx < first_expert + num_local_experts)).nonzero()[:, 0]
    entries = (topk_idx[kept].long() - first_expert) * num_ranks + rank
    ends = torch.cat([recv_offsets.new_zeros(1), recv_offsets[: num_local_experts * num_ranks]]).long()
    rows = ends[entries] + expand_idx[kept].long()
    has_room = (rows >= 0) & (rows < ends[entries + 1])
    return kept[has_room], rows[has_room]
