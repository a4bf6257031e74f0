"""What dispatch and combine by blocks share."""

from __future__ import annotations

from moe_triton.core.ascendc_blocks import BLOCKS_POST
from moe_triton.core.plan import Hole, Launch, Value, launch
from moe_triton.schemes.blocks.layout import BlocksLayout
from moe_triton.schemes.site import Operator, Site


def of_peers(site: Site) -> dict[str, Value]:
    """Where the windows of all ranks are."""
    return {"peers": Hole("peers"), "num_ranks": site.config.num_ranks, "rank": site.rank}


def in_blocks(
    site: Site, layout: BlocksLayout, operator: Operator, zone: int, call: int, row_step: int
) -> dict[str, Value]:
    """Which round it is, and where things are in a block, of rows of ``row_step`` bytes."""
    return {
        "numbers": Hole("round_numbers"),
        **site.zone_of(operator, zone),
        "call": call,
        "header_words": layout.header_words,
        "flag_word": layout.flag_word,
        "call_word": layout.call_word,
        "rows_offset": layout.rows_offset,
        "row_step": row_step,
        "max_rows": layout.max_rows,
        "peer_blocks": layout.blocks.words(),
    }


def post(site: Site, layout: BlocksLayout, operator: Operator, zone: int, call: int, row_step: int) -> Launch:
    """Step 2: FLAG2 behind the rows of every block."""
    return launch(
        "flag",
        BLOCKS_POST,
        "communication",
        site.num_blocks,
        rows_to=Hole("rows_to"),
        **of_peers(site),
        **in_blocks(site, layout, operator, zone, call, row_step),
        report=Hole("report"),
    )
