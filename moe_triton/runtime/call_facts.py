"""What a back end's faster way for whole calls (`moe_triton.backends.base.Calls`) needs to know of a rank."""

from __future__ import annotations

import torch

from moe_triton.backends.base import WholeCall
from moe_triton.layout import NUM_ZONES, TRAILER_WORDS
from moe_triton.schemes.direct.layout import DirectLayout
from moe_triton.schemes.site import Site
from moe_triton.schemes.variants import DispatchVariant, Variant


def facts_of(site: Site, buffer_id: int, window_base: int) -> dict[str, int]:
    """The numbers that hold for every call of a buffer.

    Args:
        site: where its plans run; of the newest rules.
        buffer_id: which buffer it is.
        window_base: address of this rank's window.
    """
    assert not site.is_version_1  # the zones of its operators turn together
    config, layout = site.config, site.layout
    results = [0] * NUM_ZONES
    results_bytes = 0
    if isinstance(layout, DirectLayout):
        results = [window_base + layout.results.offset(zone=zone) for zone in range(NUM_ZONES)]
        results_bytes = site.capacity * layout.results.stride("index")
    return {
        "buffer_id": buffer_id,
        "hidden": config.hidden,
        "topk": config.num_topk,
        "num_experts": config.num_experts,
        "num_smooth": config.num_shared_experts + config.num_experts,
        "max_tokens": config.num_max_tokens_per_rank,
        "capacity": site.capacity,
        "num_local_experts": site.num_local_experts,
        "num_offsets": site.num_entries,
        "num_triples": 3 * site.capacity + TRAILER_WORDS,
        "dispatch_tokens": site.tuning.dispatch_tokens,
        "combine_tokens": site.tuning.combine_tokens,
        "window_base": window_base,
        "results_zone_0": results[0],
        "results_zone_1": results[1],
        "results_bytes": results_bytes,
    }


def whole_call(variant: Variant, zone: int, parts: int, tokens: torch.Tensor | None) -> WholeCall:
    """Which calls a plan is for.

    Args:
        variant: what it is specialised for: nothing that only torch_npu's functions have.
        zone: what it is built for.
        parts: what it is cut into.
        tokens: direct: where a dispatch's rows arrive.
    """
    if isinstance(variant, DispatchVariant):
        operator, quantize, smooth, in_place = "dispatch", variant.quantize, variant.smooth, False
    else:
        operator, quantize, smooth, in_place = "combine", False, False, variant.in_place
    return WholeCall(
        operator, variant.dtype, quantize, smooth, variant.weights, in_place, zone, parts, tokens
    )
