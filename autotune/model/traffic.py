"""What one rank sends and receives in one call: the data that kernel costs and timelines depend on.

Also what it keeps of tokens that go from server to server, as far as their sums' control flow needs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np

from moe_triton.core.config import Config
from moe_triton.core.records import POSITION_SHIFT
from moe_triton.layout import UB_ALIGN, WORD_BYTES, align
from moe_triton.schemes import scheme_type
from moe_triton.schemes.hierarchy.relay_tables import RelayTables

Tier = str
"""How far a peer is: "self"; A3 "sibling", "node", "far"; A2 "node", or "network" for another server."""


if TYPE_CHECKING:
    from moe_triton.core.config import Config


def relay_tables(config: Config, rank: int, ids: np.ndarray) -> np.ndarray:
    """`RelayTables` of one rank, with zeros for weights and positions: a copy takes as long from any slot.

    Args:
        config: the group's, of several servers.
        rank: the rank.
        ids: (EP, T, K), the experts of every rank's tokens, -1 for none.

    Returns:
        (num_words,) int32.
    """
    layout, topology = RelayTables(config), config.topology
    tables = np.zeros(layout.num_words, np.int32)
    part = {
        name: tables[table.offset : table.offset + np.prod(table.shape)].reshape(table.shape)
        for name, table in layout.parts.items()
    }
    experts = config.num_experts // topology.num_servers
    number = np.arange(topology.num_servers)

    goes = _goes(ids[rank], experts, topology.num_servers)
    tokens = len(goes)
    part["outer_ids"][:] = -1
    part["outer_ids"][:tokens] = np.where(goes, number, -1)
    part["outer_rows"][:tokens] = goes.cumsum(0) - goes
    part["outer_counts"][:] = goes.sum(0)

    here, most = topology.servers[rank], config.num_max_tokens_per_rank
    part["inner_ids"][:] = part["inner_active_index"][:] = -1
    for server, source in enumerate(topology.rail(rank)):
        place = (server - here) % topology.num_servers
        local = ids[source][_goes(ids[source], experts, topology.num_servers)[:, here]] - here * experts
        is_here = (local >= 0) & (local < experts)
        rows = slice(place * most, place * most + len(local))
        ascending = np.sort(np.where(is_here, place * experts + local, np.iinfo(np.int32).max), axis=1)
        part["inner_ids"][rows] = np.where(np.arange(ids.shape[2]) < is_here.sum(1)[:, None], ascending, -1)
        part["inner_active_index"][rows] = 0
        part["rail_counts"][place] = len(local)
    return tables


def route_words(ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """What goes with each token to a relay (`moe_triton.kernels.outer_table`).

    Args:
        ids: (T, K) of this rank's tokens.
        positions: (T * K,) how many earlier ids are the same.

    Returns:
        (T * W,) int32, W a multiple of 8.
    """
    tokens, topk = ids.shape
    words = np.full((tokens, align(topk, UB_ALIGN // WORD_BYTES)), -1, np.int32)
    words[:, :topk] = np.where(ids >= 0, ids | positions.reshape(ids.shape) << POSITION_SHIFT, -1)
    return words.reshape(-1)


def _goes(ids: np.ndarray, experts: int, servers: int) -> np.ndarray:
    """(T, S) bool: the servers that tokens go to."""
    on = np.where(ids >= 0, ids // experts, -1)
    goes: np.ndarray = (on[:, :, None] == np.arange(servers)).any(1)
    return goes


@dataclass(frozen=True)
class Traffic:
    """One rank's call.

    Attributes:
        config: the group's.
        rank: this rank.
        tiers: (EP,) how far each rank is from this one.
        topk_idx: (T, K) int32, the experts of this rank's tokens.
        recv_counts: (localE, EP) int32, rows that each expert of this rank gets from each rank.
        numbers: integers that a call brings, by the name of the placeholder: num_tokens, num_ids, num_rows,
            num_performance_entries; and own_results, an address, which is 0.
        tables: integers in memory, by the name of the placeholder: topk_idx, given_ids, active_ids, active,
            expand_idx, counts, recv_counts, recv_offsets, true_offsets, row_slots, origins, zones,
            expected_rows; where a dispatch keeps tables for its combine also tables and route_words. A mask,
            where there is one, leaves all; every received row is in the window.
        ids: (EP, T, K) int32, the experts of every rank's tokens, -1 for none; None where only this rank's
            are known.
    """

    config: Config
    rank: int
    tiers: tuple[Tier, ...]
    topk_idx: np.ndarray
    recv_counts: np.ndarray
    numbers: Mapping[str, int] = field(default_factory=dict)
    tables: Mapping[str, np.ndarray] = field(default_factory=dict)
    ids: np.ndarray | None = None

    @cached_property
    def sent(self) -> np.ndarray:
        """(EP,) rows to each rank: results of this rank's tokens."""
        c = self.config
        ids = self.topk_idx[(self.topk_idx >= 0) & (self.topk_idx < c.num_experts)]
        return np.bincount(c.num_shared_ranks + ids // c.num_local_experts, minlength=c.num_ranks)

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
    return _of_rank(config, rank, ids, np.arange(config.num_ranks), ids[rank], tiers)


def traffic_with(config: Config, rank: int, ids: np.ndarray, ranks: Sequence[int]) -> Traffic:
    """The same, as far as it goes to some ranks or comes from them; how far any are away is left out.

    Where a row goes depends on the rows that go to the same expert alone, so these go where they always do.
    """
    sources, experts = _of_ranks(config, tuple(ranks))
    return _of_rank(config, rank, ids, sources, np.where(experts[ids[rank]], ids[rank], -1), ())


@cache
def _of_ranks(config: Config, ranks: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Some ranks in order, and (M + 1,) whether each expert is theirs; the last one is none."""
    is_one = np.zeros(config.num_ranks, bool)
    is_one[list(ranks)] = True
    return np.flatnonzero(is_one), np.append(np.repeat(is_one, config.num_local_experts), False)


def _of_rank(
    config: Config, rank: int, ids: np.ndarray, sources: np.ndarray, own: np.ndarray, tiers: tuple[Tier, ...]
) -> Traffic:
    """What comes from some ranks, and what leaves with a rank's own ids; counts are of all that it has."""
    chosen = ids[rank]
    own = np.ascontiguousarray(own, dtype=np.int32)
    local = ids[sources] - rank * config.num_local_experts
    is_ours = (local >= 0) & (local < config.num_local_experts)
    number, token, k = np.nonzero(is_ours)
    source = sources[number]
    entry = local[is_ours] * config.num_ranks + source
    order = np.argsort(entry, kind="stable")
    entries = config.num_local_experts * config.num_ranks
    recv_counts = np.bincount(entry, minlength=entries).astype(np.int32)
    offsets = recv_counts.cumsum(dtype=np.int32)
    tables = {
        "topk_idx": own.reshape(-1),
        "given_ids": own.reshape(-1),
        "active_ids": own.reshape(-1),
        "active_index": np.arange(len(own), dtype=np.int32),
        "expand_idx": _index_within_expert(own.reshape(-1)),
        "counts": np.bincount(chosen[chosen >= 0], minlength=config.num_experts).astype(np.int32),
        "recv_counts": recv_counts,
        "recv_offsets": offsets,
        "true_offsets": offsets,
        # one after the other: a copy takes as long from any slot
        "row_slots": np.arange(offsets[-1], dtype=np.int32),
        "origins": np.stack([source, token, k], axis=1)[order].astype(np.int32).reshape(-1),
        "zones": np.zeros(6, np.int32),  # of three operators, and as kept
        "expected_rows": np.bincount(
            own[own >= 0] // config.num_local_experts, minlength=config.num_ranks
        ).astype(np.int32),
    }
    if scheme_type(config).tables_of(config) is not None:
        tables["tables"] = relay_tables(config, rank, ids)
        tables["route_words"] = route_words(own, tables["expand_idx"])
    num_tokens = own.shape[0]
    numbers = {
        "num_tokens": num_tokens,
        "num_ids": own.size,
        "num_rows": int(offsets[-1]),
        "own_results": 0,
        "num_performance_entries": config.num_ranks,
    }
    counts = recv_counts.reshape(config.num_local_experts, config.num_ranks)
    return Traffic(config, rank, tiers, own, counts, numbers, tables, ids)


def _index_within_expert(ids: np.ndarray) -> np.ndarray:
    """How many ids before each one are the same; 0 where there is no expert."""
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    is_first = np.diff(ordered, prepend=ordered[:1] - 1) != 0
    starts = np.flatnonzero(is_first)
    indices = np.empty_like(ids)
    indices[order] = np.arange(ids.size) - starts[np.cumsum(is_first) - 1]
    indices[ids < 0] = 0
    return indices
