"""``moe-triton model cluster``: schemes against each other over EP and BS, and where their lines cross."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from autotune.cli.model.options import MACHINE, Experts, Hidden, Markdown, Seed, machine_of
from autotune.model.clusters import a2
from autotune.model.clusters import cluster as planned
from autotune.model.clusters.a2 import SCHEMES as CLOSED_FORMS
from autotune.model.clusters.cluster import Point
from autotune.model.clusters.group import INSIDE, PLANNED, Group, Routing
from autotune.model.constants import Machine
from autotune.model.kernel_costs.kernel_cost import kernel_cost_of
from autotune.model.kernel_costs.remembered import KernelCosts, OfArguments
from autotune.model.timelines.timeline import Mode
from moe_triton.core.errors import ArgumentError
from moe_triton.tools.cli.options import MOST_TOKENS
from moe_triton.tools.plots import COLOURS, draw, legend, write_plots
from moe_triton.tools.progress import progress
from moe_triton.tools.text_table import TextTable, names, numbers, print_parts

SCHEMES_HELP = "schemes, with commas between; if not given, all that may be launched so"
QUANTIZE_HELP = "how dispatched rows travel: as EPBuffer.dispatch takes it, or none"
CSV_HEADINGS = (
    *("comm_alg", "ep", "tokens", "mode", "operator"),
    *("us", "slowest_rank", "egress_bytes", "ingress_bytes", "imbalance"),
)
BY_TOKENS, BY_RANKS = "cluster_by_tokens.svg", "cluster_by_ranks.svg"
STYLES = {"dispatch": ("-", "o"), "combine": ("--", "s")}
SIZES = {"ranks": "ranks (EP)", "tokens": "tokens of each rank (BS)"}
PANEL_WIDTH, PANEL_HEIGHT, MOST_IN_A_ROW = 3.4, 3.0, 3


def cluster(
    ep: Annotated[str, typer.Option(help="ranks of groups, 2 to 768, with commas between")] = "8,16,64,256",
    tokens: Annotated[str, typer.Option(help="tokens of each rank, with commas between")] = "8,16,32,64,128",
    routing: Annotated[str, typer.Option(help="uniform, node-limited or zipf")] = "uniform",
    machine: Annotated[str, typer.Option(help=MACHINE)] = "A3",
    comm_alg: Annotated[str, typer.Option(help=SCHEMES_HELP)] = "",
    mode: Annotated[Literal["graph", "stream"], typer.Option(help="how launches come to a device")] = "graph",
    quantize: Annotated[str, typer.Option(help=QUANTIZE_HELP)] = "int8",
    hidden: Hidden = 7168,
    topk: Annotated[int, typer.Option(help="routed experts per token")] = 8,
    experts: Experts = 0,
    groups: Annotated[int, typer.Option(help="node-limited: into which experts are cut")] = 8,
    top_groups: Annotated[int, typer.Option(help="node-limited: for each token")] = 4,
    exponent: Annotated[float, typer.Option(help="zipf: how fast popularity falls")] = 1.0,
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="everything, as JSON")] = False,
    as_markdown: Markdown = False,
    to_csv: Annotated[Path | None, typer.Option("--csv", help="file for a table of all operators")] = None,
    plot: Annotated[Path | None, typer.Option(help="folder for the plots")] = None,
) -> None:
    """Price schemes on groups of sampled routing: the slowest rank, the imbalance, where lines cross."""
    console = Console()
    used = machine_of(machine)
    schemes, kernel_costs = _schemes(used, mode, comm_alg), OfArguments(kernel_cost_of)
    rows = None if quantize == "none" else quantize
    drawn = Routing(routing, seed, groups, top_groups, exponent)
    sizes = [(ranks, count) for ranks in _numbers("ep", ep) for count in _numbers("tokens", tokens)]
    points: list[Point] = []
    try:
        with progress("sizes", len(sizes)) as work:
            for ranks, count in sizes:
                work.begin(f"EP {ranks}, BS {count}")
                fixed = ranks, count, hidden, topk, experts, rows
                each = [Group(*fixed, scheme, used.product, mode, routing=drawn) for scheme in schemes]
                points += price_schemes(each, used, kernel_costs)
                work.advance()
    except ArgumentError as error:
        raise error.renamed({"ranks": "ep"}) from None
    if as_json:
        console.print_json(json.dumps(document(points)))
    else:
        print_parts(parts(points), console, as_markdown)
    if to_csv is not None:
        to_csv.write_text(csv_text(points), encoding="utf-8")
    if plot is not None:
        write_plots(console, lambda: plot_cluster(points, plot))


def price_schemes(groups: Sequence[Group], machine: Machine, kernel_costs: KernelCosts) -> list[Point]:
    """A group with one routing by several schemes; one that no graph may hold is launched by the host."""
    ids = groups[0].draw()
    if machine.product == "A2":
        return [a2.price(group, machine, ids) for group in groups]
    points = []
    for group in groups:
        one = group if group.may_be_captured(machine) else replace(group, mode="stream")
        points.append(planned.price(one, machine, kernel_costs, ids))
    return points


def parts(points: Sequence[Point]) -> tuple[TextTable | str, ...]:
    """The table, and where lines cross."""
    columns = (
        numbers("EP"),
        numbers("BS"),
        *(numbers(f"{scheme}: dispatch + combine, us") for scheme in _names(points)),
        names("fastest"),
        numbers("imbalance", spare=1),
    )
    rows = []
    for (ranks, count), of in _by_size(points).items():
        cells = [" + ".join(f"{operator.us:.0f}" for operator in point.operators.values()) for point in of]
        fastest = _name(min(of, key=lambda point: point.us))
        rows.append((ranks, count, *cells, fastest, f"{of[0].imbalance:.2f}"))
    lines = [
        f"{fixed}: {crossing.below} is faster below {along} {crossing.size:.0f}, {crossing.above} above"
        for fixed, along, crossing in all_crossings(points)
    ]
    said = "Where lines of dispatch + combine cross:\n\n" + "\n".join(f"- {line}" for line in lines)
    crossing = said if lines else "No lines of dispatch + combine cross."
    meaning = "Imbalance: rows that the most loaded rank receives, over the mean."
    return TextTable(columns, rows, more="--json"), meaning, crossing


def all_crossings(points: Sequence[Point]) -> list[tuple[str, str, Crossing]]:
    """Crossings of dispatch + combine: what is fixed, along what, and where; for each EP, then each BS."""
    named = []
    for along, fixed in (("BS", "EP"), ("EP", "BS")):
        values = sorted({_sizes(point)[fixed] for point in points})
        for value in values:
            of = [point for point in points if _sizes(point)[fixed] == value]
            named += [(f"{fixed} {value}", along, crossing) for crossing in _along(of, along)]
    return named


def _along(points: Sequence[Point], along: str) -> list[Crossing]:
    ordered = sorted(points, key=lambda point: _sizes(point)[along])
    sizes = sorted({_sizes(point)[along] for point in points})
    lines = {name: [point.us for point in ordered if _name(point) == name] for name in _names(points)}
    return crossings(sizes, lines)


def document(points: Sequence[Point]) -> dict[str, Any]:
    """Everything, as JSON's types."""
    return {
        "points": [
            {
                **point.group.document,
                "imbalance": point.imbalance,
                "operators": {name: asdict(operator) for name, operator in point.operators.items()},
            }
            for point in points
        ],
        "crossings": [
            {"at": fixed, "along": along, **asdict(crossing)}
            for fixed, along, crossing in all_crossings(points)
        ],
    }


