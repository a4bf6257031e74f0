"""Which ranks share a server: its cards reach each other's memory, those of others have queues between."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from moe_triton.core.checks import check_integer, is_listed, listed, shown
from moe_triton.core.errors import ArgumentError
from moe_triton.core.group_sizes import MAX_RANKS, RANKS_PER_SERVER, REMEDY, RanksPerServer


def check_ranks_per_server(value: object) -> int | tuple[int, ...] | None:
    """Checks what says how many ranks a server has, and returns it with Python's own numbers.

    Raises:
        ArgumentError: it is neither an integer nor a sequence, an array or a tensor of integers, nor None; or
            one is out of range.
    """
    if value is None:
        return None
    if is_listed(value):
        return tuple(map(_number_of_ranks, listed(RANKS_PER_SERVER, value, MAX_RANKS, REMEDY)))
    return _number_of_ranks(value)


def _number_of_ranks(value: object) -> int:
    try:
        number = check_integer(RANKS_PER_SERVER, value)
    except ArgumentError as error:
        raise ArgumentError(RANKS_PER_SERVER, error.value, error.rule, REMEDY, code=error.code) from None
    if not 1 <= number <= MAX_RANKS:
        raise ArgumentError(RANKS_PER_SERVER, shown(value), f"a server has 1 to {MAX_RANKS} ranks", REMEDY)
    return number


def _ranks_in_words(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def fits(num_ranks: int, given: RanksPerServer) -> bool:
    """Whether servers of so many ranks have those of a group between them.

    Of one number for all, the last server has what is left.
    """
    if given is None or isinstance(given, int) or num_ranks < 1:  # another rule is about the group's size
        return True
    return sum(given) == num_ranks


@dataclass(frozen=True)
class Topology:
    """The servers of a group. The ranks of a server are neighbours.

    Attributes:
        sizes: ranks of each server, in the order of the ranks.
    """

    sizes: tuple[int, ...]

    @staticmethod
    def of(num_ranks: int, given: RanksPerServer, usual: int) -> Topology:
        """That of a group.

        Args:
            num_ranks: of the group.
            given: how many ranks each server has; see `fits`.
            usual: ranks of a server, the last one's aside, where nothing is given; 0 for all of them.
        """
        if given is None:
            given = usual or num_ranks
        if not isinstance(given, int):
            return Topology(tuple(given))
        size = min(given, num_ranks)
        full, rest = divmod(num_ranks, size)
        return Topology((size,) * full + (rest,) * (rest > 0))

    @staticmethod
    def or_usual(num_ranks: int, given: RanksPerServer, usual: int) -> Topology:
        """That of a group whose sizes have not been checked: without what is given where it does not fit."""
        num_ranks = min(max(1, num_ranks), MAX_RANKS)
        return Topology.of(num_ranks, given if fits(num_ranks, given) else None, usual)

    @property
    def num_servers(self) -> int:
        """How many there are."""
        return len(self.sizes)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return (0, *itertools.accumulate(self.sizes))

    def ranks_on(self, server: int) -> range:
        """Those of a server."""
        return range(self._starts[server], self._starts[server + 1])

    @cached_property
    def servers(self) -> tuple[int, ...]:
        """The server of each rank."""
        return tuple(server for server, size in enumerate(self.sizes) for _ in range(size))

    def neighbours(self, rank: int) -> range:
        """The ranks of a rank's server, itself among them."""
        return self.ranks_on(self.servers[rank])

    def rail(self, rank: int) -> tuple[int, ...]:
        """The ranks of the same number on their servers, one of each server that has so many."""
        number = rank - self.neighbours(rank).start
        return tuple(
            start + number for start, size in zip(self._starts, self.sizes, strict=False) if number < size
        )

    def in_words(self, ranks: Collection[int]) -> str:
        """Ranks as messages name them: of several servers by its number where all of it is among them, and
        otherwise with it.
        """
        if self.num_servers == 1:
            return f"rank(s) {list(ranks)}"
        parts, whole = [], []
        for server in range(self.num_servers):
            own = self.ranks_on(server)
            mentioned = [rank for rank in ranks if rank in own]
            named = f"server {server} ({_ranks_in_words(own)})"
            if len(mentioned) == len(own):
                whole.append(named)
            elif mentioned:
                parts.append(f"rank(s) {mentioned} of {named}")
        unknown = [rank for rank in ranks if not 0 <= rank < len(self.servers)]
        said = [f"rank(s) {unknown}"] if unknown else []
        return " and ".join([*said, *parts, *whole]) or "rank(s) []"

    def left(self, members: Sequence[int]) -> Topology:
        """That of the ranks that are left; a server without any is gone.

        Args:
            members: them by their new numbers.

        Raises:
            ArgumentError: the ranks of a server are no neighbours any more.
        """
        runs = [
            (server, len(list(run))) for server, run in itertools.groupby(self.servers[m] for m in members)
        ]
        if len({server for server, _ in runs}) < len(runs):
            rule = f"the ranks of a server stay neighbours, and these are numbered {list(members)}"
            raise ArgumentError(RANKS_PER_SERVER, list(self.sizes), rule, "Keep the ranks in their order.")
        return Topology(tuple(length for _, length in runs))
