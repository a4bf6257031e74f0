"""Sizes of the model whose tokens benchmarks send, if they are not what varies."""

from __future__ import annotations

from typing import Any

HIDDEN, TOPK, EXPERTS = 7168, 8, 64
SIZES: dict[str, Any] = {"hidden": HIDDEN, "num_topk": TOPK, "num_experts": EXPERTS}
"""As `EPBuffer` takes them."""
