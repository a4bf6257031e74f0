"""What a run leaves: everything as JSON, records, tables, and what was met of what is asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.compare.cases import Sample
from benchmarks.compare.figures import Samples, Target, absences
from benchmarks.harness import Record, interval_text, marked, records_of
from benchmarks.reports import write_json
from benchmarks.serving import memory, peers, rounds
from benchmarks.serving.sizes import OVER_LINK, WITHOUT_LINK
from moe_triton.tools.text_table import TextTable, names, numbers

BOTH, OVERLAPPING = "by_hand_vs_one_call", "by_hand_vs_overlapping"
TITLES = {
    BOTH: "Rounds by hand over one call, on the same buffer",
    "overlapping_vs_overlapping": "The same on a buffer that communicates beside computing",
    OVERLAPPING: "Rounds by hand on a buffer as it comes, over one call that communicates beside computing",
}
"""Of the tables of ratios, by metric."""
ASKED_WIRE = 1.0
"""The link at which something is asked: it takes as long as arranging."""


@dataclass(frozen=True)
class Report:
    """A run.

    Attributes:
        rounds: calls against their rounds by hand.
        samples: of the peers.
        memory: of one large call; None where it was not measured.
        settings, machine, versions: what the figures belong to.
    """

    rounds: list[rounds.Measured] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    memory: memory.Measured | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def load(path: Path) -> Report:
        """The inverse of `save`."""
        found = json.loads(path.read_text(encoding="utf-8"))
        found["rounds"] = [rounds.Measured.from_json(each) for each in found["rounds"]]
        found["samples"] = peers.samples_of(found["samples"])
        if found["memory"] is not None:
            found["memory"] = memory.Measured.from_json(found["memory"])
        return Report(**found)

    def save(self, path: Path) -> None:
        """Writes everything."""
        write_json(path, asdict(self), indent=None)

    def save_records(self, path: Path) -> None:
        """Writes figures and what they belong to, without each iteration."""
        kept = {name: getattr(self, name) for name in ("settings", "machine", "versions")}
        write_json(path, {"records": self.records(), **kept})

    def records(self) -> list[Record]:
        """Every figure."""
        records: list[Record] = []
        for measured in self.rounds:
            for number, link in enumerate(measured.setting.links):
                case: dict[str, object] = {"figure": "rounds", **_sizes(measured.setting)}
                case["rows"] = measured.setting.rows or "bf16"
                case |= {"wire": link.wire, "rounds_ahead": link.rounds_ahead}
                case["shared"] = measured.is_shared[number]
                records += records_of("serving", case, measured.figures(number))
        samples = Samples(self.samples)
        for each in samples.cases:
            case = {"figure": "peers", **each.as_record(), "shared": samples.is_shared(each, peers.OURS)}
            records += records_of("serving", case, peers.figures(samples, each))
        if self.memory is not None:
            case = {"figure": "memory", **_sizes(self.memory.setting)}
            records += records_of("serving", case, self.memory.memory.figures())
        return records

    def absences(self) -> list[str]:
        """Routes without figures, with the reason."""
        return absences(Samples(self.samples))


def _sizes(setting: rounds.Setting | memory.Setting) -> dict[str, object]:
    return {name: getattr(setting, name) for name in ("ranks", "tokens", "round_tokens", "hidden")}


def _verdict(target: Target | None, value: float, is_shared: bool) -> str:
    """What became of what is asked; where cores were shared, the figure tells of the machine."""
    if target is None or is_shared:
        return "" if target is None else str(target)
    return f"{target}: {'met' if target.is_met(value) else 'missed'}"


def _cells(figures: Mapping[str, float], metric: str, is_shared: bool) -> tuple[str, str]:
    return marked(f"{figures[metric]:.2f}", is_shared), interval_text(figures, metric)


def target_of(metric: str, link: rounds.Link) -> Target | None:
    """What is asked of both operators over a link: over one that takes time, of a buffer that overlaps."""
    if metric == BOTH and not link.wire:
        return WITHOUT_LINK
    return OVER_LINK if metric == OVERLAPPING and link.wire == ASKED_WIRE else None


def rounds_table(report: Report, metric: str) -> TextTable:
    """One ratio over every link, numbers of ranks and kind of rows."""
    shown = {"dispatch": f"dispatch_{metric}", "combine": f"combine_{metric}", "both": metric}
    shown["core"] = f"core_{metric}"
    rows = []
    for measured in report.rounds:
        setting = measured.setting
        for number, link in enumerate(setting.links):
            figures, is_shared = measured.figures(number), measured.is_shared[number]
            cells = [each for name in shown.values() for each in _cells(figures, name, is_shared)]
            about = (str(setting.ranks), setting.rows or "bf16", str(link))
            rows.append((*about, *cells, _verdict(target_of(metric, link), figures[metric], is_shared)))
    columns = [numbers("ranks"), names("rows"), names("link")]
    for name in shown:
        columns += [numbers(name), numbers("95 %", alone=f"{name}, 95 %")]
    return TextTable((*columns, names("asked of both")), rows, TITLES[metric])


def peers_table(report: Report) -> TextTable:
    """Every number of ranks and kind of rows."""
    samples, rows = Samples(report.samples), []
    for case in samples.cases:
        figures, is_shared = peers.figures(samples, case), samples.is_shared(case, peers.OURS)
        cells: list[str] = [str(case.ranks), case.quantize or "bf16"]
        for asked in peers.ASKED:
            name = asked.metric.name
            if name not in figures:
                cells += ["absent", ""] + [""] * (asked.target is not None)
                continue
            cells += _cells(figures, name, is_shared)
            if asked.target is not None:
                cells.append(_verdict(asked.target, figures[name], is_shared))
        rows.append(cells)
    columns = [numbers("ranks"), names("rows")]
    for asked in peers.ASKED:
        title = asked.metric.title
        columns += [numbers(title), numbers("95 %", alone=f"{title}, 95 %")]
        if asked.target is not None:
            columns.append(names("asked", alone=f"{title}, asked"))
    return TextTable(columns, rows, "Other routes' times over one call's, dispatch and combine together")


def memory_table(measured: memory.Measured) -> TextTable:
    """One call."""
    of = measured.memory
    sizes = (of.peak, of.private, of.outputs, of.window, of.rounds, of.needed)
    figures = (f"{ratio:.2f}" for ratio in of.figures().values())
    columns = ["peak, MB", "private", "outputs", "window", "two rounds", "needed", "peak / needed"]
    title = (
        f"{measured.setting.ranks} ranks, T {measured.setting.tokens:,}, H {measured.setting.hidden}: "
        "what a call takes, on the rank that takes most"
    )
    row = [f"{size / 1e6:.0f}" for size in sizes] + list(figures)
    return TextTable([numbers(each) for each in (*columns, "private / outputs")], [row], title)


def tables(report: Report) -> list[TextTable]:
    """All that there is to show."""
    shown = []
    if report.rounds:
        shown += [rounds_table(report, metric) for metric in rounds.RATIOS]
    if report.samples:
        shown.append(peers_table(report))
    if report.memory is not None:
        shown.append(memory_table(report.memory))
    return shown


def merged(last: Report, new: Report) -> Report:
    """A run beside what the last one has of other parts."""
    return Report(
        rounds=new.rounds or last.rounds,
        samples=new.samples or last.samples,
        memory=new.memory or last.memory,
        settings={**last.settings, **new.settings},
        machine=new.machine,
        versions=new.versions,
    )
