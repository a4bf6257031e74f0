"""The window between two tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from moe_triton.core.region import Region, region_of
from moe_triton.layout import NUM_ZONES, SLOT_ALIGN, STATUS_ENTRY_BYTES, UB_ALIGN, SlotLayout, align


@dataclass(frozen=True)
class ExchangeLayout:
    """The window between two tensor-parallel ranks: rows with their scales, a status entry, a header.

    Attributes:
        hidden: elements of a row.
        capacity: rows of one rank at most.
        header_words: int32 words that go along with a dispatch.
    """

    hidden: int
    capacity: int
    header_words: int

    @property
    def dispatch_status(self) -> Region:
        """Entry {1.0f, int32 rows} of each rank, dispatch."""
        return self._status(0)

    @property
    def combine_status(self) -> Region:
        """Entry of each rank, combine."""
        return self._status(NUM_ZONES * 2 * STATUS_ENTRY_BYTES)

    def _status(self, base: int) -> Region:
        entry = STATUS_ENTRY_BYTES
        return region_of("dispatch_status", base, entry, (NUM_ZONES, 2 * entry), (1, 2 * entry), (2, entry))

    @property
    def headers(self) -> Region:
        """Words that go with a dispatch."""
        stride = align(4 * self.header_words, UB_ALIGN)
        base = 2 * NUM_ZONES * 2 * STATUS_ENTRY_BYTES
        return region_of("exchange_headers", base, 4, (NUM_ZONES, stride), (self.header_words, 4))

    @property
    def state_bytes(self) -> int:
        """Status entries and headers."""
        return align(self.headers.base + NUM_ZONES * self.headers.stride("zone"), SLOT_ALIGN)

    @property
    def dispatch_slots(self) -> Region:
        """Rows that a dispatch gathers, packed as in a dispatch slot."""
        return self._slots(self.state_bytes, align(SlotLayout(self.hidden, 2).packed_bytes, SLOT_ALIGN))

    @property
    def combine_slots(self) -> Region:
        """Rows that a combine adds."""
        return self._slots(self.dispatch_slots.end, align(2 * self.hidden, SLOT_ALIGN))

    def _slots(self, base: int, stride: int) -> Region:
        return region_of(
            "indexed_slots", base, stride, (NUM_ZONES, self.capacity * stride), (self.capacity, stride)
        )

    @property
    def data_bytes(self) -> int:
        """What HCCL_BUFFSIZE has to cover."""
        return self.window_bytes - self.state_bytes

    @property
    def window_bytes(self) -> int:
        """What one rank allocates."""
        return self.combine_slots.end
