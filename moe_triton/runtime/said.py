"""What ranks say before a call in rounds, and what follows from it: the same on every rank.

See docs/protocol.md, "Rounds of one call".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moe_triton.core.config import Config
from moe_triton.core.errors import ArgumentError
from moe_triton.core.records import CALL_HEADER, MAX_CALL_TOKENS
from moe_triton.runtime.output_request import Request

PADDED = -1
"""In a header in place of a stride: experts have as many rows each, however many that will be."""


@dataclass(frozen=True)
class Said:
    """What all ranks have said of a call, on the host.

    Attributes:
        headers: (EP, words) of `CALL_HEADER`.
        columns: rows of every expert, from all ranks, as kernels number experts.
        config: of the buffer.
        of_kernels: the same as kernels have it.
    """

    headers: list[list[int]]
    columns: list[int]
    config: Config
    of_kernels: Config

    def of(self, name: str) -> list[int]:
        """A field of each rank's header."""
        word = CALL_HEADER.word(name)
        return [header[word] for header in self.headers]

    def rows_on(self, rank: int) -> list[int]:
        """The rows that each of a rank's experts receives."""
        first = first_column_of(self.of_kernels, rank)
        return self.columns[first : first + self.config.experts_on(rank)]

    @classmethod
    def of_words(cls, words: torch.Tensor, config: Config, of_kernels: Config) -> Said:
        """What stands in a window.

        Args:
            words: (EP, words) int32, on the host: of each rank a header and its counts.
            config: of the buffer.
            of_kernels: the same as kernels have it, which number experts by it.
        """
        # As numbers of NumPy's: a loop of calls is not to take memory of torch's. And by its ufuncs alone:
        # what is around them has left the caches between rounds, and took longer than all else here.
        said = words.numpy()
        counts = np.minimum(np.maximum(said[:, CALL_HEADER.num_words :], 0), MAX_CALL_TOKENS)
        columns: list[int] = np.add.reduce(counts, axis=0, dtype=np.int64).tolist()
        return cls(said[:, : CALL_HEADER.num_words].tolist(), columns, config, of_kernels)

    @property
    def num_rounds(self) -> int:
        """Rounds that the call has: as many as the rank with most tokens needs."""
        return max(1, *self.of("rounds"))

    def refusal(self, request: Request) -> ArgumentError | None:
        """Why no rank gets anything; None where all have what they need.

        Args:
            request: this rank's.
        """
        most = self.of("max_tokens")
        if len(set(most)) > 1:
            said = [number - 1 if number > 0 else None for number in most]
            shown = ", ".join(f"{number} on rank {rank}" for rank, number in enumerate(said))
            rule, remedy = f"it is {shown}", "Pass the same number on every rank."
            return ArgumentError("num_max_tokens_per_rank", request.max_tokens, rule, remedy)
        asked = zip(self.of("capacity"), self.of("alignment"), self.of("stride"), strict=True)
        for rank, (room, alignment, stride) in enumerate(asked):
            if room <= 0:
                continue
            rows, is_padded = self.rows_on(rank), stride == PADDED
            needed = max(rows, default=0) if is_padded else span_of(rows, max(1, alignment), 0)
            if room < needed:
                what = " of an expert" if is_padded else " with the gaps" if alignment > 1 else ""
                rule = f"rank {rank} has room for {room} rows and receives {needed}{what}: no rank gets any"
                remedy = "Pass a larger number there, or 'exact'."
                return ArgumentError("num_recv_tokens", request.received, rule, remedy)
        return None


def said_table(config: Config, rank: int, source_bytes: int) -> torch.Tensor:
    """By what native code looks at what ranks have said: ``Table`` in kernels_ascendc/host/calls_said.cpp.

    Args:
        config: as kernels have it.
        rank: this one.
        source_bytes: from what a rank says to what the next one does.
    """
    names = "rounds", "max_tokens", "capacity", "alignment", "stride"
    words = [config.num_ranks, rank, source_bytes // CALL_HEADER.word_bytes, CALL_HEADER.num_words]
    words += [*map(CALL_HEADER.word, names), PADDED, MAX_CALL_TOKENS]
    for other in range(config.num_ranks):
        words += [first_column_of(config, other), config.experts_on(other)]
    return torch.tensor(words, dtype=torch.int64, device="cpu")


def first_column_of(config: Config, rank: int) -> int:
    """Where the counts of a rank's experts begin behind a header.

    Args:
        config: as kernels have it.
        rank: whose they are.
    """
    shared = config.num_shared_ranks
    return rank if config.is_shared_rank(rank) else shared + config.first_expert_on(rank)


def span_of(rows: Sequence[int], alignment: int, stride: int) -> int:
    """Rows of outputs with so many for each expert, gaps included."""
    return len(rows) * stride if stride else sum(-(-count // alignment) * alignment for count in rows)
