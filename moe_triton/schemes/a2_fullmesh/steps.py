"""What dispatch and combine by blocks share."""

from __future__ import annotations

from moe_triton.core.plan import Hole, Launch, Value
from moe_triton.core.region import Region
from moe_triton.schemes.a2_fullmesh.ascendc import BLOCKS_END
from moe_triton.schemes.a2_fullmesh.layout import BlocksLayout
from moe_triton.schemes.common.steps import Steps


def in_blocks(steps: Steps, layout: BlocksLayout, row_step: int) -> dict[str, Value | Region]:
    """Which round it is, and where things are in a block, of rows of ``row_step`` bytes."""
    ends_apart = steps.posts and not steps.site.keeps_order
    return {
        "numbers": Hole("round_numbers"),
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
        return {**steps.posting(), "payload_bytes": 0, "num_parts": 1, "part_lines": 0}
    return {**steps.posting(), "payload_bytes": payload_bytes, "num_parts": steps.site.post_parts}


def ends(steps: Steps) -> list[Launch]:
    """Step 2, where no block is posted: FLAG2 of each. Who posts blocks ends them as well."""
    return [] if steps.posts else [steps.launch("flag", BLOCKS_END, window=0, out_offset=0)]
