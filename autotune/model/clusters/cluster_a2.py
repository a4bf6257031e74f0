"""A2's schemes on a group: closed forms (`autotune.model.clusters.a2`) of every rank, drawn routing."""

from __future__ import annotations

import numpy as np

from autotune.model.bodies import movement
from autotune.model.clusters import a2, fused
from autotune.model.clusters.cluster import Load, OperatorPoint, Point
from autotune.model.clusters.group import OPERATORS, Group
from autotune.model.constants import Machine
from autotune.model.topology import RANKS_PER_NODE
from moe_triton.core.errors import ArgumentError

ROWS = "int8"
"""How dispatch's rows travel in Ascend's own operators, whose times the forms are held against."""


def price(group: Group, machine: Machine, ids: np.ndarray | None = None) -> Point:
    """What dispatch and combine take on the slowest rank.

    A server by itself is the same for all schemes: its cards reach each other's memory.

    Args:
        group: the group, of product A2; up to 8 ranks, or whole servers of 8.
        machine: that each rank is.
        ids: (EP, T, K) experts, if they are drawn already.

    Raises:
        ArgumentError: no such scheme, a group of parts of servers, rows of another format, or a routing that
            cannot be drawn.
    """
    if group.comm_alg not in a2.SCHEMES:
        rule = f"A2 has {list(a2.SCHEMES)}"
        raise ArgumentError("comm_alg", repr(group.comm_alg), rule, "Name one of them.")
    if group.quantize != ROWS:
        rule = f"A2's schemes are priced with rows as {ROWS}"
        raise ArgumentError("quantize", repr(group.quantize), rule, f"Pass {ROWS!r}.")
    ids = group.draw() if ids is None else ids
    load = Load.of(group, ids, machine)
    of_operators = _one_server if group.ranks <= RANKS_PER_NODE["A2"] else _servers
    return Point(group, of_operators(group, machine, ids, load), load.imbalance, tuple(range(group.ranks)))


def _one_server(group: Group, machine: Machine, ids: np.ndarray, load: Load) -> dict[str, OperatorPoint]:
    call, slowest = _call(group, load), int(load.received.argmax())
    found = {"dispatch": fused.dispatch(call, machine), "combine": fused.combine(call, machine)}
    return {
        operator: _point(group, machine, slowest, phases, load.most(operator, _row_bytes(operator, call)))
        for operator, phases in found.items()
    }


def _servers(group: Group, machine: Machine, ids: np.ndarray, load: Load) -> dict[str, OperatorPoint]:
    call = _call(group, load)
    flows = a2.flows_of(ids, group.num_experts, RANKS_PER_NODE["A2"])
    found: dict[str, OperatorPoint] = {}
    for operator in OPERATORS:
        phases = [a2.phases(group.comm_alg, operator, call, flow, machine) for flow in flows]
        slowest = max(range(len(flows)), key=lambda rank: fused.total(phases[rank]))
        most = (
            _most_sent(group, operator, call, flows, machine),
            _most_sent(group, operator, call, [flow.reversed for flow in flows], machine),
        )
        found[operator] = _point(group, machine, slowest, phases[slowest], most)
    return found


def _most_sent(group: Group, operator: str, call: fused.Call, flows: list[a2.Flow], machine: Machine) -> int:
    """Bytes that the rank sends that sends most."""
    rows = _row_bytes(operator, call)
    between = a2.token_bytes(rows, group.topk) if operator == "dispatch" else rows
    return max(
        a2.operator_cost(group.comm_alg, operator, flow, machine, row_bytes=rows, token_bytes=between).sent
        for flow in flows
    )


def _call(group: Group, load: Load) -> fused.Call:
    sizes = group.ranks, group.tokens, group.topk, group.num_experts, group.hidden
    return fused.Call("A2", *sizes, most_rows=float(load.received.max()))


def _row_bytes(operator: str, call: fused.Call) -> int:
    return call.slot_bytes if operator == "dispatch" else 2 * call.hidden


def _point(
    group: Group, machine: Machine, slowest: int, phases: fused.Phases, most: tuple[int, int]
) -> OperatorPoint:
    """One operator; a captured graph's launch is part of its start."""
    parts = movement.merged(*phases.values())
    if group.mode == "stream":
        parts = {"launch": machine.launch_stream_us, **parts}
    return OperatorPoint(sum(parts.values()), slowest, parts, *most)
