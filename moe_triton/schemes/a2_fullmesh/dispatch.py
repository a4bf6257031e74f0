"""Dispatch by blocks: to each rank its rows one after the other, by expert, with their counts ahead of them.

Steps: route (with pack where rows are quantised); send, which brings the rows to their places in the
receivers' blocks, and posts blocks between servers, the first ones while it makes the next; inside a server
flag; wait; offsets; arrange.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_triton.core.plan import Hole, Launch, Plan, Value, joined, launch
from moe_triton.kernels.arrange import arrange_kernel
from moe_triton.layout import SlotLayout
from moe_triton.layout.call_word import call_word
from moe_triton.operators.variants import DispatchVariant
from moe_triton.schemes.a2_fullmesh.ascendc import BLOCKS_SEND, FUSED
from moe_triton.schemes.a2_fullmesh.layout import BlockRow, BlocksLayout
from moe_triton.schemes.a2_fullmesh.steps import ends, in_blocks, of_peers, of_posts, wait
from moe_triton.schemes.common import steps as local
from moe_triton.schemes.site import COMBINE_KIND, DISPATCH_WORD, Site, launch_matching


@dataclass(frozen=True)
class DispatchPlans:
    """Builds the plans of dispatch on one rank.

    Holes: x, topk_idx, expand_idx, num_tokens, num_ids, peers, window, recv_offsets, tokens_per_expert,
    tokens, origins, report; given_ids, mask, smooth_scales, topk_weights, scales, weights, recv_stats,
    performance_info and rank_table where the variant has them; and names of `Scheme.scratch`.

    Attributes:
        site: where they run.
        layout: of the window.
    """

    site: Site
    layout: BlocksLayout

    def whole(self, variant: DispatchVariant, zone: int) -> Plan:
        """All of it: what sends goes on with the wait."""
        phases = [*self._send(variant, zone), *self._receive(variant, zone)]
        return self._plan(
            zone, [*self._before_send(variant), *joined(phases, FUSED), *self._after(variant, zone)]
        )

    def setup(self, variant: DispatchVariant, zone: int) -> Plan:
        """Up to the flags."""
        return self._plan(zone, [*self._before_send(variant), *joined(self._send(variant, zone), FUSED)])

    def teardown(self, variant: DispatchVariant, zone: int) -> Plan:
        """From the wait on."""
        return self._plan(zone, [*joined(self._receive(variant, zone), FUSED), *self._after(variant, zone)])

    @staticmethod
    def _plan(zone: int, launches: list[Launch]) -> Plan:
        return Plan("dispatch", zone, tuple(launches))

    def _before_send(self, variant: DispatchVariant) -> list[Launch]:
        steps = [local.select(self.site, variant)] if variant.mask != "none" else []
        first = local.route_pack if variant.row_format.is_quantized else local.route
        return [*steps, first(self.site, variant)]

    def _row(self, variant: DispatchVariant) -> BlockRow:
        return BlockRow.of(self.site.config.hidden, variant.row_format, variant.dtype)

    def _send(self, variant: DispatchVariant, zone: int) -> list[Launch]:
        """Steps 1 and 2: counts and rows; behind them, when all are there, the flags, or posts."""
        c, site, row = self.site.config, self.site, self._row(variant)
        call = call_word("dispatch", variant.kind)
        packed = SlotLayout.of(c.hidden, variant.row_format, variant.dtype)
        is_quantized = variant.row_format.is_quantized
        values: dict[str, Value] = {
            "rows": local.packed_of(variant) if is_quantized else Hole("x"),
            "row_stride": packed.packed_bytes if is_quantized else packed.row_bytes,
            "row_bytes": row.stamp_offset,
            "stamp_offset": row.stamp_offset,
            "rows_per_token": c.num_topk if variant.smooth else 1,
            "topk_idx": local.ids_of(variant),
            "topk_weights": Hole("topk_weights") if variant.weights else 0,
            "expand_idx": Hole("expand_idx"),
            "counts": Hole("counts"),
            "first_token": 0,
            "num_tokens": Hole("num_tokens"),
            "topk": c.num_topk,
            "num_experts": c.num_experts,
            "num_local_experts": c.num_local_experts,
            "rows_to": Hole("rows_to"),
            "combine_kind": COMBINE_KIND,
            "dispatch_word": DISPATCH_WORD,
            **of_peers(site, self.layout),
            **of_posts(site, "dispatch", row.row_bytes),
            **in_blocks(site, self.layout, "dispatch", zone, call, row.packed_bytes),
            "report": Hole("report"),
        }
        send = launch("send", BLOCKS_SEND, "communication", site.num_blocks, **values)
        return [send, *ends(site, self.layout, "dispatch", zone, call, row.packed_bytes)]

    def _receive(self, variant: DispatchVariant, zone: int) -> list[Launch]:
        """Step 3, and where rows belong and are."""
        site, row = self.site, self._row(variant)
        call = call_word("dispatch", variant.kind)
        waits = wait(
            site,
            self.layout,
            "dispatch",
            zone,
            call,
            row.packed_bytes,
            is_timed=variant.waits,
            recv_counts=Hole("recv_counts"),
            expected_rows=0,
            num_local_experts=site.num_local_experts,
            max_count=site.config.num_max_tokens_per_rank,
            dispatch_word=DISPATCH_WORD,
        )
        slots = self.layout.rows(row.packed_bytes)
        return [waits, local.offsets(site, variant, zone, slots, sees_all=False, by_source=True)]

    def _after(self, variant: DispatchVariant, zone: int) -> list[Launch]:
        """Step 4: to expert order, out of the window."""
        site = self.site
        arrange = launch_matching(
            "arrange",
            arrange_kernel(self._row(variant), variant.weights, None, site.zones_on_device),
            "compute",
            site.num_blocks,
            {
                "slots": Hole("window"),
                "slot_scales": Hole("window"),
                "row_slots": Hole("row_slots"),
                "num_rows": local.last_offset(site),
                "entries": Hole("window"),
                "num_entries": 0,  # flags are numbers: there is nothing to clear
                "zone_stride": 0,
                "out_rows": Hole("tokens"),
                "out_scales": Hole("scales"),
                "out_origins": Hole("origins"),
                "out_weights": Hole("weights"),
                "kept_zone": site.kept_zone("dispatch"),
                "zone": site.zone_cell("dispatch"),
                "capacity": site.capacity,
            },
        )
        waits = [local.record_waits(site, site.num_local_experts)] if variant.waits else []
        return [arrange, *waits]
