"""The window of hierarchy.

Shape symbols: S servers of L ranks, E experts on each rank, EP = S * L, maxBs tokens of a rank at most, K
experts of a token.

Sizes in bytes::

    state     barrier entries, end flags of both operators, token counts, and flags of results by piece: zone
              0, zone 1
    rails     tokens, zone 0 and zone 1; partial rows, the same: what other servers write
    data      forwarded rows, zone 0 and zone 1; results, the same: what this rank's own server writes
    out       state and rails once more, for what is posted

A token on a rail (`RailSlot`)::

    0        head: number of the round, token, call word, tokens of a message
             (`moe_triton.core.records.RAIL_HEAD`)
    32       row, Align32
    then     K words {expert, its number among its rank's for that expert}, Align8(K) of them
    then     K weights, the same
    then     32 bytes with its scale; more where it has several

Heads stand at the same places whatever rows are: nothing but heads is ever there, so nothing is cleared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from moe_triton.core.config import Config
from moe_triton.core.records import RAIL_END, RAIL_HEAD
from moe_triton.core.region import Region, packed, region_of
from moe_triton.core.row_formats import RowFormat
from moe_triton.layout import (
    SLOT_ALIGN,
    STATUS_ENTRY_BYTES,
    UB_ALIGN,
    WORD_BYTES,
    Layout,
    SlotLayout,
    align,
    entry_per_rank,
)

UNIT_WORDS = UB_ALIGN // WORD_BYTES


@dataclass(frozen=True)
class RailSlot:
    """How a token is packed on a rail.

    Attributes:
        row_bytes: of its row, a multiple of 32.
        topk: K.
        scale_bytes: there are for its scales, a multiple of 32.
    """

    row_bytes: int
    topk: int
    scale_bytes: int = UB_ALIGN

    @staticmethod
    def of(config: Config, row_format: RowFormat, dtype: torch.dtype) -> RailSlot:
        """That of tokens of this dtype."""
        slot = SlotLayout.of(config.hidden, row_format, dtype)
        return RailSlot(slot.scale_offset, config.num_topk, slot.scale_stride)

    @property
    def route_words(self) -> int:
        """Words of a token's choices, and of its weights."""
        return align(self.topk, UNIT_WORDS)

    @property
    def words_offset(self) -> int:
        """Where the choices begin."""
        return RAIL_HEAD.num_bytes + self.row_bytes

    @property
    def weights_offset(self) -> int:
        """Where the weights begin."""
        return self.words_offset + WORD_BYTES * self.route_words

    @property
    def scale_offset(self) -> int:
        """Where the scales begin."""
        return self.weights_offset + WORD_BYTES * self.route_words

    @property
    def slot_bytes(self) -> int:
        """Bytes in use, a multiple of 32."""
        return self.scale_offset + self.scale_bytes


