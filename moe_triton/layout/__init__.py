"""What the windows of all schemes are made of: sizes, how a slot is packed, the call word.

Offsets come from nowhere else than from this folder and the layouts of schemes
(`moe_triton.schemes.fullmesh.layout`, `moe_triton.schemes.direct.layout`). Python asks a `Region` for them,
Triton kernels get its strides, Ascend C kernels get it as a struct from the generated header
(`moe_triton.tools.codegen`), and ``moe-triton layout`` prints it. Everything in it is linear: a base and one
stride per dimension; but a region may be rotated from one rank's window to the next one's
(`moe_triton.core.region`).

A dispatch slot::

    0             row, Align32(H * itemsize)
    scale_offset  the row's fp32 scales, Align32(4 * n); 32 bytes where it has none
    stamp_offset  32 bytes, `moe_triton.core.records.STAMP`

A stamp that is the flag of its row is where that of a 16-bit row is, whatever the row: no row of any format
has a byte there, and what another call has left can look like no flag.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch

from moe_triton.core import records
from moe_triton.core.config import Config
from moe_triton.core.records import CALL_HEADER, STATUS_ENTRY, TRAILER
from moe_triton.core.region import Region, packed, region_of
from moe_triton.core.row_formats import RowFormat

if TYPE_CHECKING:  # in typing since Python 3.11
    from typing_extensions import Self

ORIGIN, STAMP = records.ORIGIN, records.STAMP
UB_ALIGN, WORD_BYTES, FLAG_BITS = records.UB_ALIGN, records.WORD_BYTES, records.FLAG_BITS
BLOCK_BYTES, BLOCK_DATA_BYTES = records.BLOCK_BYTES, records.BLOCK_DATA_BYTES
SLOT_ALIGN = 512
PAGE_BYTES = 4096
"""Of memory that can be replaced by other memory at its address."""
NUM_ZONES = 2
STATUS_ENTRY_BYTES, CALL_WORD = STATUS_ENTRY.num_bytes, STATUS_ENTRY.word("call")
STAMP_BYTES = STAMP.num_bytes
TRAILER_MARK, TRAILER_WORDS = records.TRAILER_MARK, TRAILER.num_words
# So far into a zone of A3's state window combine's entries begin: hence the rule localE * EP <= 2048.
STATE_COMBINE_OFFSET = 64 * 1024


def align(size: int, to: int) -> int:
    """``size`` rounded up to a multiple of ``to``."""
    return -(-size // to) * to


@dataclass(frozen=True)
class SlotLayout:
    """How one dispatch slot is packed, for rows of ``itemsize`` bytes an element and their scales.

    Attributes:
        is_flagged: the stamp is the row's flag.
    """

    hidden: int
    itemsize: int
    num_scales: int = 0
    is_flagged: bool = False

    @classmethod
    def of(cls, hidden: int, row_format: RowFormat, dtype: torch.dtype, *, is_flagged: bool = False) -> Self:
        """That of tokens of this dtype."""
        return cls(hidden, (row_format.dtype or dtype).itemsize, row_format.num_scales(hidden), is_flagged)

    @property
    def row_bytes(self) -> int:
        """Bytes of the row itself."""
        return self.hidden * self.itemsize

    @property
    def scale_offset(self) -> int:
        """Where the scales begin."""
        return align(self.row_bytes, UB_ALIGN)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales themselves."""
        return WORD_BYTES * self.num_scales

    @property
    def scale_stride(self) -> int:
        """Bytes that are there for the scales: those of one at least."""
        return align(max(self.scale_bytes, WORD_BYTES), UB_ALIGN)

    @property
    def scaled_bytes(self) -> int:
        """Bytes of the row with what is there for its scales."""
        return self.scale_offset + self.scale_stride

    @property
    def stamp_offset(self) -> int:
        """Where the 32 bytes of the stamp begin."""
        return SlotLayout(self.hidden, 2).scaled_bytes if self.is_flagged else self.scaled_bytes

    @property
    def packed_bytes(self) -> int:
        """Bytes in use, a multiple of 32."""
        return self.scaled_bytes + STAMP_BYTES


def entry_per_rank(
    name: str, base: int, zone_stride: int, num_ranks: int, num_zones: int = NUM_ZONES
) -> Region:
    """One status entry for each ``source`` (``expert`` is 0)."""
    entry = STATUS_ENTRY_BYTES
    dims = (num_zones, zone_stride), (1, num_ranks * entry), (num_ranks, entry)
    return region_of("dispatch_status", base, entry, *dims, name=name)


class Wandering(NamedTuple):
    """Places that are now one rank's to write and now another one's, in each zone.

    Attributes:
        operators: in whose rounds they are written.
        first: bytes from the window's start to those of zone 0.
        stride: bytes from one zone to the next.
        num_bytes: of a zone.
        is_output: what has come there is the user's until the operator's next run but one.
    """

    operators: tuple[Literal["dispatch", "combine"], ...]
    first: int
    stride: int
    num_bytes: int
    is_output: bool = False

    def offset(self, zone: int) -> int:
        """Bytes from the window's start to those of a zone."""
        return self.first + zone * self.stride

    def is_whole_pages(self, page_bytes: int) -> bool:
        """Whether nothing else shares a page of so many bytes with them."""
        return not any(each % page_bytes for each in (self.first, self.stride, self.num_bytes))


