"""Combine by hierarchy: results to who relayed their rows, summed there, and one partial row back per server.

Steps: send, flag and wait inside the server; the sum of its experts' results; send, flag and wait on the
rail; the sum of the servers'.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from moe_triton.core.ascendc import POST_STATUS
from moe_triton.core.plan import Hole, Launch, Plan, joined, launch
from moe_triton.kernels.block_quantize import block_quantize_kernel
from moe_triton.kernels.weighted_sum import SumFeatures, weighted_sum_kernel
from moe_triton.layout import UB_ALIGN, WORD_BYTES, align
from moe_triton.layout.call_word import call_word
from moe_triton.operators.variants import CombineVariant
from moe_triton.reference.arithmetic import BLOCK_ELEMENTS, PARTIAL_BLOCK_ELEMENTS
from moe_triton.schemes.common.flags import posting, wait_for_ranks
from moe_triton.schemes.common.steps import rms_norm, select
from moe_triton.schemes.hierarchy.ascendc import FUSED, PARTIALS_SEND, RAIL_WAIT, RETURNS_LOST, SERVER_RETURN
from moe_triton.schemes.hierarchy.layout import HierarchyLayout
from moe_triton.schemes.hierarchy.relay_tables import RelayTables
from moe_triton.schemes.hierarchy.steps import by_token, of_rail, of_round, relay_timeout_us
from moe_triton.schemes.site import Site, launch_matching, quantized_bytes

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


@dataclass(frozen=True)
class CombinePlans:
    """Builds the plans of combine on one rank.

    Holes: y, num_rows, recv_offsets, peers, window, num_tokens, out, report; residual, gamma, eps, normed,
    rstd, and with them topk_idx and mask, where the variant has them; tables, `RelayTables`; and names of
    `Scheme.scratch`.
    Weights are those of the dispatch: they are in its tables.

    Attributes:
        site: where they run.
        layout: of the window.
    """

    site: Site
    layout: HierarchyLayout

    @cached_property
    def tables(self) -> dict[str, Hole]:
        """Where each of them is."""
        return RelayTables(self.site.config).holes

    def whole(self, variant: CombineVariant, zone: int) -> Plan:
        """All of it."""
        returned = [self._return(zone), *self._wait_returned(variant, zone)]
        *earlier, last = self._pieces()
        steps = [
            *joined(returned, FUSED),
            *(step for piece in earlier for step in self._partials(variant, zone, piece)),
            *self._server_sums(variant, zone, last),
            *joined([self._send(variant, zone, last), self._wait(variant, zone)], FUSED),
            self._sum(variant, zone),
            *(self._norm(variant) if variant.norm else []),
        ]
        return Plan("combine", zone, tuple(steps))

    def _norm(self, variant: CombineVariant) -> list[Launch]:
        """Launches that normalise the sums. Tokens that a mask leaves out have zeros: no server got them."""
        steps = [select(self.site, variant)] if variant.mask != "none" else []
        return [*steps, rms_norm(self.site, variant)]

    def _pieces(self) -> list[Piece]:
        """The partial rows that are made and sent together.

        Where launches cost next to nothing, some rows of a server are under way while the next ones are made,
        and those of the own server, which go nowhere, come last. Elsewhere a launch takes longer than
        what it would hide.
        """
        servers, most = self.layout.num_servers, self.site.config.num_max_tokens_per_rank
        if not self.site.capabilities.launches_cheaply or not by_token(self.site):
            return [Piece(range(servers), range(most))]
        parts = -(-most // PIECE_ROWS)
        pieces = [range(most * part // parts, most * (part + 1) // parts) for part in range(parts)]
        others = [Piece(range(place, place + 1), rows) for rows in pieces for place in range(1, servers)]
        return [*others, Piece(range(1), range(most))]

    def _partials(self, variant: CombineVariant, zone: int, piece: Piece) -> list[Launch]:
        """Steps 1 and 2, on the rail, of some rows."""
        return [*self._server_sums(variant, zone, piece), self._send(variant, zone, piece)]

    def _first_token(self, piece: Piece) -> int:
        """The first row of tables of tokens by server, for those of a piece."""
        c, layout = self.site.config, self.layout
        own = self.site.rank // layout.ranks_per_server
        if len(piece.places) == layout.num_servers:
            return 0
        (place,) = piece.places
        return (own + place) % layout.num_servers * c.num_max_tokens_per_rank + piece.rows.start

    def _inner(self, name: str, first_token: int) -> Hole:
        """A table of tokens by server, from a row on."""
        shape = RelayTables(self.site.config).parts[name].shape
        return replace(
            self.tables[name],
            offset=self.tables[name].offset + first_token * math.prod(shape[1:]) * WORD_BYTES,
        )

    def _block(self, variant: CombineVariant) -> int:
        """Elements that share a scale where partial rows travel as int8."""
        return PARTIAL_BLOCK_ELEMENTS[variant.dtype]

    def _partial_bytes(self, variant: CombineVariant) -> int:
        """Bytes of a partial row on its way."""
        hidden = self.site.config.hidden
        return quantized_bytes(hidden, self._block(variant)) if variant.block_quantize else 2 * hidden

    def _return(self, zone: int) -> Launch:
        """Step 1, inside the server."""
        site = self.site
        return launch(
            "return",
            SERVER_RETURN,
            "communication",
            site.num_blocks,
            rows=Hole("y"),
            row_bytes=2 * site.config.hidden,
            recv_offsets=Hole("recv_offsets"),
            num_entries=site.num_entries,
            capacity=Hole("num_rows"),
            **of_rail(site, self.layout),
            **site.zone_of("combine", zone),
            traffic=site.traffic("combine"),
            slots=self.layout.result_slots.words(),
            report=Hole("report"),
        )

    def _wait_returned(self, variant: CombineVariant, zone: int) -> list[Launch]:
        """Steps 2 and 3, inside the server; and who waits elsewhere hears of those that are missing."""
        site, ranks, status = self.site, self.layout.ranks_per_server, self.layout.return_status
        call = call_word("combine", variant.kind)
        flag = launch(
            "flag returned",
            POST_STATUS,
            "communication",
            site.num_blocks,
            peers=Hole("peers", PEER_BYTES * (site.rank // ranks * ranks)),
            num_ranks=ranks,
            count=0,
            call=call,
            kind=0,
            combine_kind=0,
            rank=site.rank % ranks,
            **site.zone_of("combine", zone),
            window=0,  # none of them is queued
            out_offset=0,
            timeout_us=0,
            traffic=0,
            status=status.words(),
            report=Hole("report"),
        )
        wait = wait_for_ranks(
            site,
            "wait for returned",
            status,
            "combine",
            zone,
            variant.kind,
            blocks=site.num_blocks,
            timeout_us=relay_timeout_us(site.timeout_us),
            count_end=1,
        )
        lost = launch(
            "lost",
            RETURNS_LOST,
            "communication",
            site.num_blocks,
            returned=Hole("barrier_counts"),
            **of_rail(site, self.layout),
            **of_round(site, "combine", zone, call),
            **posting(site, "combine"),
            returns=status.words(),
            ends=self.layout.partial_flags.words(),
            report=Hole("report"),
        )
        return [flag, wait, lost]

    def _server_sums(self, variant: CombineVariant, zone: int, piece: Piece) -> list[Launch]:
        """Launches that sum this server's results per token from the rail, by weight, experts ascending."""
        c, site, slots = self.site.config, self.site, self.layout.result_slots
        itemsize, first = variant.dtype.itemsize, self._first_token(piece)
        features = SumFeatures(masked=True, by_expert=True, zoned=site.zones_on_device)
        kernel = weighted_sum_kernel(
            variant.dtype, c.hidden, c.num_topk, 0, True, site.target, features=features
        )
        total = launch_matching(
            "server sum",
            kernel,
            "compute",
            site.num_blocks,
            {
                "slots": Hole("window", slots.offset(zone=zone)),
                "topk_idx": self._inner("inner_ids", first),
                "topk_weights": self._inner("inner_weights", first),
                "expand_idx": self._inner("inner_positions", first),
                "active": self._inner("inner_active", first),
                "out": Hole("server_sums", first * c.hidden * itemsize),
                "expert_stride": slots.stride("expert") // itemsize,
                "index_stride": slots.stride("index") // itemsize,
                "first_token": 0,
                "num_tokens": piece.num_rows,
                "num_experts": self.layout.num_servers * self.layout.server_experts,
                "max_index": c.num_max_tokens_per_rank,
                **site.zone_in_memory("combine", slots.stride("zone") // itemsize, kept=False),
            },
        )
        return [total, self._quantize(variant, piece)] if variant.block_quantize else [total]

    def _quantize(self, variant: CombineVariant, piece: Piece) -> Launch:
        c, site, row_bytes = self.site.config, self.site, self._partial_bytes(variant)
        first = self._first_token(piece)
        kernel = block_quantize_kernel(
            variant.dtype, c.hidden, site.target, masked=True, block=self._block(variant)
        )
        return launch_matching(
            "quantize",
            kernel,
            "compute",
            site.num_blocks,
            {
                "rows": Hole("server_sums", first * c.hidden * variant.dtype.itemsize),
                "active": self._inner("inner_active", first),
                "packed": Hole("quantized_sums", first * row_bytes),
                "packed_scales": Hole("quantized_sums", first * row_bytes + align(c.hidden, UB_ALIGN)),
                "capacity": piece.num_rows,
                "row_stride": row_bytes,
                "scale_stride": row_bytes // variant.dtype.itemsize,
            },
        )

    def _send(self, variant: CombineVariant, zone: int, piece: Piece) -> Launch:
        """Steps 1 and 2, on the rail."""
        site = self.site
        return launch(
            "send",
            PARTIALS_SEND,
            "communication",
            site.num_blocks,
            rows=Hole("quantized_sums" if variant.block_quantize else "server_sums"),
            row_bytes=self._partial_bytes(variant),
            payload_bytes=site.config.hidden * (1 if variant.block_quantize else variant.dtype.itemsize),
            rail_counts=self.tables["rail_counts"],
            returned=Hole("barrier_counts"),
            by_token=by_token(site),
            first_place=piece.places.start,
            num_places=len(piece.places),
            first_row=piece.rows.start,
            last_row=piece.rows.stop,
            **of_rail(site, self.layout),
            **of_round(site, "combine", zone, call_word("combine", variant.kind)),
            **posting(site, "combine"),
            returns=self.layout.return_status.words(),
            slots=self.layout.partials_of(self._partial_bytes(variant)).words(),
            ends=self.layout.partial_flags.words(),
            report=Hole("report"),
        )

    def _wait(self, variant: CombineVariant, zone: int) -> Launch:
        """Step 3, on the rail."""
        site = self.site
        return launch(
            "wait",
            RAIL_WAIT,
            "communication",
            site.num_blocks,
            window=Hole("window"),
            outer_counts=self.tables["outer_counts"],
            rail_seen=Hole("rail_seen"),
            timeout_us=site.timeout_us,
            **of_rail(site, self.layout, is_local=True),
            **of_round(site, "combine", zone, call_word("combine", variant.kind)),
            kept_zone=site.keeping_zone("combine"),
            ends=self.layout.partial_flags.words(),
            report=Hole("report"),
        )

    def _sum(self, variant: CombineVariant, zone: int) -> Launch:
        """Step 4: the partial rows of all servers, ascending."""
        c, site = self.site.config, self.site
        rows = self.layout.partials_of(self._partial_bytes(variant))
        itemsize, window = 1 if variant.block_quantize else variant.dtype.itemsize, rows.offset(zone=zone)
        features = SumFeatures(
            quantized=variant.block_quantize,
            wide_blocks=variant.block_quantize and self._block(variant) > BLOCK_ELEMENTS,
            by_expert=True,
            fp32_out=variant.norm,
            zoned=site.zones_on_device,
            turns=site.zones_on_device and not variant.norm,
        )
        kernel = weighted_sum_kernel(
            variant.dtype, c.hidden, self.layout.num_servers, 0, False, site.target, features=features
        )
        return launch_matching(
            "sum",
            kernel,
            "compute",
            site.num_blocks,
            {
                "slots": Hole("window", window),
                "slot_scales": Hole("window", window + align(c.hidden, UB_ALIGN)),
                "topk_idx": self.tables["outer_ids"],
                "topk_weights": 0,
                "expand_idx": self.tables["outer_rows"],
                "out": Hole("sums" if variant.norm else "out"),
                "expert_stride": rows.stride("server") // itemsize,
                "index_stride": rows.stride("index") // itemsize,
                "first_token": 0,
                "num_tokens": Hole("num_tokens"),
                "num_experts": self.layout.num_servers,
                "max_index": c.num_max_tokens_per_rank,
                "turned": site.zone_cell("combine"),
                **site.zone_in_memory("combine", rows.stride("zone") // itemsize),
            },
        )
