"""What a dispatch of a hierarchy keeps for its combine, and what that combine is held to.

Results are summed on the ranks that have passed their tokens on, with the weights that came with them.

Shapes: S servers, T most tokens of a rank, K experts per token. With torch_npu's functions the tensor is what
follows the counts in ep_recv_counts; it is only ever read on the rank that wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from moe_triton.core.config import Config
from moe_triton.core.errors import ArgumentError
from moe_triton.core.plan import Phases, Placeholder
from moe_triton.layout import ORIGIN, WORD_BYTES
from moe_triton.operators.buffer import TABLES
from moe_triton.schemes.hierarchy.left_out import open_places, word_of
from moe_triton.schemes.scheme import Bindings, KeptTables

Ints = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
REMEDY = "Pass what dispatch returned; if this is it, a rank that relays tokens here has sent something else."


class Table(NamedTuple):
    """A part of the tensor.

    Attributes:
        offset: words before it.
        shape: of its words.
    """

    offset: int
    shape: tuple[int, ...]

    @property
    def words(self) -> slice:
        """Its own among those of all."""
        return slice(self.offset, self.offset + math.prod(self.shape))


class _Known(NamedTuple):
    """What tables are held to, made once.

    Attributes:
        servers: (S,) the number of each.
        places: (T,) that of each token of a source.
        first_experts: (S, 1, 1) number, in the inner tables, of the first expert of each place.
        experts: of a server.
        extents: (3,) ends of a row's source, token and k.
    """

    servers: Ints
    places: Ints
    first_experts: Ints
    experts: int
    extents: npt.NDArray[np.uint32]


class RelayTables(KeptTables):
    """Where the tables of a `Config` lie. The same on every rank.

    ``outer_ids`` (T, S): q where a token of this rank goes to server q, else -1. ``outer_rows`` (T, S): how
    many of its earlier tokens go there too. ``outer_counts`` (S,): how many go there in all.

    What came to be relayed is in the order that begins with this rank's own server, place 0, so that what
    came from others is together. ``rail_counts`` (S,): tokens that came from the server at each place. Row
    p * T + n of the inner tables is about token n that came from place p. ``inner_ids`` (S * T, K): its
    experts on this server, ascending, as p * (experts of a server) + number in the server, then -1.
    ``inner_positions`` (S * T, K): its number among its source's tokens for each of them. ``inner_weights``
    (S * T, K): the bits of its fp32 weights. ``inner_active_index`` (S * T,): 0 where there is a token, else
    -1.

    ``own_weights`` (T, K): the bits of the weights that this rank has dispatched, where the host reads them.

    Args:
        config: the group's settings.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
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
            "inner_active_index": (relayed,),
            "own_weights": (tokens, topk),
        }
        self.parts: dict[str, Table] = {}
        self.num_words = 0
        for name, shape in shapes.items():
            self.parts[name] = Table(self.num_words, shape)
            self.num_words += math.prod(shape)

    @cached_property
    def placeholders(self) -> dict[str, Placeholder]:
        """Where plans find each."""
        return {name: Placeholder(TABLES, WORD_BYTES * table.offset) for name, table in self.parts.items()}

    def of(self, tables: torch.Tensor, name: str) -> torch.Tensor:
        """One of them.

        Args:
            tables: (`num_words`,) int32, or longer.
            name: which.

        Returns:
            Its memory, in its shape.
        """
        table = self.parts[name]
        return tables[table.words].view(table.shape)

    def keep(self, bindings: Bindings) -> None:
        """Keeps the weights that dispatch was given, ``topk_weights`` (T, K) fp32."""
        given = bindings["topk_weights"]
        self.of(bindings[TABLES], "own_weights")[: len(given)].copy_(given.view(torch.int32))

    def empty(self, tables: torch.Tensor) -> torch.Tensor:
        """Those of a relay that no token has come to."""
        made = torch.full_like(tables, -1)
        for name in ("outer_counts", "rail_counts"):
            self.of(made, name).zero_()
        return made

    def mark_lost(
        self,
        bindings: Bindings,
        rank: int,
        is_masked: Callable[[int], bool],
        is_lost_relay: Callable[[int], bool],
        ran: Sequence[Phases] = (),
    ) -> None:
        """Takes out servers whose rank of this rail is masked, and experts of masked ranks of this server.

        But for servers on which another rank stands in for that one.

        These only of what is not summed yet, nor decided (`moe_triton.schemes.hierarchy.left_out`).
        """
        tables, topology = bindings[TABLES], self.config.topology
        own = topology.neighbours(rank)
        for server, relay in enumerate(topology.rail(rank)):
            if is_lost_relay(relay):
                self.of(tables, "outer_ids")[:, server] = -1
                self.of(tables, "outer_counts")[server] = 0
        servers, experts = topology.num_servers, self.config.num_experts // topology.num_servers
        open_ = open_places(servers, ran)
        bindings["left_out"][open_] = word_of(self.config, rank, is_masked)
        by_place = self.of(tables, "inner_ids").view(servers, -1)
        ids, of_rank = by_place[open_], experts // len(own)
        for number, neighbour in enumerate(own):
            if is_masked(neighbour):
                ids[(ids >= 0) & (ids % experts // of_rank == number)] = -1
        by_place[open_] = ids

    def check(self, bindings: Bindings, called: Mapping[str, str]) -> None:
        """Checks for dispatch's weights, tables as a dispatch leaves them, and origins that can be."""
        self._check_weights(bindings, called["topk_weights"])
        self._check_tables(bindings, called[TABLES])
        if "origins" in called:
            self._check_origins(bindings, called["origins"])

    def _check_weights(self, bindings: Bindings, name: str) -> None:
        """Weights of entries that a mask leaves out, or without an expert, do not matter."""
        given = bindings["topk_weights"].detach()
        kept = self.of(bindings[TABLES], "own_weights")[: len(given)].numpy()
        others = (kept != given.view(torch.int32).numpy()) & (bindings["topk_idx"].numpy() >= 0)
        if (mask := bindings.get("mask")) is not None:
            others &= (mask if mask.dim() == 2 else mask[:, None]).numpy()
        if others.any():
            token, k = (int(place) for place in np.argwhere(others)[0])
            dispatched = float(kept.view(np.float32)[token, k])
            rule = f"dispatch was given {dispatched} there, which other ranks sum with"
            remedy = "Pass the weights that were dispatched."
            raise ArgumentError(name, f"{float(given[token, k])} at token {token}, k {k}", rule, remedy)

    def _check_tables(self, bindings: Bindings, name: str) -> None:
        """Kernels stay in bounds whatever tables hold, but would sum other rows.

        Numbers of the inner tables that another dispatch might have left there are taken.
        """
        for part, values, is_wrong in self._misfits(bindings[TABLES].numpy(), bindings["num_tokens"]):
            if is_wrong.any():
                _refuse(name, part, values, is_wrong, "no dispatch leaves that there")

    def _misfits(self, words: Ints, num_tokens: int) -> Iterator[tuple[str, Ints, Mask]]:
        """Each table, and where it has numbers that no dispatch of so many tokens leaves.

        A number is at least 0 and below an end if it is below it without its sign.
        """
        c, known = self.config, self._known
        servers, most = c.topology.num_servers, c.num_max_tokens_per_rank
        of = {part: words[table.words].reshape(table.shape) for part, table in self.parts.items()}
        ids, rows, counts = of["outer_ids"][:num_tokens], of["outer_rows"][:num_tokens], of["outer_counts"]
        goes = ids >= 0
        so_far = goes.cumsum(0, dtype=np.int32)
        yield "outer_ids", ids, (ids != known.servers) & (ids != -1)
        yield "outer_rows", rows, goes & (rows != so_far - goes)
        yield "outer_counts", counts, counts != (so_far[-1] if num_tokens else 0)
        relayed = of["rail_counts"]
        yield "rail_counts", relayed, relayed.view(np.uint32) > most
        is_there = known.places < relayed[:, None]
        active_index = of["inner_active_index"].reshape(servers, most)
        yield "inner_active_index", active_index, active_index != is_there.view(np.int8) - 1
        shape = servers, most, c.num_topk
        inner, positions = of["inner_ids"].reshape(shape), of["inner_positions"].reshape(shape)
        is_known = ((inner - known.first_experts).view(np.uint32) < known.experts) | (inner == -1)
        yield "inner_ids", inner, is_there[..., None] & ~is_known
        yield "inner_positions", positions, is_there[..., None] & (positions.view(np.uint32) >= most)

    @cached_property
    def _known(self) -> _Known:
        c = self.config
        experts = c.num_experts // c.topology.num_servers
        return _Known(
            np.arange(c.topology.num_servers, dtype=np.int32),
            np.arange(c.num_max_tokens_per_rank, dtype=np.int32),
            np.arange(0, c.num_experts, experts, dtype=np.int32)[:, None, None],
            experts,
            np.array([c.num_ranks, c.num_max_tokens_per_rank, c.num_topk], np.uint32),
        )

    def _check_origins(self, bindings: Bindings, name: str) -> None:
        """Their relays wrote them."""
        origins = bindings["origins"].numpy()
        num_rows = min(max(int(bindings["recv_offsets"][-1]), 0), len(origins) // ORIGIN.num_words)
        rows = origins[: num_rows * ORIGIN.num_words].reshape(-1, ORIGIN.num_words)
        extents = self._known.extents
        if (is_wrong := rows.view(np.uint32) >= extents).any():
            _refuse(name, "a row's source, token and k", rows, is_wrong, f"they are below {extents.tolist()}")


def _refuse(name: str, part: str, values: Ints, is_wrong: Mask, rule: str) -> NoReturn:
    place = np.unravel_index(is_wrong.argmax(), is_wrong.shape)
    at = [int(i) for i in place]
    raise ArgumentError(name, f"{int(values[place])} in {part} at {at}", rule, REMEDY)
