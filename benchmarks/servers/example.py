"""The published example of A2's two ways by the model, with the bytes and posts of our plans.

8 servers of 8 ranks; each rank has 16 tokens of 7168 in fp16, which go to 8 experts on 4 servers. Published
are rows on wires and nothing else: 86.1 us for a row to each expert, 38.3 + 8 us for one to each server and
from there to each expert.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from autotune.model.clusters.a2 import Flow, mean_flow, operator_cost
from autotune.model.clusters.group import OPERATORS
from autotune.model.constants import Machine, machine_named
from autotune.model.kernel_costs import movement
from benchmarks.harness import Record, print_table, records_of
from moe_triton.backends import CAPABILITIES
from moe_triton.core.config import Config
from moe_triton.core.tuning import POSTS, Tuning
from moe_triton.operators.variants import DispatchVariant
from moe_triton.schemes import make_scheme
from moe_triton.schemes.common.waits import arguments_of
from moe_triton.schemes.rank_context import RankContext
from moe_triton.schemes.scheme import Scheme

SERVERS, CARDS, TOKENS, TOPK, SERVERS_PER_TOKEN, HIDDEN = 8, 8, 16, 8, 4, 7168
# What the published figures follow from: bytes alone, and 7 links of a card to the others of its server.
LINK_GB_PER_S = 200.7 / 7
RATES = {
    "rdma_gb_per_s": 20.97,
    "rdma_message_us": 0.0,
    "remote_write_gb_per_s": 7 * LINK_GB_PER_S,
    "pair_write_gb_per_s": LINK_GB_PER_S,
    "pair_read_gb_per_s": LINK_GB_PER_S,
}
STAGES = {"aicpu": "hierarchy", "aiv": "hierarchy-aiv"}


@dataclass(frozen=True)
class Wires:
    """What one rank sends in a dispatch.

    Attributes:
        between: bytes to other servers.
        inside: bytes to other ranks of its server.
        posts: messages to other servers.
        tokens: of a message whose tokens cores post; 1 of others.
    """

    between: float
    inside: float
    posts: float
    tokens: int = 1

    def us(self, machine: Machine) -> tuple[float, float]:
        """Microseconds on the wire between servers, and on the wire inside a server."""
        inside = movement.wire(machine, self.inside) if self.inside else 0.0
        return movement.rdma_us(machine, self.between, self.posts), inside


def machine() -> Machine:
    """A2 with the rates of the example."""
    return machine_named("A2").replaced(RATES)


def example_flow() -> Flow:
    """What a rank moves, on average."""
    return mean_flow(SERVERS, CARDS, TOKENS, TOPK, SERVERS_PER_TOKEN)


def made(scheme: str, posts: str | None = None) -> Scheme:
    """On a rank of the example's group."""
    sizes = SERVERS * CARDS, TOKENS, HIDDEN, TOPK, 4 * SERVERS * CARDS
    config = Config(*sizes, product="A2", scheme=scheme, ranks_per_server=CARDS)
    tuning = Tuning(posts=posts) if posts else Tuning()  # type: ignore[arg-type]
    return make_scheme(RankContext(config, 0, 48, 1_000_000, CAPABILITIES["cpu"], tuning=tuning))


def hierarchy(posts: str) -> Wires:
    """By the plan of a dispatch."""
    flow = example_flow()
    plan = made("hierarchy", posts).whole(DispatchVariant(torch.float16, weights=True), 0)
    steps = {
        launch.step: arguments_of(launch) for launch in plan.launches if launch.kernel.name.startswith("rail")
    }
    send, relay = steps["send"], steps["relay"]
    tokens = float(np.delete(flow.copies, flow.server).sum())
    rows = float(np.delete(flow.relayed, flow.card).sum())
    others = SERVERS - 1
    end_bytes = stamp_bytes = 32
    messages = others * (math.ceil(tokens / others / send["message_tokens"]) + 1)
    row_bytes = relay["row_bytes"] + stamp_bytes
    num_bytes = tokens * send["slot_bytes"] + others * end_bytes, rows * row_bytes
    return Wires(*num_bytes, messages, send["message_tokens"] if posts == "aiv" else 1)


def fullmesh() -> Wires:
    """By the plan of a dispatch: rows to all ranks, those of the own server too."""
    flow = example_flow()
    plan = made("fullmesh").whole(DispatchVariant(torch.float16, weights=True), 0)
    post = next(arguments_of(launch) for launch in plan.launches if launch.kernel.name == "blocks_send")
    others = SERVERS * CARDS - 1
    rows = float(flow.sent.sum() - flow.sent[0])
    return Wires(rows * post["row_step"] + others * (post["rows_offset"] + 32), 0.0, others)


def example() -> list[Record]:
    """Prints a table and returns its figures."""
    used, flow = machine(), example_flow()
    rows: list[list[str]] = []
    figures: list[Record] = []
    for name, scheme, wires in (
        ("fullmesh", "fullmesh", fullmesh()),
        *((f"hierarchy, {posts}", STAGES[posts], hierarchy(posts)) for posts in reversed(POSTS)),
    ):
        between, inside = wires.us(used)
        sizes = {"row_bytes": 2 * HIDDEN, "tokens_per_message": wires.tokens}
        costs = {o: operator_cost(scheme, o, flow, used, **sizes) for o in OPERATORS}
        parts = costs["dispatch"].parts
        sums = costs["combine"].parts["sum"]
        rows.append(
            [
                name,
                f"{wires.between / 2**20:.3f}",
                f"{between:.1f}",
                f"{wires.inside / 2**20:.3f}",
                f"{inside:.1f}",
                f"{wires.posts:.0f}",
                f"{parts['posts']:.1f}",
                f"{parts.get('hccs', 0.0):.1f}",
                f"{sums:.1f}",
                *(f"{costs[operator].us:.1f}" for operator in OPERATORS),
            ]
        )
        case = {"figure": "example", "route": name}
        figures += records_of("servers", case, {"between": between, "inside": inside}, "us")
    columns = ["", "MiB between", "us", "MiB inside", "us", "posts", "add us", "relay adds", "sums"]
    print_table(
        "The published example of A2's two ways, by the model",
        [*columns, *(f"{o} us" for o in OPERATORS)],
        rows,
    )
    return figures
