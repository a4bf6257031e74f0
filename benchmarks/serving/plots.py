"""The figure of the page: one call against its rounds by hand, and against its peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.compare.figures import Samples
from benchmarks.serving import peers
from benchmarks.serving.report import BOTH, OVERLAPPING, Report
from benchmarks.serving.sizes import OF_MEMCPY
from moe_triton.tools.plots import COLOURS, draw, legend

NAME = "serving.svg"


def plot(report: Report, folder: Path) -> list[Path]:
    """Draws what the report has."""

    def paint(figure: Any) -> None:
        figure.set_size_inches(9.5, 4.2)
        left, right = figure.subplots(1, 2)
        _rounds(left, report)
        _peers(right, report)
        legend(figure, 4)

    return [draw(folder / NAME, paint)]


def _rounds(axis: Any, report: Report) -> None:
    axis.axhline(1.0, color="black", linewidth=0.8)
    for measured, colour in zip(report.rounds, COLOURS, strict=False):
        links = [(n, link) for n, link in enumerate(measured.setting.links) if not link.rounds_ahead]
        wires, found = [link.wire for _, link in links], [measured.figures(n) for n, _ in links]
        label = f"W {measured.setting.ranks}, {measured.setting.rows or 'bf16'}"
        for metric, style, how in ((BOTH, "o-", ""), (OVERLAPPING, "s--", ", beside computing")):
            middle = [each[metric] for each in found]
            reach = [
                [each[metric] - each[f"{metric}_low"] for each in found],
                [each[f"{metric}_high"] - each[metric] for each in found],
            ]
            lines = {"color": colour, "label": label + how, "capsize": 2, "linewidth": 1}
            axis.errorbar(wires, middle, reach, fmt=style, **lines)
    axis.set(xlabel="sleep of senders, of other work (0: no link)", title="rounds by hand / one call")
    axis.set_ylim(bottom=0)


def _peers(axis: Any, report: Report) -> None:
    samples = Samples(report.samples)
    titles = [asked.metric.title for asked in peers.ASKED]
    cases = samples.cases
    for number, (case, colour) in enumerate(zip(cases, COLOURS, strict=False)):
        figures = peers.figures(samples, case)
        heights = [figures.get(asked.metric.name, 0.0) for asked in peers.ASKED]
        width = 0.8 / len(cases)
        places = [place + (number - (len(cases) - 1) / 2) * width for place in range(len(titles))]
        axis.bar(
            places, heights, width, color=colour, label=f"peers: W {case.ranks}, {case.quantize or 'bf16'}"
        )
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.axhline(OF_MEMCPY.bound, color="black", linewidth=0.8, linestyle=":")
    axis.set_xticks(
        range(len(titles)), [title.replace(" / it", "").replace(" with", "\nwith") for title in titles]
    )
    axis.tick_params(axis="x", labelsize=7)
    axis.set(title="time of others / of one call")
