"""Memory of all ranks from memfabric-hybrid: one address range with a part per rank, in rank order.

Sources: doc/pythonAPI.md of the project, and ``memfabric_hybrid.shm`` and ``smem_shm.h`` as release
1.3.0 installs them. An object's id is 0 to 63; a rank's part is 2 MB to 4 GB, a multiple of 2 MB.

Where queues lead to peers the object is of the type RDMA: memfabric makes queue pairs to every rank, and maps
the parts that MTE reaches as it does for an object of the type MTE. Its device functions post from the object
of id 0: they have no argument for another one (``smem_shm_aicore_base_rdma.h``).
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

from torch.distributed import distributed_c10d

from moe_triton.backends.npu.runtime import Runtime
from moe_triton.core.errors import WindowError
from moe_triton.layout import align
from moe_triton.rendezvous.agreement import raise_together
from moe_triton.rendezvous.meeting import Meeting, values_of

POSTING_ID = 0
GRANULE = 2 << 20
MOST_BYTES = 4 << 30
MAX_OBJECTS = 64

# memfabric is initialised once per process, for the ranks of the first group that asks.
_members: tuple[int, ...] | None = None
_used_ids: set[int] = set()
_reserved_ids: set[int] = set()  # that this process took for a group, as its first rank


class MemfabricMemory:
    """One object of memfabric's.

    Args:
        handle: of the object.
        number: its id.
        stride: bytes from one rank's part to the next.
        num_ranks: ranks that have a part.
    """

    def __init__(self, handle: Any, number: int, stride: int, num_ranks: int) -> None:
        self._handle, self._number = handle, number
        base = int(handle.gva)
        self.peers = tuple(base + rank * stride for rank in range(num_ranks))

    def free(self) -> None:
        """Gives this rank's part back, and the object's number with it."""
        self._handle.destroy()
        _used_ids.discard(self._number)
        _give_back(self._number)


def allocate(num_bytes: int, meeting: Meeting, runtime: Runtime, *, posts: bool) -> MemfabricMemory:
    """Memory for a window on every rank.

    Args:
        num_bytes: of a window.
        meeting: the group.
        runtime: torch_npu.
        posts: whether kernels post from it, and so to ranks of other servers.

    Raises:
        WindowError: a rank cannot get its part, or reach another one's.
        CommunicationTimeoutError: a rank did not come.
    """
    import memfabric_hybrid as memfabric

    stride = align(num_bytes, GRANULE)
    if stride > MOST_BYTES:
        raise WindowError(
            f"a window of {num_bytes} bytes is needed, and memfabric gives at most {MOST_BYTES} to a rank. "
            f"Lower num_max_tokens_per_rank."
        )
    _initialize(memfabric, meeting, runtime)
    number = _agree_on_id(meeting, posts)
    kinds = memfabric.shm.ShmDataOpType
    handle, failure = None, ""
    try:
        handle = memfabric.shm.create(
            number, meeting.num_ranks, meeting.rank, stride, kinds.RDMA if posts else kinds.MTE
        )
        # The binding has no way to return the set of operations, only whether the query succeeds.
        failed = [rank for rank in range(meeting.num_ranks) if handle.topology_can_reach(rank, 0) != 0]
        if failed:
            failure = f"memfabric cannot reach rank(s) {failed} from rank {meeting.rank}"
    except RuntimeError as error:
        failure = f"memfabric gives no window of {stride} bytes: {error}; {memfabric.get_last_err_msg()}"
    try:
        raise_together(meeting, failure)
    except BaseException:
        if handle is not None:
            handle.destroy()
        _give_back(number)
        raise
    _used_ids.add(number)
    return MemfabricMemory(handle, number, stride, meeting.num_ranks)


def _initialize(memfabric: Any, meeting: Meeting, runtime: Runtime) -> None:
    global _members
    members = meeting.world_ranks()
    if _members is not None:
        if not set(members) <= set(_members):
            raise WindowError(
                f"memfabric was initialised for ranks {list(_members)} of this process's world, and a group "
                f"of ranks {list(members)} is not among them. Construct the largest group's buffer first."
            )
        return
    url = _store_url(meeting)
    failure = ""
    if code := memfabric.initialize(0):
        failure = f"memfabric.initialize failed with {code}"
    elif code := memfabric.shm.initialize(
        url, meeting.num_ranks, meeting.rank, runtime.device_index, _config(memfabric, meeting)
    ):
        failure = f"memfabric.shm.initialize failed with {code}: {memfabric.get_last_err_msg()}"
    raise_together(meeting, failure)
    _members = members


def _config(memfabric: Any, meeting: Meeting) -> Any:
    config = memfabric.shm.ShmConfig()
    config.init_timeout = config.create_timeout = config.operation_timeout = max(1, int(meeting.timeout_s))
    config.start_store = meeting.rank == 0
    return config


def _store_url(meeting: Meeting) -> str:
    """Address of the ranks' control connection: on rank 0, by torch.distributed's MASTER_ADDR if set."""
    url = ""
    if meeting.rank == 0:
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        with socket.socket() as probe:
            probe.bind(("", 0))
            url = f"tcp://{socket.gethostbyname(host)}:{probe.getsockname()[1]}"
    return values_of(meeting.exchange({"url": url}, "memfabric's store"), "url", str)[0]


def _in_store(number: int, change: int) -> int:
    """Number of groups of the world that hold an id, after a change."""
    store = distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    return int(store.add(f"moe_triton/memfabric/{number}", change))


def _agree_on_id(meeting: Meeting, posts: bool) -> int:
    """An id that no rank and no other group of the world uses: all share memfabric's store.

    The group's first rank reserves it in the store of torch.distributed's world. Who does not post leaves
    `POSTING_ID` alone while there are others.

    Raises:
        WindowError: none is left.
    """
    said = meeting.exchange({"used": sorted(_used_ids)}, "memfabric's ids")
    used = {number for numbers in values_of(said, "used", list) for number in map(str, numbers)}
    taken = -1
    if meeting.rank == 0:
        others = (number for number in range(MAX_OBJECTS) if number != POSTING_ID)
        wanted = (POSTING_ID,) if posts else (*others, POSTING_ID)
        taken = next((n for n in wanted if str(n) not in used and _reserve(n)), -1)
    number = values_of(meeting.exchange({"id": taken}, "memfabric's id"), "id", int)[0]
    if number < 0 and posts:
        raise WindowError(
            f"memfabric posts from its window number {POSTING_ID} alone, and another buffer of these ranks, "
            "or of other ranks of their world, has that. Close it first."
        )
    if number < 0:
        raise WindowError(f"memfabric has {MAX_OBJECTS} windows at most, all in use. Close a buffer first.")
    return number


def _reserve(number: int) -> bool:
    """Takes an id for a group, unless another one has it."""
    if _in_store(number, 1) != 1:
        _in_store(number, -1)
        return False
    _reserved_ids.add(number)
    return True


def _give_back(number: int) -> None:
    if number in _reserved_ids:
        _reserved_ids.discard(number)
        # A world that has ended has no store any more.
        with contextlib.suppress(RuntimeError, ValueError):
            _in_store(number, -1)
