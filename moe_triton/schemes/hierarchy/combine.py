"""Combine by hierarchy: results to who relayed their rows, summed there, and one partial row back per server.

Steps: send, flag and wait inside the server; the sum of its experts' results; send, flag and wait on the
rail; the sum of the servers'. In pieces of some servers each, the own one last: what a piece has for the rail
is under way while the next piece's results are returned.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import NamedTuple

from moe_triton.core.ascendc import POST_STATUS
from moe_triton.core.plan import Launch, Placeholder, Plan, Value, joined
from moe_triton.core.region import Region
from moe_triton.kernels.block_quantize import block_quantize_kernel
from moe_triton.kernels.weighted_sum import SumFeatures, weighted_sum_kernel
from moe_triton.layout import UB_ALIGN, WORD_BYTES, align
from moe_triton.operators.variants import CombineVariant
from moe_triton.reference.arithmetic import BLOCK_ELEMENTS, PARTIAL_BLOCK_ELEMENTS
from moe_triton.schemes.common.steps import CombineSteps, words_from
from moe_triton.schemes.hierarchy.ascendc import (
    FUSED,
    PARTIALS_PLACE,
    PARTIALS_SEND,
    RAIL_WAIT,
    RETURNS_LOST,
    SERVER_RETURN,
)
from moe_triton.schemes.hierarchy.dispatch import of_rails, relay_timeout_us
from moe_triton.schemes.hierarchy.layout import HierarchyLayout
from moe_triton.schemes.hierarchy.relay_tables import RelayTables
from moe_triton.schemes.rank_context import RankContext, quantized_bytes

PIECE_ROWS = 32
"""Partial rows of a server that are summed before they are sent, about, while others follow."""


class Rows(NamedTuple):
    """Partial rows that are made and sent together.

    Attributes:
        places: of servers, counted from the own one on: that is 0, the next one 1.
        rows: of each of them, by their order.
    """

    places: range
    rows: range


def _of(rows: Rows) -> dict[str, Value]:
    """Arguments of kernels that have some partial rows."""
    return {
        "first_place": rows.places.start,
        "num_places": len(rows.places),
        "first_row": rows.rows.start,
        "last_row": rows.rows.stop,
    }


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
            "ends": self.layout.partial_flags,
        }

    def whole(self) -> Plan:
        """All of it."""
        steps: list[Launch] = []
        sent: list[Launch] = []  # goes on with what follows
        for number, places in enumerate(self._pieces()):
            returned = [self._return(number, places), *self._wait_returned(number, places)]
            steps += joined([*sent, *returned], FUSED)
            *earlier, last = self._rows_of(places)
            for rows in earlier:
                steps += [*self._made(rows), self._send(number, rows)]
            steps += self._made(last)
            sent = [self._send(number, last)]
        steps += [
            *joined([*sent, self._wait()], FUSED),
            self._sum(),
            # Tokens that a mask leaves out have zeros: no server got them.
            *(self.select() if self.variant.norm else []),
            *self.norm(),
        ]
        return self.plan(steps)

    def pass_on(self) -> Plan:
        """What a rank does for others as their relay, by itself."""
        steps: list[Launch] = []
        for number, places in enumerate(self._pieces()):
            _, *waiting = self._wait_returned(number, places)
            steps += joined(waiting, FUSED)
            for rows in self._rows_of(places):
                steps += [*self._made(rows), self._send(number, rows)]
        return self.plan(steps, phase="pass_on")

    def _pieces(self) -> list[range]:
        """Places of servers whose results are returned together, in the order in which all their ranks do it.

        The own server's, which then have no further way to go, come last.
        """
        others, pieces = self.layout.num_servers - 1, self.context.return_pieces - 1
        if not pieces:
            return [range(others + 1)]
        ends = [1 + others * piece // pieces for piece in range(pieces + 1)]
        return [*(range(first, last) for first, last in itertools.pairwise(ends)), range(1)]

    def _rows_of(self, places: range) -> list[Rows]:
        """The partial rows of a piece that are made and sent together.

        Where launches cost next to nothing, some rows of a server are under way while the next ones are made,
        and those of the own server, which go nowhere, come last. Elsewhere a launch takes longer than
        what it would hide.
        """
        most = self.config.num_max_tokens_per_rank
        if not self.context.capabilities.launches_cheaply or self.context.posts == "aicpu":
            return [Rows(places, range(most))]
        parts = -(-most // PIECE_ROWS)
        rows = [range(most * part // parts, most * (part + 1) // parts) for part in range(parts)]
        others = [Rows(range(place, place + 1), of_part) for of_part in rows for place in places if place]
        return [*others, *([Rows(range(1), range(most))] if 0 in places else [])]

    def _tables_of(self, rows: Rows) -> range:
        """The rows of tables of tokens by place that some partial rows have: neighbours."""
        most = self.config.num_max_tokens_per_rank
        first, last = rows.places.start * most, (rows.places.stop - 1) * most
        return range(first + rows.rows.start, last + rows.rows.stop)

    def _inner(self, name: str, first_token: int) -> Placeholder:
        """A table of tokens by place, from a row on."""
        placeholder = self.tables.placeholders[name]
        words = first_token * math.prod(self.tables.parts[name].shape[1:])
        return replace(placeholder, offset=placeholder.offset + words * WORD_BYTES)

    def _counts_of(self, piece: int) -> Placeholder:
        """What came with the flags of a piece."""
        return Placeholder("barrier_counts", WORD_BYTES * piece * self.layout.ranks_per_server)

    def _returned(self, piece: int) -> dict[str, Value | Region]:
        """Flags of a piece, and what came with them."""
        return {"returned": self._counts_of(piece), "returns": self.layout.return_status_of(piece)}

    def _return(self, piece: int, places: range) -> Launch:
        """Step 1, inside the server."""
        return self.launch(
            "return",
            SERVER_RETURN,
            row_bytes=2 * self.config.hidden,
            first_place=places.start,
            num_places=len(places),
            slots=self.layout.result_slots,
            adds_traffic=1 if piece else self.has_posted,
        )

    def _wait_returned(self, piece: int, places: range) -> list[Launch]:
        """Steps 2 and 3, inside the server."""
        rank, ranks = self.context.rank, self.layout.ranks_per_server
        status = self.layout.return_status_of(piece)
        # None of them is queued.
        nothing = "count", "kind", "combine_kind", "window", "out_offset", "timeout_us", "traffic"
        flag = self.launch(
            "flag returned",
            POST_STATUS,
            peers=words_from(rank // ranks * ranks),
            num_ranks=ranks,
            rank=rank % ranks,
            status=status,
            **dict.fromkeys(nothing, 0),
        )
        wait = self.wait_for_ranks(
            "wait for returned",
            status,
            first_rank=rank // ranks * ranks,
            timeout_us=relay_timeout_us(self.context.timeout_us),
            count_end=1,
            recv_counts=self._counts_of(piece),
        )
        return [flag, wait, *self._lost(piece, places)]

    def _lost(self, piece: int, places: range) -> list[Launch]:
        """Who waits elsewhere hears of ranks that are missing, from this launch if a report ends a plan.

        Otherwise what sends says so. Of a plan that ends all servers hear that have not been sent to.
        """
        if self.context.capabilities.is_asynchronous:
            return []
        left = self.layout.num_servers - places.start if places.start else len(places)
        return [
            self.launch(
                "lost",
                RETURNS_LOST,
                **self._returned(piece),
                first_place=places.start,
                num_places=left,
            )
        ]

    def _made(self, rows: Rows) -> list[Launch]:
        """Partial rows, and where they are posted from."""
        place = self.launch(
            "place",
            PARTIALS_PLACE,
            rows=Placeholder("quantized_sums" if self.variant.block_quantize else "server_sums"),
            row_bytes=self.partial_bytes,
            **_of(rows),
            slots=self.layout.partials_of(self.partial_bytes),
        )
        return [*self._sums_of(self._tables_of(rows)), place]

    def _sums_of(self, tokens: range) -> list[Launch]:
        """This server's results of neighbours in tables of tokens by place, by weight, experts ascending."""
        c, context, slots, itemsize = self.config, self.context, self.layout.result_slots, self.itemsize
        features = SumFeatures(masked=True, by_expert=True, zoned=context.zones_on_device)
        sizes = self.variant.dtype, c.hidden, c.num_topk, 0
        first = tokens.start
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
            num_tokens=len(tokens),
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
            capacity=len(tokens),
            row_stride=row_bytes,
            scale_stride=row_bytes // itemsize,
        )
        return [total, quantize]

    def _send(self, piece: int, rows: Rows) -> Launch:
        """Steps 1 and 2, on the rail."""
        is_quantized = self.variant.block_quantize
        return self.launch(
            "send",
            PARTIALS_SEND,
            row_bytes=self.partial_bytes,
            payload_bytes=self.config.hidden * (1 if is_quantized else self.itemsize),
            **_of(rows),
            **self._returned(piece),
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
