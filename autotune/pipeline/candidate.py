"""`Candidate`: one way to set up the ranks of a group, and `Sizes`, the group."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from moe_triton import Tuning
from moe_triton.core.config import Config
from moe_triton.core.space import Settings, text_of
from moe_triton.tables.pipelines import BLOCKS


@dataclass(frozen=True)
class Sizes:
    """A group. Every rank brings as many tokens as it may.

    Attributes:
        ranks: EP.
        tokens: T, of each rank.
        hidden: H.
        topk: K.
        experts: M.
    """

    ranks: int = 2
    tokens: int = 64
    hidden: int = 7168
    topk: int = 8
    experts: int = 64

    def config(self, scheme: str) -> Config:
        """Of a buffer of this group."""
        sizes = self.ranks, self.tokens, self.hidden, self.topk, self.experts
        return Config(*sizes, scheme=scheme, relaxed=True)

    def __str__(self) -> str:
        return f"H {self.hidden}, K {self.topk}, EP {self.ranks}, BS {self.tokens}"


@dataclass(frozen=True)
class Candidate:
    """A scheme, and settings that are not the defaults.

    Attributes:
        scheme: its name.
        settings: by the names of `Tuning`'s fields, and "num_blocks".
    """

    scheme: str
    settings: Settings = field(default_factory=dict)

    def with_(self, **settings: int) -> Candidate:
        """The same with other settings."""
        return replace(self, settings={**self.settings, **settings})

    def options(self) -> dict[str, Any]:
        """Of `EPBuffer`."""
        tuning: dict[str, Any] = {name: value for name, value in self.settings.items() if name != BLOCKS}
        return {
            "comm_alg": self.scheme,
            "num_blocks": self.settings.get(BLOCKS),
            "tuning": Tuning(**tuning),
        }

    def __str__(self) -> str:
        return f"{self.scheme} {text_of(self.settings)}"
