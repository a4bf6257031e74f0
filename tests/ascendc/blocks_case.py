"""What ranks do that dispatch and combine by blocks, and what a dispatch of theirs writes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from moe_triton.core.config import Config
from moe_triton.layout import NUM_ZONES, TRAILER_WORDS
from moe_triton.schemes.a2_fullmesh.layout import BlockRow, BlocksLayout

from .case import Case
from .memory import Guarded


@dataclass(frozen=True)
class BlocksCase(Case):
    """Rows with scales are of 8 bits an element, others of 16.

    Attributes:
        old_limits: whether headers are as by the limits of v3.
        first_number: that of the first round.
        zones: how many are used in turn. One is not enough.
        mimicked: whether rows that come are full of what a flag could be taken for.
        servers: ranks of each; () for one, in which blocks are written straight into windows.
        keeps_order: whether queues between servers keep order inside messages.
        ring_items: posts that a queue holds.
        post_parts: in which blocks are made that are posted, one rank each at most.
    """

    old_limits: bool = False
    first_number: int = 1
    zones: int = NUM_ZONES
    mimicked: bool = False
    servers: tuple[int, ...] = ()
    keeps_order: bool = False
    ring_items: int = 1
    post_parts: int = 2

    @property
    def config(self) -> Config:
        """With the servers."""
        return replace(super().config, ranks_per_server=self.servers or None)

    @property
    def row(self) -> BlockRow:
        """How a row is packed."""
        return BlockRow(self.hidden, 1 if self.scaled else 2, self.num_scales * self.scaled)

    @property
    def layout(self) -> BlocksLayout:
        """Of the windows."""
        config = self.config
        if self.old_limits:
            object.__setattr__(config, "generation", "v3")
        return BlocksLayout(config)

    @property
    def sent_bytes(self) -> int:
        """Bytes of a row on its way, without its stamp."""
        return self.row.stamp_offset

    @property
    def result_bytes(self) -> int:
        """Bytes of a result."""
        return 2 * self.hidden


@dataclass
class Outputs:
    """All that a rank's dispatch writes outside of its window."""

    recv_counts: Guarded
    recv_offsets: Guarded
    tokens_per_expert: Guarded
    trailer: Guarded
    row_slots: Guarded
    waited_us: Guarded

    @staticmethod
    def of(experts: int, ranks: int, capacity: int) -> Outputs:
        entries = Guarded((experts * ranks,), np.int32)
        counts, waited = (Guarded((experts, ranks), np.int32) for _ in range(2))
        tokens, trailer = Guarded((experts,), np.int64), Guarded((TRAILER_WORDS,), np.int32)
        return Outputs(counts, entries, tokens, trailer, Guarded((capacity,), np.int32), waited)

    def check_guards(self) -> None:
        for output in vars(self).values():
            output.check_guards()
