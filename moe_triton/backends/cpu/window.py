"""Windows in POSIX shared memory: private to the user, and unlinked once every peer has mapped them."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import time
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from moe_triton.backends.cpu import native
from moe_triton.backends.cpu.fabric import APART, Fabric, common_provider, providers
from moe_triton.backends.cpu.nic import Nic, NicSettings
from moe_triton.backends.cpu.paced_link import PacedLink
from moe_triton.backends.cpu.room import Limit, available_memory, cgroup_limits
from moe_triton.backends.cpu.spare import Spare
from moe_triton.backends.cpu.trace_log import NativeTraceLog
from moe_triton.core import shared_memory
from moe_triton.core.endings import at_end
from moe_triton.core.errors import WindowError
from moe_triton.core.reach import Queues, token_of
from moe_triton.core.shared_memory import create_locked
from moe_triton.core.threads import Deadline, in_thread
from moe_triton.rendezvous.agreement import raise_failures, raise_together
from moe_triton.rendezvous.meeting import MAX_REASON, Meeting, values_of
from moe_triton.rendezvous.stores import below, read_key

PREFIX = "moe_triton-"
SUFFIX = re.compile(r"\d+-[0-9a-f]{24}")
# Advice of Linux 5.14, which Python's mmap has no names for.
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23
CLOSING_S, CLOSING_LOOK_S = 2.0, 0.01
LOOK_S = 0.0002  # a NIC takes as long to let go of a rank
SOFTWARE = "tcp"
"""Providers of libfabric that begin so write to addresses, whatever memory is there by then."""
QUEUES = (
    "Use a scheme with queues between servers, and pass ranks_per_server where it is not found by itself."
)
# In place of the window of a rank on another host.
NOT_HERE = torch.empty(0, dtype=torch.uint8, device="cpu")
REMEDY = (
    "Enlarge it (mount -o remount,size=... /dev/shm, or docker run --shm-size=... --memory=...), or lower "
    "num_max_tokens_per_rank."
)


class SharedWindow:
    """This rank's window and its view of every peer's.

    The file has a name only from its creation until every rank has mapped it; after that the memory is freed
    however the processes end. Until then each rank knows all names, and removes all of them if the rendezvous
    fails; names left by a killed group are removed by the next one (`remove_stale`).

    The size of a peer's file is checked when it is mapped. If a process of the same user truncates a file
    later, every process that touches the missing part gets a SIGBUS.

    Args:
        num_bytes: the window's size, the same on every rank.
        meeting: the group.
        private_bytes: that this rank's calls will take besides: where there is no room for them, a process
            would be killed later.
        has_pages: whether all pages are mapped now, so that no later access waits for that: about 0.2 s for a
            GB of the own window, and half of that for one of a peer's.
        spare_bytes: that parts of it may be `renew`-ed with. They are addresses, and no memory until then.

    Raises:
        WindowError: a rank could not get its memory, or a peer's file is not what it should be.
        CommunicationTimeoutError: a rank did not come.
    """

    page_bytes = mmap.PAGESIZE

    def __init__(
        self,
        num_bytes: int,
        meeting: Meeting,
        private_bytes: int = 0,
        *,
        has_pages: bool = False,
        spare_bytes: int = 0,
    ) -> None:
        self._meeting, self._has_pages = meeting, has_pages
        self._spare = Spare(num_bytes, spare_bytes)
        self._views: list[torch.Tensor] = []
        self._file = -1
        folder, failure = _chosen_folder()
        failure = failure or self._out_of_reach()
        remove_stale(folder)
        name = f"{PREFIX}{os.getuid()}-{secrets.token_hex(12)}"
        limits = cgroup_limits()
        keys = [limit.key for limit in limits]
        mine = {"name": name, "folder": str(folder), "cgroups": keys, "private": private_bytes}
        said = meeting.exchange(mine, "name of the window")
        names = values_of(said, "name", str)
        if not all(_is_name(n) for n in names):
            raise WindowError(f"a peer named its window {names}, which no rank of this package does")
        cgroups, private = values_of(said, "cgroups", list), values_of(said, "private", int)
        folders = values_of(said, "folder", str)
        failure = failure or _disagreement([each for rank, each in enumerate(folders) if self._is_here(rank)])
        members = [(frozenset(map(str, keys)), own) for keys, own in zip(cgroups, private, strict=True)]
        members = [each for rank, each in enumerate(members) if self._is_here(rank)]
        paths = [folder / each if self._is_here(rank) else None for rank, each in enumerate(names)]
        try:
            self._build(
                num_bytes, folder / name, paths, failure or _shortage(folder, num_bytes, members, limits)
            )
        except BaseException:
            self._views = []
            raise
        finally:
            # On success every rank has mapped all windows; on failure no name may be left behind.
            _unlink(each for each in paths if each is not None)
        self.base = self._views[meeting.rank].data_ptr()
        self.peers = tuple(view.data_ptr() for view in self._views)

    def _mapped(self, path: Path, own: Path) -> torch.Tensor:
        return _map(path, self._spare, _advice(path == own)) if self._has_pages else _map(path, self._spare)

    def is_mapped(self, rank: int) -> bool:
        """See `moe_triton.backends.base.RenewedWindow`."""
        return self._is_here(rank)

    @property
    def why_not_let_go(self) -> str:
        """See `moe_triton.backends.base.RenewedWindow`."""
        return ""

    def let_go(self, rank: int) -> None:
        """Nothing: ranks of this host write to memory."""

    def _out_of_reach(self) -> str:
        """Why this window is none that all ranks reach; "" if it is."""
        others = [rank for rank in range(self._meeting.num_ranks) if not self._is_here(rank)]
        if not others:
            return ""
        said = f"rank(s) {others} are on other hosts, and only memory of this one is reached"
        return f"{said}. Make it with a group of one host's ranks."

    def _is_here(self, rank: int) -> bool:
        """Whether it is of this host."""
        hosts = self._meeting.hosts
        return hosts[rank] == hosts[self._meeting.rank]

    def _build(self, num_bytes: int, path: Path, paths: Sequence[Path | None], shortage: str) -> None:
        meeting, spare = self._meeting, self._spare
        failure, fd = "", -1
        try:
            # Before any rank takes memory: a process that touches a page of a full tmpfs is killed.
            raise_together(meeting, shortage, "there is room for windows")
            try:
                fd = _create(path, spare)
            except WindowError as error:
                failure = str(error)
            raise_together(meeting, failure, "the window is made")
            try:
                self._views = [NOT_HERE if each is None else self._mapped(each, path) for each in paths]
            except (OSError, WindowError) as error:
                failure = f"cannot map a peer's window: {error}"
            raise_together(meeting, failure, "the windows are mapped")
            if spare.num_bytes:
                self._file, fd = fd, -1
        finally:
            if fd >= 0:
                os.close(fd)

    def tensor(self) -> torch.Tensor:
        """This rank's window as a flat uint8 tensor."""
        return self._views[self._meeting.rank]

    def view(self, rank: int) -> torch.Tensor:
        """A rank's window as a flat uint8 tensor."""
        return self._views[rank]

    def barrier(self) -> None:
        """Waits for every rank of the group."""
        self._meeting.exchange({}, "barrier")

    def queued(self) -> dict[int, int]:
        """Nothing: no queues lead anywhere."""
        return {}

    def renew(self, number: int, at: int, num_bytes: int, keeps: bool) -> None:
        """See `moe_triton.backends.base.RenewedWindow`."""
        self._spare.renew(self._file, self.base, number, at, num_bytes, keeps)

    def follow(self, rank: int, number: int, at: int, num_bytes: int) -> None:
        """See `moe_triton.backends.base.RenewedWindow`."""
        self._spare.follow(rank, self._views[rank].data_ptr(), number, at, num_bytes)

    def say_masked(self, ranks: Collection[int]) -> None:
        """See `moe_triton.backends.base.RenewedWindow`."""
        views = self._views  # kept, where another thread closes the window meanwhile
        if views:
            native.library().moe_fence()
            self._spare.say_masked(views[self._meeting.rank].data_ptr(), ranks)
            # Before results that take the place of those that a masked rank may still read.
            native.library().moe_fence()

    def masked_by(self, rank: int) -> frozenset[int]:
        """See `moe_triton.backends.base.RenewedWindow`."""
        native.library().moe_fence()
        return self._spare.masked_by(self._views[rank].data_ptr())

    def close(self) -> None:
        """Drops the mappings; the memory goes with the last rank that drops it."""
        self._views = []
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class QueuedWindow(SharedWindow):
    """The same where queues lead to some peers: kernels have no address of theirs, the NIC has.

    Args:
        num_bytes, meeting, private_bytes: see `SharedWindow`.
        queues: where they lead.
        settings: of the emulated NIC.
        link: that messages to other servers go over, or None.
        log: of what that carries, or None.
        has_pages, spare_bytes: see `SharedWindow`.

    Attributes:
        nic: what carries out posts.
    """

    def __init__(
        self,
        num_bytes: int,
        meeting: Meeting,
        private_bytes: int,
        queues: Queues,
        settings: NicSettings,
        link: PacedLink | None,
        log: NativeTraceLog | None = None,
        *,
        has_pages: bool = False,
        spare_bytes: int = 0,
    ) -> None:
        self._queues = queues
        super().__init__(num_bytes, meeting, private_bytes, has_pages=has_pages, spare_bytes=spare_bytes)
        mapped, rank = self.peers, meeting.rank
        self._fabric: Fabric | None = None
        try:
            if not all(mapped):
                self._connect(meeting, queues, num_bytes)
                if meeting.network.nic_cpu is not None:
                    settings = replace(settings, cpu=meeting.network.nic_cpu)
            self.nic = Nic(queues, rank, mapped, num_bytes, settings, link, log, self._fabric)
        except BaseException:
            if self._fabric is not None:
                self._fabric.close()
            super().close()
            raise
        # Of a buffer that is dropped, or that the process ends with: posts are read from memory that goes.
        self._ending = at_end(self, partial(_close, self.nic, self._fabric))
        self.peers = tuple(
            queues.word(rank, peer, token_of(peer) if peer in queues.peers else mapped[peer])
            for peer in range(meeting.num_ranks)
        )

    def _out_of_reach(self) -> str:
        others = [rank for rank in range(self._meeting.num_ranks) if not self._is_here(rank)]
        if missing := sorted(set(others) - self._queues.peers):
            return f"rank(s) {missing} are on other hosts, and no queue leads there. {QUEUES}"
        return ""

    def _connect(self, meeting: Meeting, queues: Queues, num_bytes: int) -> None:
        """To the ranks on other hosts."""
        found: list[str] = []
        failure = memory = ""
        names: dict[int, str] = {}
        others = [rank for rank in range(meeting.num_ranks) if not self.peers[rank]]
        try:
            found += providers(meeting.network)
        except WindowError as error:
            failure = str(error)[:MAX_REASON]
        said = meeting.exchange({"providers": found, "failure": failure}, "libfabric is there")
        raise_failures(meeting, said)
        try:
            provider = common_provider(
                [[str(each) for each in has] for has in values_of(said, "providers", list)]
            )
        except WindowError:
            meeting.end()  # every rank sees this
            raise
        try:
            of_memory = self.base, num_bytes, queues.in_bytes
            of_host = meeting.timeout_s, meeting.network, provider
            self._fabric = Fabric(meeting.num_ranks, others, *of_memory, *of_host)
            names, memory = self._fabric.names, self._fabric.memory
        except WindowError as error:
            failure = str(error)[:MAX_REASON]
        told = [names.get(rank, "") for rank in range(meeting.num_ranks)]
        mine = {"names": told, "memory": memory, "failure": failure}
        said = meeting.exchange(mine, "addresses of libfabric")
        raise_failures(meeting, said)
        fabric = self._fabric
        assert fabric is not None
        try:
            of_ranks = values_of(said, "names", list), values_of(said, "memory", str)
            for rank, (theirs, place) in enumerate(zip(*of_ranks, strict=True)):
                if rank in others:
                    # Of several the one that is for this rank.
                    fabric.connect(rank, str(dict(enumerate(theirs)).get(meeting.rank)), place)
        except WindowError as error:
            failure = str(error)
        raise_together(meeting, failure, "libfabric is connected")

    def _meet_to_close(self) -> None:
        """Until all others close as well, or for a moment: a connection that is closed takes with it what a
        peer has not read yet, and flags of the last call may be among that.
        """
        asking = in_thread(self._wait_for_others, "ranks that close")
        with contextlib.suppress(Exception):  # a store that is gone has nothing to say
            asking.result(CLOSING_S)

    def _wait_for_others(self) -> None:
        store, deadline = below(self._meeting.store(), "closing"), Deadline(CLOSING_S)
        store.set(str(self._meeting.rank), "closes")
        ranks = range(self._meeting.num_ranks)
        others = [rank for rank in ranks if not self._is_here(rank) and not self.nic.is_dropped(rank)]
        while others and deadline.left() > 0:
            others = [rank for rank in others if not read_key(store, str(rank))]
            time.sleep(CLOSING_LOOK_S)

    def renew(self, number: int, at: int, num_bytes: int, keeps: bool) -> None:
        """See `moe_triton.backends.base.RenewedWindow`."""
        if self._fabric is not None and not self._fabric.provider.startswith(SOFTWARE):
            raise WindowError(
                f"ranks that are masked may still write to this rank's window, and by "
                f"{self._fabric.provider} ranks of other hosts write to the memory that it began with. End "
                f"them before the next call."
            )
        super().renew(number, at, num_bytes, keeps)

    @property
    def why_not_let_go(self) -> str:
        """See `moe_triton.backends.base.RenewedWindow`."""
        if self._fabric is None or self._fabric.provider in APART:
            return ""
        return (
            f"ranks are on several hosts, and libfabric's provider {self._fabric.provider!r} has one "
            f"endpoint for all: what a masked rank of another host still writes cannot be kept away. "
            f"{list(APART)} can"
        )

    def let_go(self, rank: int) -> None:
        """See `moe_triton.backends.base.RenewedWindow`."""
        if self._is_here(rank) or self.nic.is_dropped(rank):
            return
        self.nic.drop(rank)
        deadline = Deadline(CLOSING_S)
        while not self.nic.is_dropped(rank):
            if deadline.left() <= 0:
                raise WindowError(
                    f"rank {rank} of another host is masked, and libfabric does not close its connection, "
                    f"over which it may still write to this rank's window. Construct a new buffer without it."
                )
            time.sleep(LOOK_S)

    def post(self, rank: int, local: int, remote: int, num_bytes: int) -> bool:
        """See `moe_triton.backends.base.HostPosts`."""
        return self.nic.post(rank, self.base + local, token_of(rank) + remote, num_bytes)

    def delivered(self, rank: int) -> int:
        """See `moe_triton.backends.base.HostPosts`."""
        return self.nic.delivered(rank)

    def queued(self) -> dict[int, int]:
        """By rank, how many posts are not delivered."""
        return {rank: number for rank in self._queues.peers if (number := self.nic.queued(rank))}

    def close(self) -> None:
        """Ends the NIC, which delivers what was posted, and drops the mappings."""
        if self._fabric is not None and self.nic.address:
            self._meet_to_close()
        self._ending()
        super().close()


