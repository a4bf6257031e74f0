"""How many ranks groups and servers have, for who asks about that before there is torch."""

from __future__ import annotations

from collections.abc import Sequence

RANKS_PER_SERVER = "ranks_per_server"
MAX_RANKS = 1024  # more than any product's group has
RanksPerServer = int | Sequence[int] | None
REMEDY = (
    "Servers are ranges of consecutive ranks: pass how many ranks a server has, as 8, or a list of how many "
    "each of them has, as [3, 1]."
)
