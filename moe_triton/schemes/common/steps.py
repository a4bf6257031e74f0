"""Steps of one rank by itself, before its rows leave and after its counts have come."""

from __future__ import annotations

from moe_triton.core.plan import Hole, Launch, Value, launch
from moe_triton.kernels.pack import pack_kernel
from moe_triton.kernels.route import offsets_kernel, route_kernel
from moe_triton.kernels.select import select_kernel
from moe_triton.kernels.share import share_kernel
from moe_triton.layout import WORD_BYTES, SlotLayout
from moe_triton.operators.variants import DispatchVariant, Mask, Variant
from moe_triton.schemes.site import Site, launch_matching, tokens_of


def slot_of(site: Site, variant: DispatchVariant) -> SlotLayout:
    """How a slot of this variant is packed."""
    return SlotLayout.of(site.config.hidden, variant.row_format, variant.dtype)


def ids_of(variant: Variant) -> Hole:
    """The expert ids that count: those that a mask leaves, where there is one."""
    return Hole("topk_idx" if variant.mask == "none" else "masked_ids")


def packed_of(variant: DispatchVariant) -> Hole:
    """Where `pack` leaves rows: one for each token, or with smooth scales one for each result."""
    return Hole("packed_results" if variant.smooth else "packed")


def true_offsets(site: Site) -> Hole:
    """Where the blocks of received rows end, whatever is reported of them."""
    return Hole("true_offsets" if site.keeps_own_tokens else "recv_offsets")


def rows_to_send(site: Site, variant: DispatchVariant, part: int = 0, parts: int = 1) -> dict[str, Value]:
    """Of a kernel that sends rows: which rows, of which tokens, for which experts."""
    first_token, num_tokens = tokens_of(part, parts)
    c, slot = site.config, slot_of(site, variant)
    shared = c.num_shared_experts > 0
    return {
        "rows": packed_of(variant) if variant.row_format.is_quantized else Hole("x"),
        "row_stride": slot.packed_bytes if variant.row_format.is_quantized else slot.row_bytes,
        "rows_per_token": c.num_results_per_token if variant.smooth else 1,
        "topk_idx": ids_of(variant),
        "topk_weights": Hole("topk_weights") if variant.weights else 0,
        "shared_ranks": Hole("shared_ranks") if shared else 0,
        "shared_slots": Hole("shared_slots") if shared else 0,
        "peers": Hole("peers"),
        "first_token": first_token,
        "num_tokens": num_tokens,
        "topk": c.num_topk,
        "num_experts": c.num_experts,
        "num_shared_experts": c.num_shared_experts,
        "num_shared_ranks": c.num_shared_ranks,
        "rank": site.rank,
        "report": Hole("report"),
    }


def select(site: Site, mask: Mask) -> Launch:
    """What an active mask leaves of the routing; dispatch and combine each ask."""
    return launch(
        "select",
        select_kernel(site.config.num_topk, mask == "entries", site.target),
        "compute",
        1,
        expert_ids=Hole("topk_idx"),
        mask=Hole("mask"),
        topk_idx=Hole("masked_ids"),
        active=Hole("active"),
        num_active=Hole("num_active"),
        num_tokens=Hole("num_tokens"),
    )


def share(site: Site, variant: DispatchVariant) -> Launch:
    """Which rank of shared experts each token goes to."""
    c = site.config
    return launch_matching(
        "share",
        share_kernel(site.is_version_1, variant.mask != "none", site.target),
        "compute",
        1,
        {
            "active": Hole("active"),
            "shared_ranks": Hole("shared_ranks"),
            "shared_slots": Hole("shared_slots"),
            "shared_counts": Hole("shared_counts"),
            "num_tokens": Hole("num_tokens"),
            "num_shared_experts": c.num_shared_experts,
            "num_shared_ranks": c.num_shared_ranks,
            "rank": site.rank,
        },
    )


def route(site: Site, variant: DispatchVariant) -> Launch:
    """Numbers the results of each expert, and counts them."""
    return launch(
        "route",
        route_kernel(site.target),
        "compute",
        1,
        topk_idx=ids_of(variant),
        expand_idx=Hole("expand_idx"),
        counts=Hole("counts"),
        num_entries=Hole("num_ids"),
        num_experts=site.config.num_experts,
    )


def pack(
    site: Site, variant: DispatchVariant, scales: Hole | None = None, part: int = 0, parts: int = 1
) -> Launch:
    """Quantises rows; their scales go to ``scales`` one after the other, or behind each row."""
    first_token, num_tokens = tokens_of(part, parts)
    c, slot, packed = site.config, slot_of(site, variant), packed_of(variant)
    shared, block = c.num_shared_experts if variant.smooth else 0, variant.row_format.block or 0
    return launch_matching(
        "pack",
        pack_kernel(variant.dtype, c.hidden, c.num_topk, variant.smooth, site.target, shared, block),
        "compute",
        site.blocks("compute", parts),
        {
            "x": Hole("x"),
            "topk_idx": ids_of(variant),
            "smooth_scales": Hole("smooth_scales"),
            "scale_row_offset": c.num_shared_experts,
            "num_scale_rows": c.num_shared_experts + c.num_experts,
            "rows": packed,
            "scales": scales or Hole(packed.name, slot.scale_offset),
            "first_token": first_token,
            "num_tokens": num_tokens,
            "row_stride": slot.packed_bytes,
            "scale_stride": 1 if scales else slot.packed_bytes // WORD_BYTES,
        },
    )


def offsets(site: Site, variant: DispatchVariant) -> Launch:
    """Where each block of received rows ends."""
    return launch_matching(
        "offsets",
        offsets_kernel(site.target, variant.cumulative, variant.recv_stats),
        "compute",
        1,
        {
            "recv_counts": Hole("recv_counts"),
            "recv_offsets": true_offsets(site),
            "tokens_per_expert": Hole("tokens_per_expert"),
            "recv_stats": Hole("recv_stats"),
            "trailer": Hole("origins", 3 * WORD_BYTES * site.capacity),
            "num_entries": site.num_entries,
            "num_local_experts": site.num_local_experts,
            "max_count": site.config.num_max_tokens_per_rank,
            "capacity": site.capacity,
        },
    )
