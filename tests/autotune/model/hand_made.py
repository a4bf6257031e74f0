"""Plans made by hand, with bodies that take what is written beside them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autotune.model.bodies.remembered import Bodies
from autotune.model.constants import Machine, machine_named
from autotune.model.cost import Body, Cost, Work
from autotune.model.traffic import Traffic, traffic_of
from moe_triton.core.config import Config
from moe_triton.core.kernel import AscendCKernel, TritonKernel
from moe_triton.core.plan import Hole, Launch, Plan, Stream, Value
from moe_triton.schemes.fullmesh.ascendc import COMBINE_SEND, COMBINE_WAIT, DISPATCH_ROWS, DISPATCH_SEND
from moe_triton.schemes.site import tokens_of

LAUNCH_US, EVENT_US, HOP_US, FLAG_US = 4.0, 2.0, 0.5, 0.25
MACHINE = machine_named("A3").replaced(
    {
        "launch_graph_us": LAUNCH_US,
        "launch_stream_us": 2 * LAUNCH_US,
        "event_us": EVENT_US,
        "hop_sibling_us": HOP_US,
        "hop_node_us": HOP_US,
        "flag_latency_us": FLAG_US,
        "remote_write_gb_per_s": 1.0,  # a thousand bytes a microsecond
    }
)
LATENCY_US = HOP_US + FLAG_US
STATUS, SLOTS = (7,), (8,)


def compute(name: str, alongside: bool = False, stream: Stream = "compute") -> Launch:
    """A Triton kernel without arguments."""
    kernel = TritonKernel(name, None, (), {}, lambda *_: None)
    return Launch(name, kernel, (), 1, stream, alongside)


def communicate(
    step: str, kernel: AscendCKernel, alongside: bool = False, blocks: int = 1, **given: Value
) -> Launch:
    """An Ascend C kernel, with what it needs to know of the window and 0 for the rest."""
    known: dict[str, Value] = {"peers": Hole("peers"), "window": Hole("window"), "status": STATUS}
    known |= {"slots": SLOTS, "origins": Hole("origins"), **given}
    values = tuple(known.get(arg.name, 0) for arg in kernel.args)
    return Launch(step, kernel, values, blocks, "communication", alongside)


def send(step: str = "send", alongside: bool = False, last: bool = True) -> Launch:
    """Rows with flags; the first of them, counts."""
    return communicate(step, DISPATCH_SEND, alongside, post_status=int(last))


def wait(step: str = "wait", alongside: bool = False) -> Launch:
    """For the rows of `send`."""
    return communicate(step, DISPATCH_ROWS, alongside)


def send_results(blocks: int = 1) -> Launch:
    """Results with a flag for each."""
    return communicate("send", COMBINE_SEND, blocks=blocks, flag_rows=1)


def wait_results(step: str = "wait", part: int = 0, parts: int = 1, alongside: bool = False) -> Launch:
    """For the results of a part of the tokens."""
    first, count = tokens_of(part, parts)
    return communicate(step, COMBINE_WAIT, alongside, first_token=first, num_tokens=count)


def plan_of(*launches: Launch, overlap: bool = True) -> Plan:
    """A dispatch."""
    return Plan("dispatch", 0, launches, overlap)


def bodies_of(us: Mapping[str, float], sent: Mapping[str, int] | None = None) -> Bodies:
    """Bodies by the name of the kernel."""

    def body_of(kernel: AscendCKernel | TritonKernel) -> Body:
        def body(work: Work, machine: Machine) -> Cost:
            return Cost({"fixed": us[kernel.name]}, sent=(sent or {}).get(kernel.name, 0))

        return body

    return body_of


def traffics_of(ids: object, num_experts: int = 2) -> list[Traffic]:
    """Of every rank: (EP, T, K) expert ids, all ranks in one node."""
    routed = np.array(ids)
    num_ranks, tokens, topk = routed.shape
    config = Config(num_ranks, tokens, 64, topk, num_experts, relaxed=True)
    tiers = [tuple("self" if a == b else "node" for a in range(num_ranks)) for b in range(num_ranks)]
    return [traffic_of(config, rank, routed, tiers[rank]) for rank in range(num_ranks)]


TWO_RANKS = [[[0], [1]], [[0], [1]]]
"""Each of two ranks has two tokens: one for itself, and one for the other."""
