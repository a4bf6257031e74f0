"""Memory of each rank that all ranks of a buffer reach, beside its windows."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from moe_triton.backends.base import Backend
from moe_triton.core.checks import check_integer
from moe_triton.core.errors import ArgumentError, BufferStateError
from moe_triton.core.reach import Queues
from moe_triton.core.uncopied import Uncopied
from moe_triton.rendezvous.agreement import agree
from moe_triton.rendezvous.meeting import Meeting
from moe_triton.runtime.exclusive import FORKED

Wanted = Callable[[], tuple[int, Mapping[str, Any]]]
"""Bytes of a rank's memory, and what else all ranks must say alike, JSON's types by name."""
OutBytes = Callable[[], int]
"""Bytes behind these, from which a rank posts. Called after the other."""


class PeerMemory(Uncopied):
    """As much memory of each rank as of any other, all of which each of them reads and writes.

    With ``out_bytes`` ranks of other servers are not read or written, but posted to. Nothing orders what
    ranks do there but their own words, and calls of the buffer: what a rank has written before its dispatch
    or barrier is seen by whoever has ended the same one. It begins as zeros.

    Args:
        backend: makes it.
        meeting: of the ranks, for this alone.
        asked: called once the ranks meet, so that they hear of its errors.
        num_dispatches: how many dispatches this rank has begun, on any of its buffer's ways.
        servers: the server of each rank.
        out_bytes: None where all ranks are reached, other servers' too.

    Attributes:
        queued: ranks that are posted to.
        copies: what copies there beside a rank's own work.
        num_dispatches: as it was given.
        number: of the meeting in which it was made, the same on every rank and no other one's.
        timeout_s: that ranks wait for each other.

    Raises:
        ArgumentError: a number of bytes that cannot be; or no ``out_bytes`` where ranks are on several hosts.
        ConfigMismatchError: ranks ask for different things, or another one's request is refused.
        WindowError: no memory for it, or a rank is out of reach.
        CommunicationTimeoutError: a rank did not come.
    """

    _uncopied = "it is this rank's part of its group's memory. Make one where the copy is used."

    def __init__(
        self,
        backend: Backend,
        meeting: Meeting,
        asked: Wanted,
        num_dispatches: Callable[[], int],
        servers: tuple[int, ...],
        out_bytes: OutBytes | None = None,
    ) -> None:
        own = servers[meeting.rank]
        others = frozenset(rank for rank, server in enumerate(servers) if server != own)
        self.queued = others if out_bytes else frozenset[int]()
        try:
            if not out_bytes and meeting.num_hosts > 1:
                rule = "ranks are on several hosts, and those of others can only be posted to"
                raise ArgumentError("out_bytes", None, rule, "Say how many bytes to post from.")
            num_bytes, said = asked()
            self.num_bytes = check_integer("num_bytes", num_bytes)
            if self.num_bytes < 1:
                raise ArgumentError("num_bytes", num_bytes, "it must be positive", "Pass what is needed.")
            posted = out_bytes() if out_bytes and self.queued else 0
            agree(meeting, {"num_bytes": self.num_bytes, **said}, "memory of all ranks")
            queues = Queues(self.queued, servers, self.num_bytes) if self.queued else None
            made = backend.make_side_window(self.num_bytes + posted, meeting, queues)
            self._window, self._posts = made
            meeting.exchange({}, "memory of all ranks is made")
        except BaseException as error:
            meeting.refuse(error)
            raise
        self.copies = backend.make_side_copies()
        self.number, self.timeout_s = meeting.number, meeting.timeout_s
        self.num_dispatches = num_dispatches
        self._meeting, self._is_closed, self._pid = meeting, False, os.getpid()

    def of(self, rank: int) -> torch.Tensor:
        """A rank's memory, (num_bytes,) uint8, and behind it what it posts from.

        It stays mapped while a tensor of it is held.

        Args:
            rank: one that is reached.

        Raises:
            BufferStateError: it was given back, or this process was forked from the one that made it.
        """
        self._check_open()
        assert rank not in self.queued, "only a queue leads there"
        return self._window.view(rank)

    def post(self, rank: int, local: int, remote: int, num_bytes: int) -> bool:
        """Posts to a rank of ``queued``; see `moe_triton.backends.base.HostPosts`.

        Raises:
            BufferStateError: as of `of`.
        """
        self._check_open()
        assert self._posts is not None
        return self._posts.post(rank, local, remote, num_bytes)

    def delivered(self, rank: int) -> int:
        """How many posts to a rank have come.

        Raises:
            BufferStateError: as of `of`.
        """
        self._check_open()
        assert self._posts is not None
        return self._posts.delivered(rank)

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise BufferStateError(FORKED)
        if self._is_closed:
            raise BufferStateError("this memory was given back. Make other memory.")

    def close(self) -> None:
        """Gives this rank's part back, once nobody reads it any more. May be called twice.

        In a forked child it does nothing: the memory is its parent's.
        """
        if self._pid != os.getpid():
            return
        self._is_closed = True
        self._window.close()
        self._meeting.leave()
