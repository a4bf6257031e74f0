"""What ranks run with memfabric-hybrid itself, up to its check for a driver; as ``f(rank, num_ranks)``."""

from __future__ import annotations

import types
from typing import cast

from moe_triton.backends.npu import memfabric
from moe_triton.backends.npu.runtime import Runtime
from moe_triton.core.errors import WindowError
from moe_triton.rendezvous.meeting import Meeting


def allocate(rank: int, num_ranks: int, posts: bool) -> str:
    """What the first window of a process says."""
    runtime = cast(Runtime, types.SimpleNamespace(device_index=rank))
    try:
        memfabric.allocate(1 << 20, Meeting(None, 10.0), runtime, posts=posts)
    except WindowError as error:
        return str(error)
    return ""


def create(rank: int, num_ranks: int, kind: str) -> str:
    """What memfabric says of a window before it is initialised: just that, if it takes the arguments."""
    import memfabric_hybrid

    shm = memfabric_hybrid.shm
    try:
        shm.create(0, num_ranks, rank, memfabric.GRANULE, getattr(shm.ShmDataOpType, kind))
    except RuntimeError:
        return str(memfabric_hybrid.get_last_err_msg())
    return ""
