"""Who is missing, read from what a timed-out wait left behind."""

from __future__ import annotations

import itertools

import torch

from moe_triton.ascendc import REPORT_TIMEOUT
from moe_triton.config import Config
from moe_triton.layout import WindowLayout

FLAG = 1.0


def missing_in_dispatch(config: Config, recv_counts: torch.Tensor) -> list[int]:
    """Ranks whose status entries did not come.

    Args:
        config: the group's.
        recv_counts: (E * EP,) int32 as the wait left it: -1 where nothing came.
    """
    by_source = recv_counts.view(-1, config.num_ranks)
    return [int(rank) for rank in (by_source < 0).any(dim=0).nonzero().flatten()]


def missing_in_inband(config: Config, report: torch.Tensor, recv_counts: torch.Tensor) -> list[int]:
    """Ranks whose rows did not all come, where each row carries its flags.

    Args:
        config: the group's.
        report: (blocks, words) int32: code, first entry concerned, how many from there on.
        recv_counts: (E * EP,) int32, rows of each entry: one without rows waits for nobody.
    """
    missing: set[int] = set()
    for code, first, count in report[:, :3].tolist():
        if code == REPORT_TIMEOUT:
            entries = range(first, first + count)
            missing |= {n % config.num_ranks for n in entries if int(recv_counts[n]) > 0}
    return sorted(missing)


def missing_in_combine(
    layout: WindowLayout,
    rank: int,
    zone: int,
    window: torch.Tensor,
    topk_idx: torch.Tensor,
    report: torch.Tensor,
    end: int,
) -> list[int]:
    """Ranks whose results did not come, for the tokens that waits did not get past.

    Args:
        layout: of the window.
        rank: this rank.
        zone: of the combine.
        window: this rank's, flat uint8. Entries of a token that did not complete were not cleared.
        topk_idx: (T, K) int32.
        report: (blocks, words) int32: code, first token concerned, tokens from there to the block's end.
        end: tokens from this one on were not waited for.
    """
    config = layout.config
    region = layout.combine_status
    late = [range(first, first + n) for code, first, n in report[:, :3].tolist() if code == REPORT_TIMEOUT]
    missing: set[int] = set()
    for token in itertools.chain(*late, range(end, len(topk_idx))):
        for k, owner in _owners(config, rank, topk_idx[token].tolist()):
            offset = region.offset(zone=zone, token=token, k=k)
            if float(window[offset : offset + 4].view(torch.float32)) != FLAG:
                missing.add(owner)
    return sorted(missing)


def _owners(config: Config, rank: int, ids: list[int]) -> list[tuple[int, int]]:
    """(k, rank that computes it) of each result that a token waits for."""
    routed = [
        (k, config.rank_of_expert(expert)) for k, expert in enumerate(ids) if 0 <= expert < config.num_experts
    ]
    shared = [
        (config.num_topk + s, config.rank_of_shared_expert(s, rank)) for s in range(config.num_shared_experts)
    ]
    return routed + shared
