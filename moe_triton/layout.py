"""Every offset in a window: where slots and status entries lie, and how a slot is packed.

This is the only source of offsets. Python asks a `Region` for them, Triton kernels get its strides,
Ascend C kernels get it as a struct from the generated header (`moe_triton.codegen`), and
``moe-triton layout`` prints it. Everything in it is linear: a base and one stride per dimension.

The window of a rank, A3 fullmesh (sizes in bytes)::

    0       state: zone 0 {dispatch entries, combine entries}, zone 1 {the same}     1 MB
    1 MB    data:  zone 0 {combine slots, dispatch slots}, zone 1 {the same}

A dispatch slot::

    0             row, Align32(H * itemsize)
    scale_offset  32 bytes, the row's fp32 scale first
    stamp_offset  32 bytes, int32 (source rank, token, k), then the fp32 routing weight
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moe_triton.config import Config

UB_ALIGN = 32
SLOT_ALIGN = 512
STATUS_ENTRY_BYTES = 32
SCALE_BYTES = 32
STAMP_BYTES = 32
NUM_ZONES = 2

# The state window of A3: 1 MB, zones 500 KB apart, combine's entries 64 KB into a zone. The 64 KB is
# where the rule localE * EP <= 2048 comes from.
STATE_BYTES = 1 << 20
STATE_ZONE_STRIDE = 500 * 1024
STATE_COMBINE_OFFSET = 64 * 1024


def align(size: int, to: int) -> int:
    """``size`` rounded up to a multiple of ``to``."""
    return -(-size // to) * to


@dataclass(frozen=True)
class Dim:
    """One dimension of a region: how many entries, and bytes from one to the next."""

    name: str
    extent: int
    stride: int


@dataclass(frozen=True)
class Region:
    """A strided array inside a window."""

    name: str
    base: int
    item_bytes: int
    dims: tuple[Dim, ...]

    def offset(self, **index: int) -> int:
        """Bytes from the window's start to one entry. Indices that are left out are 0.

        Raises:
            IndexError: an index outside its extent, or an unknown dimension.
        """
        unknown = index.keys() - {dim.name for dim in self.dims}
        if unknown:
            raise IndexError(f"{self.name} has no dimension {sorted(unknown)}")
        offset = self.base
        for dim in self.dims:
            i = index.get(dim.name, 0)
            if not 0 <= i < dim.extent:
                raise IndexError(f"{self.name}: {dim.name} = {i} is outside [0, {dim.extent})")
            offset += i * dim.stride
        return offset

    def stride(self, dim: str) -> int:
        """Bytes between neighbours along a dimension."""
        return next(d.stride for d in self.dims if d.name == dim)

    @property
    def end(self) -> int:
        """First byte after the last entry."""
        return self.base + sum((d.extent - 1) * d.stride for d in self.dims) + self.item_bytes

    def words(self) -> tuple[int, ...]:
        """The region as the generated C++ struct holds it: base, then stride and extent per dimension."""
        return (self.base, *(value for d in self.dims for value in (d.stride, d.extent)))


# Names and dimensions of the regions, shared by `WindowLayout` and the generated C++ structs.
REGION_DIMS: dict[str, tuple[str, ...]] = {
    "dispatch_slots": ("zone", "source", "expert", "index"),
    "combine_slots": ("zone", "token", "k"),
    "dispatch_status": ("zone", "expert", "source"),
    "combine_status": ("zone", "token", "k"),
}


def _region(name: str, base: int, item_bytes: int, *dims: tuple[int, int]) -> Region:
    named = zip(REGION_DIMS[name], dims, strict=True)
    return Region(name, base, item_bytes, tuple(Dim(n, extent, stride) for n, (extent, stride) in named))


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


@dataclass(frozen=True)
class WindowLayout:
    """The A3 fullmesh window of a `Config`. The same on every rank.

    Sizes follow HCCL_BUFFSIZE's formula (operators.md, section 6): slots are strided for 16-bit rows
    whether or not a call quantises, so that region bases stay fixed for the life of the window.
    """

    config: Config

    @cached_property
    def slot_stride(self) -> int:
        """Bytes from one dispatch slot to the next."""
        return align(SlotLayout(self.config.hidden, 2).packed_bytes, SLOT_ALIGN)

    @cached_property
    def combine_stride(self) -> int:
        """Bytes from one combine slot to the next."""
        return align(2 * self.config.hidden, SLOT_ALIGN)

    @cached_property
    def combine_zone_bytes(self) -> int:
        """Bytes of the combine slots of one zone."""
        c = self.config
        return c.num_max_tokens_per_rank * c.num_results_per_token * self.combine_stride

    @cached_property
    def dispatch_zone_bytes(self) -> int:
        """Bytes of the dispatch slots of one zone."""
        c = self.config
        return c.num_local_experts * c.num_max_tokens_per_rank * c.num_ranks * self.slot_stride

    @cached_property
    def zone_bytes(self) -> int:
        """Bytes from one zone to the next."""
        return self.combine_zone_bytes + self.dispatch_zone_bytes

    @property
    def data_bytes(self) -> int:
        """What HCCL_BUFFSIZE has to cover."""
        return NUM_ZONES * self.zone_bytes

    @property
    def window_bytes(self) -> int:
        """State and data together: what one rank allocates."""
        return STATE_BYTES + self.data_bytes

    @cached_property
    def dispatch_slots(self) -> Region:
        """Slot of the ``index``-th row from ``source`` for local ``expert``."""
        c, stride = self.config, self.slot_stride
        rows = c.num_max_tokens_per_rank
        return _region(
            "dispatch_slots",
            STATE_BYTES + self.combine_zone_bytes,
            stride,
            (NUM_ZONES, self.zone_bytes),
            (c.num_ranks, c.num_local_experts * rows * stride),
            (c.num_local_experts, rows * stride),
            (rows, stride),
        )

    @cached_property
    def combine_slots(self) -> Region:
        """Result ``k`` of a token: K routed ones, then S shared ones, contiguous per token."""
        c, stride = self.config, self.combine_stride
        return _region(
            "combine_slots",
            STATE_BYTES,
            stride,
            (NUM_ZONES, self.zone_bytes),
            (c.num_max_tokens_per_rank, c.num_results_per_token * stride),
            (c.num_results_per_token, stride),
        )

    @cached_property
    def dispatch_status(self) -> Region:
        """Entry {1.0f, int32 count} that ``source`` posts for local ``expert``, expert-major."""
        c = self.config
        return _region(
            "dispatch_status",
            0,
            STATUS_ENTRY_BYTES,
            (NUM_ZONES, STATE_ZONE_STRIDE),
            (c.num_local_experts, c.num_ranks * STATUS_ENTRY_BYTES),
            (c.num_ranks, STATUS_ENTRY_BYTES),
        )

    @cached_property
    def combine_status(self) -> Region:
        """Entry of eight 1.0f that announces result ``k`` of a token."""
        c = self.config
        return _region(
            "combine_status",
            STATE_COMBINE_OFFSET,
            STATUS_ENTRY_BYTES,
            (NUM_ZONES, STATE_ZONE_STRIDE),
            (c.num_max_tokens_per_rank, c.num_results_per_token * STATUS_ENTRY_BYTES),
            (c.num_results_per_token, STATUS_ENTRY_BYTES),
        )

    @property
    def regions(self) -> tuple[Region, ...]:
        """All of them, in the order of `REGION_DIMS`."""
        return tuple(getattr(self, name) for name in REGION_DIMS)

    def region(self, name: str) -> Region:
        """The region of this name."""
        if name not in REGION_DIMS:
            raise KeyError(name)
        region: Region = getattr(self, name)
        return region
