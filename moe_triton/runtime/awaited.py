"""Whom a wait that goes on is for, read from where it looks, and the line that says so."""

from __future__ import annotations

import bisect
import ctypes
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from moe_triton.backends.waits import Waiting
from moe_triton.core import abi, ascendc
from moe_triton.core.region import REGION_DIMS, Region, region_of
from moe_triton.layout import BLOCK_BYTES, BLOCK_DATA_BYTES, FLAG_BITS, STAMP_BYTES
from moe_triton.rendezvous.notes import Notes
from moe_triton.runtime.diagnosis import owners
from moe_triton.runtime.disagreement import is_exchange
from moe_triton.schemes.site import Site

MAX_PATIENCE_S = 5.0
_log = logging.getLogger("moe_triton")


def patience_s(timeout_s: float) -> float:
    """Seconds that a wait may take in silence."""
    return min(MAX_PATIENCE_S, timeout_s / 2)


def tell_of(site: Site, waiting: Waiting, counts: Mapping[str, int], notes: Notes) -> None:
    """Logs a warning of a wait that lasts: operator, number, zone, time and ranks; and tells the peers.

    Args:
        site: where it waits.
        waiting: the launch; one that waits for no peer is passed by.
        counts: runs of each operator that have ended.
        notes: for those who wait for this rank.
    """
    ranks = awaited_ranks(site, waiting)
    if ranks is None:
        return
    operator, zone = waiting.plan.operator, waiting.plan.zone
    number = counts[operator]
    if not is_exchange(waiting.launch):
        notes.leave(f"{operator} number {number}", ranks, waiting.goes_on)
    _log.warning(
        "%s number %d (zone %d) has waited %.1f s for %srank(s) %s",
        operator,
        number,
        zone,
        waiting.seconds,
        "tensor-parallel " if is_exchange(waiting.launch) else "",
        ranks,
    )


def awaited_ranks(site: Site, waiting: Waiting) -> list[int] | None:
    """Ranks whose flags are not there yet, or None of a launch that waits for nobody.

    Args:
        site: where it waits.
        waiting: the launch, in the middle of a run.
    """
    find = _FINDERS.get(waiting.launch.kernel.name)
    if find is None:
        return None
    if is_exchange(waiting.launch):
        assert site.exchange_rank is not None
        return [1 - site.exchange_rank]
    arguments = _arguments(waiting)
    if arguments["zone_at"]:
        arguments["zone"] = _int32(arguments["zone_at"])
    missing: set[int] = set()
    for first, count in waiting.awaited.values():
        missing |= set(find(site, arguments, range(first, first + count)))
    return sorted(missing)


def _in_entries(site: Site, arguments: dict[str, Any], entries: range) -> Iterator[int]:
    status: Region = arguments["status"]
    num_ranks = status.dims[-1].extent
    for entry in entries:
        expert, source = divmod(entry, num_ranks)
        offset = status.offset(zone=arguments["zone"], expert=expert, source=source)
        if _int32(arguments["window"] + offset) != FLAG_BITS:
            yield source


def _in_results(site: Site, arguments: dict[str, Any], tokens: range) -> Iterator[int]:
    status: Region = arguments["status"]
    topk = arguments["topk"]
    for token in tokens:
        if arguments["active"] and _int32(arguments["active"], token) < 0:
            continue
        ids = [_int32(arguments["topk_idx"], token * topk + k) for k in range(topk)]
        for k, owner in owners(site.config, site.rank, ids):
            offset = status.offset(zone=arguments["zone"], token=token, k=k)
            if _int32(arguments["window"] + offset) != FLAG_BITS:
                yield owner


def _in_rows(site: Site, arguments: dict[str, Any], rows: range) -> Iterator[int]:
    """Of rows with flags in band, in the order in which they are received."""
    slots: Region = arguments["slots"]
    num_ranks = arguments["num_ranks"]
    ends = [_int32(arguments["recv_offsets"], entry) for entry in range(arguments["num_entries"])]
    blocks = range(-(-(arguments["stamp_offset"] + STAMP_BYTES) // BLOCK_DATA_BYTES))
    for row in rows:
        entry = bisect.bisect_right(ends, row)
        first = ends[entry - 1] if entry else 0
        expert, source = divmod(entry, num_ranks)
        slot = slots.offset(zone=arguments["zone"], source=source, expert=expert, index=row - first)
        flags = arguments["window"] + slot + BLOCK_DATA_BYTES
        if any(_int32(flags + block * BLOCK_BYTES) != FLAG_BITS for block in blocks):
            yield source


_FINDERS = {
    ascendc.DISPATCH_WAIT.name: _in_entries,
    ascendc.COMBINE_WAIT.name: _in_results,
    ascendc.INBAND_RECEIVE.name: _in_rows,
}


def _arguments(waiting: Waiting) -> dict[str, Any]:
    """A launch's arguments by name: numbers, addresses and regions."""
    found: dict[str, Any] = {}
    for arg, first in abi.places(waiting.launch.kernel.args):
        words = waiting.words[first : first + abi.words_of(arg)]
        if arg.type in REGION_DIMS:
            base, *rest = words
            dims = [(extent, stride) for stride, extent in zip(rest[::2], rest[1::2], strict=True)]
            found[arg.name] = region_of(arg.type, base, 0, *dims)
        else:
            found[arg.name] = words[0]
    return found


def _int32(address: int, index: int = 0) -> int:
    return ctypes.c_int32.from_address(address + 4 * index).value
