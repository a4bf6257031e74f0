"""What dispatch and combine by blocks share."""

from __future__ import annotations

from moe_triton.core.plan import Hole, Launch, Value, launch
from moe_triton.schemes.a2_fullmesh.ascendc import BLOCKS_END, BLOCKS_WAIT
from moe_triton.schemes.a2_fullmesh.layout import BlocksLayout
from moe_triton.schemes.site import Operator, Site


def of_peers(site: Site, layout: BlocksLayout) -> dict[str, Value]:
    """Where the windows of all ranks are, and where blocks are made that are posted."""
    out_offset = layout.in_bytes if site.scheme.queued_peers else 0
    return {
        "peers": Hole("peers"),
        "num_ranks": site.config.num_ranks,
        "rank": site.rank,
        "window": Hole("window") if out_offset else 0,
        "out_offset": out_offset,
    }


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
        "end_offset": layout.end_offset if site.scheme.queued_peers and not site.keeps_order else 0,
        "peer_blocks": layout.blocks.words(),
    }


def of_posts(site: Site, operator: Operator, payload_bytes: int) -> dict[str, Value]:
    """How blocks for queued peers are posted, while others are made.

    Args:
        site, operator: as in `in_blocks`.
        payload_bytes: of a row: those of the row itself.
    """
    if not site.scheme.queued_peers:
        return {"payload_bytes": 0, "num_parts": 1, "part_lines": 0, "timeout_us": 0, "traffic": 0}
    return {
        "payload_bytes": payload_bytes,
        "num_parts": site.post_parts,
        "part_lines": Hole("part_lines"),
        "timeout_us": site.timeout_us,
        "traffic": site.traffic(operator),
    }


def ends(
    site: Site, layout: BlocksLayout, operator: Operator, zone: int, call: int, row_step: int
) -> list[Launch]:
    """Step 2, where no block is posted: FLAG2 of each. Who posts blocks ends them as well.

    Args:
        site, layout, operator, zone, call, row_step: as in `in_blocks`.
    """
    if site.scheme.queued_peers:
        return []
    end = launch(
        "flag",
        BLOCKS_END,
        "communication",
        site.num_blocks,
        rows_to=Hole("rows_to"),
        **of_peers(site, layout),
        **in_blocks(site, layout, operator, zone, call, row_step),
        report=Hole("report"),
    )
    return [end]


def wait(
    site: Site,
    layout: BlocksLayout,
    operator: Operator,
    zone: int,
    call: int,
    row_step: int,
    *,
    is_timed: bool,
    **counts: Value,
) -> Launch:
    """Step 3: until every rank's block is there.

    Args:
        site, layout, operator, zone, call, row_step: as in `in_blocks`.
        is_timed: whether it says how long each rank was waited for.
        counts: what a header counts, where that goes, and what it must be: arguments of the kernel.
    """
    return launch(
        "wait",
        BLOCKS_WAIT,
        "communication",
        site.num_blocks,
        window=Hole("window"),
        waited_us=Hole("waited") if is_timed else 0,
        num_ranks=site.config.num_ranks,
        timeout_us=site.timeout_us,
        kept_zone=site.keeping_zone(operator),
        **in_blocks(site, layout, operator, zone, call, row_step),
        **counts,
        report=Hole("report"),
    )
