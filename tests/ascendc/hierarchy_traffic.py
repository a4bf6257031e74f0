"""What a rank of a hierarchy has to count of what it posts, and copies to others of its server."""

from __future__ import annotations

import numpy as np

from moe_triton.core.records import RAIL_END, TRAFFIC

from .case import WrongResultError, draw_routing, sent_to
from .hierarchy_case import HierarchyCase, Received, outer_table

Counters = dict[str, int]


def check_dispatched(case: HierarchyCase, seed: int, rank: int, number: int, words: np.ndarray) -> None:
    """Raises unless the blocks of a dispatch have counted all of it.

    Args:
        case: what is sent.
        seed: of the routing.
        rank: that sent.
        number: of the dispatch.
        words: (blocks, words) what the blocks have counted.
    """
    sent = outer_table(case, draw_routing(case, seed, number, rank)).counts
    slot, stride = case.rail_slot, case.layout.rail_slots.stride("index")
    counts = [int(sent[server]) for server in _others(case, rank)]
    passed_on = _passed_on(case, seed, rank, number) * slot.row_bytes
    _check(words, _posted(case, counts, slot.row_bytes, slot.slot_bytes, stride), passed_on)


def check_combined(case: HierarchyCase, rank: int, received: Received, words: np.ndarray) -> None:
    """Raises unless the blocks of a combine have counted all of it.

    Args:
        case: what is sent.
        rank: that sent.
        received: the dispatch whose results it returned.
        words: (blocks, words) what the blocks have counted.
    """
    size, ranks = case.result_bytes, case.layout.ranks_per_server
    counts = received.rail_counts.array[1:].tolist()  # the own server's are at place 0
    returned = received.origins[:, 0] % ranks != rank % ranks
    _check(words, _posted(case, counts, size, size, size), int(returned.sum()) * size)


def _others(case: HierarchyCase, rank: int) -> list[int]:
    """Servers that messages go to."""
    own = rank // case.layout.ranks_per_server
    return [server for server in range(case.layout.num_servers) if server != own]


def _posted(case: HierarchyCase, counts: list[int], row_bytes: int, used: int, stride: int) -> Counters:
    """What so many rows for each server are, and an end flag behind those of each.

    Args:
        case: how they are posted.
        counts: for each server.
        row_bytes: of a row; ``used`` with what goes with it, ``stride`` from one to the next.
    """
    posts, payload = len(counts), sum(counts) * row_bytes
    framing = RAIL_END.num_bytes * len(counts) - payload
    for count in counts:
        most = case.message_tokens or max(count, 1)
        for first in range(0, count, most):
            posts += 1
            framing += (min(most, count - first) - 1) * stride + used
    return {"posts": posts, "payload": payload, "framing": framing}


def _passed_on(case: HierarchyCase, seed: int, rank: int, number: int) -> int:
    """Rows that go on from a rank to others of its server."""
    config, rows = case.config, 0
    for receiver in config.topology.neighbours(rank):
        if receiver == rank:
            continue
        for source in config.topology.rail(rank):
            for expert in range(config.num_local_experts):
                rows += len(sent_to(case, seed, number, source, receiver, expert))
    return rows


def _check(words: np.ndarray, posted: Counters, inside: int) -> None:
    found = {name: int(words[:, i].sum()) for i, (name, _) in enumerate(TRAFFIC.fields)}
    want = {f"{name}_between": number for name, number in posted.items()}
    if found != want | {"posts_inside": 0, "payload_inside": inside, "framing_inside": 0}:
        raise WrongResultError(f"traffic {found} instead of {want} and {inside} bytes inside")