class CallRegions(NamedTuple):
    """What ranks say before a call in rounds (docs/protocol.md, "Rounds of one call").

    Attributes:
        counts: of each ``source`` a `moe_triton.core.records.CALL_HEADER`, and its rows for each ``entry``:
            shared ranks first, then routed experts.
        status: the entry that announces those of ``source``.
        bell: a word that a call rings which ranks need not expect: ``index`` 0. In the out part there is one
            for each rank that it is posted to.
    """

    counts: Region
    status: Region
    bell: Region


@dataclass(frozen=True)
class Layout(ABC):
    """What lies where in a scheme's own window, the same on every rank: state, then the data of each zone.

    State is status entries and the like, and behind them in a buffer what `calls` has.
    """

    config: Config
    num_zones: ClassVar[int] = NUM_ZONES
    has_calls: ClassVar[bool] = True
    """Whether buffers have calls in rounds."""
    has_row_tables: ClassVar[bool] = False
    """Whether the scheme sends a token once to each rank, where a buffer is asked for that."""

    @property
    @abstractmethod
    def entries_bytes(self) -> int:
        """Bytes of status entries and the like, a multiple of `SLOT_ALIGN`."""

    @property
    def state_bytes(self) -> int:
        """Bytes in front of the data."""
        if not self.calls:
            return self.entries_bytes
        return align(self.entries_bytes + self._call_zone_bytes * self.num_zones, PAGE_BYTES)

    @cached_property
    def calls(self) -> CallRegions | None:
        """Where ranks say what a call in rounds has; None where there are no such calls."""
        c = self.config
        if not (c.is_of_buffer and self.has_calls):
            return None
        base, zone, ranks = self.entries_bytes, self._call_zone_bytes, c.num_ranks
        words, stride = self._call_words, align(WORD_BYTES * self._call_words, UB_ALIGN)
        zones = self.num_zones, zone
        counts = region_of(
            "direct_counts", base, WORD_BYTES, zones, (ranks, stride), (words, WORD_BYTES), name="call_counts"
        )
        status = entry_per_rank("call_status", base + ranks * stride, zone, ranks, self.num_zones)
        bell = region_of(
            "indexed_slots",
            base + ranks * (stride + STATUS_ENTRY_BYTES),
            STATUS_ENTRY_BYTES,
            zones,
            (ranks, STATUS_ENTRY_BYTES),
            name="bell",
        )
        return CallRegions(counts, status, bell)

    @property
    def _call_words(self) -> int:
        return CALL_HEADER.num_words + self.config.num_shared_ranks + self.config.num_experts

    @cached_property
    def _call_zone_bytes(self) -> int:
        source = align(WORD_BYTES * self._call_words, UB_ALIGN) + 2 * STATUS_ENTRY_BYTES
        return align(self.config.num_ranks * source, SLOT_ALIGN)

    @property
    @abstractmethod
    def zone_bytes(self) -> int:
        """Bytes of data from one zone to the next."""

    @property
    @abstractmethod
    def barrier_status(self) -> Region:
        """Entry that ``source`` posts in a barrier (``expert`` is 0)."""

    @property
    @abstractmethod
    def regions(self) -> tuple[Region, ...]:
        """All of them."""

    @property
    def wandering(self) -> tuple[Wandering, ...]:
        """Places that have no writer of their own: everything else is always the same rank's to write."""
        return ()

    @property
    def data_bytes(self) -> int:
        """What HCCL_BUFFSIZE has to cover."""
        return self.num_zones * self.zone_bytes

    @cached_property
    def row_tables(self) -> Region | None:
        """What goes with rows that come once for each rank, behind the data: of every source the (T, K) ids
        of its tokens (``table`` 0) and their fp32 weights (1). None where no row comes so.
        """
        c = self.config
        if not (self.has_row_tables and c.is_of_buffer) or c.num_shared_experts:
            return None
        table = WORD_BYTES * c.num_max_tokens_per_rank * c.num_topk
        dims = packed(align(table, SLOT_ALIGN), self.num_zones, c.num_ranks, 2)
        return region_of("row_tables", self._data_end, table, *dims)

    @property
    def tables(self) -> tuple[Region, ...]:
        """`row_tables`, where there are any."""
        return () if self.row_tables is None else (self.row_tables,)

    @property
    def in_bytes(self) -> int:
        """The part of a window that peers write: it comes first."""
        return self._data_end if self.row_tables is None else align(self.row_tables.end, SLOT_ALIGN)

    @property
    def _data_end(self) -> int:
        return self.state_bytes + self.num_zones * self.zone_bytes

    @property
    def out_bytes(self) -> int:
        """The part behind it, of what is posted to peers that queues lead to."""
        return 0

    @property
    def window_bytes(self) -> int:
        """What one rank allocates."""
        return self.in_bytes + self.out_bytes

    def region(self, name: str) -> Region:
        """The region of this name."""
        return next(region for region in self.regions if region.name == name)
