"""A2's schemes on a group: closed forms (`moe_triton.model.a2`) of every rank, of sampled routing."""

from __future__ import annotations

import numpy as np

from moe_triton.core.errors import ArgumentError
from moe_triton.model import a2, fused, movement
from moe_triton.model.cluster import OPERATORS, Load, OperatorPoint, Point, Setting
from moe_triton.model.constants import Machine
from moe_triton.model.topology import RANKS_PER_NODE

ROWS = "int8"
"""How dispatch's rows travel in Ascend's own operators, whose times the forms are held against."""


def price(setting: Setting, machine: Machine, ids: np.ndarray | None = None) -> Point:
    """What dispatch and combine take on the slowest rank.

    A server by itself is the same for all schemes: its cards reach each other's memory.

    Args:
        setting: the group, of product A2; up to 8 ranks, or whole servers of 8.
        machine: that each rank is.
        ids: (EP, T, K) experts, if they are drawn already.

    Raises:
        ArgumentError: no such scheme, a group of parts of servers, rows of another format, or a routing that
            cannot be drawn.
    """
    if setting.scheme not in a2.SCHEMES:
        rule = f"A2 has {list(a2.SCHEMES)}"
        raise ArgumentError("comm_alg", repr(setting.scheme), rule, "Name one of them.")
    if setting.quantize != ROWS:
        rule = f"A2's schemes are priced with rows as {ROWS}"
        raise ArgumentError("quantize", repr(setting.quantize), rule, f"Pass {ROWS!r}.")
    ids = setting.draw() if ids is None else ids
    load = Load.of(setting, ids, machine)
    of_operators = _one_server if setting.ranks <= RANKS_PER_NODE["A2"] else _servers
    return Point(
        setting, of_operators(setting, machine, ids, load), load.imbalance, tuple(range(setting.ranks))
    )


def _one_server(setting: Setting, machine: Machine, ids: np.ndarray, load: Load) -> dict[str, OperatorPoint]:
    call, slowest = _call(setting, load), int(load.received.argmax())
    found = {"dispatch": fused.dispatch(call, machine), "combine": fused.combine(call, machine)}
    return {
        operator: _point(setting, machine, slowest, phases, load.most(operator, _row_bytes(operator, call)))
        for operator, phases in found.items()
    }


def _servers(setting: Setting, machine: Machine, ids: np.ndarray, load: Load) -> dict[str, OperatorPoint]:
    call = _call(setting, load)
    flows = a2.flows_of(ids, setting.num_experts, RANKS_PER_NODE["A2"])
    found: dict[str, OperatorPoint] = {}
    for operator in OPERATORS:
        phases = [a2.phases(setting.scheme, operator, call, flow, machine) for flow in flows]
        slowest = max(range(len(flows)), key=lambda rank: fused.total(phases[rank]))
        most = (
            _most_sent(setting, operator, call, flows, machine),
            _most_sent(setting, operator, call, [flow.reversed for flow in flows], machine),
        )
        found[operator] = _point(setting, machine, slowest, phases[slowest], most)
    return found


def _most_sent(
    setting: Setting, operator: str, call: fused.Call, flows: list[a2.Flow], machine: Machine
) -> int:
    """Bytes that the rank sends that sends most."""
    rows = _row_bytes(operator, call)
    between = a2.token_bytes(rows, setting.topk) if operator == "dispatch" else rows
    return max(
        a2.operator_cost(setting.scheme, operator, flow, machine, row_bytes=rows, token_bytes=between).sent
        for flow in flows
    )


def _call(setting: Setting, load: Load) -> fused.Call:
    sizes = setting.ranks, setting.tokens, setting.topk, setting.num_experts, setting.hidden
    return fused.Call("A2", *sizes, most_rows=float(load.received.max()))


def _row_bytes(operator: str, call: fused.Call) -> int:
    return call.slot_bytes if operator == "dispatch" else 2 * call.hidden


def _point(
    setting: Setting, machine: Machine, slowest: int, phases: fused.Phases, most: tuple[int, int]
) -> OperatorPoint:
    """One operator; a captured graph's launch is part of its start."""
    parts = movement.merged(*phases.values())
    if setting.mode == "stream":
        parts = {"launch": machine.launch_stream_us, **parts}
    return OperatorPoint(sum(parts.values()), slowest, parts, *most)
