"""Steps of one rank by itself, before its rows leave and after its counts have come."""

from __future__ import annotations

import torch

from moe_triton.core.plan import Hole, Launch, Value, launch
from moe_triton.core.region import REGION_DIMS, Region
from moe_triton.kernels.pack import pack_kernel
from moe_triton.kernels.rms_norm import rms_norm_kernel
from moe_triton.kernels.route import route_kernel
from moe_triton.kernels.route_pack import route_pack_kernel
from moe_triton.kernels.select import select_kernel
from moe_triton.kernels.share import share_kernel
from moe_triton.kernels.waits import waits_of_dispatch_kernel
from moe_triton.layout import ORIGIN, UB_ALIGN, WORD_BYTES, SlotLayout
from moe_triton.operators.variants import CombineVariant, DispatchVariant, Variant
from moe_triton.schemes.common.ascendc import DISPATCH_OFFSETS
from moe_triton.schemes.site import Site, launch_matching, tokens_of

NO_SLOTS = (0,) * (1 + 2 * len(REGION_DIMS["dispatch_slots"]))


def slot_of(site: Site, variant: DispatchVariant, *, is_flagged: bool = False) -> SlotLayout:
    """How a slot of this variant is packed."""
    layout, hidden = site.scheme.slot_layout, site.config.hidden
    return layout.of(hidden, variant.row_format, variant.dtype, is_flagged=is_flagged)


def blocks_of_words(site: Site) -> int:
    """Blocks of a kernel of few words (ids, counts): one where another thread takes too long to start."""
    return site.num_blocks if site.capabilities.owns_cores else 1


def _given_ids(variant: Variant) -> torch.dtype | None:
    return variant.given_ids if isinstance(variant, DispatchVariant) else None


def ids_of(variant: Variant) -> Hole:
    """The expert ids that count: those that a mask leaves, where there is one.

    A copy of the caller's holds no others: what combine does with it is the same.
    """
    return Hole("topk_idx" if variant.mask == "none" or _given_ids(variant) else "masked_ids")


def packed_of(variant: DispatchVariant) -> Hole:
    """Where `pack` leaves rows: one for each token, or with smooth scales one for each result."""
    return Hole("packed_results" if variant.smooth else "packed")


def true_offsets(site: Site) -> Hole:
    """Where the blocks of received rows end, whatever is reported of them."""
    return Hole("true_offsets" if site.keeps_own_tokens else "recv_offsets")


def rows_to_send(site: Site, variant: DispatchVariant, part: int = 0, parts: int = 1) -> dict[str, Value]:
    """Arguments that tell a kernel which rows to send, of which tokens, and for which experts."""
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


