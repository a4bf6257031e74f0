"""One post for each peer against posts for rows, over the number of tokens."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Record, print_table, records_of
from benchmarks.servers.plots import Line, Lines, draw_lines
from benchmarks.servers.runs import OPERATORS, Route, Setting, Wire, ratios, records, run, shown
from moe_triton.tools.plots import COLOURS

BLOCKS = Route("blocks", "A2", "fullmesh", 1)
ROWS = Route("rows", "A3", "fullmesh_v1", 1)
# Of A2 (autotune/model/constants.toml): AICPU's post, and the link that published figures give.
POST_US, GIGABYTES_PER_S = 1.5, 20.97
LOOKS = {
    f"{route.name}, {kind}": (style, colour)
    for route, colour in zip((BLOCKS, ROWS), COLOURS, strict=False)
    for kind, style in (("time", "o"), ("formula", "--"))
}


def crossing(first: Line, second: Line) -> float | None:
    """Where the second line gets above the first one, between two points; None if it never does, or always
    is.
    """
    for (left, a), (right, b), (_, c), (_, d) in zip(first, first[1:], second, second[1:], strict=False):
        if c <= a and d > b:
            return left + (right - left) * (a - c) / ((a - c) + (d - b))
    return None


def posts(
    num_ranks: int, topk: int, tokens: Sequence[int], iterations: int, slower: float, plot: Path | None = None
) -> list[Record]:
    """Prints a table and returns its figures.

    Args:
        num_ranks: each a server of its own.
        topk: K.
        tokens: of each rank, in ascending order.
        iterations: of each route.
        slower: factor by which posts and link are slower than A2's.
        plot: folder for a picture; None for none.
    """
    wire = Wire(GIGABYTES_PER_S / slower, 0.0, POST_US * slower)
    rows, found = [], []
    lines: Lines = {}
    for number in tokens:
        setting = Setting([BLOCKS, ROWS], number, topk, 4 * num_ranks, wire, iterations)
        measured = run(num_ranks, setting)
        for operator in OPERATORS:
            cells = []
            for route in setting.routes:
                times = measured.seconds(operator, route.name)
                formula = measured.most_us(operator, route.name, wire)
                for kind, us in (("time", statistics.median(times) * 1e6), ("formula", formula)):
                    line = lines.setdefault((operator, f"{route.name}, {kind}"), [])
                    line.append((number, us / 1e3))
                of_formula = ratios(times, formula / 1e6)
                case = {"figure": "posts", "operator": operator, "route": route.name, "tokens": number}
                case |= {"topk": topk, "ranks": num_ranks, "slower": slower}
                found += records(case, "time_vs_formula", of_formula)
                most = measured.most(operator, route.name)
                cells += [str(most.posts), f"{formula / 1e3:.2f}", shown(of_formula)]
            rows.append([f"{operator}, BS {number}", *cells])
    pace = f"posts of {wire.post_us:g} us, {wire.gigabytes_per_s:.3f} GB/s"
    title = f"{num_ranks} servers of one rank, K {topk}; {pace}"
    columns = [
        "",
        *(f"{name}: {what}" for name in ("block", "rows") for what in ("posts", "formula ms", "time / it")),
    ]
    print_table(f"{title}: {slower:g} times slower than A2's", columns, rows)
    print("formula: max(posts * post_us, post_us + bytes / link) + latency")
    for operator in OPERATORS:
        found += _crossing(operator, lines, {"ranks": num_ranks, "topk": topk, "slower": slower})
    if plot is not None:
        draw_lines(plot / f"posts_{num_ranks}_k{topk}.svg", lines, LOOKS, yscale="log", ylabel="ms")
    return found


def _crossing(operator: str, lines: Lines, case: dict[str, object]) -> list[Record]:
    places = {
        kind: crossing(lines[operator, f"blocks, {kind}"], lines[operator, f"rows, {kind}"])
        for kind in ("time", "formula")
    }
    sizes = [number for number, _ in lines[operator, "blocks, time"]]
    if places["time"] is None or places["formula"] is None:
        print(f"{operator}: the lines do not cross in BS {sizes[0]} to {sizes[-1]}: {places}")
        return []
    where = f"at BS {places['time']:.2f}; by the formula {places['formula']:.2f}"
    print(f"{operator}: posts for rows get slower than blocks {where}")
    about = {**case, "figure": "posts", "operator": operator}
    return records_of("servers", about, {"crossing_vs_formula": places["time"] / places["formula"]})
