"""Combine by hierarchy: results to who relayed their rows, summed there, and one partial row back per server.

Steps: send, flag and wait inside the server; the sum of its experts' results; send, flag and wait on the
rail; the sum of the servers'.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from moe_triton.core.ascendc import POST_STATUS
from moe_triton.core.plan import Launch, Placeholder, Plan, Value, joined
from moe_triton.kernels.block_quantize import block_quantize_kernel
from moe_triton.kernels.weighted_sum import SumFeatures, weighted_sum_kernel
from moe_triton.layout import UB_ALIGN, WORD_BYTES, align
from moe_triton.operators.variants import CombineVariant
from moe_triton.reference.arithmetic import BLOCK_ELEMENTS, PARTIAL_BLOCK_ELEMENTS
from moe_triton.schemes.common.steps import CombineSteps
from moe_triton.schemes.hierarchy.ascendc import FUSED, PARTIALS_SEND, RAIL_WAIT, RETURNS_LOST, SERVER_RETURN
from moe_triton.schemes.hierarchy.dispatch import of_rails, relay_timeout_us
from moe_triton.schemes.hierarchy.layout import HierarchyLayout
from moe_triton.schemes.hierarchy.relay_tables import RelayTables
from moe_triton.schemes.rank_context import RankContext, quantized_bytes

PEER_BYTES = 8  # of a rank's word in the table of peers
PIECE_ROWS = 32
"""Partial rows of a server that are summed before they are sent, about, while others follow."""


class Piece(NamedTuple):
    """Partial rows that are made and sent together.

    Attributes:
        places: of servers: the own one is 0, the next one 1.
        rows: of each of them, by their order.
    """

    places: range
    rows: range

    @property
    def num_rows(self) -> int:
        """The number of rows on all of these servers together."""
        return len(self.places) * len(self.rows)


class Combine(CombineSteps):
    """Builds the plans of combine on one rank.

    Holes: y, num_rows, recv_offsets, peers, window, num_tokens, out, report; residual, gamma, eps, normed,
    rstd, and with them topk_idx and mask, where the variant has them; tables, `RelayTables`; and names of
    `Scheme.scratch`.
    Weights are those of the dispatch: they are in its tables.
    """

    layout: HierarchyLayout

    def __init__(self, context: RankContext, variant: CombineVariant, zone: int, parts: int = 1) -> None:
        super().__init__(context, variant, zone, parts)
        hidden, self.itemsize = self.config.hidden, variant.dtype.itemsize
        # Elements that share a scale where partial rows travel as int8, and bytes of one on its way.
        self.block, self.partial_bytes = PARTIAL_BLOCK_ELEMENTS[variant.dtype], 2 * hidden
        if variant.block_quantize:
            self.partial_bytes = quantized_bytes(hidden, self.block)
        self.tables = RelayTables(self.config)
        self.usual |= {
            **of_rails(context, self.layout),
            "returned": Placeholder("barrier_counts"),
            "returns": self.layout.return_status,
            "ends": self.layout.partial_flags,
        }

    def whole(self) -> Plan:
        """All of it."""
        *earlier, last = self._pieces()
        steps = [
            *joined([self._return(), *self._wait_returned()], FUSED),
            *(step for piece in earlier for step in (*self._server_sums(piece), self._send(piece))),
            *self._server_sums(last),
            *joined([self._send(last), self._wait()], FUSED),
            self._sum(),
            # Tokens that a mask leaves out have zeros: no server got them.
            *(self.select() if self.variant.norm else []),
            *self.norm(),
        ]
        return self.plan(steps)

    def _pieces(self) -> list[Piece]:
        """The partial rows that are made and sent together.

        Where launches cost next to nothing, some rows of a server are under way while the next ones are made,
        and those of the own server, which go nowhere, come last. Elsewhere a launch takes longer than
        what it would hide.
        """
        servers, most = self.layout.num_servers, self.config.num_max_tokens_per_rank
        if not self.context.capabilities.launches_cheaply or not self.usual["by_token"]:
            return [Piece(range(servers), range(most))]
        parts = -(-most // PIECE_ROWS)
        pieces = [range(most * part // parts, most * (part + 1) // parts) for part in range(parts)]
        others = [Piece(range(place, place + 1), rows) for rows in pieces for place in range(1, servers)]
        return [*others, Piece(range(1), range(most))]

    def _first_token(self, piece: Piece) -> int:
        """The first row of tables of tokens by server, for those of a piece."""
        own = self.context.rank // self.layout.ranks_per_server
        if len(piece.places) == self.layout.num_servers:
            return 0
        (place,) = piece.places
        server = (own + place) % self.layout.num_servers
        return server * self.config.num_max_tokens_per_rank + piece.rows.start

    def _inner(self, name: str, first_token: int) -> Placeholder:
        """A table of tokens by server, from a row on."""
        placeholder = self.tables.placeholders[name]
        words = first_token * math.prod(self.tables.parts[name].shape[1:])
        return replace(placeholder, offset=placeholder.offset + words * WORD_BYTES)

    def _return(self) -> Launch:
        """Step 1, inside the server."""
        slots = self.layout.result_slots
        row_bytes, adds = 2 * self.config.hidden, self.has_posted
        return self.launch("return", SERVER_RETURN, row_bytes=row_bytes, slots=slots, adds_traffic=adds)

    def _wait_returned(self) -> list[Launch]:
        """Steps 2 and 3, inside the server; and who waits elsewhere hears of those that are missing."""
        rank, ranks, status = self.context.rank, self.layout.ranks_per_server, self.layout.return_status
        # None of them is queued.
        nothing = "count", "kind", "combine_kind", "window", "out_offset", "timeout_us", "traffic"
        flag = self.launch(
            "flag returned",
            POST_STATUS,
            peers=Placeholder("peers", PEER_BYTES * (rank // ranks * ranks)),
            num_ranks=ranks,
            rank=rank % ranks,
            status=status,
            **dict.fromkeys(nothing, 0),
        )
        timeout_us = relay_timeout_us(self.context.timeout_us)
        wait = self.wait_for_ranks("wait for returned", status, timeout_us=timeout_us, count_end=1)
        return [flag, wait, self.launch("lost", RETURNS_LOST, **self.posting())]

    def _server_sums(self, piece: Piece) -> list[Launch]:
        """Launches that sum this server's results per token from the rail, by weight, experts ascending."""
        c, context, slots, itemsize = self.config, self.context, self.layout.result_slots, self.itemsize
        features = SumFeatures(masked=True, by_expert=True, zoned=context.zones_on_device)
        sizes = self.variant.dtype, c.hidden, c.num_topk, 0
        first = self._first_token(piece)
        active_index = self._inner("inner_active_index", first)
        sums = Placeholder("server_sums", first * c.hidden * itemsize)
        total = self.launch(
            "server sum",
            weighted_sum_kernel(*sizes, True, context.target, features=features),
            slots=Placeholder("window", slots.offset(zone=self.zone)),
            topk_idx=self._inner("inner_ids", first),
            topk_weights=self._inner("inner_weights", first),
            expand_idx=self._inner("inner_positions", first),
            active_index=active_index,
            out=sums,
            expert_stride=slots.stride("expert") // itemsize,
            index_stride=slots.stride("index") // itemsize,
            num_tokens=piece.num_rows,
            num_experts=self.layout.num_servers * self.layout.server_experts,
            **self.in_memory(slots.stride("zone") // itemsize, kept=False),
        )
        if not self.variant.block_quantize:
            return [total]
        row_bytes, packed = self.partial_bytes, first * self.partial_bytes
        quantize = self.launch(
            "quantize",
            block_quantize_kernel(
                self.variant.dtype, c.hidden, context.target, masked=True, block=self.block
            ),
            rows=sums,
            active_index=active_index,
            packed=Placeholder("quantized_sums", packed),
            packed_scales=Placeholder("quantized_sums", packed + align(c.hidden, UB_ALIGN)),
            capacity=piece.num_rows,
            row_stride=row_bytes,
            scale_stride=row_bytes // itemsize,
        )
        return [total, quantize]

    def _send(self, piece: Piece) -> Launch:
        """Steps 1 and 2, on the rail."""
        is_quantized = self.variant.block_quantize
        return self.launch(
            "send",
            PARTIALS_SEND,
            rows=Placeholder("quantized_sums" if is_quantized else "server_sums"),
            row_bytes=self.partial_bytes,
            payload_bytes=self.config.hidden * (1 if is_quantized else self.itemsize),
            first_place=piece.places.start,
            num_places=len(piece.places),
            first_row=piece.rows.start,
            last_row=piece.rows.stop,
            **self.posting(),
            slots=self.layout.partials_of(self.partial_bytes),
        )

    def _wait(self) -> Launch:
        """Step 3, on the rail."""
        return self.launch("wait", RAIL_WAIT)

    def _sum(self) -> Launch:
        """Step 4: the partial rows of all servers, ascending."""
        variant, servers, zones = self.variant, self.layout.num_servers, self.context.zones_on_device
        rows, is_quantized = self.layout.partials_of(self.partial_bytes), variant.block_quantize
        itemsize, window = 1 if is_quantized else self.itemsize, rows.offset(zone=self.zone)
        features = SumFeatures(
            quantized=is_quantized,
            wide_blocks=is_quantized and self.block > BLOCK_ELEMENTS,
            by_expert=True,
            fp32_out=variant.norm,
            zoned=zones,
            turns=zones and not variant.norm,
        )
        sizes = variant.dtype, self.config.hidden, servers, 0
        values: dict[str, Value] = {
            "slots": Placeholder("window", window),
            "slot_scales": Placeholder("window", window + align(self.config.hidden, UB_ALIGN)),
            "topk_idx": self.tables.placeholders["outer_ids"],
            "topk_weights": 0,
            "expand_idx": self.tables.placeholders["outer_rows"],
            "out": self.sums,
            "expert_stride": rows.stride("server") // itemsize,
            "index_stride": rows.stride("index") // itemsize,
            "num_experts": servers,
            **self.in_memory(rows.stride("zone") // itemsize),
        }
        kernel = weighted_sum_kernel(*sizes, False, self.context.target, features=features)
        return self.launch("sum", kernel, **values)
