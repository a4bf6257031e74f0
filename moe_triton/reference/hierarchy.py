"""Combine by way of servers: sums inside each server first, and what dispatch keeps for it.

Rank r is number c = r % L of server s = r // L, of S servers with L ranks each. A token goes once to each
server that holds an expert of it, to the rank of its own rank's number there (its relay). Shapes: T tokens of
a rank, K experts per token, H hidden, E experts of a rank.

What experts receive does not depend on the way: `moe_triton.reference.dispatch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moe_triton.core.config import Config
from moe_triton.reference.arithmetic import (
    PARTIAL_BLOCK_ELEMENTS,
    Floats,
    Mask,
    as_floats,
    rounded,
    through_blocks,
    weighted_sum,
)
from moe_triton.reference.combine import Results, results_of
from moe_triton.reference.dispatch import expand_index

NONE = -1  # for a server or an expert that there is none of


@dataclass(frozen=True)
class Relayed:
    """What a relay keeps of the tokens of one source: the rank of its number on one server.

    Attributes:
        tokens: (n,) int32, the tokens at their source, ascending.
        inner_ids: (n, K) int32, their experts on the relay's server, counted from the server's first one:
            ascending, and -1 behind.
        inner_positions: (n, K) int32, where each of them has the token: its number among the source's tokens
            for that expert.
        inner_weights: (n, K) fp32, the routing weights. Positions and weights behind the last expert mean
            nothing.
    """

    tokens: torch.Tensor
    inner_ids: torch.Tensor
    inner_positions: torch.Tensor
    inner_weights: torch.Tensor


@dataclass(frozen=True)
class Tables:
    """What dispatch keeps on one rank for combine.

    Attributes:
        outer_ids: (T, S) int32: q where the token goes to server q, else -1.
        outer_rows: (T, S) int32: how many earlier tokens go there too, and so which row of its relay's a
            token is.
        inner: by source server, what this rank relays.
    """

    outer_ids: torch.Tensor
    outer_rows: torch.Tensor
    inner: tuple[Relayed, ...]

    @property
    def sent_to(self) -> torch.Tensor:
        """(S,) int64: tokens of this rank by the server that they go to."""
        return (self.outer_ids >= 0).sum(0)

    @property
    def received_from(self) -> torch.Tensor:
        """(S,) int64: tokens that this rank relays by the server that they come from."""
        return torch.tensor([len(each.tokens) for each in self.inner])


def servers_of(config: Config, topk_idx: torch.Tensor) -> torch.Tensor:
    """The servers that tokens go to.

    Args:
        config: the group's.
        topk_idx: (T, K), -1 for no expert.

    Returns:
        (T, S) bool.
    """
    on = _server_of_each(config, topk_idx)
    return torch.stack([(on == server).any(1) for server in range(config.topology.num_servers)], 1)


def tables(
    config: Config, topk_idx: Sequence[torch.Tensor], topk_weights: Sequence[torch.Tensor]
) -> list[Tables]:
    """What dispatch keeps on every rank.

    Args:
        config: the group's.
        topk_idx: (T, K) int32, per rank.
        topk_weights: (T, K) fp32, per rank.
    """
    tables_by_rank = []
    for rank, ids in enumerate(topk_idx):
        goes = servers_of(config, ids)
        servers = torch.arange(config.topology.num_servers, dtype=torch.int32).expand(goes.shape)
        rows = goes.cumsum(0) - goes.long()
        here = config.topology.servers[rank]
        inner = [
            _relayed(config, here, topk_idx[source], topk_weights[source])
            for source in config.topology.rail(rank)
        ]
        tables_by_rank.append(Tables(servers.where(goes, NONE), rows.int(), tuple(inner)))
    return tables_by_rank


def sums_by_servers(
    config: Config,
    y: Sequence[torch.Tensor],
    origins: Sequence[torch.Tensor],
    topk_idx: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor],
    *,
    comm_quant_mode: int = 0,
) -> list[Floats]:
    """Every rank's sums, before they are rounded for the last time.

    Inside a server, its experts ascending from +0 in fp32: each result times its weight, rounded, and then
    added; the sum rounded to the results' dtype. Then the servers ascending from +0 in fp32, the token's own
    one like the others.

    Args:
        config: the group's.
        y: per rank, at least (rows, H): the experts' outputs.
        origins: per rank, (rows, 3) int32: source rank, token, k.
        topk_idx: (T, K) int32, per rank.
        topk_weights: (T, K) fp32, per rank: those that were dispatched.
        comm_quant_mode: 0, or 2 where the servers' rounded sums travel as int8: in blocks of 8 in bf16, of 16
            in fp16.

    Returns:
        (T, H) fp32 per rank.
    """
    rows = [outputs[: len(of_rank)] for outputs, of_rank in zip(y, origins, strict=True)]
    sums = []
    for rank, (ids, weights) in enumerate(zip(topk_idx, topk_weights, strict=True)):
        results = results_of(rank, origins, rows, ids.shape, 0)
        partials = _partials(config, ids, weights, results, y[rank].dtype)
        if comm_quant_mode == 2:
            partials = [through_blocks(each, PARTIAL_BLOCK_ELEMENTS[each.dtype]) for each in partials]
        goes = servers_of(config, ids).numpy()
        entries = [(goes[:, q], as_floats(partial), None) for q, partial in enumerate(partials)]
        sums.append(weighted_sum((len(ids), y[rank].shape[1]), entries))
    return sums


def _server_of_each(config: Config, ids: torch.Tensor) -> torch.Tensor:
    """(T, K): the server of each expert, -1 for none."""
    ranks = map(config.rank_of_expert, range(config.num_experts))
    servers = torch.tensor([config.topology.servers[rank] for rank in ranks])
    return torch.where(ids >= 0, servers[ids.clamp(min=0).long()], NONE)


def _relayed(config: Config, here: int, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Relayed:
    """What a relay on server ``here`` keeps of one source's tokens."""
    positions = expand_index(topk_idx, config.num_experts).view(topk_idx.shape)
    tokens = servers_of(config, topk_idx)[:, here].nonzero().flatten()
    per_server = config.num_experts // config.topology.num_servers
    is_here = (_server_of_each(config, topk_idx) == here)[tokens]
    ids = torch.where(is_here, topk_idx[tokens] - here * per_server, per_server)
    order = ids.argsort(dim=1)
    ids = ids.gather(1, order)
    return Relayed(
        tokens.int(),
        torch.where(ids < per_server, ids, NONE).int(),
        positions[tokens].gather(1, order),
        topk_weights[tokens].gather(1, order),
    )


def _partials(
    config: Config, ids: torch.Tensor, weights: torch.Tensor, results: Results, dtype: torch.dtype
) -> list[torch.Tensor]:
    """By server, (T, H): the sum of its experts for each of one rank's tokens."""
    order = ids.argsort(dim=1)
    ascending = order.numpy()
    on = _server_of_each(config, ids).gather(1, order).numpy()
    by_expert = as_floats(weights.gather(1, order))
    values = np.take_along_axis(results.values, ascending[:, :, None], axis=1)

    def entries(server: int) -> Iterator[tuple[Mask, Floats, Floats]]:
        for k in range(ids.shape[1]):
            yield on[:, k] == server, values[:, k], by_expert[:, k]

    shape = len(ids), values.shape[2]
    return [
        rounded(weighted_sum(shape, entries(server)), dtype) for server in range(config.topology.num_servers)
    ]
