"""The window of the direct scheme: rows where the receiver's output begins, results where experts write.

Sizes in bytes; A is what a dispatch can deliver to any rank at most::

    state   zone 0 {counts of every source, entries}, zone 1 {the same}, a word of each zone, Align4096
    data    zone 0 {rows, scales; results; stamps}, each Align4096, zone 1 {the same}

A row's place is its place in the output: where it starts follows from the counts of all ranks, which each
rank sends to all others before any row. A stamp is 32 bytes, int32 (source rank, token, k), the fp32 routing
weight and the fp32 scale of rows that have one. Where rows have several scales, those lie behind the last
row: rows that have any are of half as many bytes as there is room for.
"""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

from moe_triton.core.region import Region, region_of
from moe_triton.layout import (
    PAGE_BYTES,
    SLOT_ALIGN,
    STAMP_BYTES,
    STATUS_ENTRY_BYTES,
    UB_ALIGN,
    WORD_BYTES,
    Layout,
    SlotLayout,
    Wandering,
    align,
    entry_per_rank,
)

OUTCOME_BYTES = 64
"""Of a word that any rank may write, in a line of its own."""


class DirectLayout(Layout):
    """The direct window of a `Config`. The same on every rank.

    Rows are strided for 16 bits an element in the region's size, and closely packed in a call, since the
    output is a tensor that users get.
    """

    has_calls: ClassVar = False  # outputs lie in the window, which has room for one round

    @cached_property
    def capacity(self) -> int:
        """Rows that a dispatch can deliver to any rank at most (A)."""
        return max(self.config.routed_capacity, self.config.shared_capacity)

    @property
    def num_entries(self) -> int:
        """Counts that a source sends to every rank: its rows for each shared rank and each routed expert."""
        return self.config.num_shared_ranks + self.config.num_experts

    @cached_property
    def _count_stride(self) -> int:
        return align(WORD_BYTES * self.num_entries, UB_ALIGN)

    @cached_property
    def _state_zone_bytes(self) -> int:
        ranks = self.config.num_ranks
        return align(ranks * self._count_stride + 4 * ranks * STATUS_ENTRY_BYTES, SLOT_ALIGN)

    @cached_property
    def counts(self) -> Region:
        """Rows of ``source`` for each entry: shared ranks first, then routed experts."""
        zones, sources = (self.num_zones, self._state_zone_bytes), (self.config.num_ranks, self._count_stride)
        return region_of("direct_counts", 0, WORD_BYTES, zones, sources, (self.num_entries, WORD_BYTES))

    def _status(self, name: str, number: int) -> Region:
        ranks = self.config.num_ranks
        base = ranks * self._count_stride + number * ranks * STATUS_ENTRY_BYTES
        return entry_per_rank(name, base, self._state_zone_bytes, ranks, self.num_zones)

    @cached_property
    def counts_status(self) -> Region:
        """Entry that announces the counts of ``source``."""
        return self._status("counts_status", 0)

    @cached_property
    def rows_status(self) -> Region:
        """Entry that announces all rows of ``source``."""
        return self._status("rows_status", 1)

    @cached_property
    def results_status(self) -> Region:
        """Entry that announces that the results on ``source`` can be read."""
        return self._status("results_status", 2)

    @cached_property
    def barrier_status(self) -> Region:
        """Entry that ``source`` posts in a barrier."""
        return self._status("barrier_status", 3)

    @cached_property
    def outcomes(self) -> Region:
        """What the ranks have agreed on of a dispatch in which some were masked (`index` 0)."""
        dims = (self.num_zones, OUTCOME_BYTES), (1, OUTCOME_BYTES)
        base = self.num_zones * self._state_zone_bytes
        return region_of("indexed_slots", base, OUTCOME_BYTES, *dims, name="outcomes")

    @property
    def entries_bytes(self) -> int:
        """Counts and entries of both zones, and what ranks agree on."""
        return align(self.outcomes.end, PAGE_BYTES)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row of 16 bits an element."""
        return 2 * self.config.hidden

    @cached_property
    def _region_bytes(self) -> int:
        return align(self.capacity * self.row_bytes, PAGE_BYTES)

    @property
    def _stamps_bytes(self) -> int:
        return align(self.capacity * STAMP_BYTES, PAGE_BYTES)

    @cached_property
    def zone_bytes(self) -> int:
        """Bytes from one zone to the next."""
        return 2 * self._region_bytes + self._stamps_bytes

    def rows(self, itemsize: int = 2) -> Region:
        """Dispatched rows of ``itemsize`` bytes an element, in the order of the output."""
        return self._indexed("rows", self.state_bytes, itemsize * self.config.hidden)

    def scales(self, slot: SlotLayout) -> Region:
        """Scales of the dispatched rows, where rows have several."""
        behind_rows = self.state_bytes + align(self.capacity * slot.row_bytes, UB_ALIGN)
        return self._indexed("scales", behind_rows, slot.scale_stride)

    @cached_property
    def results(self) -> Region:
        """Experts' results, in the order of the rows that they answer."""
        return self._indexed("results", self.state_bytes + self._region_bytes, self.row_bytes)

    @cached_property
    def stamps(self) -> Region:
        """Stamps of the dispatched rows."""
        return self._indexed("stamps", self.state_bytes + 2 * self._region_bytes, STAMP_BYTES)

    def _indexed(self, name: str, base: int, stride: int) -> Region:
        dims = (self.num_zones, self.zone_bytes), (self.capacity, stride)
        return region_of("indexed_slots", base, stride, *dims, name=name)

    @property
    def wandering(self) -> tuple[Wandering, ...]:
        """Rows and stamps: where they lie follows from everybody's counts."""
        rows = Wandering(("dispatch",), self.state_bytes, self.zone_bytes, self._region_bytes, is_output=True)
        return rows, rows._replace(first=self.stamps.base, num_bytes=self._stamps_bytes)

    @property
    def regions(self) -> tuple[Region, ...]:
        """All of them."""
        status = self.counts_status, self.rows_status, self.results_status, self.barrier_status
        return (self.counts, *status, self.outcomes, self.rows(), self.results, self.stamps)
