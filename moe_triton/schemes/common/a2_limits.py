"""What limits of A2's schemes have in common.

The limits of v4 widen those of the V2 operators (pages of aclnnMoeDistributeDispatchV4 and its combine); V1's
page keeps its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from moe_triton.core.config import Config, usual_ranks_per_server
from moe_triton.core.group_sizes import RANKS_PER_SERVER
from moe_triton.limits.common import HIDDEN_STEP, MAX_EXPERTS_OF_BUFFER
from moe_triton.limits.rule import EITHER, NONE_CHOSEN, ConfigRule, Generations, Rule, between, one_of

CARDS = usual_ranks_per_server("A2")
GROUP_REMEDY = "Use one of these group sizes, or relaxed=True for tests."


class Sizes(NamedTuple):
    """What a page says that a scheme takes: group sizes, and the most of the others."""

    ranks: tuple[int, ...]
    tokens: int
    hidden: int
    experts: int


def ranks(sizes: Sizes, generations: Generations) -> ConfigRule:
    """Group sizes as a page lists them."""
    rule: ConfigRule = one_of("num_ranks", sizes.ranks, GROUP_REMEDY, relaxed_low=2)
    return rule.of(generations)


def ranks_of_host_checks(least: int, most: int) -> ConfigRule:
    """Group sizes as the operators' published host code checks them: pages list only some of these.

    Args:
        least: the fewest ranks: below those of a server any number will do.
        most: the most ranks.
    """
    one_server = f"{least} to {CARDS}, or " if least <= CARDS else ""
    limit = f"{one_server}a multiple of {CARDS} from {max(least, 2 * CARDS)} to {most}"

    relaxed_low = min(least, 2)

    def holds(c: Config) -> bool:
        if c.has_any_servers:
            return relaxed_low <= c.num_ranks <= most
        return least <= c.num_ranks <= most and (c.num_ranks <= CARDS or c.num_ranks % CARDS == 0)

    return Rule(
        "num_ranks",
        limit,
        holds,
        lambda c: f"{c.product} takes {f'{relaxed_low} to {most}' if c.has_any_servers else limit} here",
        GROUP_REMEDY,
        relaxed=f"{relaxed_low} to {most}",
        generations=NONE_CHOSEN,
    )


def most_of(sizes: Sizes, generations: Generations = EITHER) -> tuple[ConfigRule, ...]:
    """The most of the other sizes as a page has them."""
    rules = (
        between("num_max_tokens_per_rank", 1, sizes.tokens, "Split larger batches into several dispatches."),
        between("hidden", HIDDEN_STEP, sizes.hidden, "Use a smaller hidden dimension.", buffer_low=1),
        between(
            "num_experts", 1, sizes.experts, "Use fewer routed experts.", buffer_high=MAX_EXPERTS_OF_BUFFER
        ),
    )
    return tuple(rule.of(generations) for rule in rules)


servers = Rule[[Config]](
    RANKS_PER_SERVER,
    f"{CARDS}; all ranks of a group of no more",
    lambda c: c.has_any_servers or c.topology == replace(c, ranks_per_server=None).topology,
    f"a server of A2 has {CARDS} cards",
    "Pass None, or relaxed=True for tests.",
    relaxed="any",
)
