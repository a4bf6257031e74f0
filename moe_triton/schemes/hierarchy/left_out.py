"""Masked ranks whose results a relay's sums are without: when that is decided, and how it is said.

A relay sums the results of its server's ranks for ranks of other servers, and in pieces. What has come of a
rank that is masked meanwhile is in some of them and not in others. So it is decided once for each piece,
where its wait for results has ended: sums of a piece all have a rank's results, or none has. Those that they
go to hear which in the end flag (`moe_triton.core.records.RAIL_END`), and mark what they did not get.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from moe_triton.core.config import Config
from moe_triton.core.plan import Phases
from moe_triton.schemes.common.waits import arguments_of
from moe_triton.schemes.hierarchy.ascendc import SERVER_RETURN

RETURN, WAIT_RETURNED = "return", "wait for returned"
"""Steps of a combine that have the places of a piece, and that decide whose results are in it."""


def open_places(num_servers: int, ran: Sequence[Phases]) -> list[int]:
    """Places of the servers for which it is not decided yet whose results are summed.

    A wait that has just run may have gone on without a rank: its piece is still open.

    Args:
        num_servers: of the group.
        ran: launches of a combine that have run, before which, or in the last of which, ranks were masked.
    """
    decided: set[int] = set()
    returned = range(0)
    for phases in ran[:-1]:
        for launch in phases:
            if launch.kernel.name == SERVER_RETURN.name:
                values = arguments_of(launch)
                first = values["first_place"]
                returned = range(first, first + values["num_places"])
            elif launch.step == WAIT_RETURNED:
                decided |= set(returned)
    return [place for place in range(num_servers) if place not in decided]


def word_of(config: Config, rank: int, is_masked: Callable[[int], bool]) -> int:
    """What an end flag of a rank says of its server, as int32.

    Args:
        config: of the group.
        rank: the relay.
        is_masked: of a rank.
    """
    neighbours = config.topology.neighbours(rank)
    word = sum(1 << number for number, each in enumerate(neighbours) if is_masked(each))
    return word - (1 << 32) if word >> 31 else word


def ranks_of(config: Config, words: Collection[int]) -> Iterator[int]:
    """The ranks that end flags say sums are without.

    Args:
        config: of the group.
        words: what those of each server say, by server.
    """
    for server, word in enumerate(words):
        for number, rank in enumerate(config.topology.ranks_on(server)):
            if word >> number & 1:
                yield rank
