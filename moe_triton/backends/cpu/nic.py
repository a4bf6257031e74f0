"""The NIC of an emulated rank: a native thread that carries out what kernels post to queues (`nic.h`)."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moe_triton.backends.cpu import native
from moe_triton.backends.cpu.fabric import Fabric
from moe_triton.backends.cpu.native import I64, POINTER, U32, U64, alike
from moe_triton.backends.cpu.paced_link import PacedLink, in_range
from moe_triton.backends.cpu.trace_log import NativeTraceLog
from moe_triton.core.checks import check_flag, check_integer
from moe_triton.core.errors import ArgumentError, WindowError
from moe_triton.core.reach import Queues

RING_ITEMS = 256
_MOST_POST_US = 1_000_000.0
_MOST_SEED, _MOST_RING_ITEMS = (1 << 62) - 1, 1 << 20


@dataclass(frozen=True)
class NicSettings:
    """Properties of the emulated device, for tests and benchmarks; see `emulated_nic`.

    Attributes:
        post_us: what a post takes, in microseconds, one after the other; the NIC sleeps meanwhile. One of
            AICPU's takes 1 to 2 us (published).
        keeps_order: whether a queue keeps the order of bytes inside a message; the same on all ranks.
        cpu: that the NIC runs on; None for any.
        seed: not 0: bytes arrive late and in any order that queues may have, under this seed, and at no pace.
        ring_items: posts that a queue holds.

    Raises:
        ArgumentError: a number is out of its range.
    """

    post_us: float = 0.0
    keeps_order: bool = True
    cpu: int | None = None
    seed: int = 0
    ring_items: int = RING_ITEMS

    def __post_init__(self) -> None:
        """Checks all of them, and makes integers Python's."""
        in_range("post_us", self.post_us, 0, _MOST_POST_US)
        for name, low, high in (("seed", 0, _MOST_SEED), ("ring_items", 1, _MOST_RING_ITEMS)):
            number = check_integer(name, getattr(self, name))
            object.__setattr__(self, name, int(in_range(name, number, low, high)))
        object.__setattr__(self, "keeps_order", check_flag("keeps_order", self.keeps_order))
        if self.cpu is not None and check_integer("cpu", self.cpu) not in os.sched_getaffinity(0):
            rule = f"this process runs on {sorted(os.sched_getaffinity(0))}"
            raise ArgumentError("cpu", self.cpu, rule, "Pass one of these, or None.")


_in_use: list[NicSettings] = []


@contextlib.contextmanager
def emulated_nic(settings: NicSettings) -> Iterator[NicSettings]:
    """Buffers of this process that are made inside have such NICs, where a queue leads to a peer."""
    _in_use.append(settings)
    try:
        yield settings
    finally:
        _in_use.pop()


def in_use() -> NicSettings:
    """Those of buffers that are made now."""
    return _in_use[-1] if _in_use else NicSettings()


class NicDescription(ctypes.Structure):
    """``moe::NicDescription``."""

    _fields_ = (
        *alike(U64, "num_ranks", "rank"),
        *alike(POINTER, "windows", "inside"),
        *alike(U64, "own", "in_bytes", "window_bytes", "has_doorbells", "ring_items", "post_ns"),
        ("link", POINTER),
        *alike(U64, "seed", "keeps_order"),
        ("cpu", I64),
        *alike(POINTER, "log", "others", "elsewhere"),
        ("is_loose", U64),
    )


