"""What a rank of fullmesh posts to ranks of other servers, which only queues reach.

The kernels that send write what is for such a rank into the out part of their own window. When all blocks
have, one core for each queue posts it: of a dispatch all rows for an expert in one message, then the rank's
entries in another; of a combine each row, and then its flag. Receivers look at flags as ever.
"""

from __future__ import annotations

from moe_triton.core.plan import Hole, Launch, Value, launch
from moe_triton.layout import STAMP_BYTES, SlotLayout
from moe_triton.layout.call_word import call_word
from moe_triton.operators.variants import CombineVariant, DispatchVariant
from moe_triton.schemes.common.flags import posting
from moe_triton.schemes.fullmesh.ascendc import COMBINE_POST, DISPATCH_POST
from moe_triton.schemes.fullmesh.layout import WindowLayout
from moe_triton.schemes.site import COMBINE_KIND, Site, launch_matching


def dispatch_post(
    site: Site, layout: WindowLayout, slot: SlotLayout, variant: DispatchVariant, zone: int
) -> Launch:
    """Rows and entries of a dispatch, to queued peers."""
    return launch(
        "post",
        DISPATCH_POST,
        "communication",
        site.num_blocks,
        counts=Hole("counts"),
        shared_counts=Hole("shared_counts") if site.config.num_shared_experts else 0,
        peers=Hole("peers"),
        num_shared_ranks=site.config.num_shared_ranks,
        rank=site.rank,
        **site.zone_of("dispatch", zone),
        row_bytes=slot.row_bytes,
        slot_bytes=slot.stamp_offset + STAMP_BYTES,
        call=call_word("dispatch", variant.kind),
        combine_kind=COMBINE_KIND,
        **posting(site, "dispatch"),
        slots=layout.dispatch_slots.words(),
        status=layout.dispatch_status.words(),
        report=Hole("report"),
    )


def combine_post(site: Site, layout: WindowLayout, send: Launch, variant: CombineVariant) -> Launch:
    """What a launch of combine_send leaves for queued peers."""
    sent = {arg.name: value for arg, value in zip(send.kernel.args, send.values, strict=True)}
    itemsize = 1 if variant.block_quantize else variant.dtype.itemsize
    own: dict[str, Value] = {
        "payload_bytes": site.config.hidden * itemsize,
        **posting(site, "combine"),
        "out_flags": layout.out_flags.words(),
    }
    return launch_matching("post", COMBINE_POST, "communication", site.num_blocks, sent | own)
