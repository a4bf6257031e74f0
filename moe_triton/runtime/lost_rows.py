"""Rows of ranks that were masked during a call whose rows have places: taken out once all others are there.

A round may have received some of them, and their places in the outputs are those of a call in which they had
rows. What is left moves to where it would be without.

Shape symbols:
    E    experts of this rank
    EP   ranks
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from moe_triton.core.records import ORIGIN, TRAILER


class Tables(NamedTuple):
    """Where rows of each expert and source are, of a whole call.

    Attributes:
        offsets: (E * EP,) int32, inclusive prefix sums of the rows.
        first_starts: (E * EP,) int32, the row of the outputs at which they begin.
        limits: (E * EP,) int32, behind their last one.
    """

    offsets: torch.Tensor
    first_starts: torch.Tensor
    limits: torch.Tensor


class LostRows:
    """The rows of some ranks in one call.

    Args:
        tables: of the call, with these rows.
        num_ranks: EP.
        lost: whose rows they are.
    """

    def __init__(self, tables: Tables, num_ranks: int, lost: Collection[int]) -> None:
        self._tables, self._lost = tables, sorted(lost)
        counts = _counts_of(tables.offsets).view(-1, num_ranks)
        self._left = counts.clone()
        self._left[:, self._lost] = 0
        self.has_places = bool((self._left != counts).any())

    @property
    def rows_left(self) -> list[int]:
        """Rows of each expert without them."""
        rows: list[int] = self._left.sum(1).tolist()
        return rows

    def tables(self, alignment: int, stride: int) -> Tables:
        """Where the others belong.

        Args:
            alignment: of experts' first rows.
            stride: from one expert's to the next one's; 0 where they follow one another.
        """
        rows = self._left.sum(1)
        spans = torch.full_like(rows, stride) if stride else -(-rows // alignment) * alignment
        limits = (spans.cumsum(0) - spans)[:, None] + self._left.cumsum(1)
        made = self._left.flatten().cumsum(0), limits - self._left, limits
        return Tables(*(each.flatten().int() for each in made))

    def moves(self, tables: Tables) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of the outputs that are left, and where each belongs.

        Args:
            tables: what `tables` has returned.
        """
        counts = self._left.flatten()
        return _rows_at(self._tables.first_starts, counts), _rows_at(tables.first_starts, counts)

    def places(self) -> torch.Tensor:
        """The rows of the outputs that are lost."""
        gone = _counts_of(self._tables.offsets) - self._left.flatten()
        return _rows_at(self._tables.first_starts, gone)

    def leave_round(
        self,
        recv_offsets: torch.Tensor,
        assist_info: torch.Tensor,
        places: torch.Tensor,
        moved: torch.Tensor | None,
    ) -> torch.Tensor:
        """Takes them out of what a round has received, in place.

        Args:
            recv_offsets: (E * EP,) int32 of the round.
            assist_info: (3 A + 2,) int32, the rows' origins.
            places: (A,) int32, that they have in the outputs.
            moved: by place, where each row is now; None where it is where it was.

        Returns:
            (E,) int64 how many of them each expert had in the round.
        """
        recv_offsets = recv_offsets[: self._left.numel()]
        counts = _counts_of(recv_offsets)
        entries = counts.view(self._left.shape)
        gone = entries[:, self._lost].sum(1)
        if moved is None and not gone.any():
            return gone
        is_left = torch.ones_like(entries, dtype=torch.bool)
        is_left[:, self._lost] = False
        keep = is_left.flatten().repeat_interleave(counts)
        total, left = len(keep), int(keep.sum())
        origins = assist_info[: ORIGIN.num_words * total].view(-1, ORIGIN.num_words)
        origins[:left] = origins[keep]
        assist_info[len(assist_info) - TRAILER.num_words + TRAILER.word("num_rows")] = left
        kept = places[:total][keep]
        # A count that cannot be leaves rows without a place.
        places[:left] = (
            kept if moved is None else torch.where(kept < 0, kept, moved[kept.clamp(min=0).long()])
        )
        entries[:, self._lost] = 0
        recv_offsets.copy_(counts.cumsum(0))
        return gone


def _rows_at(firsts: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """So many rows from each of these on."""
    begins = (firsts.long() - counts.cumsum(0) + counts).repeat_interleave(counts)
    return begins + torch.arange(len(begins), device=begins.device)


def _counts_of(offsets: torch.Tensor) -> torch.Tensor:
    return offsets.long().diff(prepend=offsets.new_zeros(1, dtype=torch.int64))
