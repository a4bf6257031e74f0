"""What a rank has posted to queues in an operator, and passed on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moe_triton.core.records import TRAFFIC

PLACEHOLDER = "traffic"
"""The memory in which the blocks of a launch count: `TRAFFIC` for each block."""
NUM_COUNTERS = len(TRAFFIC.fields)


class ByReach(NamedTuple):
    """A number of messages or bytes.

    Attributes:
        between: to ranks of other servers.
        inside: to ranks of this rank's own server.
    """

    between: int
    inside: int


class Traffic(NamedTuple):
    """What a rank has posted to queues in one dispatch or combine, in all of its rounds.

    Attributes:
        posts: messages, each of which costs the same whatever its size.
        payload_bytes: bytes of rows, without padding, scales and stamps. By hierarchy those inside are of
            rows and results that are passed on to other ranks of this rank's server: copied, not posted.
        framing_bytes: all other bytes that were posted.
    """

    posts: ByReach
    payload_bytes: ByReach
    framing_bytes: ByReach

    @staticmethod
    def of(counters: Sequence[int]) -> Traffic:
        """From sums of all blocks' counters, in the order of `TRAFFIC`."""
        return Traffic(*(ByReach(counters[of.between], counters[of.inside]) for of in _PLACES))


_PLACES = [
    ByReach(*(TRAFFIC.word(f"{what}_{where}") for where in ByReach._fields))
    for what in ("posts", "payload", "framing")
]
"""The counters of each field of `Traffic`, in their order."""