def select(site: Site, variant: Variant) -> Launch:
    """What an active mask leaves of the routing; dispatch and combine each ask."""
    given, per_entry = _given_ids(variant), variant.mask == "entries"
    return launch(
        "select",
        select_kernel(site.config.num_topk, per_entry, site.target, given == torch.int64),
        "compute",
        1,
        expert_ids=Hole("given_ids" if given else "topk_idx"),
        mask=Hole("mask"),
        topk_idx=ids_of(variant),
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
        blocks_of_words(site),
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
    kernel = route_kernel(site.target, **_taking(variant))
    return launch_matching("route", kernel, "compute", blocks_of_words(site), _routing(site, variant))


def _taking(variant: DispatchVariant) -> dict[str, bool]:
    """Whether the kernel that routes copies the ids: with a mask, `select` has. And what of."""
    given = variant.given_ids if variant.mask == "none" else None
    return {"takes": given is not None, "int64": given == torch.int64}


def _routing(site: Site, variant: DispatchVariant) -> dict[str, Value]:
    return {
        "given": Hole("given_ids"),
        "topk_idx": ids_of(variant),
        "expand_idx": Hole("expand_idx"),
        "counts": Hole("counts"),
        "num_entries": Hole("num_ids"),
        "num_experts": site.config.num_experts,
    }


def pack(
    site: Site, variant: DispatchVariant, scales: Hole | None = None, part: int = 0, parts: int = 1
) -> Launch:
    """Quantises rows; their scales go to ``scales`` one after the other, or behind each row."""
    c = site.config
    shared, block = _shared_and_block(site, variant)
    kernel = pack_kernel(variant.dtype, c.hidden, c.num_topk, variant.smooth, site.target, shared, block)
    values = _packing(site, variant, scales, part, parts)
    return launch_matching("pack", kernel, "compute", site.blocks("compute", parts), values)


def route_pack(site: Site, variant: DispatchVariant, scales: Hole | None = None, parts: int = 1) -> Launch:
    """`route`, and `pack` of the first part: neither reads what the other writes."""
    c = site.config
    shared, block = _shared_and_block(site, variant)
    rows = c.num_topk, variant.smooth, site.target, shared, block
    kernel = route_pack_kernel(variant.dtype, c.hidden, *rows, **_taking(variant))
    values = _packing(site, variant, scales, 0, parts) | _routing(site, variant)
    return launch_matching("route + pack", kernel, "compute", site.num_blocks, values)


def _shared_and_block(site: Site, variant: DispatchVariant) -> tuple[int, int]:
    """Shared experts that have rows of their own, and elements that share a scale; 0 for all of a row's."""
    return site.config.num_shared_experts if variant.smooth else 0, variant.row_format.block or 0


def _packing(
    site: Site, variant: DispatchVariant, scales: Hole | None, part: int, parts: int
) -> dict[str, Value]:
    first_token, num_tokens = tokens_of(part, parts)
    c, slot, packed = site.config, slot_of(site, variant), packed_of(variant)
    return {
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
    }


def last_offset(site: Site) -> Hole:
    """Where the number of received rows stands."""
    return Hole(true_offsets(site).name, WORD_BYTES * (site.num_entries - 1))


def offsets(
    site: Site,
    variant: DispatchVariant,
    zone: int,
    slots: Region | None,
    *,
    sees_all: bool,
    by_source: bool = False,
) -> Launch:
    """Where each block of received rows ends, and, given the region of slots, in which slot each row is.

    With ``sees_all`` it follows a wait whose every block has seen all counts; otherwise one in which each has
    seen its share, and all have ended it. With ``by_source`` rows of a source lie one after the other, in
    slots that the region has as those of one expert.
    """
    c = site.config
    return launch(
        "offsets",
        DISPATCH_OFFSETS,
        "communication",
        site.num_blocks,
        recv_counts=Hole("all_counts" if sees_all else "recv_counts"),
        recv_offsets=true_offsets(site),
        tokens_per_expert=Hole("tokens_per_expert"),
        recv_stats=Hole("recv_stats") if variant.recv_stats else 0,
        trailer=Hole("origins", ORIGIN.num_bytes * site.capacity),
        row_slots=Hole("row_slots") if slots else 0,
        num_local_experts=site.num_local_experts,
        num_ranks=c.num_ranks,
        max_count=c.num_max_tokens_per_rank,
        capacity=site.capacity,
        cumulative=int(variant.cumulative),
        **site.zone_of("dispatch", zone),
        kept_rank=site.rank if variant.keeps_own else -1,
        by_source=int(by_source),
        slots=slots.in_units(UB_ALIGN).words() if slots else NO_SLOTS,
        report=Hole("report"),
    )


def record_waits(site: Site, num_local_experts: int) -> Launch:
    """How long each rank was waited for, of so many entries each."""
    return launch_matching(
        "record waits",
        waits_of_dispatch_kernel(site.target),
        "compute",
        blocks_of_words(site),
        {
            "waited": Hole("waited"),
            "table": Hole("rank_table"),
            "performance_info": Hole("performance_info"),
            "num_local_experts": num_local_experts,
            "num_ranks": site.config.num_ranks,
            "num_table": Hole("num_performance_entries"),
        },
    )


def rms_norm(site: Site, variant: CombineVariant) -> Launch:
    """Adds the residual to the sums, and normalises them."""
    return launch_matching(
        "norm",
        rms_norm_kernel(
            site.config.hidden, site.target, masked=variant.mask != "none", turns=site.zones_on_device
        ),
        "compute",
        site.num_blocks,
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
            "zone": site.kept_zone("combine"),
            "turned": site.zone_cell("combine"),
        },
    )
