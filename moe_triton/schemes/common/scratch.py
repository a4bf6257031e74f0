"""Memory that plans keep between their launches, and what several schemes keep there."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_triton.core import traffic
from moe_triton.core.records import TRAFFIC
from moe_triton.core.row_formats import QUANTIZED
from moe_triton.layout import NUM_ZONES, SlotLayout
from moe_triton.schemes.site import COUNTED, Site

I32 = torch.int32


class Scratch(NamedTuple):
    """Memory of one hole.

    Attributes:
        elements: how many.
        dtype: of each.
        is_zeroed: whether they are zero at first.
    """

    elements: int
    dtype: torch.dtype = I32
    is_zeroed: bool = False


def shared_scratch(site: Site) -> dict[str, Scratch]:
    """What more than one scheme keeps, by the name of its hole: most of it in `schemes.common`'s steps."""
    c = site.config
    tokens, results = c.num_max_tokens_per_rank, c.num_results_per_token
    packed = max(SlotLayout.of(c.hidden, r, torch.bfloat16).packed_bytes for r in QUANTIZED.values())
    counters = len(COUNTED) * site.num_blocks * TRAFFIC.num_words
    return {
        "counts": Scratch(c.num_experts),
        "recv_counts": Scratch(site.num_entries),
        "all_counts": Scratch(site.num_entries),
        "row_slots": Scratch(site.capacity),
        "true_offsets": Scratch(site.num_entries),
        "barrier_counts": Scratch(c.num_ranks),
        "reduced_counts": Scratch(2),
        "packed": Scratch(tokens * packed, torch.uint8),
        "packed_results": Scratch(tokens * results * packed, torch.uint8),
        "masked_ids": Scratch(tokens * c.num_topk),
        "active": Scratch(tokens),
        "num_active": Scratch(1),
        "shared_ranks": Scratch(tokens * c.num_shared_experts),
        "shared_slots": Scratch(tokens),
        "shared_counts": Scratch(c.num_shared_ranks),
        "waited": Scratch(max(site.num_entries, tokens * results)),
        "reduced_rows": Scratch(site.capacity * c.hidden, torch.int16),
        "sums": Scratch(tokens * c.hidden, torch.float32),
        "result_offsets": Scratch(tokens * results, torch.int64),
        "round_numbers": Scratch(NUM_ZONES * len(COUNTED), is_zeroed=True),
        traffic.HOLE: Scratch(counters, torch.int64, is_zeroed=True),
    }
