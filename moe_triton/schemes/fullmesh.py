"""A3 fullmesh: every row straight into its expert's rank, a status entry after all of them.

The four steps of both operators (send, flag, wait, arrange) are the launches below, in order. Dispatch
posts one status entry per expert after a SyncAll over its blocks; combine posts a flag right after each
row. A flag is never visible before what it announces: the two send kernels are where that is ensured.

Zones (see `moe_triton.buffer` for who turns them): dispatch waits for an entry from every rank, empty
ones included, so a rank that starts dispatch i + 2 knows that nobody still reads what dispatch i left.
Combine waits for its own tokens only; a dispatch between combine i and i + 2 separates those two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_triton import ascendc
from moe_triton.config import Config
from moe_triton.kernels.arrange import arrange_kernel
from moe_triton.kernels.pack import pack_kernel
from moe_triton.kernels.route import offsets_kernel, route_kernel
from moe_triton.kernels.weighted_sum import weighted_sum_kernel
from moe_triton.layout import SlotLayout, WindowLayout
from moe_triton.plan import Hole, Launch, Plan, Value, launch

WORD = 4  # bytes of the int32 words that arrange copies


@dataclass(frozen=True)
class DispatchVariant:
    """What a dispatch is specialised for.

    Attributes:
        dtype: of x.
        quantize: whether rows travel as int8.
        smooth: whether x is multiplied by its expert's smooth scales first: one packed row per expert.
        weights: whether routing weights travel along.
    """

    dtype: torch.dtype
    quantize: bool
    smooth: bool
    weights: bool


@dataclass(frozen=True)
class CombineVariant:
    """What a combine is specialised for: dtype, and whether results are weighted."""

    dtype: torch.dtype
    weights: bool


@dataclass(frozen=True)
class Fullmesh:
    """Builds the plans of one rank.

    Attributes:
        config: the group's settings.
        rank: this rank.
        num_blocks: blocks per kernel.
        timeout_us: deadline of each wait, in microseconds.
        target: what the Triton kernels are specialised for: the back end's name.
    """

    config: Config
    rank: int
    num_blocks: int
    timeout_us: int
    target: str

    @property
    def layout(self) -> WindowLayout:
        """Where things lie in a window."""
        return WindowLayout(self.config)

    def slot(self, variant: DispatchVariant) -> SlotLayout:
        """How a slot of this variant is packed."""
        return SlotLayout(self.config.hidden, 1 if variant.quantize else variant.dtype.itemsize)

    def packed_rows_bytes(self) -> int:
        """Scratch that packing needs at most: one packed row per token and expert, for smooth scales."""
        rows = self.config.num_max_tokens_per_rank * self.config.num_topk
        return rows * SlotLayout(self.config.hidden, 1).packed_bytes

    def dispatch(self, variant: DispatchVariant, zone: int) -> Plan:
        """The plan of one dispatch.

        Holes: x, topk_idx, expand_idx, counts, num_tokens, num_ids, peers, window, recv_counts,
        recv_offsets, tokens_per_expert, tokens, triples, report; packed and scales when quantised,
        smooth_scales, topk_weights and weights where the variant has them.
        """
        steps = [self._route()]
        if variant.quantize:
            steps.append(self._pack(variant))
        steps += [
            self._send_rows(variant, zone),
            self._wait_status(zone),
            self._offsets(),
            self._arrange(variant, zone),
        ]
        return Plan("dispatch", zone, tuple(steps))

    def combine(self, variant: CombineVariant, zone: int) -> Plan:
        """The plan of one combine.

        Holes: y, num_rows, triples, recv_offsets, peers, window, topk_idx, num_tokens, out, report;
        topk_weights where results are weighted.
        """
        return Plan(
            "combine",
            zone,
            (self._send_results(zone), self._wait_results(zone), self._weighted_sum(variant, zone)),
        )

    def _route(self) -> Launch:
        return launch(
            "route",
            route_kernel(self.target),
            "compute",
            1,
            topk_idx=Hole("topk_idx"),
            expand_idx=Hole("expand_idx"),
            counts=Hole("counts"),
            num_entries=Hole("num_ids"),
            num_experts=self.config.num_experts,
        )

    def _pack(self, variant: DispatchVariant) -> Launch:
        c, slot = self.config, self.slot(variant)
        smooth: dict[str, Value] = {
            "topk_idx": Hole("topk_idx"),
            "smooth_scales": Hole("smooth_scales"),
            "scale_row_offset": 0,
            "num_scale_rows": c.num_experts,
        }
        return launch(
            "pack",
            pack_kernel(variant.dtype, c.hidden, c.num_topk, variant.smooth, self.target),
            "compute",
            self.num_blocks,
            x=Hole("x"),
            rows=Hole("packed"),
            scales=Hole("packed", slot.scale_offset),
            triples=Hole("packed", slot.stamp_offset),
            rank=self.rank,
            first_token=0,
            num_tokens=Hole("num_tokens"),
            row_stride=slot.packed_bytes,
            scale_stride=slot.packed_bytes // WORD,
            triple_stride=slot.packed_bytes // WORD,
            **(smooth if variant.smooth else {}),
        )

    def _send_rows(self, variant: DispatchVariant, zone: int) -> Launch:
        """Steps 1 and 2: rows to their slots, then a status entry to every expert's rank."""
        c, slot, layout = self.config, self.slot(variant), self.layout
        return launch(
            "send",
            ascendc.DISPATCH_SEND,
            "communication",
            self.num_blocks,
            rows=Hole("packed") if variant.quantize else Hole("x"),
            row_stride=slot.packed_bytes if variant.quantize else slot.row_bytes,
            row_bytes=slot.stamp_offset if variant.quantize else slot.row_bytes,
            stamp_offset=slot.stamp_offset,
            rows_per_token=c.num_topk if variant.smooth else 1,
            topk_idx=Hole("topk_idx"),
            topk_weights=Hole("topk_weights") if variant.weights else 0,
            expand_idx=Hole("expand_idx"),
            counts=Hole("counts"),
            peers=Hole("peers"),
            first_token=0,
            num_tokens=Hole("num_tokens"),
            total_tokens=Hole("num_tokens"),
            topk=c.num_topk,
            num_shared_experts=c.num_shared_experts,
            num_shared_ranks=c.num_shared_ranks,
            rank=self.rank,
            zone=zone,
            post_status=1,
            slots=layout.dispatch_slots.words(),
            status=layout.dispatch_status.words(),
            report=Hole("report"),
        )

    def _wait_status(self, zone: int) -> Launch:
        """Step 3: until an entry from every rank is there."""
        return launch(
            "wait",
            ascendc.DISPATCH_WAIT,
            "communication",
            self.num_blocks,
            window=Hole("window"),
            recv_counts=Hole("recv_counts"),
            num_local_experts=self.config.experts_on(self.rank),
            zone=zone,
            timeout_us=self.timeout_us,
            status=self.layout.dispatch_status.words(),
            report=Hole("report"),
        )

    def _offsets(self) -> Launch:
        c = self.config
        return launch(
            "offsets",
            offsets_kernel(self.target),
            "compute",
            1,
            recv_counts=Hole("recv_counts"),
            recv_offsets=Hole("recv_offsets"),
            tokens_per_expert=Hole("tokens_per_expert"),
            num_entries=c.experts_on(self.rank) * c.num_ranks,
            num_local_experts=c.experts_on(self.rank),
            max_count=c.num_max_tokens_per_rank,
        )

    def _arrange(self, variant: DispatchVariant, zone: int) -> Launch:
        """Step 4: out of the window, into expert order."""
        c, slot, slots = self.config, self.slot(variant), self.layout.dispatch_slots
        window = Hole("window", slots.offset(zone=zone))
        return launch(
            "arrange",
            arrange_kernel(
                slot.row_bytes // WORD,
                slot.scale_offset // WORD,
                slot.stamp_offset // WORD,
                variant.quantize,
                variant.weights,
            ),
            "compute",
            self.num_blocks,
            slots=window,
            slot_scales=window,
            recv_offsets=Hole("recv_offsets"),
            out_rows=Hole("tokens"),
            out_scales=Hole("scales") if variant.quantize else 0,
            out_triples=Hole("triples"),
            out_weights=Hole("weights") if variant.weights else 0,
            num_entries=c.experts_on(self.rank) * c.num_ranks,
            num_ranks=c.num_ranks,
            src_stride=slots.stride("source") // WORD,
            expert_stride=slots.stride("expert") // WORD,
            slot_stride=slots.stride("index") // WORD,
        )

    def _send_results(self, zone: int) -> Launch:
        """Steps 1 and 2: each row to its token's slot, its flag right after it."""
        c, layout = self.config, self.layout
        return launch(
            "send",
            ascendc.COMBINE_SEND,
            "communication",
            self.num_blocks,
            rows=Hole("y"),
            row_bytes=SlotLayout(c.hidden, 2).row_bytes,
            triples=Hole("triples"),
            recv_offsets=Hole("recv_offsets"),
            num_entries=c.experts_on(self.rank) * c.num_ranks,
            capacity=Hole("num_rows"),
            peers=Hole("peers"),
            num_ranks=c.num_ranks,
            zone=zone,
            slots=layout.combine_slots.words(),
            status=layout.combine_status.words(),
            report=Hole("report"),
        )

    def _wait_results(self, zone: int) -> Launch:
        """Step 3: until every result of this rank's own tokens is there."""
        c = self.config
        return launch(
            "wait",
            ascendc.COMBINE_WAIT,
            "communication",
            self.num_blocks,
            window=Hole("window"),
            topk_idx=Hole("topk_idx"),
            first_token=0,
            num_tokens=Hole("num_tokens"),
            topk=c.num_topk,
            num_shared_experts=c.num_shared_experts,
            zone=zone,
            timeout_us=self.timeout_us,
            status=self.layout.combine_status.words(),
            report=Hole("report"),
        )

    def _weighted_sum(self, variant: CombineVariant, zone: int) -> Launch:
        """Step 4: out of the window, summed by weight."""
        c, slots = self.config, self.layout.combine_slots
        itemsize = variant.dtype.itemsize
        return launch(
            "sum",
            weighted_sum_kernel(
                variant.dtype, c.hidden, c.num_topk, c.num_shared_experts, variant.weights, self.target
            ),
            "compute",
            self.num_blocks,
            slots=Hole("window", slots.offset(zone=zone)),
            topk_idx=Hole("topk_idx"),
            topk_weights=Hole("topk_weights") if variant.weights else 0,
            out=Hole("out"),
            token_stride=slots.stride("token") // itemsize,
            slot_stride=slots.stride("k") // itemsize,
            first_token=0,
            num_tokens=Hole("num_tokens"),
        )
