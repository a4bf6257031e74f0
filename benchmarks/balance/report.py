"""What a run leaves: everything as JSON, records, and tables for the terminal and the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.balance import costs
from benchmarks.balance.policies import NONE, ORACLE, REBALANCE, REFINE
from benchmarks.balance.processes import EVEN, VARIANTS, Measured, Setting
from benchmarks.balance.simulation import ANY, MODES, NODE_LIMITED, Outcome, speed_ups
from benchmarks.harness import Record, interval_text, marked, records_of
from benchmarks.reports import write_json
from moe_triton.tools.text_table import TextTable, names, numbers

KNOWN_EP, KNOWN_GOAL, SPEED_UP_GOAL = 16, 1.15, 1.3
"""Asked of loads that are known, at this EP; and of a step, by processes of two ranks and by the model."""


@dataclass(frozen=True)
class Report:
    """A run.

    Attributes:
        outcomes: of the simulation.
        measured: of processes.
        settings, machine, versions: what the figures belong to.
    """

    outcomes: list[Outcome]
    measured: list[Measured]
    settings: dict[str, Any]
    machine: dict[str, str]
    versions: dict[str, str]

    @staticmethod
    def load(path: Path) -> Report:
        """The inverse of `save`."""
        found = json.loads(path.read_text(encoding="utf-8"))
        found["outcomes"] = [Outcome(**each) for each in found["outcomes"]]
        found["measured"] = [
            Measured(**{**each, "setting": Setting(**each["setting"])}) for each in found["measured"]
        ]
        return Report(**found)

    def save(self, path: Path) -> None:
        """Writes everything."""
        document = {**vars(self), "outcomes": [each.document for each in self.outcomes]}
        document["measured"] = [asdict(each) for each in self.measured]
        write_json(path, document, indent=None)

    def save_records(self, path: Path) -> None:
        """Writes figures and what they belong to, without each step."""
        kept = {name: getattr(self, name) for name in ("settings", "machine", "versions")}
        write_json(path, {"records": self.records(), **kept})

    def records(self) -> list[Record]:
        """Every figure."""
        records: list[Record] = []
        faster = speed_ups(self.outcomes)
        for each in self.outcomes:
            case: dict[str, object] = {"routing": each.routing, "ep": each.ranks, "policy": each.policy}
            case |= {"period": each.period, "tokens": each.tokens}
            figures = {f"skew_by_{mode}": each.mean(mode) for mode in each.skew}
            figures |= {f"skew_by_{mode}_p99": each.p99(mode) for mode in each.skew}
            figures["speed_up"] = faster[each.key]
            for name in ("dispatch_us", "combine_us", "experts_us", "moves_us", "step_us"):
                figures[name] = getattr(each, name)
            records += records_of("balance", case, figures)
            moved = {"copies": each.copies, "most_copies": each.most_copies}
            records += records_of("balance", case, moved, "experts")
        for measured in self.measured:
            for variant in VARIANTS:
                case = {"processes": measured.setting.ranks, "variant": variant}
                case["shared"] = measured.is_shared
                figures = measured.figures(variant)
                records += records_of("balance", case, {"ms": figures.pop("ms")}, "ms")
                records += records_of("balance", case, figures)
        return records

    def of(self, routing: str = ANY, ranks: int | None = None) -> list[Outcome]:
        """Outcomes of a kind of routing and a number of ranks, of the run's tokens."""
        kept = [each for each in self.outcomes if each.tokens == self.settings["tokens"]]
        return [each for each in kept if each.routing == routing and ranks in (None, each.ranks)]

    def of_other_tokens(self) -> list[Outcome]:
        """Outcomes of other numbers of tokens."""
        return [each for each in self.outcomes if each.tokens != self.settings["tokens"]]

    @property
    def eps(self) -> list[int]:
        """Numbers of ranks, ascending."""
        return sorted({each.ranks for each in self.outcomes})


def known_table(report: Report) -> TextTable:
    """Loads that are known: most rows over mean, as dispatched."""
    columns = [numbers("EP"), numbers("slots"), numbers("without replicas")]
    for mode in MODES:
        columns += [numbers(f"by {mode}"), numbers("p99", alone=f"by {mode}, p99")]
    columns.append(names(f"<= {KNOWN_GOAL}"))
    rows: list[list[str]] = []
    for ranks in report.eps:
        of = {each.policy: each for each in report.of(ANY, ranks)}
        known = of[ORACLE]
        cells = [str(ranks), str(ranks * known.slots_per_rank), f"{of[NONE].mean():.2f}"]
        for mode in MODES:
            cells += [f"{known.mean(mode):.3f}", f"{known.p99(mode):.3f}"]
        is_met = all(known.mean(mode) <= KNOWN_GOAL for mode in MODES)
        rows.append([*cells, "yes" if is_met else "no"])
    return TextTable(columns, rows, "Loads of the very step are known: most rows over mean, as dispatched")


