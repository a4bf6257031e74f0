"""Combine on A3: every result back to its token's rank, and summed there.

The four steps: send, flag, wait, arrange (the sum). V2 flags each row and waits for the results of its own
tokens, a part of them at a time; V1 names results by expert, so it flags once all rows of a rank are there
and waits for all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_triton.core import ascendc
from moe_triton.core.plan import Hole, Launch, Plan, Value, launch, pipelined
from moe_triton.kernels.block_quantize import block_quantize_kernel
from moe_triton.kernels.const_experts import const_alphas_kernel
from moe_triton.kernels.keep import result_offsets_kernel
from moe_triton.kernels.returns import returns_kernel
from moe_triton.kernels.rms_norm import rms_norm_kernel
from moe_triton.kernels.waits import waits_of_combine_kernel
from moe_triton.kernels.weighted_sum import SumFeatures, weighted_sum_kernel
from moe_triton.layout import UB_ALIGN, SlotLayout, align
from moe_triton.layout.call_word import combine_bits
from moe_triton.operators.variants import CombineVariant
from moe_triton.schemes.common.exchange import reduce_steps
from moe_triton.schemes.common.flags import post, wait_for_ranks
from moe_triton.schemes.common.steps import ids_of, select
from moe_triton.schemes.fullmesh.layout import WindowLayout
from moe_triton.schemes.site import COMBINE_KIND, Site, launch_matching, tokens_of


@dataclass(frozen=True)
class CombinePlans:
    """Builds the plans of combine on one rank.

    Holes: y, num_rows, recv_offsets, peers, window, topk_idx, num_tokens, out, report; origins (V2) or
    expand_idx (V1); topk_weights, mask, shared_x, ori_x, const_v, alpha1, alpha2, residual, gamma, eps,
    normed, rstd, exchange_counts, exchange_window, exchange_peers, performance_info and rank_table where the
    variant has them; and names of `Site.scratch`.

    Attributes:
        site: where they run.
        layout: of the window.
    """

    site: Site
    layout: WindowLayout

    def setup(self, variant: CombineVariant, zone: int) -> Plan:
        """Up to and including the flags."""
        steps = []
        if variant.exchange:
            steps += reduce_steps(self.site, variant, zone)
        if self.site.is_version_1:
            steps.append(self._returns())
        if variant.block_quantize:
            steps.append(self._block_quantize(variant))
        steps.append(self._send_results(variant, zone))
        if self.site.is_version_1:
            status = self.layout.peer_status
            steps.append(post(self.site, "flag", status, "combine", zone, variant.kind))
        return Plan("combine", zone, tuple(steps))

    def teardown(self, variant: CombineVariant, zone: int, parts: int = 1) -> Plan:
        """From the wait on; tokens are waited for and summed in this many parts."""
        steps = []
        if variant.mask != "none":
            steps.append(select(self.site, variant.mask))
        if variant.special[2]:
            steps.append(self._const_alphas(variant))
        if self.site.is_version_1:
            parts, status = 1, self.layout.peer_status
            blocks = self.site.num_blocks
            waits = [wait_for_ranks(self.site, "wait", status, "combine", zone, variant.kind, blocks=blocks)]
        else:
            waits = [self._wait_results(variant, zone, part, parts) for part in range(parts)]
        if variant.keeps_own:
            steps.append(self._result_offsets(variant, zone))
        sums = [self._weighted_sum(variant, zone, part, parts) for part in range(parts)]
        steps += pipelined(waits, sums)
        if variant.norm:
            steps.append(self._rms_norm(variant))
        if variant.waits:
            steps.append(self._record_waits(variant))
        return Plan("combine", zone, (*steps, *self.site.turn("combine")), self.site.overlaps)

    def _returns(self) -> Launch:
        """V1: where each row goes, from the counts alone."""
        c, site = self.site.config, self.site
        shared = c.is_shared_rank(site.rank)
        return launch_matching(
            "returns",
            returns_kernel(shared, site.target),
            "compute",
            1,
            {
                "recv_offsets": Hole("recv_offsets"),
                "origins": Hole("return_origins"),
                "num_entries": site.num_entries,
                "num_ranks": c.num_ranks,
                "capacity": site.capacity,
                "first_expert": site.first_expert,
                "rank": site.rank,
                "num_tokens": Hole("num_tokens"),
                "num_shared_ranks": c.num_shared_ranks,
                "num_experts": c.num_experts,
            },
        )

    def _rows(self, variant: CombineVariant) -> tuple[Hole, Value]:
        """The rows of this rank's experts, and how many there is room for."""
        if variant.exchange:
            return Hole("reduced_rows"), self.site.capacity
        return Hole("y"), Hole("num_rows")

    def _block_quantize(self, variant: CombineVariant) -> Launch:
        site = self.site
        rows, capacity = self._rows(variant)
        row_bytes, scale_offset = site.quantized_row_bytes, align(site.config.hidden, UB_ALIGN)
        return launch_matching(
            "quantize",
            block_quantize_kernel(variant.dtype, site.config.hidden, site.target),
            "compute",
            site.num_blocks,
            {
                "rows": rows,
                "recv_offsets": Hole("recv_offsets"),
                "packed": Hole("quantized_rows"),
                "packed_scales": Hole("quantized_rows", scale_offset),
                "num_entries": site.num_entries,
                "capacity": capacity,
                "row_stride": row_bytes,
                "scale_stride": row_bytes // variant.dtype.itemsize,
            },
        )

    def _send_results(self, variant: CombineVariant, zone: int) -> Launch:
        """Steps 1 and 2: each row to its token's slot; V2 sets its flag right after it."""
        c, site, layout = self.site.config, self.site, self.layout
        rows, capacity = self._rows(variant)
        row_bytes = SlotLayout(c.hidden, 2).row_bytes
        if variant.block_quantize:
            rows, row_bytes = Hole("quantized_rows"), site.quantized_row_bytes
        return launch(
            "send",
            ascendc.COMBINE_SEND,
            "communication",
            site.num_blocks,
            rows=rows,
            row_bytes=row_bytes,
            origins=Hole("return_origins" if site.is_version_1 else "origins"),
            recv_offsets=Hole("recv_offsets"),
            num_entries=site.num_entries,
            capacity=capacity,
            peers=Hole("peers"),
            num_ranks=c.num_ranks,
            **site.zone_of("combine", zone),
            kept_rank=site.rank if variant.keeps_own else -1,
            flag_rows=0 if site.is_version_1 else 1,
            kind=combine_bits(variant.kind),
            combine_kind=COMBINE_KIND,
            slots=layout.combine_slots.words(),
            status=layout.combine_status.words(),
            report=Hole("report"),
        )

    def _wait_results(self, variant: CombineVariant, zone: int, part: int, parts: int) -> Launch:
        """Step 3: until every result of these own tokens is there."""
        c = self.site.config
        first_token, num_tokens = tokens_of(part, parts)
        return launch(
            "wait",
            ascendc.COMBINE_WAIT,
            "communication",
            self.site.blocks("communication", parts),
            window=Hole("window"),
            topk_idx=ids_of(variant),
            active=0 if variant.mask == "none" else Hole("active"),
            waited_us=Hole("waited") if variant.waits else 0,
            first_token=first_token,
            num_tokens=num_tokens,
            topk=c.num_topk,
            num_experts=c.num_experts,
            num_shared_experts=c.num_shared_experts,
            **self.site.zone_of("combine", zone),
            timeout_us=self.site.timeout_us,
            status=self.layout.combine_status.words(),
            report=Hole("report"),
        )

    def _const_alphas(self, variant: CombineVariant) -> Launch:
        c, site = self.site.config, self.site
        num_zero, num_copy, num_const = variant.special
        return launch_matching(
            "const alphas",
            const_alphas_kernel(variant.dtype, c.hidden, c.num_topk, variant.const_per_element, site.target),
            "compute",
            site.num_blocks,
            {
                "x": Hole("ori_x"),
                "topk_idx": ids_of(variant),
                "alpha1": Hole("alpha1"),
                "alpha2": Hole("alpha2"),
                "alphas": Hole("alphas"),
                "first_token": 0,
                "num_tokens": Hole("num_tokens"),
                "first_const": c.num_experts + num_zero + num_copy,
                "num_const": num_const,
            },
        )

    def _weighted_sum(self, variant: CombineVariant, zone: int, part: int, parts: int) -> Launch:
        """Step 4: out of the window, summed by weight."""
        first_token, num_tokens = tokens_of(part, parts)
        c, slots = self.site.config, self.layout.combine_slots
        itemsize = 1 if variant.block_quantize else variant.dtype.itemsize
        window = slots.offset(zone=zone)
        features = SumFeatures(
            masked=variant.mask != "none",
            shared_x=variant.shared_x,
            special=any(variant.special),
            quantized=variant.block_quantize,
            by_expert=self.site.is_version_1,
            by_offset=variant.keeps_own,
            fp32_out=variant.norm,
            zoned=self.site.zones_on_device,
        )
        token, k = slots.stride("token"), slots.stride("k")
        return launch_matching(
            "sum",
            weighted_sum_kernel(
                variant.dtype,
                c.hidden,
                c.num_topk,
                c.num_shared_experts,
                variant.weights,
                self.site.target,
                features=features,
            ),
            "compute",
            self.site.blocks("compute", parts),
            {
                "slots": Hole("window", window),
                "slot_scales": Hole("window", window + align(c.hidden, UB_ALIGN)),
                "topk_idx": ids_of(variant),
                "topk_weights": Hole("topk_weights") if variant.weights else 0,
                "expand_idx": Hole("expand_idx"),
                "offsets": Hole("result_offsets"),
                "active": Hole("active"),
                "shared_x": Hole("shared_x"),
                "ori_x": Hole("ori_x") if any(variant.special[1:]) else 0,
                "alphas": Hole("alphas") if variant.special[2] else 0,
                "const_v": Hole("const_v") if variant.special[2] else 0,
                "out": Hole("sums" if variant.norm else "out"),
                "token_stride": token // itemsize,
                "slot_stride": k // itemsize,
                # V1's region counts a result's number at its expert as token, and experts as k.
                "index_stride": token // itemsize,
                "expert_stride": k // itemsize,
                "max_index": c.num_max_tokens_per_rank,
                "first_token": first_token,
                "num_tokens": num_tokens,
                "num_experts": c.num_experts,
                "num_zero": variant.special[0],
                "num_copy": variant.special[1],
                "num_const": variant.special[2],
                **self.site.zone_in_memory("combine", slots.stride("zone") // itemsize),
            },
        )

    def _result_offsets(self, variant: CombineVariant, zone: int) -> Launch:
        """Results of this rank's own experts are summed from where the experts left them."""
        c, site, slots = self.site.config, self.site, self.layout.combine_slots
        itemsize = variant.dtype.itemsize
        return launch(
            "find results",
            result_offsets_kernel(c.num_topk, c.num_shared_experts),
            "compute",
            1,
            topk_idx=ids_of(variant),
            expand_idx=Hole("expand_idx"),
            recv_offsets=Hole("recv_offsets"),
            offsets=Hole("result_offsets"),
            own_results=Hole("own_results", -(slots.offset(zone=zone) // itemsize)),
            token_stride=slots.stride("token") // itemsize,
            slot_stride=slots.stride("k") // itemsize,
            hidden=c.hidden,
            first_expert=site.first_expert,
            num_local_experts=site.num_local_experts,
            num_ranks=c.num_ranks,
            rank=site.rank,
            num_tokens=Hole("num_tokens"),
        )

    def _rms_norm(self, variant: CombineVariant) -> Launch:
        return launch_matching(
            "norm",
            rms_norm_kernel(self.site.config.hidden, self.site.target, masked=variant.mask != "none"),
            "compute",
            self.site.num_blocks,
            {
                "acc": Hole("sums"),
                "residual": Hole("residual"),
                "gamma": Hole("gamma"),
                "active": Hole("active"),
                "eps": Hole("eps"),
                "y": Hole("normed"),
                "rstd": Hole("rstd"),
                "x_out": Hole("out"),
                "first_token": 0,
                "num_tokens": Hole("num_tokens"),
            },
        )

    def _record_waits(self, variant: CombineVariant) -> Launch:
        c, site = self.site.config, self.site
        return launch_matching(
            "record waits",
            waits_of_combine_kernel(site.target),
            "compute",
            1,
            {
                "waited": Hole("waited"),
                "topk_idx": ids_of(variant),
                "table": Hole("rank_table"),
                "performance_info": Hole("performance_info"),
                "num_tokens": Hole("num_tokens"),
                "topk": c.num_topk,
                "num_experts": c.num_experts,
                "num_local_experts": c.num_local_experts,
                "num_shared_experts": c.num_shared_experts,
                "num_shared_ranks": c.num_shared_ranks,
                "num_ranks": c.num_ranks,
                "rank": site.rank,
                "num_table": Hole("num_performance_entries"),
            },
        )
