"""A token once to each server against a row to each expert: A2's hierarchy and fullmesh over a slow link."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Record, print_table, records_of
from benchmarks.servers.plots import Lines, draw_lines
from benchmarks.servers.runs import OPERATORS, Case, Route, Setting, Wire, ratios, records, run, shown
from moe_triton.tools.plots import COLOURS

TOPK = 8
LOOKS = {"measured": ("o", COLOURS[0]), "counted bytes": ("--", COLOURS[1])}


def hierarchy(
    servers: int,
    per_server: int,
    tokens: Sequence[int],
    experts: int,
    limit: int | None,
    iterations: int,
    wire_share: float,
    plot: Path | None = None,
) -> list[Record]:
    """Prints a table and returns its figures.

    Args:
        servers: of the group.
        per_server: ranks of each.
        tokens: of each rank.
        experts: M.
        limit: servers that the experts of a token lie in; None for any.
        iterations: of each route.
        wire_share: the link's time for a call of the hierarchy, of what it takes without a link: at least.
        plot: folder for a picture; None for none.
    """
    routes = [Route(name, "A2", name, per_server) for name in ("hierarchy", "fullmesh")]
    rows: list[list[str]] = []
    found: list[Record] = []
    lines: Lines = {}
    limits = None if limit is None else (servers, limit)
    for number in tokens:
        setting = Setting(routes[:1], number, TOPK, experts, Wire(), iterations, limits)
        alone = run(servers * per_server, setting)
        local = {o: statistics.median(alone.seconds(o, "hierarchy")) for o in OPERATORS}
        least = min(alone.most(o, "hierarchy").between for o in OPERATORS)
        wire = Wire(least / (wire_share * max(local.values())) / 1e9)
        both = run(servers * per_server, Setting(routes, number, TOPK, experts, wire, iterations, limits))
        for operator in OPERATORS:
            ours, theirs = (both.seconds(operator, route.name) for route in routes)
            our_bytes, their_bytes = (both.most(operator, route.name).between for route in routes)
            gain, predicted = ratios(theirs, ours), their_bytes / our_bytes
            # gloo sends the same rows as fullmesh, and nothing else: what they take on the link, and no more.
            gloo_s = wire.us(0, both.most(operator, "fullmesh").payload) / 1e6
            over_gloo = ratios([gloo_s] * len(ours), ours)
            case: Case = {"figure": "hierarchy", "operator": operator, "servers": servers, "tokens": number}
            case |= {"ranks_per_server": per_server, "experts": experts, "limit": limit}
            found += records(case, "gain_over_fullmesh", gain)
            found += records(case, "gain_over_gloo_by_arithmetic", over_gloo)
            by_bytes = {"predicted_by_bytes": predicted, "reached": gain[0] / predicted}
            found += records_of("servers", case, by_bytes)
            lines.setdefault((operator, "measured"), []).append((number, gain[0]))
            lines.setdefault((operator, "counted bytes"), []).append((number, predicted))
            link_s = wire.us(0, our_bytes) / 1e6
            sizes = [f"{our_bytes / 1e6:.2f}", f"{their_bytes / 1e6:.2f}", f"{local[operator] / link_s:.0%}"]
            result = [f"{predicted:.2f}", shown(gain), f"{gain[0] / predicted:.0%}", shown(over_gloo)]
            rows.append([f"{operator}, BS {number}", *sizes, *result])
    where = "any servers" if limit is None else f"{limit} servers"
    columns = [
        "",
        "MB",
        "MB, fullmesh",
        "without link",
        "bytes predict",
        "fullmesh / this",
        "reached",
        "gloo / this",
    ]
    title = f"hierarchy, {servers} servers of {per_server}, K {TOPK}, M {experts}, tokens to {where}"
    print_table(title, columns, rows)
    print(
        "gloo: all-to-all-v, by arithmetic: the rows between servers over the link's pace, and nothing else"
    )
    if plot is not None:
        path = plot / f"hierarchy_{servers}x{per_server}_{limit or 'any'}.svg"
        draw_lines(path, lines, LOOKS, ylabel="fullmesh / hierarchy", ylim=0)
    return found