def _close(nic: Nic, fabric: Fabric | None) -> None:
    nic.close()
    if fabric is not None:
        fabric.close()


class StandInWindow:
    """The window of another rank of this server, as that rank had it: this process runs launches of it.

    That rank has ended. Its memory stays as long as a peer maps it.

    Args:
        window: of this rank.
        rank: the other one.
        queues: as this rank has them: they lead from its whole server to the same peers.
        settings: of the emulated NIC that the other rank gets here.
        link: that messages to other servers go over, or None.

    Attributes:
        nic: carries out its posts.
    """

    def __init__(
        self, window: SharedWindow, rank: int, queues: Queues, settings: NicSettings, link: PacedLink | None
    ) -> None:
        ranks = range(len(window.peers))
        self._window, self._rank, self.peers = window, rank, window.peers
        self.base = window.view(rank).data_ptr()
        mapped = [window.view(peer).data_ptr() for peer in ranks]
        self.nic = Nic(queues, rank, mapped, window.view(rank).numel(), settings, link)
        self._ending = at_end(self, self.nic.close)

    def tensor(self) -> torch.Tensor:
        """That window as a flat uint8 tensor."""
        return self._window.view(self._rank)

    def view(self, rank: int) -> torch.Tensor:
        """A rank's window as a flat uint8 tensor."""
        return self._window.view(rank)

    def barrier(self) -> None:
        """Nothing: the group is this rank's own window's."""

    def queued(self) -> dict[int, int]:
        """Nothing: what stands in says so by the rank's own window."""
        return {}

    def close(self) -> None:
        """Ends the NIC, which delivers what was posted. May be called twice."""
        self._ending()


