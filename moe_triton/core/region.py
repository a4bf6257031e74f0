"""Strided arrays in a window: the form of everything that `moe_triton.layout` places there.

A region may be rotated: then its entries lie elsewhere in each rank's window, so that what a rank writes at
the same index to all of them goes to different addresses (docs/protocol.md, "Slots over ports").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

MAX_INT32 = 2**31 - 1


@dataclass(frozen=True)
class Dim:
    """One dimension of a region: how many entries, and bytes from one to the next."""

    name: str
    extent: int
    stride: int


@dataclass(frozen=True)
class Region:
    """A strided array inside a window. Its kind, a key of `REGION_DIMS`, names its struct in C++.

    Attributes:
        name: its own.
        base: bytes from the window's start.
        item_bytes: of an entry.
        dims: the outermost first.
        kind: of its dimensions.
        rotation: by how many places its `ROTATED_DIMS` is rotated from one rank's window to the next one's:
            0 or 1.
        receiver: the rank whose window this is of, which says nothing where the rotation is 0.
    """

    name: str
    base: int
    item_bytes: int
    dims: tuple[Dim, ...]
    kind: str = ""
    rotation: int = 0
    receiver: int = 0

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
            if dim.name == self.rotated_dim:
                i = (i + self.receiver * self.rotation) % dim.extent
            offset += i * dim.stride
        return offset

    @property
    def rotated_dim(self) -> str | None:
        """The dimension that lies elsewhere in each rank's window, if there is one."""
        return ROTATED_DIMS[self.kind] if self.rotation else None

    def on(self, receiver: int) -> Region:
        """The same region in the window of a rank."""
        return replace(self, receiver=receiver)

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
        return replace(
            self, base=self.base // num_bytes, item_bytes=-(-self.item_bytes // num_bytes), dims=dims
        )

    def words(self) -> tuple[int, ...]:
        """The region as the generated C++ struct holds it: see `fields_of`."""
        words = (self.base, *(value for d in self.dims for value in (d.stride, d.extent)))
        return (*words, self.rotation, self.receiver) if self.kind in ROTATED_DIMS else words


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
# The kinds that may be rotated, and their dimension that is.
ROTATED_DIMS: dict[str, str] = {"dispatch_slots": "source"}


def fields_of(kind: str) -> tuple[str, ...]:
    """What each of a region's words is: the fields of the C++ struct of its kind."""
    fields = ("base", *(f"{dim}_{what}" for dim in REGION_DIMS[kind] for what in ("stride", "extent")))
    return (*fields, "rotation", "receiver") if kind in ROTATED_DIMS else fields


def region_in(kind: str, words: Sequence[int]) -> Region:
    """The region that an argument's words stand for; see `Region.words`."""
    fields = dict(zip(fields_of(kind), words, strict=True))
    dims = tuple(Dim(dim, fields[f"{dim}_extent"], fields[f"{dim}_stride"]) for dim in REGION_DIMS[kind])
    rotated = {name: fields[name] for name in ("rotation", "receiver") if kind in ROTATED_DIMS}
    return Region(kind, fields["base"], 0, dims, kind, **rotated)


def packed(item_bytes: int, *extents: int) -> list[tuple[int, int]]:
    """(extent, stride) of dimensions without gaps, the last one innermost."""
    return [(extent, item_bytes * math.prod(extents[i:])) for i, extent in enumerate(extents, 1)]


def region_of(
    kind: str, base: int, item_bytes: int, *dims: tuple[int, int], name: str = "", rotation: int = 0
) -> Region:
    """A region of one of the kinds of `REGION_DIMS`, from (extent, stride) per dimension."""
    assert rotation == 0 or kind in ROTATED_DIMS, kind
    named = tuple(Dim(n, *dim) for n, dim in zip(REGION_DIMS[kind], dims, strict=True))
    return Region(name or kind, base, item_bytes, named, kind, rotation)
