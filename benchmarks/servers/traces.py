"""Figures that need traces: how much of a rank's work lies beside the link, over the speed of the link.

*packing*: blocks that are posted while others are made, against blocks that are posted when all are. How much
of making blocks lies beside the link is taken from traces: the steps of a rank's send in which it copies
rows, and of these what lies in spans in which its own link carries blocks of this call.

*stages*: passing tokens on while others arrive against doing it when all are there. A rank's relaying is, in
dispatch, that it passes tokens on to ranks of its server: the steps of its relay in which it neither polls
nor sleeps. Beside the link is what of it lies in spans in which links carry that call's tokens *to* this
rank. In combine it is the sums of its server's results, and beside the link is what lies in spans in which
its own link carries its partial rows *away*: those are what its sums are for. So phases in series hide
nothing: they pass on when the last token has come, and send behind the last sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import Record, median_with_interval, print_table
from benchmarks.servers.runs import (
    OPERATORS,
    Case,
    Measured,
    Route,
    Setting,
    Wire,
    ratios,
    records,
    run,
    shown,
    traced,
)
from benchmarks.spans import Event, Span, calls_of, merged, overlap_us, span_of, spans_named, steps_in
from moe_triton.tools.plots import COLOURS, draw, legend

TOPK, EXPERTS = 8, 64
SEND, COPIES = "send", ("write",)
PARTS, WHOLE = "parts", "whole"
ROUTES = Route(PARTS, "A2", "fullmesh", 1), Route(WHOLE, "A2", "fullmesh", 1, post_parts=1)
RELAY, SERVER_SUM = "relay", "server sum"
PASSING_ON = ("write", "flag")
STAGES_EXPERTS = 32
TRACED = 60
STAGE_3, STAGE_2 = "aiv", "aicpu"
STAGES = {STAGE_3: "stage_3", STAGE_2: "stage_2"}
Line = list[tuple[float, float, float, float]]


def packing(
    num_ranks: int, tokens: int, factors: Sequence[float], iterations: int, traces: Path | None = None
) -> list[Record]:
    """Prints a table and returns its figures.

    Args:
        num_ranks: each a server of its own.
        tokens: of each rank.
        factors: the link's time for a dispatch, of what its send takes without a link and in one part.
        iterations: of each route.
        traces: folder to keep the traces in; None to drop them.
    """
    alone = run(num_ranks, Setting(ROUTES[1:], tokens, TOPK, EXPERTS, Wire(), iterations))
    send_us = alone.step_us("dispatch", WHOLE, SEND)
    num_bytes = alone.most("dispatch", WHOLE).between
    rows: list[list[str]] = []
    figures: list[Record] = []
    for factor in factors:
        wire = Wire(num_bytes / (factor * send_us) / 1e3)
        setting = Setting(ROUTES, tokens, TOPK, EXPERTS, wire, iterations)
        with traced(num_ranks, setting, traces and traces / f"{factor:g}") as (measured, folder):
            cells = []
            for operator in OPERATORS:
                case: Case = {"figure": "packing", "operator": operator, "tokens": tokens, "ranks": num_ranks}
                cells += _compared(measured, folder, case | {"link_vs_send": factor}, iterations, figures)
        rows.append([f"{factor:g}", f"{wire.gigabytes_per_s:.4f}", *cells])
    title = f"one part / in parts, {num_ranks} servers of one rank, K {TOPK}, BS {tokens}"
    columns = [column for operator in OPERATORS for column in (operator, "hidden in parts", "in one")]
    print_table(title, ["link / send", "GB/s", *columns], rows)
    print(f"send: {send_us / 1e3:.2f} ms without a link; hidden: of copying rows, what lay beside the link")
    return figures


def _compared(
    measured: Measured, folder: Path, case: Case, iterations: int, figures: list[Record]
) -> list[str]:
    operator = str(case["operator"])
    gain = ratios(*(measured.seconds(operator, route) for route in (WHOLE, PARTS)))
    figures += records(case, "gain_of_parts", gain)
    cells = [shown(gain)]
    for route in (PARTS, WHOLE):
        hidden = median_with_interval(packed(folder / f"{route}.json", operator, iterations))
        figures += records(case, f"hidden_in_{route}", hidden)
        cells.append(f"{hidden[0]:.0%}")
    return cells


def packed(trace: Path, operator: str, last: int) -> list[float]:
    """Share of the time of copying rows that lay beside the link, in each of an operator's last calls."""
    return [hidden_of(ranks) for ranks in calls_of(trace, operator, last).values()]


