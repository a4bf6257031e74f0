"""Cases of the hierarchy, and what Triton kernels do in it, on bytes.

A "sum" is one whose result depends on the order of its terms. Symbols: S servers, L ranks of each, E
experts of a rank, T tokens of a rank, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from moe_triton.core.config import Config
from moe_triton.core.records import POSITION_SHIFT
from moe_triton.core.region import Region
from moe_triton.layout import NUM_ZONES, TRAILER_WORDS, SlotLayout
from moe_triton.schemes.hierarchy.layout import HierarchyLayout, RailSlot

from .case import Case, Routing, WrongResultError
from .memory import Guarded

MOST_SHOWN = 32  # numbers of an array, in an error


@dataclass(frozen=True)
class HierarchyCase(Case):
    """Rows with a scale are of 8 bits an element, others of 16.

    Attributes:
        servers: ranks of each, as many everywhere.
        message_tokens: of a message; 0 for all of a server, with phases that follow one another.
        pieces: in which results are returned.
        parts: in which tokens are made and posted.
        first_number: that of the first round of either operator.
        zones: how many are used in turn. One is not enough.
        keeps_order: whether queues keep order inside messages.
        ring_items: posts that a queue holds.
        post_us: not 0: NICs keep all order, and take so long for a post.
    """

    servers: tuple[int, ...] = (2, 2)
    message_tokens: int = 1
    pieces: int = 1
    parts: int = 1
    first_number: int = 1
    zones: int = NUM_ZONES
    keeps_order: bool = False
    ring_items: int = 3
    post_us: float = 0.0

    @property
    def config(self) -> Config:
        """With the servers."""
        return replace(super().config, ranks_per_server=self.servers)

    @property
    def slot(self) -> SlotLayout:
        """Of a forwarded row."""
        return SlotLayout(self.hidden, 1 if self.scaled else 2, self.num_scales * self.scaled)

    @property
    def rail_slot(self) -> RailSlot:
        """Of a token on a rail."""
        return RailSlot(self.slot.scale_offset, self.topk, self.slot.scale_stride)

    @property
    def layout(self) -> HierarchyLayout:
        """Of the windows."""
        return HierarchyLayout(self.config)

    @property
    def result_bytes(self) -> int:
        """Bytes of a result."""
        return 2 * self.hidden


class OuterTable(NamedTuple):
    """What `outer_table` makes of a rank's ids: see there."""

    ids: np.ndarray
    rows: np.ndarray
    counts: np.ndarray
    words: np.ndarray


def outer_table(case: HierarchyCase, routing: Routing) -> OuterTable:
    """One token after the other."""
    c, layout = case.config, case.layout
    tokens, servers = len(routing.ids), layout.num_servers
    ids = np.full((tokens, servers), -1, np.int32)
    rows = np.zeros((tokens, servers), np.int32)
    words = np.full((tokens, case.rail_slot.route_words), -1, np.int32)
    counts = np.zeros(servers, np.int32)
    for token in range(tokens):
        rows[token] = counts
        for k, expert in enumerate(routing.sent_ids[token].tolist()):
            if 0 <= expert < c.num_experts:
                words[token, k] = expert | int(routing.expand_idx[token, k]) << POSITION_SHIFT
                ids[token, expert // layout.server_experts] = expert // layout.server_experts
        counts += ids[token] >= 0
    return OuterTable(ids, rows, counts, words)


def in_order(rows: Iterable[np.ndarray], num_bytes: int) -> np.ndarray:
    """A "sum" of rows that shows their order."""
    total = np.full(num_bytes, 7, np.uint8)
    for row in rows:
        total = total * np.uint8(3) + row
    return total


@dataclass
class Received:
    """What a rank's dispatch leaves, and its combine reads.

    Attributes:
        number: of the dispatch.
        origins: (rows, 3) in the order of the output.
    """

    number: int
    recv_counts: Guarded
    recv_offsets: Guarded
    tokens_per_expert: Guarded
    trailer: Guarded
    row_slots: Guarded
    rail_counts: Guarded
    origins: np.ndarray

    @staticmethod
    def of(config: Config, servers: int, number: int, capacity: int) -> Received:
        """With room for what comes."""
        experts, ranks = config.num_local_experts, config.num_ranks
        return Received(
            number,
            Guarded((experts, ranks), np.int32),
            Guarded((experts * ranks,), np.int32),
            Guarded((experts,), np.int64),
            Guarded((TRAILER_WORDS,), np.int32),
            Guarded((capacity,), np.int32),
            Guarded((servers,), np.int32),
            np.zeros((0, 3), np.int32),
        )

    def check_guards(self) -> None:
        """See `Guarded`."""
        for each in vars(self).values():
            if isinstance(each, Guarded):
                each.check_guards()


def check(name: str, found: object, wanted: object) -> None:
    """Raises where two arrays differ, with the first few numbers of each."""
    if not np.array_equal(np.asarray(found), np.asarray(wanted)):
        shown = [np.asarray(each).reshape(-1)[:MOST_SHOWN].tolist() for each in (found, wanted)]
        raise WrongResultError(f"{name}: {shown[0]} instead of {shown[1]}")


def rows_of(window: np.ndarray, region: Region, zone: int, server: int) -> np.ndarray:
    """(places, bytes from one to the next) of a server's."""
    first, stride = region.offset(zone=zone, server=server), region.stride("index")
    return window[first : first + region.extent("index") * stride].reshape(-1, stride)
