"""Posts of kernels that run on the stand-in: the CPU's NIC carries them out, over memfabric's windows.

That one names a peer's memory by rank and offset, where memfabric has addresses: the words of queued peers
are looked at, and replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterator
from typing import Any

from moe_triton.backends.cpu import native, nic
from moe_triton.backends.npu import window
from moe_triton.core.reach import QUEUED_BIT, Queues, address_of, token_of
from moe_triton.rendezvous.meeting import Meeting

MAKE = window.make_window
# As of threads without settings: no streaming stores, no sleep on doorbells.
_DEFAULTS = {"cached_bytes": (1 << 64) - 1, "spins": 200, "yields": 20_000}

_settings: native.SettingsStruct | None = None


class PostedWindow:
    """A window of the back end's, and the NIC of its rank."""

    def __init__(self, made: window.NpuWindow, num_bytes: int, rank: int, queues: Queues) -> None:
        global _settings
        assert _settings is None, "memfabric posts from one window"
        self._made = made
        self.base, self.tensor, self.barrier = made.base, made.tensor, made.barrier
        places = [address_of(word % (1 << 64)) for word in made.peers]
        assert {peer for peer, word in enumerate(made.peers) if word >> QUEUED_BIT & 1} == queues.peers
        assert places[rank] == made.base
        self.peers = tuple(
            queues.word(rank, peer, token_of(peer) if peer in queues.peers else place)
            for peer, place in enumerate(places)
        )
        # What delivers in an order of its own keeps none inside a message, as the back end expects.
        settings = nic.NicSettings(seed=1 + rank, keeps_order=False)
        told, _kept = nic.describe(queues, rank, places, num_bytes, settings, has_doorbells=False)
        opened = native.library().moe_nic_open(ctypes.addressof(told))
        # Of a buffer that is dropped: posts are read from memory that goes.
        self._ending = weakref.finalize(self, native.library().moe_nic_close, opened)
        _settings = native.SettingsStruct(**_DEFAULTS, nic=opened)

    def close(self) -> None:
        """Ends the NIC, which delivers what was posted. May be called twice."""
        global _settings
        if self._ending.alive:
            self._ending()
            _settings = None
        self._made.close()


def make_window(num_bytes: int, meeting: Meeting, *rest: Any) -> window.NpuWindow | PostedWindow:
    """`moe_triton.backends.npu.window.make_window`, and the NIC where queues are."""
    made, queues = MAKE(num_bytes, meeting, *rest), rest[-1]
    return PostedWindow(made, num_bytes, meeting.rank, queues) if queues else made


@contextlib.contextmanager
def in_use() -> Iterator[None]:
    """Kernels that this thread launches inside post to the NIC, if there is one."""
    if _settings is None:
        yield
        return
    native.library().moe_use_settings(ctypes.addressof(_settings))
    try:
        yield
    finally:
        native.library().moe_use_settings(None)
