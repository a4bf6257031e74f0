"""Combine by blocks: to each rank the results of its rows, in the order in which they came in its block.

Steps: places, which are known from the ids alone; send, flag and wait, as in dispatch; the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_triton.core.plan import Hole, Launch, Plan, Value, joined, launch
from moe_triton.kernels.block_places import block_places_kernel
from moe_triton.kernels.weighted_sum import SumFeatures, weighted_sum_kernel
from moe_triton.layout.call_word import call_word, combine_bits
from moe_triton.operators.variants import CombineVariant
from moe_triton.schemes.a2_fullmesh.ascendc import BLOCKS_RETURN, FUSED
from moe_triton.schemes.a2_fullmesh.layout import BlocksLayout
from moe_triton.schemes.a2_fullmesh.steps import ends, in_blocks, of_peers, of_posts, wait
from moe_triton.schemes.common.steps import blocks_of_words, ids_of, record_waits, rms_norm, select
from moe_triton.schemes.site import COMBINE_KIND, Site, launch_matching


@dataclass(frozen=True)
class CombinePlans:
    """Builds the plans of combine on one rank.

    Holes: y, num_rows, recv_offsets, peers, window, topk_idx, num_ids, num_tokens, out, report; topk_weights,
    mask, ori_x, residual, gamma, eps, normed, rstd, performance_info and rank_table where the variant has
    them; and names of `Scheme.scratch`.

    Attributes:
        site: where they run.
        layout: of the window.
    """

    site: Site
    layout: BlocksLayout

    def whole(self, variant: CombineVariant, zone: int) -> Plan:
        """All of it: what sends goes on with the wait."""
        phases = [*self._send(variant, zone), self._wait(variant, zone)]
        return self._plan(zone, [*self._places(variant), *joined(phases, FUSED), *self._after(variant, zone)])

    def setup(self, variant: CombineVariant, zone: int) -> Plan:
        """Up to the flags."""
        return self._plan(zone, joined(self._send(variant, zone), FUSED))

    def teardown(self, variant: CombineVariant, zone: int) -> Plan:
        """From the wait on."""
        steps = [*self._places(variant), self._wait(variant, zone), *self._after(variant, zone)]
        return self._plan(zone, steps)

    @staticmethod
    def _plan(zone: int, launches: list[Launch]) -> Plan:
        return Plan("combine", zone, tuple(launches))

    @property
    def _row_bytes(self) -> int:
        return 2 * self.site.config.hidden

    def _send(self, variant: CombineVariant, zone: int) -> list[Launch]:
        """Steps 1 and 2."""
        site, call = self.site, call_word("combine", variant.kind)
        values: dict[str, Value] = {
            "rows": Hole("y"),
            "recv_offsets": Hole("recv_offsets"),
            "num_entries": site.num_entries,
            "capacity": Hole("num_rows"),
            "rows_to": Hole("rows_to"),
            "kind": combine_bits(variant.kind),
            "combine_kind": COMBINE_KIND,
            **of_peers(site, self.layout),
            **of_posts(site, "combine", self._row_bytes),
            **in_blocks(site, self.layout, "combine", zone, call, self._row_bytes),
            "report": Hole("report"),
        }
        send = launch("send", BLOCKS_RETURN, "communication", site.num_blocks, **values)
        return [send, *ends(site, self.layout, "combine", zone, call, self._row_bytes)]

    def _places(self, variant: CombineVariant) -> list[Launch]:
        """Where each result will be, and how many come from each rank."""
        c, site = self.site.config, self.site
        steps = [select(site, variant)] if variant.mask != "none" else []
        places = launch_matching(
            "places",
            block_places_kernel(site.target),
            "compute",
            blocks_of_words(site),
            {
                "topk_idx": ids_of(variant),
                "counts": Hole("counts"),
                "offsets": Hole("result_offsets"),
                "expected_rows": Hole("expected_rows"),
                "num_entries": Hole("num_ids"),
                "num_experts": c.num_experts,
                "num_local_experts": c.num_local_experts,
                "num_ranks": c.num_ranks,
                "block_stride": self.layout.block_bytes // variant.dtype.itemsize,
                "row_stride": c.hidden,
            },
        )
        return [*steps, places]

    def _wait(self, variant: CombineVariant, zone: int) -> Launch:
        """Step 3."""
        return wait(
            self.site,
            self.layout,
            "combine",
            zone,
            call_word("combine", variant.kind),
            self._row_bytes,
            is_timed=variant.waits,
            recv_counts=Hole("barrier_counts"),
            expected_rows=Hole("expected_rows"),
            num_local_experts=1,
            max_count=self.layout.max_rows,
            dispatch_word=0,
        )

    def _after(self, variant: CombineVariant, zone: int) -> list[Launch]:
        """Step 4: out of the window, summed by weight."""
        c, site, blocks = self.site.config, self.site, self.layout.blocks
        itemsize = variant.dtype.itemsize
        features = SumFeatures(
            masked=variant.mask != "none",
            clears=variant.mask != "none" and not variant.norm,
            shared_x=variant.shared_x,
            special=any(variant.special),
            by_offset=True,
            fp32_out=variant.norm,
            zoned=site.zones_on_device,
            turns=site.zones_on_device and not variant.norm,
        )
        total = launch_matching(
            "sum",
            weighted_sum_kernel(
                variant.dtype, c.hidden, c.num_topk, 0, variant.weights, site.target, features=features
            ),
            "compute",
            site.num_blocks,
            {
                "slots": Hole("window", blocks.offset(zone=zone) + self.layout.rows_offset),
                "topk_idx": ids_of(variant),
                "topk_weights": Hole("topk_weights") if variant.weights else 0,
                "offsets": Hole("result_offsets"),
                "active": Hole("active"),
                "shared_x": Hole("shared_x"),
                "ori_x": Hole("ori_x") if any(variant.special[1:]) else 0,
                "alphas": 0,
                "const_v": 0,
                "out": Hole("sums" if variant.norm else "out"),
                "first_token": 0,
                "num_tokens": Hole("num_tokens"),
                "num_experts": c.num_experts,
                "num_zero": variant.special[0],
                "num_copy": variant.special[1],
                "num_const": variant.special[2],
                "turned": site.zone_cell("combine"),
                **site.zone_in_memory("combine", blocks.stride("zone") // itemsize),
            },
        )
        norm = [rms_norm(site, variant)] if variant.norm else []
        waits = [record_waits(site, 1)] if variant.waits else []
        return [total, *norm, *waits]
