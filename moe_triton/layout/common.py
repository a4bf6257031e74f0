"""What all layouts share: sizes of slots and status entries, and how a slot is packed.

A dispatch slot::

    0             row, Align32(H * itemsize)
    scale_offset  32 bytes, the row's fp32 scale first
    stamp_offset  32 bytes, `moe_triton.core.records.STAMP`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from moe_triton.core import records
from moe_triton.core.config import Config
from moe_triton.core.records import STAMP, STATUS_ENTRY, TRAILER
from moe_triton.core.region import Region, region_of

UB_ALIGN, WORD_BYTES, FLAG_BITS = records.UB_ALIGN, records.WORD_BYTES, records.FLAG_BITS
BLOCK_BYTES, BLOCK_DATA_BYTES = records.BLOCK_BYTES, records.BLOCK_DATA_BYTES
SLOT_ALIGN = 512
SCALE_BYTES = 32
NUM_ZONES = 2
STATUS_ENTRY_BYTES = STATUS_ENTRY.num_bytes
STAMP_BYTES = STAMP.num_bytes
TRAILER_MARK, TRAILER_WORDS = records.TRAILER_MARK, TRAILER.num_words


# The state window of A3: 1 MB, zones 500 KB apart, combine's entries 64 KB into a zone. The 64 KB is
# where the rule localE * EP <= 2048 comes from.
STATE_BYTES = 1 << 20
STATE_ZONE_STRIDE = 500 * 1024
STATE_COMBINE_OFFSET = 64 * 1024
# Behind the most entries that a combine can have (512 tokens of 16 + 4 results).
STATE_BARRIER_OFFSET = 400 * 1024
STATE_PEER_OFFSET = 432 * 1024


def align(size: int, to: int) -> int:
    """``size`` rounded up to a multiple of ``to``."""
    return -(-size // to) * to


@dataclass(frozen=True)
class SlotLayout:
    """How one dispatch slot is packed, for rows of ``itemsize`` bytes an element."""

    hidden: int
    itemsize: int

    @property
    def row_bytes(self) -> int:
        """Bytes of the row itself."""
        return self.hidden * self.itemsize

    @property
    def scale_offset(self) -> int:
        """Where the 32 bytes of the scale begin."""
        return align(self.row_bytes, UB_ALIGN)

    @property
    def stamp_offset(self) -> int:
        """Where the 32 bytes of the stamp begin."""
        return self.scale_offset + SCALE_BYTES

    @property
    def packed_bytes(self) -> int:
        """Bytes in use, a multiple of 32."""
        return self.stamp_offset + STAMP_BYTES


def entry_per_rank(
    name: str, base: int, zone_stride: int, num_ranks: int, num_zones: int = NUM_ZONES
) -> Region:
    """One status entry for each ``source`` (``expert`` is 0)."""
    entry = STATUS_ENTRY_BYTES
    dims = (num_zones, zone_stride), (1, num_ranks * entry), (num_ranks, entry)
    return region_of("dispatch_status", base, entry, *dims, name=name)


@dataclass(frozen=True)
class Layout(ABC):
    """What lies where in a scheme's own window, the same on every rank: state, then the data of each zone."""

    config: Config
    num_zones: ClassVar[int] = NUM_ZONES

    @property
    @abstractmethod
    def state_bytes(self) -> int:
        """Bytes in front of the data: status entries and the like."""

    @property
    @abstractmethod
    def zone_bytes(self) -> int:
        """Bytes of data from one zone to the next."""

    @property
    @abstractmethod
    def regions(self) -> tuple[Region, ...]:
        """All of them."""

    @property
    def data_bytes(self) -> int:
        """What HCCL_BUFFSIZE has to cover."""
        return self.num_zones * self.zone_bytes

    @property
    def window_bytes(self) -> int:
        """What one rank allocates."""
        return self.state_bytes + self.data_bytes

    def region(self, name: str) -> Region:
        """The region of this name."""
        return next(region for region in self.regions if region.name == name)
