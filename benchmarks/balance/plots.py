"""Plots: skew over the day by policy, and what steps gain by period and EP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.balance.policies import BOUNDED, NONE, ORACLE, PERIODIC
from benchmarks.balance.report import SPEED_UP_GOAL, Report
from benchmarks.balance.simulation import ANY, Outcome, speed_ups
from moe_triton.tools.plots import COLOURS, draw, legend

DAY, GAINS = "balance_day.svg", "balance_gains.svg"
LINES = ("-", "--", ":")


def plot(report: Report, folder: Path) -> list[Path]:
    """Both, of routing to any experts."""
    return [
        draw(folder / DAY, lambda figure: _day(figure, report)),
        draw(folder / GAINS, lambda figure: _gains(figure, report)),
    ]


def _periods(outcomes: Sequence[Outcome]) -> list[int]:
    return sorted({each.period for each in outcomes if each.policy in PERIODIC})


def _day(figure: Any, report: Report) -> None:
    """A panel for each period; lines by policy, those without a period in each."""
    outcomes = report.of(ANY, report.eps[0])
    periods = _periods(outcomes)
    figure.set_size_inches(7.5, 2.0 * len(periods) + 0.7)
    axes = figure.subplots(len(periods), 1, squeeze=False, sharex=True, sharey=True)[:, 0]
    colours = dict(zip((NONE, *PERIODIC, ORACLE, BOUNDED), COLOURS, strict=False))
    for axis, period in zip(axes, periods, strict=True):
        for each in outcomes:
            if each.policy in colours and (each.period == period or each.policy not in PERIODIC):
                axis.plot(
                    each.steps,
                    each.skew["token"],
                    color=colours[each.policy],
                    label=each.policy,
                    linewidth=1.1,
                )
        axis.set_title(f"placements made anew every {period:,} steps")
        axis.set_ylabel("most rows / mean")
        axis.grid(visible=True, axis="y", linewidth=0.4, alpha=0.6)
        axis.set_ylim(bottom=0.9)
    axes[-1].set_xlabel(f"step of the day, EP {report.eps[0]}, replicas by token")
    legend(figure, columns=len(colours))


def _gains(figure: Any, report: Report) -> None:
    """Lines over EP, by policy and period."""
    faster = speed_ups(report.outcomes)
    figure.set_size_inches(7.5, 3.6)
    axis = figure.subplots()
    periods = _periods(report.of())
    for colour, policy in zip(COLOURS, (*PERIODIC, ORACLE), strict=False):
        for line, period in zip(LINES, periods if policy in PERIODIC else [0], strict=False):
            of = [each for each in report.of() if (each.policy, each.period) == (policy, period)]
            ratios = [faster[each.key] for each in of]
            axis.plot(
                [each.ranks for each in of],
                ratios,
                line,
                color=colour,
                marker="o",
                markersize=3,
                label=of[0].name if of else policy,
            )
    axis.axhline(SPEED_UP_GOAL, color="black", linewidth=0.8, linestyle=":")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = [1, SPEED_UP_GOAL, 2, 3, 5, 8]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_xticks(report.eps, [str(ranks) for ranks in report.eps])
    axis.set_xlabel("ranks (EP)")
    axis.set_title("time of a step without replicas / with, by the model")
    axis.grid(visible=True, axis="y", linewidth=0.4, alpha=0.6)
    legend(figure, columns=3)