class HierarchyLayout(Layout):
    """The window of a `Config` with servers of equal size. The same on every rank."""

    @property
    def num_servers(self) -> int:
        """S."""
        return self.config.topology.num_servers

    @property
    def ranks_per_server(self) -> int:
        """L."""
        return self.config.topology.sizes[0]

    @property
    def server_experts(self) -> int:
        """Experts of a server."""
        return self.ranks_per_server * self.config.num_local_experts

    @cached_property
    def barrier_status(self) -> Region:
        """Entry that ``source`` posts in a barrier."""
        size = self.config.num_ranks * STATUS_ENTRY_BYTES
        return entry_per_rank("barrier_status", 0, size, self.config.num_ranks)

    def _ends(self, name: str, base: int) -> Region:
        dims = packed(RAIL_END.num_bytes, self.num_zones, self.num_servers)
        return region_of("rail_ends", base, RAIL_END.num_bytes, *dims, name=name)

    @cached_property
    def rail_flags(self) -> Region:
        """What ends the tokens of each ``server``'s rank of this rail."""
        return self._ends("rail_flags", self.barrier_status.end)

    @cached_property
    def partial_flags(self) -> Region:
        """What ends its partial rows."""
        return self._ends("partial_flags", self.rail_flags.end)

    @cached_property
    def token_counts(self) -> Region:
        """Entry {1.0f, int32 count} of ``source`` for local ``expert``, from who relays its rows."""
        entry, experts, ranks = STATUS_ENTRY_BYTES, self.config.num_local_experts, self.config.num_ranks
        dims = (self.num_zones, ranks * experts * entry), (experts, entry), (ranks, experts * entry)
        return region_of("dispatch_status", self.partial_flags.end, entry, *dims, name="token_counts")

    @cached_property
    def return_status(self) -> Region:
        """Entry that each rank of this server posts once its results of a piece are here, by its number.

        An ``expert`` is a piece: there are at most as many as servers.
        """
        entry, ranks = STATUS_ENTRY_BYTES, self.ranks_per_server
        piece, base = ranks * entry, self.token_counts.end
        dims = (self.num_zones, self.num_servers * piece), (self.num_servers, piece), (ranks, entry)
        return region_of("dispatch_status", base, entry, *dims, name="return_status")

    def return_status_of(self, piece: int) -> Region:
        """The entries of one piece."""
        status = self.return_status
        zones, pieces, ranks = status.dims
        base, one = status.offset(expert=piece), (1, pieces.stride)
        dims = (zones.extent, zones.stride), one, (ranks.extent, ranks.stride)
        return region_of(status.kind, base, status.item_bytes, *dims, name=status.name)

    @property
    def entries_bytes(self) -> int:
        """Flags and entries of both zones."""
        return align(self.return_status.end, SLOT_ALIGN)

    def _rails(self, name: str, base: int, stride: int) -> Region:
        """Places of the same size for each token of each server's rank."""
        rows = self.config.num_max_tokens_per_rank
        server = align(rows * stride, SLOT_ALIGN)
        dims = (self.num_zones, self.num_servers * server), (self.num_servers, server), (rows, stride)
        return region_of("rail_slots", base, stride, *dims, name=name)

    @cached_property
    def rail_slots(self) -> Region:
        """Token number ``index`` of those that the rank of this rail at a place has for this server.

        Here a ``server`` is a place in the order that begins with this rank's own: place 0.
        """
        stride = RailSlot(align(2 * self.config.hidden, UB_ALIGN), self.config.num_topk).slot_bytes
        return self._rails("rail_slots", self.state_bytes, stride)

    @cached_property
    def partial_rows(self) -> Region:
        """Partial row of token number ``index`` of those that this rank has for ``server``."""
        return self._rails("partial_rows", align(self.rail_slots.end, SLOT_ALIGN), 2 * self.config.hidden)

    def partials_of(self, row_bytes: int) -> Region:
        """Those of rows of another size, which lie one after the other as well."""
        rows = self.partial_rows
        zones, servers, indices = rows.dims
        dims = ((zones.extent, zones.stride), (servers.extent, servers.stride), (indices.extent, row_bytes))
        return region_of(rows.kind, rows.base, row_bytes, *dims, name=rows.name)

    @cached_property
    def posted_bytes(self) -> int:
        """The first bytes of a window, which other servers write."""
        return align(self.partial_rows.end, SLOT_ALIGN)

    @cached_property
    def slot_stride(self) -> int:
        """Bytes from one forwarded row to the next."""
        return align(SlotLayout(self.config.hidden, 2).packed_bytes, SLOT_ALIGN)

    @cached_property
    def forward_slots(self) -> Region:
        """Slot of the ``index``-th row of ``source`` for local ``expert``, from the rank that relays it."""
        c, stride = self.config, self.slot_stride
        rows = c.num_ranks, c.num_local_experts, c.num_max_tokens_per_rank
        dims = packed(stride, self.num_zones, *rows)
        return region_of("dispatch_slots", self.posted_bytes, stride, *dims, name="forward_slots")

    @cached_property
    def result_slots(self) -> Region:
        """Result of the ``index``-th row of this rail's rank at a place for ``expert`` of this server.

        Here a ``source`` is a place of servers, as in `rail_slots`.
        """
        stride, base = 2 * self.config.hidden, align(self.forward_slots.end, SLOT_ALIGN)
        rows = self.num_servers, self.server_experts, self.config.num_max_tokens_per_rank
        dims = packed(stride, self.num_zones, *rows)
        return region_of("dispatch_slots", base, stride, *dims, name="result_slots")

    @property
    def zone_bytes(self) -> int:
        """Bytes of data of each zone. Zones of a region are neighbours."""
        return self.data_bytes // self.num_zones

    @property
    def data_bytes(self) -> int:
        """Counts the bytes from the rails to the last result, which HCCL_BUFFSIZE has to cover."""
        return align(self.result_slots.end, SLOT_ALIGN) - self.state_bytes

    @property
    def out_bytes(self) -> int:
        """Counts the bytes of the out part, a mirror of what other servers write."""
        return self.posted_bytes

    @property
    def regions(self) -> tuple[Region, ...]:
        """All of them."""
        rails = self.rail_slots, self.rail_flags, self.partial_rows, self.partial_flags
        data = self.forward_slots, self.token_counts, self.result_slots, self.return_status
        return (*rails, *data, self.barrier_status)
