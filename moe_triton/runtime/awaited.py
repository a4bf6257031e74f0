"""Warnings about long waits: which ranks a launch is still waiting for, read from the flags that it polls."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from moe_triton.backends.waits import Waiting
from moe_triton.core import abi
from moe_triton.core.region import REGION_DIMS
from moe_triton.rendezvous.notes import Notes
from moe_triton.runtime.disagreement import group_of, in_words
from moe_triton.schemes import scheme_type
from moe_triton.schemes.common.waits import POSTS, int32_at, region_in
from moe_triton.schemes.site import Site

MAX_PATIENCE_S = 5.0
_log = logging.getLogger("moe_triton")


def patience_s(timeout_s: float) -> float:
    """Seconds before a wait is reported."""
    return min(MAX_PATIENCE_S, timeout_s / 2)


def note_of(site: Site, waiting: Waiting, counts: Mapping[str, int], notes: Notes) -> None:
    """Leaves a note of a wait for peers; none of a launch that does not wait for them.

    Args:
        site: where it waits.
        waiting: the launch.
        counts: runs of each operator that have ended.
        notes: of this rank, read by ranks that wait for it.
    """
    ranks = awaited_ranks(site, waiting)
    if ranks is None:
        return
    call = f"{waiting.plan.operator} number {counts[waiting.plan.operator]}"
    if group := group_of(site, waiting.launch):  # whose numbers are others
        call, ranks = f"{call}, for its {group}peer", []
    notes.leave(call, ranks, waiting.goes_on)


def tell_of(site: Site, waiting: Waiting, counts: Mapping[str, int]) -> None:
    """Logs a warning about a long wait: operator, number, zone, time and ranks.

    Args:
        site: where it waits.
        waiting: the launch; nothing is logged if it does not wait for peers.
        counts: runs of each operator that have ended.
    """
    ranks = awaited_ranks(site, waiting)
    if ranks is None:
        return
    operator, zone = waiting.plan.operator, waiting.plan.zone
    _log.warning(
        "%s number %d (zone %d) has waited %.1f s for %s",
        operator,
        counts[operator],
        zone,
        waiting.seconds,
        in_words(site, waiting.launch, ranks),
    )


def awaited_ranks(site: Site, waiting: Waiting) -> list[int] | None:
    """Ranks whose flags have not arrived yet, or None for a launch that does not wait for peers.

    Where a launch posts, none of its blocks may have anything to wait for: queues have room.

    Args:
        site: where it waits.
        waiting: the launch, which is still running.
    """
    finder = scheme_type(site.config).finders.get(waiting.launch.kernel.name)
    if finder is None or (finder is POSTS and not waiting.awaited):
        return None
    peers = site.scheme.peers_of(waiting.launch)
    if peers.group == "tensor":
        return [1 - peers.rank]
    arguments = _arguments(waiting)
    if arguments["zone_at"]:
        arguments["zone"] = int32_at(arguments["zone_at"])
    missing: set[int] = set()
    for first, count in waiting.awaited.values():
        missing |= set(finder.goes_on(site, arguments, range(first, first + count)))
    return sorted(missing)


def _arguments(waiting: Waiting) -> dict[str, Any]:
    """A launch's arguments by name: numbers, addresses and regions."""
    found: dict[str, Any] = {}
    for arg, first in abi.word_offsets(waiting.launch.kernel.args):
        words = waiting.words[first : first + abi.words_of(arg)]
        found[arg.name] = region_in(arg.type, words) if arg.type in REGION_DIMS else words[0]
    return found
