"""What one rank sends and receives in one call: the data that bodies and timelines depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autotune.model.relaying import relay_tables
from moe_triton.core.config import Config

Tier = str
"""How far a peer is: "self"; A3 "sibling", "node", "far"; A2 "node", or "network" for another server."""


@dataclass(frozen=True)
class Traffic:
    """One rank's call.

    Attributes:
        config: the group's.
        rank: this rank.
        tiers: (EP,) how far each rank is from this one.
        topk_idx: (T, K) int32, the experts of this rank's tokens.
        recv_counts: (localE, EP) int32, rows that each expert of this rank gets from each rank.
        numbers: integers that a call brings, by the name of the hole: num_tokens, num_ids, num_rows,
            num_performance_entries; and own_results, an address, which is 0.
        tables: integers in memory, by the name of the hole: topk_idx, given_ids, masked_ids, active,
            expand_idx, counts, recv_counts, recv_offsets, true_offsets, row_slots, origins, zones; between
            servers that can relay also tables. A mask, where there is one, leaves all; every received row is
            in the window.
    """

    config: Config
    rank: int
    tiers: tuple[Tier, ...]
    topk_idx: np.ndarray
    recv_counts: np.ndarray
    numbers: Mapping[str, int] = field(default_factory=dict)
    tables: Mapping[str, np.ndarray] = field(default_factory=dict)

    @cached_property
    def sent(self) -> np.ndarray:
        """(EP,) rows to each rank: results of this rank's tokens."""
        c = self.config
        ids = self.topk_idx[(self.topk_idx >= 0) & (self.topk_idx < c.num_experts)]
        ranks = c.num_shared_ranks + ids // c.num_local_experts
        return np.bincount(ranks, minlength=c.num_ranks)

    @cached_property
    def received(self) -> np.ndarray:
        """(EP,) rows from each rank."""
        counts: np.ndarray = self.recv_counts.sum(axis=0)
        return counts

    @property
    def num_rows(self) -> int:
        """Rows that this rank receives."""
        return int(self.received.sum())


def traffic_of(config: Config, rank: int, ids: np.ndarray, tiers: tuple[Tier, ...]) -> Traffic:
    """What one rank of a group sends and receives.

    Args:
        config: the group's, without shared experts.
        rank: the rank.
        ids: (EP, T, K), the experts of every rank's tokens, -1 for none.
        tiers: how far each rank is from this one.
    """
    own = np.ascontiguousarray(ids[rank], dtype=np.int32)
    first = rank * config.num_local_experts
    local = ids - first
    is_ours = (local >= 0) & (local < config.num_local_experts)
    source, token, k = np.nonzero(is_ours)
    entry = local[is_ours] * config.num_ranks + source
    order = np.argsort(entry, kind="stable")
    entries = config.num_local_experts * config.num_ranks
    recv_counts = np.bincount(entry, minlength=entries).astype(np.int32)
    offsets = recv_counts.cumsum(dtype=np.int32)
    tables = {
        "topk_idx": own.reshape(-1),
        "given_ids": own.reshape(-1),
        "masked_ids": own.reshape(-1),
        "active": np.arange(len(own), dtype=np.int32),
        "expand_idx": _index_within_expert(own.reshape(-1)),
        "counts": np.bincount(own[own >= 0], minlength=config.num_experts).astype(np.int32),
        "recv_counts": recv_counts,
        "recv_offsets": offsets,
        "true_offsets": offsets,
        # one after the other: a copy takes as long from any slot
        "row_slots": np.arange(offsets[-1], dtype=np.int32),
        "origins": np.stack([source, token, k], axis=1)[order].astype(np.int32).reshape(-1),
        "zones": np.zeros(6, np.int32),  # of three operators, and as kept
    }
    servers = config.topology.sizes
    if len(servers) > 1 and len(set(servers)) == 1:
        tables["tables"] = relay_tables(config, rank, ids)
    num_tokens = own.shape[0]
    numbers = {
        "num_tokens": num_tokens,
        "num_ids": own.size,
        "num_rows": int(offsets[-1]),
        "own_results": 0,
        "num_performance_entries": config.num_ranks,
    }
    counts = recv_counts.reshape(config.num_local_experts, config.num_ranks)
    return Traffic(config, rank, tiers, own, counts, numbers, tables)


def _index_within_expert(ids: np.ndarray) -> np.ndarray:
    """How many ids before each one are the same; 0 where there is no expert."""
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    lengths = np.diff(np.r_[starts, ids.size])
    found = np.empty_like(ids)
    found[order] = np.arange(ids.size) - np.repeat(starts, lengths)
    found[ids < 0] = 0
    return found
