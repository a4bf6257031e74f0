"""What is published of the bytes of a window (docs/limits.md, "Window memory: HCCL_BUFFSIZE")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moe_triton.core.config import Config
from moe_triton.limits.rule import EITHER, Generations

ITEM_BYTES = 2  # bf16 and fp16


@dataclass(frozen=True)
class Formula:
    """Bytes that one scheme needs.

    Attributes:
        title: of which scheme.
        text: the formula, for the documentation.
        needed: the same as a function.
        generations: of the published limits that have it. Where none is chosen, the smallest result counts.
    """

    title: str
    text: str
    needed: Callable[[Config], int]
    generations: Generations = EITHER
