"""The windows of the slot schemes: every row has a place of its own, whoever sends what.

The window of a rank, A3 fullmesh (sizes in bytes)::

    0       state: zone 0 {dispatch entries, combine entries}, zone 1 {the same}     1 MB, or what it takes
    1 MB    data:  zone 0 {combine slots, dispatch slots}, zone 1 {the same}

    then    tables of an `EPBuffer`: zone 0 {of every source}, zone 1 {the same} (`Layout.row_tables`)

and behind that, where the group has several servers, what is posted::

    in_bytes        all of the above once more: what is posted to a peer, where it would lie had that peer
                    sent it here; of dispatches' rows and entries, and of flags for whole ranks
    then            zone 0 {results, by the numbers of their rows}, zone 1 {the same}
    then            zone 0 {a flag of a result for each peer}, zone 1 {the same}
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from moe_triton.core.records import STAMP
from moe_triton.core.region import Region, packed, region_of
from moe_triton.layout import (
    BLOCK_BYTES,
    BLOCK_DATA_BYTES,
    PAGE_BYTES,
    SLOT_ALIGN,
    STAMP_BYTES,
    STATE_COMBINE_OFFSET,
    STATUS_ENTRY_BYTES,
    UB_ALIGN,
    WORD_BYTES,
    Layout,
    SlotLayout,
    Wandering,
    align,
    entry_per_rank,
)

# The state window of A3: 1 MB, zones 500 KB apart. It is larger only where entries need more room, which the
# limits of torch_npu's functions do not let happen.
STATE_BYTES = 1 << 20
STATE_ZONE_STRIDE = 500 * 1024
# Behind the most entries that a combine has by these limits (512 tokens of 16 + 4 results).
STATE_BARRIER_OFFSET = 400 * 1024
# Of an entry for each of 1,024 ranks, more than a group has.
STATE_RANKS_BYTES = 32 * 1024


class WindowLayout(Layout):
    """The A3 fullmesh window of a `Config`. The same on every rank.

    Sizes follow the published formula (docs/limits.md, "Window memory: HCCL_BUFFSIZE"): slots are strided
    for 16-bit rows whether or not a call quantises, so that region bases stay fixed for the life of the
    window.
    """

    has_row_tables: ClassVar[bool] = True

    @cached_property
    def _combine_offset(self) -> int:
        """How far into a zone's state combine's entries begin, behind those of dispatch."""
        c = self.config
        entries = max(c.experts_on(rank) for rank in (0, c.num_ranks - 1)) * c.num_ranks
        return max(STATE_COMBINE_OFFSET, align(STATUS_ENTRY_BYTES * entries, PAGE_BYTES))

    @cached_property
    def _barrier_offset(self) -> int:
        """How far into it those of barriers begin."""
        c = self.config
        entries = STATUS_ENTRY_BYTES * c.num_max_tokens_per_rank * c.num_results_per_token
        return max(STATE_BARRIER_OFFSET, align(self._combine_offset + entries, PAGE_BYTES))

    @cached_property
    def _state_zone_stride(self) -> int:
        """Bytes from the state of one zone to that of the next."""
        return max(STATE_ZONE_STRIDE, self._barrier_offset + 2 * STATE_RANKS_BYTES)

    @cached_property
    def entries_bytes(self) -> int:
        """Entries of both zones."""
        return max(STATE_BYTES, align(self.num_zones * self._state_zone_stride, PAGE_BYTES))

    @cached_property
    def slot_stride(self) -> int:
        """Bytes from one dispatch slot to the next."""
        return align(SlotLayout(self.config.hidden, 2).packed_bytes, SLOT_ALIGN)

    @cached_property
    def combine_stride(self) -> int:
        """Bytes from one combine slot to the next."""
        return align(2 * self.config.hidden, SLOT_ALIGN)

    @property
    def _combine_bytes(self) -> int:
        c = self.config
        return c.num_max_tokens_per_rank * c.num_results_per_token * self.combine_stride

    @property
    def _dispatch_bytes(self) -> int:
        c = self.config
        return c.num_local_experts * c.num_max_tokens_per_rank * c.num_ranks * self.slot_stride

    @cached_property
    def combine_zone_bytes(self) -> int:
        """Bytes of the combine slots of one zone, with what is left of their last page."""
        return align(self._combine_bytes, PAGE_BYTES)

    @cached_property
    def dispatch_zone_bytes(self) -> int:
        """Bytes of the dispatch slots of one zone, with what is left of their last page."""
        return align(self._dispatch_bytes, PAGE_BYTES)

    @property
    def zone_bytes(self) -> int:
        """Bytes from one zone to the next."""
        return self.combine_zone_bytes + self.dispatch_zone_bytes

    @property
    def data_bytes(self) -> int:
        """What HCCL_BUFFSIZE has to cover, by its formula: slots alone."""
        return self.num_zones * (self._combine_bytes + self._dispatch_bytes)

    @property
    def dispatch_base(self) -> int:
        """First byte of zone 0's dispatch slots."""
        return self.state_bytes + self.combine_zone_bytes

    @cached_property
    def dispatch_slots(self) -> Region:
        """Slot of the ``index``-th row from ``source`` for local ``expert``, in the window of rank 0.

        On A3 the HCCS port that a write takes is a hash of bits 9 to 20 of its address, and windows begin at
        multiples of 2 MiB. So sources are rotated from one rank's window to the next one's, in the slots of
        each expert: what a source sends to one expert number of all ranks goes to as many places.
        """
        c, stride = self.config, self.slot_stride
        expert, source, index = packed(stride, c.num_local_experts, c.num_ranks, c.num_max_tokens_per_rank)
        dims = (self.num_zones, self.zone_bytes), source, expert, index
        return region_of("dispatch_slots", self.dispatch_base, stride, *dims, rotation=1)

    @cached_property
    def combine_slots(self) -> Region:
        """Result ``k`` of a token: K routed ones, then S shared ones, contiguous per token."""
        c, stride = self.config, self.combine_stride
        slots = packed(stride, c.num_max_tokens_per_rank, c.num_results_per_token)
        return region_of("combine_slots", self.state_bytes, stride, (self.num_zones, self.zone_bytes), *slots)

    @cached_property
    def dispatch_status(self) -> Region:
        """Entry {1.0f, int32 count} that ``source`` posts for ``expert`` of a rank of routed ones."""
        return self._dispatch_status(self.config.num_local_experts)

    def dispatch_status_on(self, rank: int) -> Region:
        """Those in the window of a rank: by source, without gaps, one each where there is one expert."""
        return self._dispatch_status(self.config.experts_on(rank))

    def _dispatch_status(self, num_experts: int) -> Region:
        entry, ranks = STATUS_ENTRY_BYTES, self.config.num_ranks
        zones = self.num_zones, self._state_zone_stride
        dims = zones, (num_experts, entry), (ranks, num_experts * entry)
        return region_of("dispatch_status", 0, entry, *dims)

    @cached_property
    def combine_status(self) -> Region:
        """Entry whose words are the round's number: it announces result ``k`` of a token."""
        c, entry = self.config, STATUS_ENTRY_BYTES
        zones = self.num_zones, self._state_zone_stride
        entries = packed(entry, c.num_max_tokens_per_rank, c.num_results_per_token)
        return region_of("combine_status", self._combine_offset, entry, zones, *entries)

    @cached_property
    def barrier_status(self) -> Region:
        """Entry that ``source`` posts in a barrier (expert is 0)."""
        return self._entry_per_rank("barrier_status", self._barrier_offset)

    @cached_property
    def peer_status(self) -> Region:
        """Entry that ``source`` posts once all its results are there (expert is 0): V1's combine."""
        return self._entry_per_rank("peer_status", self._barrier_offset + STATE_RANKS_BYTES)

    def _entry_per_rank(self, name: str, base: int) -> Region:
        return entry_per_rank(name, base, self._state_zone_stride, self.config.num_ranks)

    @property
    def _posts(self) -> bool:
        return self.config.topology.num_servers > 1

    @property
    def out_rows(self) -> Region:
        """Results that go back to queued peers, by the numbers of their rows (a zone's ``index``).

        They cannot lie where their tokens' slots would: more come together here than any rank takes.
        """
        rows = max(self.config.routed_capacity, self.config.shared_capacity) if self._posts else 0
        dims = packed(self.combine_stride, self.num_zones, rows)
        return region_of("indexed_slots", 2 * self.in_bytes, self.combine_stride, *dims, name="out_rows")

    @property
    def out_flags(self) -> Region:
        """A flag of a result for each queued peer (``index``): what is posted of a round is the same."""
        ranks, entry = self.config.num_ranks if self._posts else 0, STATUS_ENTRY_BYTES
        base = 2 * self.in_bytes + self.num_zones * self.out_rows.stride("zone")
        dims = packed(entry, self.num_zones, ranks)
        return region_of("indexed_slots", base, entry, *dims, name="out_flags")

    @property
    def out_bytes(self) -> int:
        """Counts the bytes of the out part: the mirror of what peers write, results, and flags."""
        return self.out_flags.end - self.in_bytes if self._posts else 0

    @property
    def wandering(self) -> tuple[Wandering, ...]:
        """What combines write: a result's place is that of its token and k, whichever rank it comes from."""
        zones, begin = self._state_zone_stride, self._combine_offset
        return (
            Wandering(("combine",), self.state_bytes, self.zone_bytes, self.combine_zone_bytes),
            Wandering(("combine",), begin, zones, self._barrier_offset - begin),
        )

    @property
    def regions(self) -> tuple[Region, ...]:
        """All of them."""
        slots = self.dispatch_slots, self.combine_slots
        posted = (self.out_rows, self.out_flags) if self._posts else ()
        entries = self.dispatch_status, self.combine_status, self.barrier_status, self.peer_status
        return (*slots, *entries, *self.tables, *posted)


