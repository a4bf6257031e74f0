"""What a rank knows of the others of its group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["alive", "late", "dead", "left", "masked"]


@dataclass(frozen=True)
class RankHealth:
    """What this rank knows of one of its group, itself included.

    Attributes:
        rank: its number in the buffer.
        state: "alive"; "late", where a call of this rank waits for it now; "dead", where its process has
            ended in any other way than by its own will; "left", where it has closed its buffers of the group,
            or its process ended as Python's do; "masked", where this rank goes on without it, dead or not.
        since_s: when this rank noticed, in seconds as ``time.time()`` has them. Of one that is alive, since
            when it has been watched; of one that is late, when the wait began.
        sign: by which it is known, in words.
    """

    rank: int
    state: State
    since_s: float
    sign: str
