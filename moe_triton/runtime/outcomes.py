"""What the ranks agree on of a dispatch in which some were masked: to keep what was sent, or to repeat it.

Each may be the first to say so, in a word of a window that all of them have mapped: memory that is shared
outlives the process that made it, so that nobody's death, not even that of a group's store, keeps the others
from agreeing.
"""

from __future__ import annotations

from collections.abc import Callable

from moe_triton.core.errors import RankMaskedError
from moe_triton.core.region import Region

MOST_ATTEMPTS = 1 << 24
"""Of one dispatch."""


class Outcomes:
    """One rank's view of what was agreed on.

    Args:
        region: of the words, one for each zone.
        window: address of the window that they are in, the same one's on all ranks.
        exchange: replaces a word if it is what was expected, and returns what was there.
    """

    def __init__(self, region: Region, window: int, exchange: Callable[[int, int, int], int]) -> None:
        self._region, self._window, self._exchange = region, window, exchange

    def settle(self, number: int, attempt: int, *, repeat: bool) -> bool:
        """Says what is to become of an attempt, unless another rank has said so before.

        Args:
            number: which dispatch of the buffer, from 0.
            attempt: of it, from 0.
            repeat: what this rank says. Who does cannot go on otherwise.

        Returns:
            Whether it is repeated, on all ranks.

        Raises:
            RankMaskedError: the others have gone on: they have not waited for this rank.
        """
        zones = self._region.dims[0].extent
        at = self._window + self._region.offset(zone=number % zones)
        mine = number * MOST_ATTEMPTS + attempt + 1  # not 0, as fresh memory is
        found = 0
        while found >> 1 < mine:
            seen = self._exchange(at, found, mine << 1 | repeat)
            if seen == found:
                return repeat
            found = seen
        if found >> 1 > mine or repeat > found & 1:
            raise RankMaskedError(
                f"the other ranks have ended dispatch number {number} without this one, which they have "
                f"masked. Construct a new buffer on every rank to take part again."
            )
        return bool(found & 1)