def csv_text(points: Sequence[Point]) -> str:
    """A line of `CSV_HEADINGS` for each operator."""
    made = io.StringIO()
    writer = csv.writer(made, lineterminator="\n")
    writer.writerow(CSV_HEADINGS)
    for point in points:
        one = point.group
        for name, operator in point.operators.items():
            bytes_moved = operator.egress_bytes, operator.ingress_bytes
            figures = f"{operator.us:.3f}", operator.slowest, *bytes_moved, f"{point.imbalance:.4f}"
            writer.writerow((one.comm_alg, one.ranks, one.tokens, one.mode, name, *figures))
    return made.getvalue()


def _by_size(points: Sequence[Point]) -> dict[tuple[int, int], list[Point]]:
    points_by_size: dict[tuple[int, int], list[Point]] = {}
    for point in points:
        points_by_size.setdefault((point.group.ranks, point.group.tokens), []).append(point)
    return points_by_size


def _sizes(point: Point) -> dict[str, int]:
    return {"EP": point.group.ranks, "BS": point.group.tokens}


def _names(points: Sequence[Point]) -> list[str]:
    return list(dict.fromkeys(_name(point) for point in points))


def _name(point: Point) -> str:
    """The scheme, and how it is launched if that is not as usual."""
    return point.group.comm_alg if point.group.mode == "graph" else f"{point.group.comm_alg} (stream)"


