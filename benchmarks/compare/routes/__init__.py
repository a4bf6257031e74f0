"""The routes of one case, made together; what cannot be made is named with the reason."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from benchmarks.compare.routes.base import Delivered, Inputs, Route
from benchmarks.compare.routes.collectives import AllGather, AllToAllV, Gloo, Mpi
from benchmarks.compare.routes.memcpy import Arena, Memcpy
from benchmarks.compare.routes.mpi_native import MpiNative
from benchmarks.compare.routes.ours import Direct, NoWait, Slots
from benchmarks.sizes import EXPERTS, TOPK
from moe_triton import EPBuffer
from moe_triton.core.errors import ArgumentError, WindowError
from moe_triton.schemes import product_of

__all__ = ["COMM_ALGS", "Buffers", "Delivered", "Route", "make_routes"]

# Routes with a buffer of their own.
COMM_ALGS = {"slots": "", "direct": "direct", "blocks": "fullmesh"}
SPARED = "blocks"
"""Left out where memory is short, lest the machine's last resort end a rank."""
MEMORY_SHARE = 0.6
"""What windows may take of the machine's memory: other routes keep theirs outside of them."""


@dataclass(frozen=True)
class Buffers:
    """The buffers that could be constructed, and why the others could not."""

    made: dict[str, EPBuffer]
    absent: dict[str, str]

    @staticmethod
    def open(names: set[str], num_tokens: int, hidden: int, stack: contextlib.ExitStack) -> Buffers:
        """Constructs those of these names; collective. They are closed with the stack."""
        made: dict[str, EPBuffer] = {}
        absent: dict[str, str] = {}
        num_ranks, left = dist.get_world_size(), MEMORY_SHARE * _memory_bytes()
        for name in sorted(names, key=list(COMM_ALGS).index):
            comm_alg = COMM_ALGS[name]
            sizes: dict[str, Any] = {
                **{"num_max_tokens_per_rank": num_tokens, "hidden": hidden},
                **{"num_topk": TOPK, "num_experts": EXPERTS},
                **{"product": product_of(comm_alg), "comm_alg": comm_alg},
            }
            num_bytes = num_ranks * EPBuffer.get_buffer_size_hint(num_ranks, **sizes)
            left -= num_bytes
            if name == SPARED and left < 0:
                absent[name] = f"its windows of {num_bytes / 1e9:.1f} GB do not fit beside the others"
                continue
            try:
                buffer = EPBuffer(**sizes)
            except (ArgumentError, WindowError) as error:
                absent[name] = str(error)
                continue
            made[name] = stack.enter_context(buffer)
        return Buffers(made, absent)


def make_routes(
    inputs: Inputs, quantize: str, wanted: set[str], buffers: Buffers, comm: Any, no_mpi: str
) -> tuple[dict[str, Route], dict[str, str]]:
    """Routes by name, and the reasons for those that are absent.

    Args:
        wanted: names. Gloo's all-to-all-v is made in any case: the others are checked against it.
        comm: an ``mpi4py.MPI.Comm``, or None.
        no_mpi: why there is none.
    """
    routes: dict[str, Route] = {"gloo_alltoallv": AllToAllV(inputs, Gloo(), quantize)}
    absent = {name: reason for name, reason in buffers.absent.items() if name in wanted}
    if "slots" in buffers.made:
        slots = Slots(inputs, buffers.made["slots"], quantize)
        routes["slots"] = slots
        if "nowait" in wanted:
            _run_both_zones(slots)
            routes["nowait"] = NoWait(slots)
    elif "nowait" in wanted:
        absent["nowait"] = f"there are no slots: {buffers.absent['slots']}"
    if "direct" in buffers.made:
        routes["direct"] = Direct(inputs, buffers.made["direct"], quantize)
    if "blocks" in buffers.made:
        routes["blocks"] = Slots(inputs, buffers.made["blocks"], quantize)
    if "gloo_allgather" in wanted:
        routes["gloo_allgather"] = AllGather(inputs, Gloo(), quantize)
    if comm is None:
        absent |= {name: no_mpi for name in wanted if name.startswith("mpi_")}
    else:
        routes |= {
            "mpi_alltoallv": AllToAllV(inputs, Mpi(comm), quantize),
            "mpi_allgather": AllGather(inputs, Mpi(comm), quantize),
            "mpi_native": MpiNative(inputs, comm, quantize),
        }
    arena = Arena()
    routes |= {
        "memcpy_slots": Memcpy(inputs, "slots", quantize, arena),
        "memcpy_slots_whole": Memcpy(inputs, "slots", quantize, arena, whole=True),
        "memcpy_direct": Memcpy(inputs, "direct", quantize, arena),
        "memcpy_whole": Memcpy(inputs, "direct", quantize, arena, whole=True),
    }
    return {name: route for name, route in routes.items() if name in wanted | {"gloo_alltoallv"}}, absent


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _run_both_zones(slots: Slots) -> None:
    """Compiles the plans of both zones and leaves both full of this variant's rows."""
    for _ in range(2):
        slots.dispatch()
        slots.combine()
