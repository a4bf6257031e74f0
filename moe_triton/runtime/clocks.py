"""How far the clocks of several hosts are apart, found by barriers.

Nobody leaves a barrier before all have come. So of each barrier the time at which a rank of one host came is
before that at which a rank of another one left, whatever either clock shows: that bounds how far these are
apart from both sides, and of many barriers the narrowest bounds count. No rank needs to answer another at
once, and neither way needs to take as long as the other.
"""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_triton.core.errors import ConfigMismatchError
from moe_triton.rendezvous.hosts import own_machine
from moe_triton.rendezvous.meeting import Meeting, values_of

BARRIERS = 32
Passage = tuple[int, int]
"""When a rank came to a barrier and when it left it, in nanoseconds of its clock."""


@dataclass(frozen=True)
class HostClock:
    """The clock of a host, whose times with the offset are those of the group's first host.

    Attributes:
        host: its number in the group.
        name: of the host.
        clock: the clock itself: processes that have the same one read the same times.
        reference: the clock of the first host.
        offset_ns: to be added to times of this clock.
        error_ns: by which that is wrong at most, as of when it was found.
    """

    host: int
    name: str
    clock: str
    reference: str
    offset_ns: int
    error_ns: int


def compare(meeting: Meeting, barrier: Callable[[], None]) -> HostClock:
    """The clock of this rank's host. Collective.

    Args:
        meeting: of ranks whose hosts are known.
        barrier: waits until every rank is here.

    Raises:
        MoeTritonError: what a barrier raises, or an exchange of the meeting.
    """
    passed: list[Passage] = []
    for _ in range(BARRIERS):
        came = time.monotonic_ns()
        barrier()
        passed.append((came, time.monotonic_ns()))
    said = meeting.exchange({"clock": own_clock(), "passed": passed}, "clocks of hosts")
    names, passages = values_of(said, "clock", str), [*map(_checked, *_numbered(said))]
    host, first = meeting.hosts[meeting.rank], meeting.hosts[0]
    lowest, highest = bounds(
        [each for each, its in zip(passages, meeting.hosts, strict=True) if its == first],
        [each for each, its in zip(passages, meeting.hosts, strict=True) if its == host],
    )
    offset, error = (lowest + highest) // 2, (abs(highest - lowest) + 1) // 2
    if (
        names[0] == names[meeting.rank] and lowest <= 0 <= highest
    ):  # hosts on one machine, or this is the first
        offset = error = 0
    return HostClock(host, platform.node(), names[meeting.rank], names[0], offset, error)


def own_clock() -> str:
    """What tells the monotonic clock of this process from others: since when, and of which namespace."""
    with contextlib.suppress(OSError):
        if boot := own_machine():
            return f"{boot} {Path('/proc/self/ns/time').stat().st_ino}"
    return platform.node()


def bounds(first: Sequence[Sequence[Passage]], own: Sequence[Sequence[Passage]]) -> tuple[int, int]:
    """Between which nanoseconds lies what is to be added to times of one host for those of another.

    Args:
        first: of ranks of the other host, when they passed each barrier.
        own: of ranks of the one.
    """
    lowest = [
        max(came for came, _ in others) - min(left for _, left in ours)
        for others, ours in zip(zip(*first, strict=True), zip(*own, strict=True), strict=True)
    ]
    highest = [
        min(left for _, left in others) - max(came for came, _ in ours)
        for others, ours in zip(zip(*first, strict=True), zip(*own, strict=True), strict=True)
    ]
    return max(lowest), min(highest)


def _numbered(said: Sequence[dict[str, Any]]) -> tuple[range, list[list[Any]]]:
    return range(len(said)), values_of(said, "passed", list)


def _checked(rank: int, passed: list[Any]) -> list[Passage]:
    """What a rank has said of when it passed barriers.

    Raises:
        ConfigMismatchError: it is something else.
    """
    try:
        pairs = [(int(came), int(left)) for came, left in passed]
    except (TypeError, ValueError, OverflowError):
        pairs = []
    if len(pairs) != BARRIERS:
        raise ConfigMismatchError(
            f"rank {rank} sent no times of {BARRIERS} barriers, but {len(passed)} others"
        )
    return pairs
