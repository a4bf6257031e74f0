"""What a rank keeps of tokens that go from server to server, as far as their sums' control flow needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moe_triton.core.records import POSITION_SHIFT
from moe_triton.layout import UB_ALIGN, WORD_BYTES, align
from moe_triton.schemes.hierarchy.relay_tables import RelayTables

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
    part["inner_ids"][:] = part["inner_active"][:] = -1
    for server, source in enumerate(topology.rail(rank)):
        local = ids[source][_goes(ids[source], experts, topology.num_servers)[:, here]] - here * experts
        is_here = (local >= 0) & (local < experts)
        rows = slice(server * most, server * most + len(local))
        ascending = np.sort(np.where(is_here, server * experts + local, np.iinfo(np.int32).max), axis=1)
        part["inner_ids"][rows] = np.where(np.arange(ids.shape[2]) < is_here.sum(1)[:, None], ascending, -1)
        part["inner_active"][rows] = 0
        part["rail_counts"][server] = len(local)
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
    found: np.ndarray = (on[:, :, None] == np.arange(servers)).any(1)
    return found
