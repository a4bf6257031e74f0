"""A token once to each server against a row to each expert: A2's hierarchy and fullmesh over a slow link."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Record, print_table, records_of
from benchmarks.servers.runs import (
    OPERATORS,
    Case,
    Figures,
    Route,
    Setting,
    Wire,
    ratios,
    records,
    run,
    seconds,
    shown,
)
from moe_triton.tools.plots import COLOURS, draw, legend

TOPK = 8
Line = list[tuple[int, float]]
Lines = dict[tuple[str, str], Line]


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
        local = {o: statistics.median(seconds(alone, o, "hierarchy")) for o in OPERATORS}
        least = min(most(alone, o, "hierarchy") for o in OPERATORS)
        wire = Wire(least / (wire_share * max(local.values())) / 1e9)
        per_rank = run(servers * per_server, Setting(routes, number, TOPK, experts, wire, iterations, limits))
        for operator in OPERATORS:
            ours, theirs = (seconds(per_rank, operator, route.name) for route in routes)
            our_bytes, their_bytes = (most(per_rank, operator, route.name) for route in routes)
            gain, predicted = ratios(theirs, ours), their_bytes / our_bytes
            # gloo sends the same rows as fullmesh, and nothing else: what they take on the link, and no more.
            gloo_s = wire.us(0, payload(per_rank, operator, "fullmesh")) / 1e6
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
        _draw(plot / f"hierarchy_{servers}x{per_server}_{limit or 'any'}.svg", lines)
    return found


def most(per_rank: Sequence[Figures], operator: str, route: str) -> int:
    """Bytes between servers of the rank that sends most."""
    return max(figures.between[operator][route] for figures in per_rank)


def payload(per_rank: Sequence[Figures], operator: str, route: str) -> int:
    """Those of rows, of the rank that sends most."""
    return max(figures.payload[operator][route] for figures in per_rank)


def _draw(path: Path, lines: Lines) -> None:
    def paint(figure: Any) -> None:
        figure.set_size_inches(9.0, 3.8)
        for axis, operator in zip(figure.subplots(1, len(OPERATORS)), OPERATORS, strict=True):
            for (of, kind), line in lines.items():
                if of == operator:
                    x, y = zip(*line, strict=True)
                    style, colour = ("o", COLOURS[0]) if kind == "measured" else ("--", COLOURS[1])
                    axis.plot(x, y, style, color=colour, label=kind)
            axis.set(
                title=operator, xscale="log", xlabel="tokens of a rank", ylabel="fullmesh / hierarchy", ylim=0
            )
        legend(figure, 2)

    draw(path, paint)
