"""How many tokens a part has, and who says so: the caller, a table of settings, or the back end's default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from moe_triton.core.capabilities import Capabilities
from moe_triton.core.config import Config
from moe_triton.core.tuning import Tuning

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


def part_tokens(
    operator: str,
    config: Config,
    capabilities: Capabilities,
    tuning: Tuning,
    sources: Mapping[str, str],
) -> PartTokens:
    """The size of an operator's parts, one for all calls: combine by readiness needs it to be on all ranks.

    Where a launch costs microseconds, parts only add launches unless cores of their own communicate
    meanwhile, and by the model even then: one part is fastest at all sizes (``moe-triton model parts``).

    Args:
        operator: "dispatch" or "combine".
        config: the group's settings.
        capabilities: of the back end.
        tuning: what the caller set, or a table.
        sources: where its settings come from, those of the caller aside.
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
    return PartTokens(whole, "one part, unless set: the fastest by the model")
