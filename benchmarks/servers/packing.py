"""Blocks that are posted while others are made, against blocks that are posted when all are, over the link's
speed.

How much of making blocks lies beside the link is taken from traces: the steps of a rank's send in which it
copies rows, and of these what lies in spans in which its own link carries blocks of this call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

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
from benchmarks.spans import Event, calls_of, merged, overlap_us, span_of, steps_in

TOPK, EXPERTS = 8, 64
SEND, COPIES = "send", ("write",)
PARTS, WHOLE = "parts", "whole"
ROUTES = Route(PARTS, "A2", "fullmesh", 1), Route(WHOLE, "A2", "fullmesh", 1, post_parts=1)


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
    found: list[Record] = []
    for factor in factors:
        wire = Wire(num_bytes / (factor * send_us) / 1e3)
        setting = Setting(ROUTES, tokens, TOPK, EXPERTS, wire, iterations)
        with traced(num_ranks, setting, traces and traces / f"{factor:g}") as (measured, folder):
            cells = []
            for operator in OPERATORS:
                case: Case = {"figure": "packing", "operator": operator, "tokens": tokens, "ranks": num_ranks}
                cells += _compared(measured, folder, case | {"link_vs_send": factor}, iterations, found)
        rows.append([f"{factor:g}", f"{wire.gigabytes_per_s:.4f}", *cells])
    title = f"one part / in parts, {num_ranks} servers of one rank, K {TOPK}, BS {tokens}"
    columns = [column for operator in OPERATORS for column in (operator, "hidden in parts", "in one")]
    print_table(title, ["link / send", "GB/s", *columns], rows)
    print(f"send: {send_us / 1e3:.2f} ms without a link; hidden: of copying rows, what lay beside the link")
    return found


def _compared(
    measured: Measured, folder: Path, case: Case, iterations: int, found: list[Record]
) -> list[str]:
    operator = str(case["operator"])
    gain = ratios(*(measured.seconds(operator, route) for route in (WHOLE, PARTS)))
    found += records(case, "gain_of_parts", gain)
    cells = [shown(gain)]
    for route in (PARTS, WHOLE):
        calls = packed(folder / f"{route}.json", operator, iterations)
        hidden = median_with_interval(calls)
        found += records(case, f"hidden_in_{route}", hidden)
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
