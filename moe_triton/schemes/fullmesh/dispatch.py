"""Dispatch on A3: every row straight into its expert's rank, a status entry for every expert.

The four steps: send, flag (both in `_send_rows`), wait, arrange. ``fullmesh_v1`` posts an entry after a
SyncAll over the blocks that wrote the rows; ``fullmesh_v2`` posts it at once and has a flag in every
block of every slot. A flag is never visible before what it announces: the send kernels see to that.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_triton.core import ascendc
from moe_triton.core.plan import Hole, Launch, Plan, launch, pipelined
from moe_triton.kernels.arrange import arrange_kernel
from moe_triton.kernels.keep import keep_kernel
from moe_triton.kernels.returns import own_offsets_kernel
from moe_triton.kernels.waits import waits_of_dispatch_kernel
from moe_triton.layout import WORD_BYTES
from moe_triton.layout.call_word import call_word
from moe_triton.operators.variants import DispatchVariant
from moe_triton.schemes.common import steps as local
from moe_triton.schemes.common.exchange import gather_steps
from moe_triton.schemes.fullmesh.layout import WindowLayout
from moe_triton.schemes.site import COMBINE_KIND, DISPATCH_WORD, Site, launch_matching


@dataclass(frozen=True)
class DispatchPlans:
    """Builds the plans of dispatch on one rank.

    Holes: x, topk_idx, expand_idx, num_tokens, num_ids, peers, window, recv_offsets, tokens_per_expert,
    tokens, origins, report; mask, smooth_scales, topk_weights, scales, weights, performance_info and
    rank_table, exchange_counts, exchange_window and exchange_peers where the variant has them; and names
    of `Site.scratch`.

    Attributes:
        site: where they run.
        layout: of the window.
        inband: whether each row carries its flags.
    """

    site: Site
    layout: WindowLayout
    inband: bool = False

    def setup(self, variant: DispatchVariant, zone: int, parts: int = 1) -> Plan:
        """Up to and including the flags; rows are quantised and sent in this many parts."""
        steps = []
        if variant.mask != "none":
            steps.append(local.select(self.site, variant.mask))
        if self.site.config.num_shared_experts:
            steps.append(local.share(self.site, variant))
        steps.append(local.route(self.site, variant))
        if not variant.row_format.is_quantized:
            parts = 1  # nothing to compute that sending could hide
        sends = [self._send_rows(variant, zone, part, parts) for part in range(parts)]
        if variant.row_format.is_quantized:
            packs = [local.pack(self.site, variant, part=part, parts=parts) for part in range(parts)]
            steps += pipelined(packs, sends)
        else:
            steps += sends
        return Plan("dispatch", zone, tuple(steps), self.site.overlaps)

    def teardown(self, variant: DispatchVariant, zone: int) -> Plan:
        """From the wait on."""
        steps = [self._wait_status(variant, zone), local.offsets(self.site, variant)]
        if self.inband:
            steps.append(self._receive_inband(variant, zone))
        else:
            if variant.keeps_own:
                steps.append(self._keep(variant))
            steps.append(self._arrange(variant, zone))
        if self.site.keeps_own_tokens:
            steps.append(self._report_own_tokens())
        if variant.exchange:
            steps += gather_steps(self.site, local.slot_of(self.site, variant), variant, zone)
        if variant.waits:
            steps.append(self._record_waits())
        return Plan("dispatch", zone, (*steps, *self.site.turn("dispatch")))

    def _send_rows(self, variant: DispatchVariant, zone: int, part: int, parts: int) -> Launch:
        """Steps 1 and 2: rows to their slots; after the last part, a status entry to every expert's rank."""
        c, slot, layout = self.site.config, local.slot_of(self.site, variant), self.layout
        return launch(
            "send",
            ascendc.INBAND_SEND if self.inband else ascendc.DISPATCH_SEND,
            "communication",
            self.site.blocks("communication", parts),
            **local.rows_to_send(self.site, variant, part, parts),
            row_bytes=slot.stamp_offset if variant.row_format.is_quantized else slot.row_bytes,
            stamp_offset=slot.stamp_offset,
            expand_idx=Hole("expand_idx"),
            counts=Hole("counts"),
            shared_counts=Hole("shared_counts") if c.num_shared_experts else 0,
            **self.site.zone_of("dispatch", zone),
            kept_rank=self.site.rank if variant.keeps_own else -1,
            post_status=int(part == parts - 1),
            call=call_word("dispatch", variant.kind),
            combine_kind=COMBINE_KIND,
            dispatch_word=DISPATCH_WORD,
            slots=layout.dispatch_slots.words(),
            status=layout.dispatch_status.words(),
        )

    def _wait_status(self, variant: DispatchVariant, zone: int) -> Launch:
        """Step 3: until an entry from every rank is there."""
        return launch(
            "wait",
            ascendc.DISPATCH_WAIT,
            "communication",
            self.site.num_blocks,
            window=Hole("window"),
            recv_counts=Hole("recv_counts"),
            waited_us=Hole("waited") if variant.waits else 0,
            num_local_experts=self.site.num_local_experts,
            **self.site.zone_of("dispatch", zone),
            timeout_us=self.site.timeout_us,
            call=call_word("dispatch", variant.kind),
            dispatch_word=DISPATCH_WORD,
            status=self.layout.dispatch_status.words(),
            report=Hole("report"),
        )

    def _keep(self, variant: DispatchVariant) -> Launch:
        """Rows of this rank for itself: from where they are to where they belong."""
        c, site, slot = self.site.config, self.site, local.slot_of(self.site, variant)
        rows_per_token = c.num_results_per_token if variant.smooth else 1
        packed = local.packed_of(variant)
        stride = slot.packed_bytes if variant.row_format.is_quantized else slot.row_bytes
        return launch_matching(
            "keep",
            keep_kernel(
                slot.row_bytes // WORD_BYTES, c.num_topk, slot.num_scales, variant.weights, rows_per_token
            ),
            "compute",
            site.num_blocks,
            {
                "rows": packed if variant.row_format.is_quantized else Hole("x"),
                "scales": Hole(packed.name, slot.scale_offset),
                "topk_idx": local.ids_of(variant),
                "topk_weights": Hole("topk_weights"),
                "expand_idx": Hole("expand_idx"),
                "recv_offsets": Hole("recv_offsets"),
                "out_rows": Hole("tokens"),
                "out_scales": Hole("scales"),
                "out_origins": Hole("origins"),
                "out_weights": Hole("weights"),
                "row_stride": stride // WORD_BYTES,
                "first_expert": site.first_expert,
                "num_local_experts": site.num_local_experts,
                "num_ranks": c.num_ranks,
                "rank": site.rank,
                "num_tokens": Hole("num_tokens"),
            },
        )

    def _arrange(self, variant: DispatchVariant, zone: int) -> Launch:
        """Step 4: out of the window, into expert order."""
        site, slot, slots = self.site, local.slot_of(self.site, variant), self.layout.dispatch_slots
        window = Hole("window", slots.offset(zone=zone))
        return launch_matching(
            "arrange",
            arrange_kernel(
                slot.row_bytes // WORD_BYTES,
                slot.scale_offset // WORD_BYTES,
                slot.stamp_offset // WORD_BYTES,
                slot.num_scales,
                variant.weights,
                site.zones_on_device,
            ),
            "compute",
            site.num_blocks,
            {
                "slots": window,
                "slot_scales": window,
                "recv_offsets": local.true_offsets(self.site),
                "out_rows": Hole("tokens"),
                "out_scales": Hole("scales") if slot.num_scales else 0,
                "out_origins": Hole("origins"),
                "out_weights": Hole("weights") if variant.weights else 0,
                "num_entries": site.num_entries,
                "num_ranks": site.config.num_ranks,
                "kept_rank": site.rank if variant.keeps_own else -1,
                "src_stride": slots.stride("source") // WORD_BYTES,
                "expert_stride": slots.stride("expert") // WORD_BYTES,
                "slot_stride": slots.stride("index") // WORD_BYTES,
                **site.zone_in_memory("dispatch", slots.stride("zone") // WORD_BYTES),
            },
        )

    def _receive_inband(self, variant: DispatchVariant, zone: int) -> Launch:
        """Steps 3 and 4 of fullmesh_v2: each row as soon as its own flags are there."""
        site, slot = self.site, local.slot_of(self.site, variant)
        return launch(
            "arrange",
            ascendc.INBAND_RECEIVE,
            "communication",
            site.num_blocks,
            window=Hole("window"),
            recv_offsets=local.true_offsets(self.site),
            waited_us=Hole("waited") if variant.waits else 0,
            num_entries=site.num_entries,
            num_ranks=site.config.num_ranks,
            capacity=site.capacity,
            row_bytes=slot.row_bytes,
            scale_offset=slot.scale_offset,
            scale_bytes=slot.scale_bytes,
            stamp_offset=slot.stamp_offset,
            out_rows=Hole("tokens"),
            out_scales=Hole("scales") if slot.num_scales else 0,
            out_origins=Hole("origins"),
            out_weights=Hole("weights") if variant.weights else 0,
            **self.site.zone_of("dispatch", zone),
            timeout_us=site.timeout_us,
            slots=self.layout.dispatch_slots.words(),
            report=Hole("report"),
        )

    def _report_own_tokens(self) -> Launch:
        c, site = self.site.config, self.site
        return launch(
            "report own tokens",
            own_offsets_kernel(site.target),
            "compute",
            1,
            recv_offsets=Hole("true_offsets"),
            out=Hole("recv_offsets"),
            num_ranks=c.num_ranks,
            num_shared_ranks=c.num_shared_ranks,
            rank=site.rank,
            num_tokens=Hole("num_tokens"),
        )

    def _record_waits(self) -> Launch:
        site = self.site
        return launch_matching(
            "record waits",
            waits_of_dispatch_kernel(site.target),
            "compute",
            1,
            {
                "waited": Hole("waited"),
                "table": Hole("rank_table"),
                "performance_info": Hole("performance_info"),
                "num_local_experts": site.num_local_experts,
                "num_ranks": site.config.num_ranks,
                "num_table": Hole("num_performance_entries"),
            },
        )
