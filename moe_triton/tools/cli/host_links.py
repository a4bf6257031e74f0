"""How fast hosts write to each other's memory: as posts of the CPU back end, from Python on both sides.

All ranks of a group make windows, and the first ranks of two hosts at a time write to each other's: a number
that the other one answers by the same, and messages with a number behind them, which comes after them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moe_triton.backends import make_backend
from moe_triton.backends.base import HostPosts
from moe_triton.core.reach import Queues
from moe_triton.core.threads import Deadline
from moe_triton.rendezvous import hosts
from moe_triton.rendezvous.deaths import Watch
from moe_triton.rendezvous.meeting import Meeting

NUMBER_BYTES, MESSAGE_BYTES = 64, 1 << 20
MESSAGES, STREAMS = 16, 3
WARM_UP, PINGS = 20, 200
ANSWER_S = 10.0
_NUMBERS = 1 << 16  # of a link: what stands there from the one before is none of this one
_LOOKS = 256  # between looks at the clock
_IN_BYTES = NUMBER_BYTES + MESSAGE_BYTES


@dataclass(frozen=True)
class Link:
    """From one host to another.

    Attributes:
        source, target: numbers of hosts.
        ping_us: from a write of 8 bytes until the answer is there; the median. None where none came.
        stream_gb_s: of messages of 1 MB, in 10^9 bytes per second; the median. None where one was missing.
    """

    source: int
    target: int
    ping_us: float | None
    stream_gb_s: float | None


class _SilentError(Exception):
    """Nothing has come for too long."""


class _End:
    """One end of a link, which is used by one pair of ranks at a time.

    Args:
        posts: of this rank.
        memory: its window: a number and a message that the peer writes, and behind them those for the peer.
        peer: rank of the other end.
    """

    def __init__(self, posts: HostPosts, memory: np.ndarray, peer: int) -> None:
        self._posts, self._peer = posts, peer
        self._here = memory[:8].view(np.uint64)
        self._sent = memory[_IN_BYTES : _IN_BYTES + 8].view(np.uint64)

    def say(self, number: int, messages: int = 0) -> None:
        """Posts a number, behind messages. The last one has been answered, so that its memory is free."""
        for _ in range(messages):
            self._post(_IN_BYTES + NUMBER_BYTES, NUMBER_BYTES, MESSAGE_BYTES)
        self._sent[0] = number
        self._post(_IN_BYTES, 0, 8)

    def hear(self, number: int) -> None:
        """Waits for a number."""
        deadline, here = Deadline(ANSWER_S), self._here
        while deadline.left() > 0:
            for _ in range(_LOOKS):
                if here[0] == number:
                    return
                os.sched_yield()
        raise _SilentError

    def _post(self, local: int, remote: int, num_bytes: int) -> None:
        deadline = Deadline(ANSWER_S)
        while not self._posts.post(self._peer, local, remote, num_bytes):
            if deadline.left() <= 0:
                raise _SilentError
            os.sched_yield()


def measured(group_timeout_s: float) -> tuple[tuple[int, ...], list[Link]]:
    """Measures links between all hosts of the default group. Collective.

    Args:
        group_timeout_s: seconds that ranks wait for each other.

    Returns:
        The number of each rank's host, and the links from this rank's host, where it is the first one there.

    Raises:
        WindowError: there can be no windows.
        CommunicationTimeoutError: a rank did not come.
    """
    meeting = Meeting(None, group_timeout_s)
    with contextlib.closing(hosts.Probe()) as probe, contextlib.closing(Watch(meeting)) as watch:
        hosts.find(meeting, watch, (0,) * meeting.num_ranks, probe)
        links = _links(meeting) if meeting.num_hosts > 1 else []
        meeting.exchange({}, "all links")
    return meeting.hosts, links


def _links(meeting: Meeting) -> list[Link]:
    own = meeting.hosts[meeting.rank]
    elsewhere = frozenset(rank for rank, host in enumerate(meeting.hosts) if host != own)
    queues = Queues(elsewhere, meeting.hosts, _IN_BYTES)
    window, posts = make_backend("cpu", "torch").make_side_window(2 * _IN_BYTES, meeting, queues)
    assert posts is not None
    memory, links = window.tensor().numpy(), list[Link]()
    try:
        firsts = [meeting.hosts.index(host) for host in range(meeting.num_hosts)]
        pairs = list(itertools.permutations(range(meeting.num_hosts), 2))
        for number, (source, target) in enumerate(pairs, start=1):
            meeting.exchange({}, f"link from host {source} to host {target}")
            numbers = itertools.count(number * _NUMBERS)
            if meeting.rank == firsts[source]:
                links.append(_link(source, target, _End(posts, memory, firsts[target]), numbers))
            elif meeting.rank == firsts[target]:
                _answer(_End(posts, memory, firsts[source]), numbers)
    finally:
        del memory
        window.close()
    return links


def _link(source: int, target: int, end: _End, numbers: Iterator[int]) -> Link:
    ping_us = stream_gb_s = None
    try:
        pings = [_seconds_until_answered(end, next(numbers)) for _ in range(WARM_UP + PINGS)]
        ping_us = 1e6 * statistics.median(pings[WARM_UP:])
        streams = [_seconds_until_answered(end, next(numbers), MESSAGES) for _ in range(STREAMS)]
        took_s = statistics.median(streams) - ping_us / 2e6  # the answer's way
        stream_gb_s = MESSAGES * MESSAGE_BYTES / took_s / 1e9
    except _SilentError:
        pass
    return Link(source, target, ping_us, stream_gb_s)


def _seconds_until_answered(end: _End, number: int, messages: int = 0) -> float:
    began = time.perf_counter()
    end.say(number, messages)
    end.hear(number)
    return time.perf_counter() - began


def _answer(end: _End, numbers: Iterator[int]) -> None:
    with contextlib.suppress(_SilentError):
        for _ in range(WARM_UP + PINGS + STREAMS):
            number = next(numbers)
            end.hear(number)
            end.say(number)
