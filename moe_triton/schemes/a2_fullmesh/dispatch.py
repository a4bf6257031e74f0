"""Dispatch by blocks: to each rank its rows one after the other, by expert, with their counts ahead of them.

Steps: route (with pack where rows are quantised); send, which brings the rows to their places in the
receivers' blocks, and posts blocks between servers, the first ones while it makes the next; inside a server
flag; wait; offsets; arrange.
"""

from __future__ import annotations

from moe_triton.core.plan import Launch, Placeholder, Plan, Value, joined
from moe_triton.core.region import Region
from moe_triton.operators.variants import DispatchVariant
from moe_triton.schemes.a2_fullmesh.ascendc import BLOCKS_END, BLOCKS_SEND, BLOCKS_WAIT, FUSED
from moe_triton.schemes.a2_fullmesh.layout import BlockRow, BlocksLayout
from moe_triton.schemes.common.steps import DispatchSteps, Steps
from moe_triton.schemes.rank_context import DISPATCH_WORD, RankContext


def in_blocks(steps: Steps, layout: BlocksLayout, row_step: int) -> dict[str, Value | Region]:
    """Which round it is, and where things are in a block, of rows of ``row_step`` bytes."""
    ends_apart = steps.posts and not steps.context.keeps_order
    return {
        "numbers": Placeholder("round_numbers"),
        "header_words": layout.header_words,
        "flag_word": layout.flag_word,
        "call_word": layout.call_word,
        "rows_offset": layout.rows_offset,
        "row_step": row_step,
        "max_rows": layout.max_rows,
        "end_offset": layout.end_offset if ends_apart else 0,
        "peer_blocks": layout.blocks,
    }


def of_posts(steps: Steps, payload_bytes: int) -> dict[str, Value]:
    """How blocks for queued peers are posted, while others are made.

    Args:
        steps: of the operator.
        payload_bytes: of a row: those of the row itself.
    """
    if not steps.posts:
        return {**steps.posting_on(), "payload_bytes": 0, "num_parts": 1, "part_lines": 0}
    return {**steps.posting_on(), "payload_bytes": payload_bytes, "num_parts": steps.context.post_parts}


def ends(steps: Steps) -> list[Launch]:
    """Step 2, where no block is posted: FLAG2 of each. Who posts blocks ends them as well."""
    return [] if steps.posts else [steps.launch("flag", BLOCKS_END, window=0, out_offset=0)]


class Dispatch(DispatchSteps):
    """Builds the plans of dispatch on one rank.

    Holes: x, topk_idx, expand_idx, num_tokens, num_ids, peers, window, recv_offsets, tokens_per_expert,
    tokens, origins, report; given_ids, mask, smooth_scales, topk_weights, scales, weights, recv_stats,
    performance_info and rank_table where the variant has them; and names of `Scheme.scratch`.
    """

    layout: BlocksLayout

    def __init__(self, context: RankContext, variant: DispatchVariant, zone: int, parts: int = 1) -> None:
        super().__init__(context, variant, zone, parts)
        self.row = BlockRow.of(self.config.hidden, variant.row_format, variant.dtype)
        self.usual |= in_blocks(self, self.layout, self.row.packed_bytes)
        self.usual["dispatch_word"] = DISPATCH_WORD

    def whole(self) -> Plan:
        """All of it: what sends goes on with the wait."""
        phases = [*self._send(), *self._receive()]
        return self.plan([*self._before_send(), *joined(phases, FUSED), *self.arrangement()])

    def setup(self) -> Plan:
        """Up to the flags."""
        return self.plan([*self._before_send(), *joined(self._send(), FUSED)])

    def teardown(self) -> Plan:
        """From the wait on."""
        return self.plan([*joined(self._receive(), FUSED), *self.arrangement()])

    def count(self) -> Plan:
        """Of a call in rounds: sends a round, and waits until it is known what has come of it."""
        phases = [*self._send(), *self._receive()]
        return self.plan([*self._before_send(), *joined(phases, FUSED)], phase="count")

    def _before_send(self) -> list[Launch]:
        return [*self.before_routing(), *self.route_or_pack()]

    def _send(self) -> list[Launch]:
        """Steps 1 and 2: counts and rows; behind them, when all are there, the flags, or posts."""
        stamp, posts = self.row.stamp_offset, of_posts(self, self.row.row_bytes)
        rows = self.rows_to_send()
        send = self.launch("send", BLOCKS_SEND, row_bytes=stamp, stamp_offset=stamp, **rows, **posts)
        return [send, *ends(self)]

    def _receive(self) -> list[Launch]:
        """Step 3, until every rank's block is there; and where rows belong and are."""
        slots = self.layout.rows(self.row.packed_bytes)
        wait = self.launch("wait", BLOCKS_WAIT, expected_rows=0)
        return [wait, self.offsets(slots, sees_all=False, by_source=True)]

    def arrangement(self) -> list[Launch]:
        """Step 4: to expert order, out of the window. Flags are numbers: there is nothing to clear."""
        waits = self.record_waits(self.context.num_local_experts)
        return [self.arrange(self.row), *self.local_ids(), *waits]
