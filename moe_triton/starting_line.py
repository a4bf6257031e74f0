"""Where ranks start together, closer together than they leave a barrier of gloo.

While some still leave it, its threads pass messages on, which takes the time of those who have started where
cores are fewer than ranks: milliseconds, with 8 ranks on 2 cores. So ranks gather at such a barrier, where
who waits sleeps and disturbs nobody, and then start at counts in shared memory, when all have left it.
"""

from __future__ import annotations

import ctypes
import os
import time

import torch.distributed as dist

from moe_triton.backends.cpu.window import SharedWindow
from moe_triton.rendezvous import hosts
from moe_triton.rendezvous.meeting import Meeting

TIMEOUT_S = 300.0
_WORDS_APART = 8  # each rank's count in a cache line of its own


class StartingLine:
    """A barrier for timing. Collective: every rank of the default group makes it, and waits at it.

    Raises:
        WindowError: no memory for it, or ranks are on several hosts.
        CommunicationTimeoutError: a rank did not come to make it.
    """

    def __init__(self) -> None:
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        words = _WORDS_APART * self._num_ranks
        meeting = Meeting(None, TIMEOUT_S)
        hosts.find_unwatched(meeting)
        self._window = SharedWindow(8 * words, meeting)
        self._counts = (ctypes.c_int64 * words).from_address(self._window.peers[0])
        self._round = 0

    def wait(self) -> None:
        """Returns when every rank has come.

        Raises:
            TimeoutError: one has not.
        """
        dist.barrier()
        self._round += 1
        self._counts[_WORDS_APART * self._rank] = self._round
        deadline = time.monotonic() + TIMEOUT_S
        for rank in range(self._num_ranks):
            while self._counts[_WORDS_APART * rank] < self._round:
                os.sched_yield()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {rank} did not come to start {self._round}")