def _schemes(machine: Machine, mode: Mode, given: str) -> list[str]:
    """The schemes named, or all of the machine's product that may be launched so."""
    if given:
        return [name.strip() for name in given.split(",")]
    if machine.product not in PLANNED:
        return list(CLOSED_FORMS)
    groups = [Group(comm_alg=name, product=machine.product) for name in INSIDE[machine.product]]
    return [each.comm_alg for each in groups if mode == "stream" or each.may_be_captured(machine)]


def _numbers(argument: str, given: str) -> list[int]:
    try:
        integers = sorted({int(number) for number in given.split(",")})
    except ValueError:
        rule = "it must be integers with commas between"
        raise ArgumentError(argument, repr(given), rule, "Write 8,16,64.") from None
    if integers[-1] > MOST_TOKENS:
        raise ArgumentError(argument, integers[-1], f"it must be {MOST_TOKENS} at most", "Write 8,16,64.")
    return integers


def plot_cluster(points: Sequence[Point], folder: Path) -> list[Path]:
    """Both plots."""
    return [
        draw(folder / BY_TOKENS, lambda figure: _panels(figure, points, "tokens", "ranks")),
        draw(folder / BY_RANKS, lambda figure: _panels(figure, points, "ranks", "tokens")),
    ]


def _panels(figure: Any, points: Sequence[Point], along: str, across: str) -> None:
    """A panel for each size across; lines over the other one, by scheme and operator."""
    values = sorted({getattr(point.group, across) for point in points})
    columns = min(len(values), MOST_IN_A_ROW)
    rows = -(-len(values) // columns)
    figure.set_size_inches(max(PANEL_WIDTH * columns, 7.5), PANEL_HEIGHT * rows + 0.7)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    for axis, value in zip(axes, values, strict=False):
        _lines(axis, [point for point in points if getattr(point.group, across) == value], along)
        axis.set_title(f"{'EP' if across == 'ranks' else 'BS'} {value}")
        axis.set_xlabel(SIZES[along])
    for axis in axes[len(values) :]:
        axis.set_visible(False)
    for axis in axes[::columns]:
        axis.set_ylabel("us, slowest rank")
    legend(figure, len(STYLES))


def _lines(axis: Any, points: Sequence[Point], along: str) -> None:
    schemes = list(dict.fromkeys(point.group.comm_alg for point in points))
    for number, scheme in enumerate(schemes):
        of = sorted(
            (point for point in points if point.group.comm_alg == scheme),
            key=lambda point: int(getattr(point.group, along)),
        )
        for operator, (line, marker) in STYLES.items():
            axis.plot(
                [getattr(point.group, along) for point in of],
                [point.operators[operator].us for point in of],
                line,
                marker=marker,
                markersize=3,
                color=COLOURS[number],
                # The same operator of two schemes may take the same: the first one shows around the others.
                linewidth=1.2 + 1.6 * (len(schemes) - 1 - number),
                label=f"{scheme}, {operator}",
            )
    sizes = sorted({getattr(point.group, along) for point in points})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.grid(visible=True, which="major", axis="y", linewidth=0.4, alpha=0.6)


@dataclass(frozen=True)
class Crossing:
    """Two lines that cross.

    Attributes:
        size: where, by straight lines between the sizes that were computed.
        below, above: which one is lower before, and after.
    """

    size: float
    below: str
    above: str


def crossings(sizes: Sequence[float], lines: Mapping[str, Sequence[float]]) -> list[Crossing]:
    """All crossings of each two lines, by size.

    Lines that only touch do not cross.

    Args:
        sizes: increasing.
        lines: by name, a value for each size.
    """
    crossed: list[Crossing] = []
    for first, second in itertools.combinations(lines, 2):
        gaps = [a - b for a, b in zip(lines[first], lines[second], strict=True)]
        for size, falls in _roots(sizes, gaps):
            crossed.append(Crossing(size, second, first) if falls else Crossing(size, first, second))
    return sorted(crossed, key=lambda crossing: crossing.size)


def _roots(sizes: Sequence[float], gaps: Sequence[float]) -> list[tuple[float, bool]]:
    """Where a line changes its sign, and whether it falls there; a stretch at 0 counts once, at its begin."""
    roots = []
    points = [(size, gap) for size, gap in zip(sizes, gaps, strict=True)]
    for before, after in itertools.pairwise([index for index, (_, gap) in enumerate(points) if gap]):
        (a, low), (b, high) = points[before], points[after]
        if (low > 0) == (high > 0):
            continue
        size = points[before + 1][0] if after - before > 1 else a + (b - a) * low / (low - high)
        roots.append((size, low > 0))
    return roots
