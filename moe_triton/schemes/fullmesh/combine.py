"""Combine on A3: every result back to its token's rank, and summed there.

The four steps: send, flag, wait, arrange (the sum). V2 flags each row and waits for the results of its own
tokens, a part of them at a time; V1 names results by expert, so it flags once all rows of a rank are there
and waits for all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_triton.core.plan import Hole, Launch, Plan, Value, joined, launch, pipelined
from moe_triton.core.region import MAX_INT32
from moe_triton.kernels.block_quantize import block_quantize_kernel
from moe_triton.kernels.const_experts import const_alphas_kernel
from moe_triton.kernels.returns import returns_kernel
from moe_triton.kernels.waits import waits_of_combine_kernel
from moe_triton.kernels.weighted_sum import SumFeatures, weighted_sum_kernel
from moe_triton.layout import UB_ALIGN, SlotLayout, align
from moe_triton.layout.call_word import combine_bits
from moe_triton.operators.variants import CombineVariant
from moe_triton.schemes.common.exchange import reduce_steps
from moe_triton.schemes.common.flags import post, posting, wait_for_ranks
from moe_triton.schemes.common.steps import blocks_of_words, ids_of, rms_norm, select
from moe_triton.schemes.fullmesh.ascendc import COMBINE_SEND, COMBINE_WAIT, FUSED
from moe_triton.schemes.fullmesh.layout import WindowLayout
from moe_triton.schemes.fullmesh.parts import bounds_of, by_readiness
from moe_triton.schemes.fullmesh.posts import combine_post
from moe_triton.schemes.site import COMBINE_KIND, Site, launch_matching, tokens_of


@dataclass(frozen=True)
class CombinePlans:
    """Builds the plans of combine on one rank.

    Holes: y, num_rows, recv_offsets, peers, window, topk_idx, num_tokens, out, report; origins (V2) or
    expand_idx (V1); topk_weights, mask, shared_x, ori_x, const_v, alpha1, alpha2, residual, gamma, eps,
    normed, rstd, exchange_counts, exchange_window, exchange_peers, performance_info and rank_table where the
    variant has them; and names of `Scheme.scratch`.

    Attributes:
        site: where they run.
        layout: of the window.
    """

    site: Site
    layout: WindowLayout

    def whole(self, variant: CombineVariant, zone: int, parts: int = 1) -> Plan:
        """All of it: the launch that sends goes on with the first wait."""
        before = [*self._before_send(variant, zone, parts), *self._before_wait(variant)]
        return self._plan(zone, before, self._send(variant, zone), variant, parts)

    def setup(self, variant: CombineVariant, zone: int) -> Plan:
        """Up to and including the flags."""
        steps = [*self._before_send(variant, zone), *joined(self._send(variant, zone), FUSED)]
        return Plan("combine", zone, tuple(steps))

    def teardown(self, variant: CombineVariant, zone: int, parts: int = 1) -> Plan:
        """From the wait on; tokens are waited for and summed in this many parts."""
        return self._plan(zone, self._before_wait(variant), [], variant, parts)

    def _plan(
        self, zone: int, before: list[Launch], send: list[Launch], variant: CombineVariant, parts: int
    ) -> Plan:
        steps, parts = list(before), 1 if self.site.is_version_1 else parts
        if send and self._quantizes_in_parts(variant, parts):
            steps += self._quantized_in_parts(variant, zone, send, parts)
        else:
            if self.site.by_readiness(parts):
                wait, summed = self._wait_results(variant, zone, 0, 1), [[part] for part in range(parts)]
                waits = by_readiness(self.site, variant, send, wait, parts, summed)
            else:
                waits = [[self._wait(variant, zone, part, parts)] for part in range(parts)]
                waits[0] = joined([*send, *waits[0]], FUSED)
            sums = [[self._weighted_sum(variant, zone, part, parts)] for part in range(parts)]
            steps += pipelined(waits, sums)
        if variant.norm:
            steps.append(rms_norm(self.site, variant))
        if variant.waits:
            steps.append(self._record_waits(variant))
        return Plan("combine", zone, tuple(steps), self.site.overlaps)

    def _quantizes_in_parts(self, variant: CombineVariant, parts: int) -> bool:
        return variant.block_quantize and self.site.by_readiness(parts)

    def _quantized_in_parts(
        self, variant: CombineVariant, zone: int, send: list[Launch], parts: int
    ) -> list[Launch]:
        """Beside each part that is sent, the next one is quantised, and beside the last one what has come
        before it is summed: one launch beside each, as with results that travel as they are.
        """
        wait, summed = self._wait_results(variant, zone, 0, 1), [list(range(parts - 1)), [parts - 1]]
        sent = by_readiness(self.site, variant, send, wait, parts, summed)
        quantized = [[self._block_quantize(variant, part, parts)] for part in range(parts)]
        early, last = (self._weighted_sum(variant, zone, group[0], parts) for group in summed)
        return [*pipelined(quantized, sent), replace(early, alongside=True), last]

    def _before_send(self, variant: CombineVariant, zone: int, parts: int = 1) -> list[Launch]:
        steps = reduce_steps(self.site, variant, zone) if variant.exchange else []
        if self.site.is_version_1:
            steps.append(self._returns())
        if variant.block_quantize and not self._quantizes_in_parts(variant, parts):
            steps.append(self._block_quantize(variant))
        return steps

    def _before_wait(self, variant: CombineVariant) -> list[Launch]:
        steps = [select(self.site, variant)] if variant.mask != "none" else []
        if variant.special[2]:
            steps.append(self._const_alphas(variant))
        return steps

    def _send(self, variant: CombineVariant, zone: int) -> list[Launch]:
        """Steps 1 and 2, the phases of one launch."""
        sends = [self._send_results(variant, zone)]
        if self.site.scheme.queued_peers:
            sends.append(combine_post(self.site, self.layout, sends[0], variant))
        if not self.site.is_version_1:
            return sends
        status, blocks = self.layout.peer_status, self.site.num_blocks
        return [*sends, post(self.site, "flag", status, "combine", zone, variant.kind, blocks=blocks)]

    def _wait(self, variant: CombineVariant, zone: int, part: int, parts: int) -> Launch:
        """Step 3."""
        if not self.site.is_version_1:
            return self._wait_results(variant, zone, part, parts)
        status, blocks = self.layout.peer_status, self.site.num_blocks
        return wait_for_ranks(
            self.site, "wait", status, "combine", zone, variant.kind, blocks=blocks, keeps_zone=True
        )

    def _returns(self) -> Launch:
        """V1: where each row goes, from the counts alone."""
        c, site = self.site.config, self.site
        shared = c.is_shared_rank(site.rank)
        return launch_matching(
            "returns",
            returns_kernel(shared, site.target),
            "compute",
            site.num_blocks,
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

    def _block_quantize(self, variant: CombineVariant, part: int = 0, parts: int = 1) -> Launch:
        """Rows for the tokens that `by_readiness` sends results of in this part."""
        site = self.site
        rows, capacity = self._rows(variant)
        tokens = site.part_tokens["combine"].tokens
        row_bytes, scale_offset = site.quantized_row_bytes, align(site.config.hidden, UB_ALIGN)
        return launch_matching(
            "quantize",
            block_quantize_kernel(variant.dtype, site.config.hidden, site.target, parted=parts > 1),
            "compute",
            site.blocks("compute", parts) if part else site.num_blocks,
            {
                "rows": rows,
                "origins": Hole("origins"),
                "first_token": part * tokens,
                "end_token": (part + 1) * tokens if part + 1 < parts else MAX_INT32,
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
            COMBINE_SEND,
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
            numbers=0 if site.is_version_1 else site.numbers("combine"),
            kept_rank=site.rank if variant.keeps_own else -1,
            flag_rows=0 if site.is_version_1 else 1,
            part=0,
            num_parts=1,
            part_tokens=0,
            progress=0,
            kind=combine_bits(variant.kind),
            combine_kind=COMBINE_KIND,
            window=posting(site, "combine")["window"],
            out_rows=layout.out_rows.words(),
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
            COMBINE_WAIT,
            "communication",
            self.site.blocks("communication", parts) if part else self.site.num_blocks,
            kept_zone=self.site.keeping_zone("combine"),
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
            numbers=self.site.numbers("combine"),
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
        is_listed = self.site.by_readiness(parts)
        c, slots = self.site.config, self.layout.combine_slots
        itemsize = 1 if variant.block_quantize else variant.dtype.itemsize
        window, site = slots.offset(zone=zone), self.site
        features = SumFeatures(
            masked=variant.mask != "none",
            clears=variant.mask != "none" and not variant.norm,
            shared_x=variant.shared_x,
            special=any(variant.special),
            quantized=variant.block_quantize,
            by_expert=self.site.is_version_1,
            own=variant.keeps_own,
            fp32_out=variant.norm,
            zoned=site.zones_on_device,
            listed=is_listed,
            turns=site.zones_on_device and part == parts - 1 and not variant.norm,
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
                "recv_offsets": Hole("recv_offsets"),
                "own_results": Hole("own_results", -(window // itemsize)),
                "first_expert": site.first_expert,
                "num_local_experts": site.num_local_experts,
                "num_ranks": c.num_ranks,
                "rank": site.rank,
                "active": Hole("active"),
                "tokens": Hole("ready_tokens"),
                "bounds": bounds_of(part),
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
                "num_tokens": Hole("num_tokens") if is_listed else num_tokens,
                "num_experts": c.num_experts,
                "num_zero": variant.special[0],
                "num_copy": variant.special[1],
                "num_const": variant.special[2],
                "turned": site.zone_cell("combine"),
                **self.site.zone_in_memory("combine", slots.stride("zone") // itemsize),
            },
        )

    def _record_waits(self, variant: CombineVariant) -> Launch:
        c, site = self.site.config, self.site
        return launch_matching(
            "record waits",
            waits_of_combine_kernel(c.num_topk, site.target),
            "compute",
            blocks_of_words(site),
            {
                "waited": Hole("waited"),
                "topk_idx": ids_of(variant),
                "table": Hole("rank_table"),
                "performance_info": Hole("performance_info"),
                "num_tokens": Hole("num_tokens"),
                "num_experts": c.num_experts,
                "num_local_experts": c.num_local_experts,
                "num_shared_experts": c.num_shared_experts,
                "num_shared_ranks": c.num_shared_ranks,
                "num_ranks": c.num_ranks,
                "rank": site.rank,
                "num_table": Hole("num_performance_entries"),
            },
        )
