"""Launches of single kernels, for trials of a device before whole operators run on it."""

from __future__ import annotations

from moe_triton.core import ascendc
from moe_triton.core.abi import words_of
from moe_triton.core.kernel import AscendCKernel, TritonKernel
from moe_triton.core.plan import Hole, Launch, Stream, Value, launch
from moe_triton.core.region import REGION_DIMS, Region


def launch_of_zeros(
    step: str, kernel: TritonKernel | AscendCKernel, stream: Stream, blocks: int, **values: Value
) -> Launch:
    """A launch with 0 for each argument that is not given.

    Raises:
        ValueError: a value without an argument.
    """
    zeros: dict[str, Value] = {
        arg.name: (0,) * words_of(arg) if arg.type in REGION_DIMS else 0 for arg in kernel.args
    }
    return launch(step, kernel, stream, blocks, **{**zeros, **values})


def post_entry(status: Region, count: str, **values: Value) -> Launch:
    """Posts an entry {1.0f, count}; ``count`` names the hole with the number."""
    peers, report = Hole("peers"), Hole("report")
    values |= {"peers": peers, "count": Hole(count), "status": status.words(), "report": report}
    return launch_of_zeros("post", ascendc.POST_STATUS, "communication", 1, **values)


def wait_for_entries(status: Region, timeout_us: int, **values: Value) -> Launch:
    """Waits for an entry from every rank; the counts go to the hole "received"."""
    window, report = Hole("window"), Hole("report")
    values |= {"window": window, "recv_counts": Hole("received"), "status": status.words(), "report": report}
    values |= {"num_local_experts": 1, "timeout_us": timeout_us}
    return launch_of_zeros("wait", ascendc.DISPATCH_WAIT, "communication", 1, **values)
