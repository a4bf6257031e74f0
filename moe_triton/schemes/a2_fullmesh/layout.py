"""The window of the block schemes: for every peer one block, whatever it sends.

Sizes in bytes::

    state   barrier entries of zone 0, those of zone 1, Align512
    data    zone 0 {a block of each rank}, zone 1 {the same}
    tables  of an `EPBuffer`: zone 0 {of every source}, zone 1 {the same} (`Layout.row_tables`)
    out     in a group of several servers: the same once more, for what is posted to each rank

A block::

    0            header: int32 counts, one for each local expert, the call word, FLAG1
    rows_offset  rows one after the other, Align512 of the header before them
    behind them  FLAG2, 32 bytes; where queues keep no order inside a message, behind the most rows that
                 there can be

The header is 32 words with FLAG1 at word 24 by the limits of v3, where a rank has 24 experts at most;
otherwise as many units of 8 words as it takes, FLAG1 last. A row of a dispatch is followed by its scales, if
it has any, and its stamp. A combine's rows are results and nothing else, and only its first count means
something: their number. Dispatch and combine use the same blocks in turn.

FLAG1 is the number of the round, and FLAG2 eight words that are made of it: stale rows may lie where it goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from moe_triton.core.region import Region, packed, region_of
from moe_triton.layout import (
    SLOT_ALIGN,
    STATUS_ENTRY_BYTES,
    UB_ALIGN,
    WORD_BYTES,
    Layout,
    SlotLayout,
    align,
    entry_per_rank,
)

UNIT_WORDS = UB_ALIGN // WORD_BYTES
V3_HEADER_WORDS, V3_FLAG_WORD = 32, 24
_WORD = 1 << 32


def end_flag(number: int) -> tuple[int, ...]:
    """The words of FLAG2 in a round, as int32 (``EndFlagWord`` in block_format.h)."""
    words = []
    for i in range(UNIT_WORDS):
        word = (number * 0x9E3779B1 + i * 0x85EBCA77) % _WORD
        word = (word ^ word >> 15) * 0xC2B2AE3D % _WORD
        word ^= word >> 13
        words.append(word - _WORD if word >= _WORD // 2 else word)
    return tuple(words)


@dataclass(frozen=True)
class BlockRow(SlotLayout):
    """How a row of a dispatch is packed in a block: without room for scales that it does not have."""

    @property
    def scale_stride(self) -> int:
        """Bytes that are there for the scales."""
        return align(self.scale_bytes, UB_ALIGN)


class BlocksLayout(Layout):
    """The window of blocks of a `Config`. The same on every rank."""

    has_row_tables: ClassVar[bool] = True

    @cached_property
    def _header(self) -> tuple[int, int, int]:
        """Words of a header, and which are FLAG1 and the call word."""
        c = self.config
        if c.generation == "v3":
            return V3_HEADER_WORDS, V3_FLAG_WORD, V3_FLAG_WORD + 1
        words = align(c.num_local_experts + 2, UNIT_WORDS)
        return words, words - 1, words - 2

    @property
    def header_words(self) -> int:
        """Words of a header."""
        return self._header[0]

    @property
    def flag_word(self) -> int:
        """Which word of a header is FLAG1."""
        return self._header[1]

    @property
    def call_word(self) -> int:
        """Which word of a header says of which call it is."""
        return self._header[2]

    @property
    def rows_offset(self) -> int:
        """Bytes from a block's beginning to its first row."""
        return align(WORD_BYTES * self.header_words, SLOT_ALIGN)

    @property
    def max_rows(self) -> int:
        """Rows of a block at most."""
        c = self.config
        return c.num_max_tokens_per_rank * min(c.num_local_experts, c.num_topk)

    @cached_property
    def end_offset(self) -> int:
        """Bytes from a block's beginning to the end of the most and longest rows that it can have."""
        return self.rows_offset + self.max_rows * BlockRow(self.config.hidden, 2).packed_bytes

    @cached_property
    def block_bytes(self) -> int:
        """Bytes from one block to the next."""
        return align(self.end_offset + UB_ALIGN, SLOT_ALIGN)

    @cached_property
    def blocks(self) -> Region:
        """The block that each rank writes."""
        dims = packed(self.block_bytes, self.num_zones, self.config.num_ranks)
        return region_of("peer_blocks", self.state_bytes, self.block_bytes, *dims)

    def rows(self, row_step: int) -> Region:
        """Rows of ``row_step`` bytes in the blocks, as the kernel of offsets looks at them: of one expert,
        which stands for all.
        """
        blocks, most = self.blocks, self.max_rows
        zones = self.num_zones, blocks.stride("zone")
        sources = self.config.num_ranks, blocks.stride("rank")
        dims = zones, sources, (1, most * row_step), (most, row_step)
        return region_of("dispatch_slots", blocks.base + self.rows_offset, row_step, *dims)

    @property
    def _barrier_bytes(self) -> int:
        return self.config.num_ranks * STATUS_ENTRY_BYTES

    @cached_property
    def barrier_status(self) -> Region:
        """Entry that ``source`` posts in a barrier."""
        return entry_per_rank("barrier_status", 0, self._barrier_bytes, self.config.num_ranks, self.num_zones)

    @property
    def entries_bytes(self) -> int:
        """Barrier entries of both zones."""
        return align(self.num_zones * self._barrier_bytes, SLOT_ALIGN)

    @property
    def zone_bytes(self) -> int:
        """Bytes from one zone to the next."""
        return self.config.num_ranks * self.block_bytes

    @property
    def out_bytes(self) -> int:
        """Counts the bytes of the out part, which mirrors what peers write; 0 inside one server."""
        return self.in_bytes if self.config.topology.num_servers > 1 else 0

    @property
    def regions(self) -> tuple[Region, ...]:
        """All of them."""
        return (self.blocks, self.barrier_status, *self.tables)
