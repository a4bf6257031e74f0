"""What commands are asked about: sizes at most, and which ranks share a server."""

from __future__ import annotations

from moe_triton.core.errors import ArgumentError
from moe_triton.core.group_sizes import RANKS_PER_SERVER, REMEDY, RanksPerServer

MOST_TOKENS, MOST_EXPERTS, MOST_HIDDEN = 1 << 16, 1 << 14, 1 << 20
"""A group's routing is held in memory."""


SERVERS_HELP = "as 8, or 3,1 with one number for each; if not given, what the product's servers have"


def servers_of(text: str) -> RanksPerServer:
    """How many ranks a server has, or each of them; None for what the product's have.

    Raises:
        ArgumentError: it is neither a number nor several with commas between.
    """
    if not text:
        return None
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        rule = "it must be a number, or one for each server with commas between"
        raise ArgumentError(RANKS_PER_SERVER, repr(text), rule, REMEDY) from None
    return numbers if len(numbers) > 1 else numbers[0]
