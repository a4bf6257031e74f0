"""Passing tokens on while others arrive against doing it when all are there, over the speed of the link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import Record, median_with_interval, print_table
from benchmarks.servers.relaying import RELAY, relayed
from benchmarks.servers.runs import OPERATORS, Case, Route, Setting, Wire, ratios, records, run, shown, traced
from moe_triton.tools.plots import COLOURS, draw, legend

TOPK, EXPERTS = 8, 32
TRACED = 60
STAGE_3, STAGE_2 = "aiv", "aicpu"
STAGES = {STAGE_3: "stage_3", STAGE_2: "stage_2"}
Line = list[tuple[float, float, float, float]]


def stages(
    servers: int,
    per_server: int,
    tokens: int,
    factors: Sequence[float],
    iterations: int,
    plot: Path | None = None,
    traces: Path | None = None,
) -> list[Record]:
    """Prints a table and returns its figures.

    Args:
        servers: of the group.
        per_server: ranks of each.
        tokens: of each rank.
        factors: the link's time for a dispatch, of the time that its relay takes without a link.
        iterations: of each stage; traces are of no more than 60.
        plot: folder for a picture; None for none.
        traces: folder to keep the traces in; None to drop them.
    """
    num_ranks = servers * per_server
    routes = [Route(posts, "A2", "hierarchy", per_server, posts=posts) for posts in (STAGE_3, STAGE_2)]  # type: ignore[arg-type]
    alone = run(num_ranks, Setting(routes[1:], tokens, TOPK, EXPERTS, Wire(), iterations))
    relay_us = alone.step_us("dispatch", STAGE_2, RELAY)
    num_bytes = {operator: alone.most(operator, STAGE_2).between for operator in OPERATORS}
    rows: list[list[str]] = []
    found: list[Record] = []
    lines: dict[str, Line] = {operator: [] for operator in OPERATORS}
    for factor in factors:
        wire = Wire(num_bytes["dispatch"] / (factor * relay_us) / 1e3)
        setting = Setting(routes, tokens, TOPK, EXPERTS, wire, iterations)
        # A token more is a few spans more in a trace, in one of the stages only: times are those without one.
        plain = run(num_ranks, setting)
        seen = replace(setting, iterations=min(iterations, TRACED))
        cells = []
        with traced(num_ranks, seen, traces and traces / f"{factor:g}") as (_, folder):
            for operator in OPERATORS:
                gain = ratios(*(plain.seconds(operator, posts) for posts in (STAGE_2, STAGE_3)))
                case: Case = {"figure": "stages", "operator": operator, "tokens": tokens}
                case |= {"link_vs_relay": factor, "servers": servers, "ranks_per_server": per_server}
                found += records(case, "gain_of_stage_3", gain)
                lines[operator].append((factor, *gain))
                shares = []
                for posts, stage in STAGES.items():
                    calls = relayed(folder / f"{posts}.json", operator, seen.iterations)
                    hidden = median_with_interval([call.hidden for call in calls])
                    found += records(case, f"hidden_in_{stage}", hidden)
                    shares.append(f"{hidden[0]:.0%}")
                link_us = wire.us(0, num_bytes[operator])
                longer = ratios([link_us] * len(calls), [max(call.us) for call in calls])
                found += records(case, "link_vs_own_relaying", longer)
                cells += [f"{longer[0]:.1f}", shown(gain), *shares]
        rows.append([f"{factor:g}", f"{wire.gigabytes_per_s:.4f}", *cells])
    title = f"stage 2 / stage 3, {servers} servers of {per_server}, K {TOPK}, BS {tokens}"
    hidden_columns = ["hidden in 3", "in 2"]
    columns = ["/ passing on", "dispatch", *hidden_columns, "/ sums", "combine", *hidden_columns]
    print_table(title, ["link / relay", "GB/s", *columns], rows)
    print(f"relay: {relay_us / 1e3:.2f} ms without a link, waits for ranks that are behind among them")
    print(
        "passing on, sums: what stage 2 takes for them, by traces; hidden: of them, what lay beside the link"
    )
    if plot is not None:
        _draw(plot / f"stages_{servers}x{per_server}.svg", lines)
    return found


def _draw(path: Path, lines: dict[str, Line]) -> None:
    def paint(figure: Any) -> None:
        figure.set_size_inches(5.5, 3.8)
        axis = figure.subplots()
        for (operator, line), colour in zip(lines.items(), COLOURS, strict=False):
            x, y, low, high = zip(*line, strict=True)
            axis.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
            axis.plot(x, y, "o-", color=colour, label=operator)
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set(
            xscale="log",
            xlabel="time on the link between servers / time to pass tokens on",
            ylabel="time, AICPU posts / cores post",
        )
        legend(figure, 2)

    draw(path, paint)