def _chosen_folder() -> tuple[Path, str]:
    """Where this rank makes its window; and why it cannot, if so."""
    try:
        return shared_memory.folder(), ""
    except WindowError as error:
        return shared_memory.USUAL, str(error)


def _disagreement(folders: Sequence[str]) -> str:
    """Why ranks would not find each other's windows; empty if they do."""
    if len(set(folders)) == 1:
        return ""
    each = ", ".join(f"{folder} on rank {rank}" for rank, folder in enumerate(folders))
    return f"windows would be made in {each}. Set {shared_memory.VARIABLE} alike for all ranks."


def _is_name(name: str) -> bool:
    """Whether this is the name of a window: a peer must not make us open or remove other files."""
    return name.startswith(PREFIX) and SUFFIX.fullmatch(name.removeprefix(PREFIX)) is not None


def remove_stale(folder: Path) -> None:
    """Removes windows whose creators are gone: nobody holds their lock."""
    shared_memory.remove_unlocked(folder, f"{PREFIX}{os.getuid()}-")


def _create(path: Path, spare: Spare) -> int:
    try:
        fd = create_locked(path)
    except OSError as error:
        raise WindowError(f"cannot create a window in {path.parent}: {error}") from error
    try:
        # Reserves the pages: running out of memory later would be a SIGBUS inside a kernel.
        os.posix_fallocate(fd, 0, spare.reserved_bytes)
        os.ftruncate(fd, spare.file_bytes)
    except OSError as error:
        os.close(fd)
        raise WindowError(
            f"cannot reserve {spare.window_bytes} bytes for a window: {error.strerror}. {REMEDY}"
        ) from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def _shortage(
    folder: Path, num_bytes: int, members: Sequence[tuple[Set[str], int]], limits: Iterable[Limit]
) -> str:
    """Why the windows and calls of all ranks do not fit on this machine; empty if they do.

    Args:
        folder: of windows.
        num_bytes: of one window.
        members: of each rank, the keys of the limits that it is under, and the bytes that its calls take.
        limits: on this rank's memory.
    """
    usage = os.statvfs(folder)
    of_all = [own for _, own in members]
    room = [
        (f"{folder} has", usage.f_bavail * usage.f_frsize, [0] * len(members)),
        ("this machine has", available_memory(), of_all),
    ]
    for limit in limits:
        under = [own for keys, own in members if limit.key in keys]
        room.append((f"the memory limit of {limit.name} leaves", limit.free, under))
    for where, free, private in room:
        if num_bytes * len(private) + sum(private) > free:
            calls = f" and {sum(private)} bytes for calls" if any(private) else ""
            needed = f"{len(private)} windows of {num_bytes} bytes{calls}"
            return f"{needed} are needed but {where} {free} free. {REMEDY}"
    return ""


def _map(path: Path, spare: Spare, advice: int | None = None) -> torch.Tensor:
    size = spare.file_bytes
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.getuid() or status.st_mode & 0o077 or status.st_size != size:
            raise WindowError(
                f"{path.name} belongs to user {status.st_uid}, has mode {status.st_mode & 0o777:o} and "
                f"{status.st_size} bytes; expected user {os.getuid()}, mode 600 and {size} bytes"
            )
        mapping = mmap.mmap(fd, size, mmap.MAP_SHARED)
    finally:
        os.close(fd)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # advice only: a kernel without huge pages for tmpfs says no
            mapping.madvise(mmap.MADV_HUGEPAGE)
    if advice is not None:
        with contextlib.suppress(OSError):  # an older kernel: pages are mapped as they are touched
            mapping.madvise(advice)
    # The tensor keeps the mapping alive.
    return torch.frombuffer(mapping, dtype=torch.uint8, count=spare.window_bytes)


def _advice(is_own: bool) -> int:
    """How all pages of a window are to be mapped."""
    return MADV_POPULATE_WRITE if is_own else MADV_POPULATE_READ


def _unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