def day_table(report: Report, routing: str, ranks: int) -> TextTable:
    """A day on one number of ranks: skew, moves, and where a step's time goes."""
    columns = (
        names("policy"),
        *(numbers(heading) for heading in ("by token", "p99", "by rank", "copies", "to one rank", "MB")),
        *(numbers(heading) for heading in ("dispatch", "experts", "combine", "moves", "step, us")),
        numbers("none / it"),
    )
    faster = speed_ups(report.outcomes)
    rows = []
    for each in report.of(routing, ranks):
        by_rank = f"{each.mean('rank'):.2f}" if "rank" in each.skew else ""
        moves = ["", "", ""]
        if each.changes:
            megabytes = each.copies * costs.EXPERT_BYTES / 1e6
            moves = [f"{each.copies:.0f}", f"{each.most_copies:.1f}", f"{megabytes:,.0f}"]
        times = (each.dispatch_us, each.experts_us, each.combine_us, each.moves_us, each.step_us)
        ratio = faster[each.key]
        cells = [f"{each.mean():.2f}", f"{each.p99():.2f}", by_rank, *moves, *(f"{us:,.0f}" for us in times)]
        rows.append([each.name, *cells, f"{ratio:.2f}"])
    title = (
        f"EP {ranks}, {routing}: most rows over mean, copies of experts in a change, and a step of the model"
    )
    return TextTable(columns, rows, title)


def speed_up_table(report: Report) -> TextTable:
    """By policy and EP: how many times as long a step takes without replicas, and most rows over mean."""
    columns = [names("policy"), *(numbers(f"EP {ranks}") for ranks in report.eps)]
    rows = _gains(report.of(), report.eps, "ranks")
    return TextTable(columns, rows, f"T {report.settings['tokens']}: {_GAINS}")


def tokens_table(report: Report) -> TextTable:
    """The same by policy and tokens, of the fewest ranks."""
    others = report.of_other_tokens()
    ranks, known = others[0].ranks, {each.name for each in others}
    outcomes = [*others, *(each for each in report.of(ANY, ranks) if each.name in known)]
    tokens = sorted({each.tokens for each in outcomes})
    columns = [names("policy"), *(numbers(f"T {number:,}") for number in tokens)]
    return TextTable(columns, _gains(outcomes, tokens, "tokens"), f"EP {ranks}: {_GAINS}")


_GAINS = "a step without replicas over one with, in brackets most rows over mean"


def _gains(outcomes: Sequence[Outcome], sizes: Sequence[int], along: str) -> list[list[str]]:
    faster = speed_ups(outcomes)
    cells = {
        (each.name, getattr(each, along)): f"{faster[each.key]:.2f} ({each.mean():.2f})" for each in outcomes
    }
    shown = dict.fromkeys(each.name for each in outcomes)
    return [[name, *(cells.get((name, size), "") for size in sizes)] for name in shown]


def processes_table(report: Report) -> TextTable:
    """Ranks as processes on this machine."""
    columns = (
        numbers("W"),
        names("variant"),
        numbers("rows of ranks"),
        numbers("most / mean"),
        numbers("step, ms"),
        numbers("none / it"),
        numbers("95 %"),
        numbers("experts' core time, none / it"),
        numbers("95 %"),
    )
    rows = []
    for measured in report.measured:
        for variant in VARIANTS:
            figures = measured.figures(variant)
            of_ranks = ", ".join(map(str, measured.rows[variant]))
            rows.append(
                [
                    str(measured.setting.ranks),
                    variant,
                    of_ranks,
                    f"{figures['skew']:.2f}",
                    f"{figures['ms']:.0f}",
                    marked(f"{figures['speed_up']:.2f}", measured.is_shared),
                    interval_text(figures, "speed_up"),
                    f"{figures['experts_speed_up']:.2f}",
                    interval_text(figures, "experts_speed_up"),
                ]
            )
    return TextTable(columns, rows, "Dispatch, experts and combine by processes on this machine")


def goals(report: Report) -> list[str]:
    """What was asked, and what was found: lines."""
    lines = []
    if KNOWN_EP in report.eps:
        known = next(each for each in report.of(ANY, KNOWN_EP) if each.policy == ORACLE)
        found = ", ".join(f"{known.mean(mode):.2f} by {mode}" for mode in MODES)
        lines.append(f"EP {KNOWN_EP}, loads known, at most {KNOWN_GOAL}: {found}.")
    faster = speed_ups(report.outcomes)
    for policy in (REBALANCE, REFINE):
        for period in sorted({each.period for each in report.of() if each.policy == policy}):
            of = [o for o in report.of() if (o.policy, o.period) == (policy, period)]
            found = ", ".join(f"{faster[o.key]:.2f}" for o in of)
            eps = ", ".join(str(o.ranks) for o in of)
            lines.append(f"By the model at least {SPEED_UP_GOAL}, {of[0].name}: {found} at EP {eps}.")
    for measured in report.measured:
        figures = measured.figures(VARIANTS[1])
        even = measured.figures(EVEN)
        lines.append(
            f"{measured.setting.ranks} processes at least {SPEED_UP_GOAL}: "
            f"{marked(format(figures['speed_up'], '.2f'), measured.is_shared)} with replicas, of "
            f"{marked(format(even['speed_up'], '.2f'), measured.is_shared)} by even rows; of the busiest "
            f"rank's core time in experts {figures['experts_speed_up']:.2f}."
        )
    return lines


def tables(report: Report) -> list[TextTable]:
    """All of them, as far as there are figures."""
    made = [known_table(report)]
    made += [day_table(report, ANY, report.eps[0])]
    if report.of(NODE_LIMITED):
        made.append(day_table(report, NODE_LIMITED, report.of(NODE_LIMITED)[0].ranks))
    made.append(speed_up_table(report))
    if report.of_other_tokens():
        made.append(tokens_table(report))
    if report.measured:
        made.append(processes_table(report))
    return made


def name_of(sequence: Sequence[int]) -> str:
    """Numbers with commas between."""
    return ", ".join(f"{each:,}" for each in sequence)
