"""How many tokens a part has, and who says so: the caller, the back end's default, or the table of parts.

The table, ``parts.json``, has the number of parts that the model finds fastest where cores of an NPU are set
aside for communication, half of them. An operator that no row is of cannot be cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from moe_triton.core.capabilities import Capabilities
from moe_triton.core.config import Config
from moe_triton.core.tables import Table, damaged, read_table
from moe_triton.core.tuning import Tuning

TABLE = Path(__file__).with_name("parts.json")
COMMAND = "moe-triton model parts --write"
KEYS, SIZES, VALUES = ("product", "scheme", "operator"), ("hidden", "ranks", "tokens"), ("parts",)
USUAL_TOKENS = 64
"""Tokens of a part where launches are cheap, unless set."""


class PartTokens(NamedTuple):
    """The size of an operator's parts.

    Attributes:
        tokens: of a part, at most.
        source: who says so.
    """

    tokens: int
    source: str


def kept() -> Table:
    """The table of parts.

    Raises:
        ArgumentError: it is missing or damaged.
    """
    table = read_table(TABLE, COMMAND)
    if (table.keys, table.sizes, table.values) != (KEYS, SIZES, VALUES):
        raise damaged(TABLE, COMMAND, f"its columns must be {', '.join((*KEYS, *SIZES, *VALUES))}")
    return table


def part_tokens(
    operator: str,
    config: Config,
    capabilities: Capabilities,
    tuning: Tuning,
    sources: Mapping[str, str],
) -> PartTokens:
    """The size of an operator's parts.

    Where a launch costs microseconds: without cores of its own for communication nothing overlaps, and parts
    would only add launches. With them, a call of as many tokens as there may be is cut into as many parts as
    the nearest row of the table says; it is one size for all calls, because combine by readiness needs it to
    be the same on all ranks.

    Args:
        operator: "dispatch" or "combine".
        config: the group's settings.
        capabilities: of the back end.
        tuning: what the caller set, or a table.
        sources: where its settings come from, those of the caller aside.

    Raises:
        ArgumentError: the table of parts is damaged.
    """
    whole = config.num_max_tokens_per_rank
    if not capabilities.launches_cheaply and not tuning.communication_blocks:
        return PartTokens(whole, "without communication_blocks nothing overlaps")
    given = tuning.dispatch_tokens if operator == "dispatch" else tuning.combine_tokens
    if given is not None:
        name = f"{operator}_tokens"
        return PartTokens(given, sources.get(name, f"Tuning({name}={given})"))
    if capabilities.launches_cheaply:
        return PartTokens(USUAL_TOKENS, f"{USUAL_TOKENS} tokens a part, unless set")
    table = kept()
    sizes = config.hidden, config.num_ranks, whole
    row = table.nearest((config.product, config.scheme, operator), sizes)
    if row is None:
        return PartTokens(whole, f"table {table.name} has no row: it cannot be cut")
    return PartTokens(-(-whole // int(row.values[0])), f"{table.said(row)} ({table.source})")
