"""What a dispatch of a hierarchy keeps for its combine, as parts of one int32 tensor.

Shapes: S servers, T most tokens of a rank, K experts per token. With torch_npu's functions the tensor is what
follows the counts in ep_recv_counts; it is only ever read on the rank that wrote it.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

import torch

from moe_triton.core.config import Config
from moe_triton.core.plan import Hole
from moe_triton.layout.common import WORD_BYTES

HOLE = "tables"
"""The tensor, in plans."""


class Table(NamedTuple):
    """A part of the tensor.

    Attributes:
        offset: words before it.
        shape: of its words.
    """

    offset: int
    shape: tuple[int, ...]


class RelayTables:
    """Where the tables of a `Config` lie. The same on every rank.

    ``outer_ids`` (T, S): q where a token of this rank goes to server q, else -1. ``outer_rows`` (T, S): how
    many of its earlier tokens go there too. ``outer_counts`` (S,): how many go there in all. ``rail_counts``
    (S,): tokens that came from each server to be relayed.

    Row s * T + n of the inner ones is about token n that came from server s. ``inner_ids`` (S * T, K): its
    experts on this server, ascending, as s * (experts of a server) + number in the server, then -1.
    ``inner_positions`` (S * T, K): its number among its source's tokens for each of them. ``inner_weights``
    (S * T, K): the bits of its fp32 weights. ``inner_active`` (S * T,): 0 where there is a token, else -1.

    ``own_weights`` (T, K): the bits of the weights that this rank has dispatched, where the host reads them.

    Args:
        config: the group's settings.
    """

    def __init__(self, config: Config) -> None:
        servers, tokens = config.topology.num_servers, config.num_max_tokens_per_rank
        relayed, topk = servers * tokens, config.num_topk
        shapes = {
            "outer_ids": (tokens, servers),
            "outer_rows": (tokens, servers),
            "outer_counts": (servers,),
            "rail_counts": (servers,),
            "inner_ids": (relayed, topk),
            "inner_positions": (relayed, topk),
            "inner_weights": (relayed, topk),
            "inner_active": (relayed,),
            "own_weights": (tokens, topk),
        }
        self.parts: dict[str, Table] = {}
        self.num_words = 0
        for name, shape in shapes.items():
            self.parts[name] = Table(self.num_words, shape)
            self.num_words += math.prod(shape)

    @cached_property
    def holes(self) -> dict[str, Hole]:
        """Where plans find each."""
        return {name: Hole(HOLE, WORD_BYTES * table.offset) for name, table in self.parts.items()}

    def of(self, tables: torch.Tensor, name: str) -> torch.Tensor:
        """One of them.

        Args:
            tables: (`num_words`,) int32, or longer.
            name: which.

        Returns:
            Its memory, in its shape.
        """
        table = self.parts[name]
        return tables[table.offset : table.offset + math.prod(table.shape)].view(table.shape)
