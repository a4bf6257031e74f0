"""`Candidate`: one way to set up the ranks of a group, and `Sizes`, the group."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from moe_triton import Tuning
from moe_triton.backends import CAPABILITIES
from moe_triton.core.config import Config, Product
from moe_triton.core.space import Settings, text_of
from moe_triton.core.tuning import fields_of
from moe_triton.schemes import SCHEMES, make_scheme, scheme_type
from moe_triton.schemes.rank_context import RankContext
from moe_triton.schemes.scheme import Output
from moe_triton.tables import FOLDER
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
        product: whose schemes it has.
    """

    ranks: int = 2
    tokens: int = 64
    hidden: int = 7168
    topk: int = 8
    experts: int = 64
    product: Product = "A3"

    def config(self, scheme: str) -> Config:
        """The configuration of a buffer of this group with a scheme."""
        sizes = self.ranks, self.tokens, self.hidden, self.topk, self.experts
        return Config(*sizes, product=self.product, scheme=scheme, relaxed=True)

    @property
    def schemes(self) -> list[str]:
        """The product's, its own one first; one between super nodes where there are several machines."""
        return [scheme for scheme in SCHEMES[self.product] if self._is_for(self.config(scheme))]

    @staticmethod
    def _is_for(config: Config) -> bool:
        return not scheme_type(config).compares_super_nodes or config.topology.num_servers > 1

    @property
    def alike(self) -> list[str]:
        """Those of `schemes` that give the same bits, so that one may stand for another."""
        return [scheme for scheme in self.schemes if scheme_type(self.config(scheme)).sums_alike]

    def lies_in_window(self, scheme: str, output: Output) -> bool:
        """Whether a scheme has a place for rows or results in the window."""
        made = make_scheme(RankContext(self.config(scheme), 0, 1, 1, CAPABILITIES["cpu"]))
        return made.place(output, torch.bfloat16.itemsize) is not None

    def __str__(self) -> str:
        return f"H {self.hidden}, K {self.topk}, EP {self.ranks}, BS {self.tokens}"


@dataclass(frozen=True)
class Candidate:
    """A scheme, and settings that are not the defaults.

    Attributes:
        scheme: its name.
        settings: by the names of `Tuning`'s fields, and "num_blocks"; see `Space.usual`.
    """

    scheme: str
    settings: Settings = field(default_factory=dict)

    @property
    def tuning(self) -> Tuning:
        """Its settings. What a user has found before is none of them."""
        numbers = {name: value for name, value in self.settings.items() if name != BLOCKS}
        return Tuning(**fields_of(numbers), tables=FOLDER)

    @property
    def num_blocks(self) -> int | None:
        """Blocks per kernel; None for the machine's own."""
        return self.settings.get(BLOCKS)

    def __str__(self) -> str:
        return f"{self.scheme} {text_of(self.settings)}"
