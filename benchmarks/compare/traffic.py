"""Bytes that a route has to move through memory: what it is compared with memcpy for.

Counted are the rows, each time that a kernel has to read one from memory or write one there, on one rank:

=================  =====================================  ==========================================
                   read                                   written
=================  =====================================  ==========================================
quantise and pack  T rows of x                            T packed rows
send, dispatch     T rows (packed ones if quantised)      T*K rows, into the peers' windows; slots: T*K-O
arrange (slots)    N-O rows, and T of its own             N rows
send, combine      N-O rows (slots)                       N-O rows (slots)
copy, combine      N rows (direct copied)                 N rows (direct copied)
sum                T*K rows                               T rows
=================  =====================================  ==========================================

T tokens, N rows received, O of them from this rank itself: slots keep those out of the window.

A row of x counts once, not K times: its K copies leave one after the other, while it is in the cache.
*Direct* has no arrange, since rows are sent to where they stay, and no send in combine, since the sum reads
the peers' rows where they are. *Direct copied* is direct with answers in memory of the experts' own, which
combine copies into the window first. Scales, stamps, counts and flags are left out (under 1% of a row). All
of this makes the bytes, and so the time that memcpy is given, rather too small than too large.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.compare.cases import Phase

Scheme = Literal["slots", "direct", "direct copied"]
ANSWER_ITEMSIZE = 2


@dataclass(frozen=True)
class Traffic:
    """Bytes of one rank.

    Attributes:
        read: from memory.
        written: to memory.
        row: bytes of the rows that most of them are.
    """

    read: int
    written: int
    row: int

    @property
    def moved(self) -> int:
        """Read and written."""
        return self.read + self.written

    @property
    def copied(self) -> int:
        """What memcpy has to copy to read and write as many."""
        return self.moved // 2


def dispatch_traffic(
    scheme: Scheme, *, tokens: int, sent: int, received: int, kept: int, hidden: int, quantize: str
) -> Traffic:
    """Bytes that a dispatch moves on one rank, which sends itself ``kept`` of the rows."""
    full = hidden * ANSWER_ITEMSIZE
    row = hidden if quantize else full
    read = tokens * row
    written = sent * row
    if quantize:
        read += tokens * full
        written += tokens * row
    if scheme == "slots":
        read += (received - kept + tokens) * row
        written += (received - kept) * row
    return Traffic(read, written, row)


def combine_traffic(
    scheme: Scheme, *, tokens: int, sent: int, received: int, kept: int, hidden: int
) -> Traffic:
    """Bytes that a combine moves on one rank."""
    row = hidden * ANSWER_ITEMSIZE
    returned = {"slots": received - kept, "direct": 0, "direct copied": received}[scheme]
    return Traffic((returned + sent) * row, (returned + tokens) * row, row)


def group_bytes(
    scheme: Scheme, phase: Phase, *, ranks: int, tokens: int, topk: int, hidden: int, quantize: str
) -> int:
    """Bytes read and written by all ranks together, by tokens per rank."""
    rows = tokens * topk  # received on average, which is what the sum over ranks needs
    sizes = {"tokens": tokens, "sent": rows, "received": rows, "kept": rows // ranks, "hidden": hidden}
    to = dispatch_traffic(scheme, quantize=quantize, **sizes).moved
    back = combine_traffic(scheme, **sizes).moved
    return ranks * {"dispatch": to, "combine": back, "both": to + back}[phase]