@dataclass(frozen=True)
class InbandSlot(SlotLayout):
    """fullmesh_v2: without room for scales that a row does not have; an only scale is a word of the stamp.

    So an int8 row of H = 7168 fills 15 blocks to the last byte, instead of 16 of which one is nearly empty.
    """

    @property
    def scale_offset(self) -> int:
        """Where the scales begin."""
        after_row = align(self.row_bytes, UB_ALIGN)
        return after_row + STAMP.word("scale") * WORD_BYTES if self.num_scales == 1 else after_row

    @property
    def scaled_bytes(self) -> int:
        """Bytes of the row with its scales, an only one with what the stamp will overwrite around it."""
        return align(self.scale_offset + self.scale_bytes, UB_ALIGN)

    @property
    def stamp_offset(self) -> int:
        """Where the 32 bytes of the stamp begin."""
        return self.scaled_bytes - STAMP_BYTES if self.num_scales == 1 else self.scaled_bytes

    @property
    def packed_bytes(self) -> int:
        """Bytes in use, a multiple of 32."""
        return self.stamp_offset + STAMP_BYTES


class InbandLayout(WindowLayout):
    """fullmesh_v2: a dispatch slot is cut into blocks that carry their flags."""

    @cached_property
    def slot_stride(self) -> int:
        """Bytes from one dispatch slot to the next."""
        return -(-SlotLayout(self.config.hidden, 2).packed_bytes // BLOCK_DATA_BYTES) * BLOCK_BYTES


class ExpertSlotsLayout(WindowLayout):
    """V1: a result's slot is named by its expert and its number there, as ``expand_idx`` counts.

    Dispatch and combine use the same bytes of a zone in turn: each of them waits for every rank, and one
    toggle serves both. Sizes follow V1's formula (docs/limits.md, "Window memory: HCCL_BUFFSIZE"): slots of
    2 * (H + 128) bytes.
    """

    @cached_property
    def slot_stride(self) -> int:
        """Bytes from one slot to the next."""
        return 2 * (self.config.hidden + 128)

    @property
    def combine_stride(self) -> int:
        """Bytes from one combine slot to the next."""
        return self.slot_stride

    @property
    def _zone_slots_bytes(self) -> int:
        c = self.config
        slots = c.num_ranks * c.num_local_experts + c.num_topk + 1
        return c.num_max_tokens_per_rank * self.slot_stride * slots

    @cached_property
    def zone_bytes(self) -> int:
        """Bytes from one zone to the next."""
        return align(self._zone_slots_bytes, PAGE_BYTES)

    @property
    def data_bytes(self) -> int:
        """What HCCL_BUFFSIZE has to cover, by its formula: slots alone."""
        return self.num_zones * self._zone_slots_bytes

    @property
    def wandering(self) -> tuple[Wandering, ...]:
        """All data: what is one rank's to write in a dispatch is another one's in a combine."""
        return (Wandering(("dispatch", "combine"), self.state_bytes, self.zone_bytes, self.zone_bytes),)

    @property
    def dispatch_base(self) -> int:
        """First byte of zone 0's dispatch slots."""
        return self.state_bytes

    @cached_property
    def combine_slots(self) -> Region:
        """Result number ``token`` of expert ``k``; expert M is the shared one, numbered by token."""
        c, stride, rows = self.config, self.slot_stride, self.config.num_max_tokens_per_rank
        dims = (self.num_zones, self.zone_bytes), (rows, stride), (c.num_experts + 1, rows * stride)
        return region_of("combine_slots", self.state_bytes, stride, *dims)
