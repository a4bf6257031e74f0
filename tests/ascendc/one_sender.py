"""One rank that sends to all: their windows, and what its kernel is given to write or post to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from moe_triton.backends.cpu.nic import NicSettings
from moe_triton.core.reach import Queues
from moe_triton.core.records import TRAFFIC
from moe_triton.schemes.fullmesh.layout import WindowLayout

from .call_words import NOT_POSTING
from .case import PATIENT_US
from .library import Library, address
from .memory import Guarded, across_lines
from .nics import Nics


@dataclass(frozen=True)
class Sender:
    """What one rank's kernel takes, and where it leaves what it sends."""

    windows: list[Guarded]
    traffic: np.ndarray
    arguments: dict[str, object]


@contextmanager
def one_sender(
    library: Library, layout: WindowLayout, rank: int, blocks: int, first_seed: int
) -> Iterator[Sender]:
    """All windows, and the arguments of ``rank``, which posts to other servers where there are some."""
    topology = layout.config.topology
    everyone = frozenset(range(layout.config.num_ranks))
    windows = [Guarded((layout.window_bytes,), align=512) for _ in everyone]
    addresses = [address(window.array) for window in windows]
    traffic = Guarded((blocks, TRAFFIC.num_words), np.int64, align=64)
    posting, peers, nics = NOT_POSTING, addresses, None
    if topology.num_servers > 1:
        queued = [everyone - frozenset(topology.neighbours(each)) for each in sorted(everyone)]
        queues = [Queues(others, topology.servers, layout.in_bytes) for others in queued]
        settings = [NicSettings(seed=first_seed + each, ring_items=1) for each in sorted(everyone)]
        nics = Nics(library, addresses, layout.window_bytes, queues, settings)
        nics.use(rank)
        peers = nics.words[rank]
        posting = {
            "window": windows[rank].array,
            "out_offset": layout.in_bytes,
            "timeout_us": PATIENT_US,
            "traffic": traffic.array,
        }
    whom = {"peers": across_lines(peers), "num_ranks": len(everyone), "rank": rank}
    try:
        yield Sender(windows, traffic.array, {**whom, **posting})
    finally:
        if nics is not None:
            nics.close()
