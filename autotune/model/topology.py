"""How far ranks are from each other, and how long a write without bytes takes to get there."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from autotune.model.constants import Machine
from autotune.model.traffic import Tier
from moe_triton.core.errors import ArgumentError

# Published. Atlas A3: 8 cards a node, two dies a card, a rank on each die. Atlas A2: 8 cards a server.
RANKS_PER_NODE = {"A2": 8, "A3": 16}
DIES_PER_CARD = 2

NETWORK = "network"
"""The tier of a rank of another server, which nothing but queues reaches."""

_OUTSIDE = {"A2": NETWORK, "A3": "far"}
_HOPS = {"sibling": "hop_sibling_us", "node": "hop_node_us", "far": "hop_far_us", NETWORK: "rdma_latency_us"}


@functools.cache
def tiers(product: str, ranks: int, rank: int) -> tuple[Tier, ...]:
    """How far each rank of a group is from one of them.

    Args:
        product: "A3": "self", "sibling" (the other die of the card), "node" or "far"; "A2": "self", "node"
            (another card of the server, over HCCS) or "network".
        ranks: of the group, one on each device, in the order of the devices.
        rank: the one.

    Returns:
        (EP,) tiers.

    Raises:
        ArgumentError: another product, or no such rank.
    """
    if product not in RANKS_PER_NODE:
        rule = f"topologies are known of {list(RANKS_PER_NODE)}"
        raise ArgumentError("product", repr(product), rule, "Name one of them.")
    if not 0 <= rank < ranks:
        raise ArgumentError("rank", rank, f"it must be in [0, {ranks})", "Name a rank of the group.")
    return tuple(_tier(product, rank, peer, RANKS_PER_NODE[product]) for peer in range(ranks))


def tiers_between(servers: Sequence[int], rank: int) -> tuple[Tier, ...]:
    """How far each rank of a group on several servers is from one of them: "self", "node" or "network".

    Args:
        servers: the server of each rank.
        rank: the one.
    """
    return tuple(
        "self" if peer == rank else "node" if server == servers[rank] else NETWORK
        for peer, server in enumerate(servers)
    )


def _tier(product: str, rank: int, peer: int, ranks_per_node: int) -> Tier:
    if peer == rank:
        return "self"
    if peer // ranks_per_node != rank // ranks_per_node:
        return _OUTSIDE[product]
    return "sibling" if product == "A3" and peer // DIES_PER_CARD == rank // DIES_PER_CARD else "node"


def hop_us(machine: Machine, tier: Tier) -> float:
    """Microseconds of a write without bytes; 0 to this device itself.

    Raises:
        ArgumentError: an unknown tier, or one that the machine does not have.
    """
    if tier == "self":
        return 0.0
    if _HOPS.get(tier) not in machine.constants:
        known = ["self", *(name for name, constant in _HOPS.items() if constant in machine.constants)]
        rule = f"peers of {machine.name} are one of {known}"
        raise ArgumentError("tier", repr(tier), rule, "Take it from topology.tiers.")
    return machine.constants[_HOPS[tier]].value
