"""Strided arrays in a window: the form of everything that `moe_triton.layout` places there."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_INT32 = 2**31 - 1


@dataclass(frozen=True)
class Dim:
    """One dimension of a region: how many entries, and bytes from one to the next."""

    name: str
    extent: int
    stride: int


@dataclass(frozen=True)
class Region:
    """A strided array inside a window. Its kind, a key of `REGION_DIMS`, names its struct in C++."""

    name: str
    base: int
    item_bytes: int
    dims: tuple[Dim, ...]
    kind: str = ""

    def offset(self, **index: int) -> int:
        """Bytes from the window's start to one entry. Indices that are left out are 0.

        Raises:
            IndexError: an index outside its extent, or an unknown dimension.
        """
        if unknown := index.keys() - {dim.name for dim in self.dims}:
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

    def extent(self, dim: str) -> int:
        """How many there are along a dimension."""
        return next(d.extent for d in self.dims if d.name == dim)

    @property
    def end(self) -> int:
        """First byte after the last entry."""
        return self.base + sum((d.extent - 1) * d.stride for d in self.dims) + self.item_bytes

    def in_units(self, num_bytes: int) -> Region:
        """The same region, its offsets counted in units of so many bytes.

        Raises:
            ValueError: an offset is no whole number of units, or one that int32 cannot hold.
        """
        steps = (self.base, *(dim.stride for dim in self.dims))
        if any(step % num_bytes for step in steps):
            raise ValueError(f"{self.name}: offsets {steps} are not multiples of {num_bytes} bytes")
        if self.end // num_bytes > MAX_INT32:
            raise ValueError(f"{self.name}: {self.end} bytes are too many for int32 in units of {num_bytes}")
        dims = tuple(Dim(dim.name, dim.extent, dim.stride // num_bytes) for dim in self.dims)
        return Region(self.name, self.base // num_bytes, -(-self.item_bytes // num_bytes), dims, self.kind)

    def words(self) -> tuple[int, ...]:
        """The region as the generated C++ struct holds it: base, then stride and extent per dimension."""
        return (self.base, *(value for d in self.dims for value in (d.stride, d.extent)))


# Kinds of regions and their dimensions, shared by the layouts and the generated C++ structs.
REGION_DIMS: dict[str, tuple[str, ...]] = {
    "dispatch_slots": ("zone", "source", "expert", "index"),
    "combine_slots": ("zone", "token", "k"),
    "dispatch_status": ("zone", "expert", "source"),
    "combine_status": ("zone", "token", "k"),
    "indexed_slots": ("zone", "index"),
    "exchange_headers": ("zone", "word"),
    "direct_counts": ("zone", "source", "entry"),
    "peer_blocks": ("zone", "rank"),
    "rail_slots": ("zone", "server", "index"),
    "rail_ends": ("zone", "server"),
    "row_tables": ("zone", "source", "table"),
}


def packed(item_bytes: int, *extents: int) -> list[tuple[int, int]]:
    """(extent, stride) of dimensions without gaps, the last one innermost."""
    return [(extent, item_bytes * math.prod(extents[i:])) for i, extent in enumerate(extents, 1)]


def region_of(kind: str, base: int, item_bytes: int, *dims: tuple[int, int], name: str = "") -> Region:
    """A region of one of the kinds of `REGION_DIMS`, from (extent, stride) per dimension."""
    named = zip(REGION_DIMS[kind], dims, strict=True)
    return Region(
        name or kind, base, item_bytes, tuple(Dim(n, extent, stride) for n, (extent, stride) in named), kind
    )