def describe(
    queues: Queues,
    rank: int,
    windows: Sequence[int],
    window_bytes: int,
    settings: NicSettings,
    link: PacedLink | None = None,
    log: NativeTraceLog | None = None,
    *,
    has_doorbells: bool = True,
    fabric: Fabric | None = None,
) -> tuple[NicDescription, object]:
    """What native code is told of a NIC, and what has to live until it was told.

    Args:
        queues: where they lead, and what is posted.
        rank: this one.
        windows: address of each rank's window in this process.
        window_bytes: of each of them.
        settings: of the device.
        link: that messages to other servers go over; None for none.
        log: of what that carries; None for none.
        has_doorbells: whether there is one behind each window.
        fabric: to ranks on other hosts, which have no window here; None where there are none.

    Raises:
        ArgumentError: a seed together with a pace.
    """
    if settings.seed and (link or settings.post_us):
        rule = "bytes in a random order have no pace"
        raise ArgumentError("seed", settings.seed, rule, "Leave out the seed, or post_us and the paced link.")
    ranks = range(len(windows))
    places = np.array([windows[peer] if peer in queues.peers else 0 for peer in ranks], np.uint64)
    elsewhere = np.array([peer in queues.peers and not windows[peer] for peer in ranks], np.uint64)
    inside = np.array([queues.is_inside(rank, peer) for peer in ranks], np.uint64)
    description = NicDescription(
        len(windows),
        rank,
        places.ctypes.data,
        inside.ctypes.data,
        windows[rank],
        queues.in_bytes,
        window_bytes,
        has_doorbells,
        settings.ring_items,
        round(settings.post_us * 1000),
        link.address if link else None,
        settings.seed,
        settings.keeps_order,
        -1 if settings.cpu is None else settings.cpu,
        log.link_address if log else None,
        fabric.queues if fabric else None,
        elsewhere.ctypes.data,
        queues.is_loose,
    )
    return description, (places, inside, elsewhere)


class PostItem(ctypes.Structure):
    """``moe::PostItem``."""

    _fields_ = (*alike(U64, "local", "remote", "bytes"), *alike(U32, "dtype", "rank"))


class Nic:
    """The NIC of this rank. It uses windows: close it before they go.

    Args:
        queues, rank, windows, window_bytes, settings, link, log, fabric: see `describe`.

    Attributes:
        address: of the ``moe::Nic``; 0 when it is closed.

    Raises:
        ArgumentError: a seed together with a pace.
        WindowError: there can be no thread.
    """

    def __init__(
        self,
        queues: Queues,
        rank: int,
        windows: Sequence[int],
        window_bytes: int,
        settings: NicSettings,
        link: PacedLink | None = None,
        log: NativeTraceLog | None = None,
        fabric: Fabric | None = None,
    ) -> None:
        of_window = queues, rank, windows, window_bytes, settings, link, log
        description, _kept = describe(*of_window, fabric=fabric)
        self._link, self._log = link, log  # native code holds their addresses
        self._process = os.getpid()
        self.address: int = native.library().moe_nic_open(ctypes.addressof(description)) or 0
        if not self.address:
            raise WindowError(
                "no thread can be started for the queues to other servers. Lift the limit (ulimit -u)."
            )

    def post(self, rank: int, local: int, remote: int, num_bytes: int) -> bool:
        """Posts a message from memory that no kernel posts from, one thread at a time.

        Args:
            rank: whom to.
            local, remote: addresses of the bytes, in this rank's out part, and of where they go, as the table
                of peers has that window.
            num_bytes: of the message.

        Returns:
            Whether it is posted: the queue may be full.
        """
        item = PostItem(local, remote, num_bytes, 0, rank)
        posted: int = native.library().moe_nic_post(self.address, ctypes.addressof(item))
        assert posted >= 0, "memory that is posted, and where to, are of this window"
        return bool(posted)

    def delivered(self, rank: int) -> int:
        """How many of the messages to a rank are there, and their memory free again."""
        return int(native.library().moe_nic_delivered(self.address, rank))

    def queued(self, rank: int) -> int:
        """How many of the messages to a rank are not there yet."""
        if not self.address:
            return 0
        library = native.library()
        delivered = library.moe_nic_delivered(self.address, rank)
        return max(0, int(library.moe_nic_posted(self.address, rank) - delivered))

    def drop(self, rank: int) -> None:
        """Has nothing of a rank on another host come any more, nor go there, once it `is_dropped`."""
        if self.address:
            native.library().moe_nic_drop(self.address, rank)

    def is_dropped(self, rank: int) -> bool:
        """Whether the NIC has let go of a rank on another host, or has ended."""
        return not self.address or bool(native.library().moe_nic_is_dropped(self.address, rank))

    def close(self) -> None:
        """Waits until what was posted is delivered, 5 s at most, and ends the thread. May be called twice."""
        address, self.address = self.address, 0
        if address and os.getpid() == self._process:  # a forked child has no such thread
            native.library().moe_nic_close(address)
