"""Combine by blocks: to each rank the results of its rows, in the order in which they came in its block.

Steps: places, which are known from the ids alone; send, flag and wait, as in dispatch; the sum.
"""

from __future__ import annotations

from moe_triton.core.plan import Launch, Placeholder, Plan, joined
from moe_triton.kernels.block_places import block_places_kernel
from moe_triton.kernels.weighted_sum import SumFeatures
from moe_triton.operators.variants import CombineVariant
from moe_triton.schemes.a2_fullmesh.ascendc import BLOCKS_RETURN, BLOCKS_WAIT, FUSED
from moe_triton.schemes.a2_fullmesh.dispatch import ends, in_blocks, of_posts
from moe_triton.schemes.a2_fullmesh.layout import BlocksLayout
from moe_triton.schemes.common.steps import CombineSteps
from moe_triton.schemes.rank_context import RankContext


class Combine(CombineSteps):
    """Builds the plans of combine on one rank.

    Holes: y, num_rows, recv_offsets, peers, window, topk_idx, num_ids, num_tokens, out, report; topk_weights,
    mask, ori_x, residual, gamma, eps, normed, rstd, performance_info and rank_table where the variant has
    them; and names of `Scheme.scratch`.
    """

    layout: BlocksLayout

    def __init__(self, context: RankContext, variant: CombineVariant, zone: int, parts: int = 1) -> None:
        super().__init__(context, variant, zone, parts)
        self.row_bytes = 2 * self.config.hidden
        self.usual |= in_blocks(self, self.layout, self.row_bytes)

    def whole(self) -> Plan:
        """All of it: what sends goes on with the wait."""
        return self.plan([*self._places(), *joined([*self._send(), self._wait()], FUSED), *self._after()])

    def setup(self) -> Plan:
        """Up to the flags."""
        return self.plan(joined(self._send(), FUSED))

    def teardown(self) -> Plan:
        """From the wait on."""
        return self.plan([*self._places(), self._wait(), *self._after()])

    def _send(self) -> list[Launch]:
        """Steps 1 and 2."""
        return [self.launch("send", BLOCKS_RETURN, **of_posts(self, self.row_bytes)), *ends(self)]

    def _places(self) -> list[Launch]:
        """Where each result will be, and how many come from each rank."""
        places = self.launch(
            "places",
            block_places_kernel(self.context.target),
            self.blocks_of_words,
            offsets=Placeholder("result_offsets"),
            num_entries=Placeholder("num_ids"),
            block_stride=self.layout.block_bytes // self.variant.dtype.itemsize,
            row_stride=self.config.hidden,
        )
        return [*self.select(), places]

    def _wait(self) -> Launch:
        """Step 3: until every rank's block is there."""
        return self.launch(
            "wait",
            BLOCKS_WAIT,
            recv_counts=Placeholder("barrier_counts"),
            num_local_experts=1,
            max_count=self.layout.max_rows,
            dispatch_word=0,
        )

    def _after(self) -> list[Launch]:
        """Step 4: out of the window, summed by weight."""
        variant, zones, blocks = self.variant, self.context.zones_on_device, self.layout.blocks
        features = SumFeatures(
            masked=self.is_masked,
            clears=self.is_masked and not variant.norm,
            shared_x=variant.shared_x,
            special=any(variant.special),
            by_offset=True,
            fp32_out=variant.norm,
            zoned=zones,
            turns=zones and not variant.norm,
        )
        total = self.total(
            features,
            slots=Placeholder("window", blocks.offset(zone=self.zone) + self.layout.rows_offset),
            offsets=Placeholder("result_offsets"),
            **self.in_memory(blocks.stride("zone") // variant.dtype.itemsize),
        )
        return [total, *self.norm(), *self.record_waits(1)]
