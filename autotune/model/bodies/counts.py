"""`Counts`: what each block of a launch of an Ascend C kernel does, before anything is priced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property, reduce

import numpy as np

from autotune.model.cost import Table, UnknownWorkError, Work
from autotune.model.traffic import Tier
from moe_triton.core.region import REGION_DIMS
from moe_triton.layout import WORD_BYTES

CACHE_LINE_BYTES = 64
ADDRESS_BYTES = 8


@dataclass(frozen=True)
class Counts:
    """(blocks,) integers each: what every block does.

    Left out, because a launch without errors does none of it or because no pipe takes it: reports, scalar
    instructions on registers, flags between pipes, and the bytes of the lines that scalar accesses to global
    memory fill.

    Attributes:
        loads, load_bytes: copies from global memory to the unified buffer (MTE2).
        stores, store_bytes: copies to global memory of any device (MTE3).
        sent_bytes: of ``store_bytes``, those to other devices.
        scalar_local: scalar accesses to the unified buffer.
        scalar_global: scalar accesses to global memory, through the core's data cache.
        lines: of these, those that fill a line of the cache.
        dropped: lines of the cache that are cleaned and invalidated.
        vector: vector instructions.
        barriers: barriers of one pipe or of all pipes of a core.
        turns: of the loop that the kernel is in, for its price.
        items: slots or entries whose addresses are computed, for their price.
    """

    loads: np.ndarray
    load_bytes: np.ndarray
    stores: np.ndarray
    store_bytes: np.ndarray
    sent_bytes: np.ndarray
    scalar_local: np.ndarray
    scalar_global: np.ndarray
    lines: np.ndarray
    dropped: np.ndarray
    vector: np.ndarray
    barriers: np.ndarray
    turns: np.ndarray
    items: np.ndarray

    def __add__(self, other: Counts) -> Counts:
        pairs = ((getattr(self, name), getattr(other, name)) for name in NAMES)
        nothing = _zeros(len(self.loads))
        return Counts(*(b if a is nothing else a if b is nothing else a + b for a, b in pairs))


NAMES = tuple(field.name for field in fields(Counts))


@cache
def _zeros(blocks: int) -> np.ndarray:
    """One array for all that is nothing: most of a stage is."""
    zeros = np.zeros(blocks, np.int64)
    zeros.flags.writeable = False
    return zeros


@dataclass(frozen=True)
class Counted:
    """A launch.

    Attributes:
        stages: by name, in order, what is done in each.
        rows: (EP,) rows that are written to each rank.
        flags: (EP,) flags or entries that are written to each rank apart from rows.
    """

    stages: Mapping[str, Counts]
    rows: np.ndarray
    flags: np.ndarray

    @cached_property
    def total(self) -> Counts:
        """All stages together."""
        return reduce(Counts.__add__, self.stages.values())


def counts(work: Work, **numbers: int | np.ndarray) -> Counts:
    """Of a stage of a launch: an array for each block, or a number for all of them; what is left out is 0."""
    assert numbers.keys() <= set(NAMES), numbers.keys() - set(NAMES)
    zeros = _zeros(work.blocks)
    return Counts(*(zeros + numbers[name] if name in numbers else zeros for name in NAMES))


def fresh(work: Work, reads: int) -> Counts:
    """Scalars that others may have written: each read drops its line first."""
    return counts(work, scalar_global=reads, lines=reads, dropped=reads)


def kept(work: Work, argument: str) -> Counts:
    """A word that later launches read."""
    one = first_block(work, work.has(argument))
    return counts(work, scalar_local=one, stores=one, store_bytes=WORD_BYTES * one)


def lines_of_table(ranks: int) -> int:
    """Lines of the table of all ranks' windows, which begins with one."""
    return -(-ranks * ADDRESS_BYTES // CACHE_LINE_BYTES)


def first_block(work: Work, number: int = 1) -> np.ndarray:
    """What the first block alone does so many times."""
    return np.where(np.arange(work.blocks) == 0, number, 0)


def bounds(work: Work, total: int) -> np.ndarray:
    """(blocks + 1,) where each block's share of something begins, and the last one's ends."""
    return total * np.arange(work.blocks + 1) // work.blocks


def block_of(work: Work, total: int) -> np.ndarray:
    """(total,) the block that has each of them."""
    return np.repeat(np.arange(work.blocks), np.diff(bounds(work, total)))


def each_block(work: Work, blocks: np.ndarray, numbers: np.ndarray | None = None) -> np.ndarray:
    """(blocks,) how many, or how much, of what these blocks have."""
    return np.bincount(blocks, numbers, minlength=work.blocks).astype(np.int64)


def chunks(length: np.ndarray | int, size: int) -> np.ndarray:
    """Pieces of a certain size that something is taken in."""
    return -(-np.asarray(length) // size)


def filled(work: Work, blocks: np.ndarray, ranks: np.ndarray, before: np.ndarray | None = None) -> np.ndarray:
    """Keys of the lines of the table of windows that blocks read, without those that they have read before.

    Args:
        work: the launch.
        blocks, ranks: (N,) which block looks up whose window.
        before: keys.
    """
    per_line = CACHE_LINE_BYTES // ADDRESS_BYTES
    keys = np.unique(blocks + work.blocks * (ranks // per_line))
    return keys if before is None else np.setdiff1d(keys, before)


def filled_by(work: Work, keys: np.ndarray) -> np.ndarray:
    """(blocks,) how many of these keys each block has."""
    return each_block(work, keys % work.blocks)


def extent(work: Work, argument: str, dim: str) -> int:
    """How many there are along a dimension of a region, which an argument holds.

    Raises:
        UnknownWorkError: the argument is no region.
    """
    kind = next(arg.type for arg in work.kernel.args if arg.name == argument)
    words = work.arguments[argument]
    if not isinstance(words, tuple):
        raise UnknownWorkError(f"{argument} of {work.kernel.name} has to be a region")
    return words[2 + 2 * REGION_DIMS[kind].index(dim)]


def number_at(work: Work, name: str) -> int:
    """A number that stands in memory.

    Raises:
        UnknownWorkError: the model does not know what stands there.
    """
    value = work.arguments[name]
    if not isinstance(value, Table) or value.values is None or not value.values.size:
        raise UnknownWorkError(f"the model does not know what {name} of {work.kernel.name} points to")
    return int(value.values[-1] if name == "recv_offsets" else value.values[0])


def may_post(work: Work) -> bool:
    """Whether a launch posts to some ranks, or leaves in its own window what is to be posted to them."""
    if work.kernel.name == "combine_send":
        return work.has("window")
    return "out_offset" in work.arguments and work.number("out_offset") != 0


def is_queued(work: Work) -> np.ndarray:
    """(EP,) whether what a launch has for a rank is posted: in blocks to all others."""
    config, me = work.traffic.config, work.traffic.rank
    if not may_post(work):
        return np.zeros(config.num_ranks, bool)
    if "peer_blocks" in work.arguments:
        return np.asarray(np.arange(config.num_ranks) != me)
    servers = np.array(config.topology.servers)
    return np.asarray(servers != servers[me])


def num_parts(work: Work) -> int:
    """In how many parts blocks are made that are posted; 1 where none is."""
    return work.number("num_parts") if "part_lines" in work.arguments else 1


def parts_of(work: Work) -> np.ndarray:
    """(EP,) the part that a rank's block is in (block_posts.h): from the one behind this rank on, evenly."""
    ranks, parts = work.traffic.config.num_ranks, num_parts(work)
    places = (np.arange(ranks) - work.traffic.rank - 1) % ranks
    firsts = ranks * np.arange(1, parts) // parts
    return np.searchsorted(firsts, places, side="right")


def reached(work: Work) -> tuple[Tier, ...]:
    """(EP,) how far each rank's window is; what is to be posted is written to this rank's own."""
    pairs = zip(work.traffic.tiers, is_queued(work).tolist(), strict=True)
    return tuple("self" if queued else tier for tier, queued in pairs)


def is_remote(work: Work) -> np.ndarray:
    """(EP,) whether what is written for a rank goes to another device."""
    remote: np.ndarray = np.array(reached(work)) != "self"
    return remote


def lookups_of(work: Work, ranks: np.ndarray) -> np.ndarray:
    """Reads of the table of windows for a place at each of these ranks (``Peers::PlaceFor``)."""
    return np.asarray(1 + may_post(work) * ~is_queued(work)[ranks])


def lookups(work: Work, blocks: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """(blocks,) such reads of each block, of which each looks for a place at these ranks."""
    return each_block(work, blocks, lookups_of(work, ranks))


def found_zone(work: Work) -> Counts:
    """The zone, where it stands in memory."""
    return fresh(work, work.has("zone_at"))


def end(work: Work) -> Counts:
    """Every kernel ends with a barrier of its core's pipes."""
    return counts(work, barriers=1)


def no_ranks(work: Work) -> np.ndarray:
    """(EP,) zeros."""
    return np.zeros(work.traffic.config.num_ranks, np.int64)