def hidden_of(ranks: Mapping[int, Sequence[Event]]) -> float:
    """The same of one call, of all ranks' time; 0 where nothing was copied."""
    total = beside = 0.0
    for events in ranks.values():
        link = merged(span_of(event) for event in events if event["cat"] == "link")
        copies = steps_in(events, SEND, COPIES)
        total += sum(end - begin for begin, end in copies)
        beside += sum(overlap_us(span, link) for span in copies)
    return beside / total if total else 0.0


@dataclass(frozen=True)
class Relayed:
    """What one call relayed, in microseconds of each rank's cores.

    Attributes:
        us: by rank.
        beside_us: of that, what lay beside the link.
    """

    us: tuple[float, ...]
    beside_us: tuple[float, ...]

    @property
    def hidden(self) -> float:
        """The share that lay beside the link, of all ranks' time; 0 where nothing was relayed."""
        total = sum(self.us)
        return sum(self.beside_us) / total if total else 0.0


def relayed(trace: Path, operator: str, last: int) -> list[Relayed]:
    """The last so many calls of an operator, in order."""
    return [_relayed(ranks, operator) for ranks in calls_of(trace, operator, last).values()]


def _relayed(ranks: Mapping[int, Sequence[Event]], operator: str) -> Relayed:
    us, beside_us = [], []
    for rank, events in sorted(ranks.items()):
        link, work = merged(link_of(ranks, operator, rank)), relaying(events, operator)
        us.append(sum(end - begin for begin, end in work))
        beside_us.append(sum(overlap_us(span, link) for span in work))
    return Relayed(tuple(us), tuple(beside_us))


def relaying(events: Sequence[Event], operator: str) -> list[Span]:
    """A rank's spans of it in one call, on all of its cores."""
    return spans_named(events, SERVER_SUM) if operator == "combine" else steps_in(events, RELAY, PASSING_ON)


def link_of(ranks: Mapping[int, Sequence[Event]], operator: str, rank: int) -> list[Span]:
    """When links carried what a rank's relaying may lie beside, in one call."""
    if operator == "combine":
        return [span_of(event) for event in ranks[rank] if event["cat"] == "link"]
    return [
        span_of(event)
        for events in ranks.values()
        for event in events
        if event["cat"] == "link" and event["args"]["rank"] == rank
    ]


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
    alone = run(num_ranks, Setting(routes[1:], tokens, TOPK, STAGES_EXPERTS, Wire(), iterations))
    relay_us = alone.step_us("dispatch", STAGE_2, RELAY)
    num_bytes = {operator: alone.most(operator, STAGE_2).between for operator in OPERATORS}
    rows: list[list[str]] = []
    figures: list[Record] = []
    lines: dict[str, Line] = {operator: [] for operator in OPERATORS}
    for factor in factors:
        wire = Wire(num_bytes["dispatch"] / (factor * relay_us) / 1e3)
        setting = Setting(routes, tokens, TOPK, STAGES_EXPERTS, wire, iterations)
        # A token more is a few spans more in a trace, in one of the stages only: times are those without one.
        plain = run(num_ranks, setting)
        seen = replace(setting, iterations=min(iterations, TRACED))
        cells = []
        with traced(num_ranks, seen, traces and traces / f"{factor:g}") as (_, folder):
            for operator in OPERATORS:
                gain = ratios(*(plain.seconds(operator, posts) for posts in (STAGE_2, STAGE_3)))
                case: Case = {"figure": "stages", "operator": operator, "tokens": tokens}
                case |= {"link_vs_relay": factor, "servers": servers, "ranks_per_server": per_server}
                figures += records(case, "gain_of_stage_3", gain)
                lines[operator].append((factor, *gain))
                shares = []
                for posts, stage in STAGES.items():
                    calls = relayed(folder / f"{posts}.json", operator, seen.iterations)
                    hidden = median_with_interval([call.hidden for call in calls])
                    figures += records(case, f"hidden_in_{stage}", hidden)
                    shares.append(f"{hidden[0]:.0%}")
                link_us = wire.us(0, num_bytes[operator])
                longer = ratios([link_us] * len(calls), [max(call.us) for call in calls])
                figures += records(case, "link_vs_own_relaying", longer)
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
    return figures


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
