"""Memory of all ranks from CANN SHMEM, if memfabric-hybrid is not installed.

Source: docs/api/pythonAPI_en.md of cann/shmem (``shmem.core``). A process has one symmetric heap per
instance, and its size is given at initialisation: each window is an instance of its own.
"""

from __future__ import annotations

import itertools
from typing import Any

from moe_triton.backends.npu.runtime import Runtime
from moe_triton.core.errors import WindowError
from moe_triton.layout import align
from moe_triton.rendezvous.agreement import raise_together
from moe_triton.rendezvous.meeting import Meeting, values_of

GRANULE = 2 << 20
HEAP_EXTRA = 2 << 20  # beside the buffer, for the allocator's own alignment
MAX_INSTANCES = 255

_instances = itertools.count()


class ShmemMemory:
    """One symmetric buffer in an instance of its own.

    Args:
        core: ``shmem.core``.
        buffer: that it allocated.
        instance: that the buffer belongs to.
        num_ranks: ranks that have a part.
    """

    def __init__(self, core: Any, buffer: Any, instance: int, num_ranks: int) -> None:
        self._core, self._buffer, self._instance = core, buffer, instance
        with core.multi_instance(instance):
            self.peers = tuple(int(core.get_peer_buffer(buffer, rank).addr) for rank in range(num_ranks))

    def free(self) -> None:
        """Gives this rank's part back, and ends the instance that it belongs to."""
        with self._core.multi_instance(self._instance):
            self._core.free(self._buffer)
        self._core.finalize(self._instance)


def allocate(num_bytes: int, meeting: Meeting, runtime: Runtime) -> ShmemMemory:
    """Memory for a window on every rank.

    Raises:
        WindowError: a rank cannot get its part, or reach another one's.
        CommunicationTimeoutError: a rank did not come.
    """
    from shmem import core

    instance = next(_instances)
    if instance >= MAX_INSTANCES:
        raise WindowError(f"SHMEM has {MAX_INSTANCES} instances per process, all used. Start a new process.")
    size = align(num_bytes, GRANULE)
    memory, failure = None, ""
    unique = core.get_unique_id() if meeting.rank == 0 else b""
    said = meeting.exchange({"uid": bytes(unique).hex()}, "SHMEM's unique id")
    try:
        core.init(
            uid=bytes.fromhex(values_of(said, "uid", str)[0]),
            rank=meeting.rank,
            nranks=meeting.num_ranks,
            initializer_method="uid",
            mem_size=size + HEAP_EXTRA,
            instance_id=instance,
        )
        with core.multi_instance(instance):
            buffer = core.align(GRANULE, size)
        memory = ShmemMemory(core, buffer, instance, meeting.num_ranks)
        if not all(memory.peers):
            failed = [rank for rank, address in enumerate(memory.peers) if not address]
            failure = f"SHMEM cannot reach rank(s) {failed} from rank {meeting.rank}"
    except Exception as error:  # AclshmemError and AclshmemInvalid have no documented base
        failure = f"SHMEM gives no window of {size} bytes: {error}"
    try:
        raise_together(meeting, failure)
    except BaseException:
        if memory is not None:
            memory.free()
        raise
    assert memory is not None
    return memory
