"""Sizes of a prefill, and what is asked of it."""

from __future__ import annotations

from typing import Any

from benchmarks.compare.figures import Target
from benchmarks.sizes import EXPERTS, TOPK

HIDDEN = 2048
TOKENS, ROUND_TOKENS = 4096, 512
"""T, and B."""


def sizes(round_tokens: int, hidden: int) -> dict[str, Any]:
    """As `EPBuffer` takes them."""
    return {
        "num_max_tokens_per_rank": round_tokens,
        "hidden": hidden,
        "num_topk": TOPK,
        "num_experts": EXPERTS,
    }


WITHOUT_LINK, OVER_LINK = Target(0.98), Target(1.10)
"""Rounds by hand over one call: without a link, and where the link takes as long as arranging."""
VS_GLOO, VS_MPI, OF_MEMCPY = Target(5.0), Target(2.0), Target(0.8)
