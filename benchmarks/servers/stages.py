"""Passing tokens on while others arrive against doing it when all are there, over the speed of the link."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Record, print_table
from benchmarks.servers.hierarchy import most
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

TOPK, EXPERTS = 8, 32
RELAY = "relay"
STAGE_3, STAGE_2 = "aiv", "aicpu"
Line = list[tuple[float, float, float, float]]


def stages(
    servers: int,
    per_server: int,
    tokens: int,
    factors: Sequence[float],
    iterations: int,
    plot: Path | None = None,
) -> list[Record]:
    """Prints a table and returns its figures.

    Args:
        servers: of the group.
        per_server: ranks of each.
        tokens: of each rank.
        factors: the link's time for a dispatch, of the time that ranks take to pass its tokens on.
        iterations: of each stage.
        plot: folder for a picture; None for none.
    """
    num_ranks = servers * per_server
    routes = [Route(posts, "A2", "hierarchy", per_server, posts=posts) for posts in (STAGE_3, STAGE_2)]  # type: ignore[arg-type]
    alone = run(num_ranks, Setting(routes[1:], tokens, TOPK, EXPERTS, Wire(), iterations))
    relay_us = relay_of(alone, STAGE_2)
    num_bytes = most(alone, "dispatch", STAGE_2)
    rows: list[list[str]] = []
    found: list[Record] = []
    lines: dict[str, Line] = {operator: [] for operator in OPERATORS}
    for factor in factors:
        wire = Wire(num_bytes / (factor * relay_us) / 1e3)
        per_rank = run(num_ranks, Setting(routes, tokens, TOPK, EXPERTS, wire, iterations))
        cells = []
        for operator in OPERATORS:
            third, second = (seconds(per_rank, operator, posts) for posts in (STAGE_3, STAGE_2))
            gain = ratios(second, third)
            case: Case = {"figure": "stages", "operator": operator, "tokens": tokens, "link_vs_relay": factor}
            case |= {"servers": servers, "ranks_per_server": per_server}
            found += records(case, "gain_of_stage_3", gain)
            lines[operator].append((factor, *gain))
            cells.append(shown(gain))
            if operator == "dispatch":
                saved = statistics.median(second) - statistics.median(third)
                hidden = min(max(saved * 1e6 / relay_us, 0.0), 1.0)
                found.append(
                    Record(
                        benchmark="servers",
                        case=dict(case),
                        metric="hidden",
                        value=hidden,
                        unit="of relaying",
                    )
                )
                cells.append(f"{hidden:.0%}")
        rows.append([f"{factor:g}", f"{wire.gigabytes_per_s:.4f}", *cells])
    title = f"stage 2 / stage 3, {servers} servers of {per_server}, K {TOPK}, BS {tokens}"
    print_table(title, ["link / relay", "GB/s", "dispatch", "hidden", "combine"], rows)
    print(f"relay: {relay_us / 1e3:.2f} ms, without a link; hidden: of that, what stage 3 takes less")
    if plot is not None:
        _draw(plot / f"stages_{servers}x{per_server}.svg", lines)
    return found


def relay_of(per_rank: Sequence[Figures], route: str) -> float:
    """Microseconds in which the slowest rank passes a dispatch's tokens on."""
    return max(figures.steps["dispatch"][route][RELAY] for figures in per_rank)


def _draw(path: Path, lines: dict[str, Line]) -> None:
    def paint(figure: Any) -> None:
        figure.set_size_inches(5.5, 3.8)
        axis = figure.subplots()
        for (operator, line), colour in zip(lines.items(), COLOURS, strict=False):
            x, y, low, high = zip(*line, strict=True)
            axis.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
            axis.plot(x, y, "o-", color=colour, label=operator)
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set(xscale="log", xlabel="link's time / relay's time", ylabel="stage 2 / stage 3")
        legend(figure, 2)

    draw(path, paint)
