"""Figures of times alone: calls against their link, posts, mapped windows, what runs beside what, hierarchy.

What each of them is: the docstring of `benchmarks.servers`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness import Record, median_with_interval, print_table, records_of
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
)
from moe_triton.tools.plots import COLOURS, draw, legend

TOPK, EXPERTS, LATENCY_US = 8, 64, 5.0
Line = list[tuple[int, float]]
Lines = dict[tuple[str, str], Line]
"""By operator, and what it is of."""
BLOCKS = Route("blocks", "A2", "fullmesh", 1)
ROWS = Route("rows", "A3", "fullmesh_v1", 1)
# Of A2 (autotune/model/constants.toml): AICPU's post, and the link that published figures give.
POST_US, GIGABYTES_PER_S = 1.5, 20.97
POST_LOOKS = {
    f"{route.name}, {kind}": (style, colour)
    for route, colour in zip((BLOCKS, ROWS), COLOURS, strict=False)
    for kind, style in (("time", "o"), ("formula", "--"))
}
IDLE_S = 5.0
ALONE, LINK, POSTS, BOTH = "alone", "link", "posts", "both"
HIERARCHY_LOOKS = {"measured": ("o", COLOURS[0]), "counted bytes": ("--", COLOURS[1])}


def pace(num_ranks: int, per_server: int, tokens: int, iterations: int, wire_share: float) -> list[Record]:
    """Prints a table and returns its figures.

    Args:
        num_ranks: of the group.
        per_server: ranks of a server.
        tokens: of each rank.
        iterations: of each route.
        wire_share: the link's time for a call's bytes, of what the call takes without a link.
    """
    formats: tuple[tuple[str, Literal["int8"] | None], ...] = (("plain", None), ("int8", "int8"))
    routes = [Route(name, "A2", "fullmesh", per_server, quantize) for name, quantize in formats]
    alone = run(num_ranks, Setting(routes, tokens, TOPK, EXPERTS, Wire(), iterations))
    slowest = max(statistics.median(alone.seconds(operator, "plain")) for operator in OPERATORS)
    most = max(alone.most(operator, "plain").between for operator in OPERATORS)
    wire = Wire(most / (wire_share * slowest) / 1e9, LATENCY_US)
    paced = run(num_ranks, Setting(routes, tokens, TOPK, EXPERTS, wire, iterations))
    rows, figures = [], []
    for operator in OPERATORS:
        plain, plain_bytes = paced.seconds(operator, "plain"), paced.most(operator, "plain").between
        for route in routes:
            times, num_bytes = paced.seconds(operator, route.name), paced.most(operator, route.name).between
            local = statistics.median(alone.seconds(operator, route.name))
            link_s = wire.us(0, num_bytes) / 1e6
            case: Case = {"figure": "pace", "operator": operator, "rows": route.name, "ranks": num_ranks}
            case |= {"ranks_per_server": per_server, "tokens": tokens}
            case |= {"gigabytes_per_s": wire.gigabytes_per_s}
            over_link, gain = ratios(times, link_s), ratios(plain, times)
            figures += records(case, "time_vs_link", over_link) + records(case, "gain_of_int8", gain)
            sizes = [f"{num_bytes / 1e6:.2f}", f"{1e3 * link_s:.1f}", f"{local / link_s:.0%}"]
            against = [shown(over_link), f"{plain_bytes / num_bytes:.2f}", shown(gain)]
            rows.append([f"{operator}, {route.name}", *sizes, *against])
    at = f"{num_ranks} ranks, {per_server} a server, BS {tokens}, {wire.gigabytes_per_s:.4f} GB/s"
    against = ["time / link", "bytes, plain / this", "time, plain / this"]
    print_table(f"fullmesh of A2, {at}", ["", "MB", "link ms", "without link", *against], rows)
    return figures


def draw_lines(path: Path, lines: Lines, looks: Mapping[str, tuple[str, str]], **axes: Any) -> None:
    """Draws lines over the tokens of a rank.

    Args:
        path: of the picture.
        lines: of all operators.
        looks: style and colour, by what lines are of.
        axes: what else is set of them.
    """

    def paint(figure: Any) -> None:
        figure.set_size_inches(9.0, 3.8)
        for axis, operator in zip(figure.subplots(1, len(OPERATORS)), OPERATORS, strict=True):
            for of, (style, colour) in looks.items():
                x, y = zip(*lines[operator, of], strict=True)
                axis.plot(x, y, style, color=colour, label=of)
            axis.set(title=operator, xscale="log", xlabel="tokens of a rank", **axes)
        legend(figure, len(looks))

    draw(path, paint)


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
    rows, figures = [], []
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
                figures += records(case, "time_vs_formula", of_formula)
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
        figures += _crossing(operator, lines, {"ranks": num_ranks, "topk": topk, "slower": slower})
    if plot is not None:
        draw_lines(plot / f"posts_{num_ranks}_k{topk}.svg", lines, POST_LOOKS, yscale="log", ylabel="ms")
    return figures


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


def mapped(num_ranks: int, tokens: list[int], iterations: int) -> list[Record]:
    """Prints a table and returns its figures."""
    schemes = ("A2", "fullmesh"), ("A3", "fullmesh_v1")
    rows, all_figures, idle = [], [], 0.0
    for number in tokens:
        for product, name in schemes:
            queued = Route("queued", product, name, 1)  # type: ignore[arg-type]
            written = Route("mapped", product, name, num_ranks)  # type: ignore[arg-type]
            last = number == tokens[-1]
            setting = Setting([queued, written], number, TOPK, EXPERTS, iterations=iterations)
            measured = run(num_ranks, setting, IDLE_S * last)
            idle = max(idle, *(figures.idle_share for figures in measured.per_rank))
            cells = []
            for operator in OPERATORS:
                ratio = ratios(*(measured.seconds(operator, route) for route in ("queued", "mapped")))
                case: Case = {"figure": "mapped", "operator": operator, "comm_alg": name}
                case |= {"tokens": number, "ranks": num_ranks}
                all_figures += records(case, "queued_vs_mapped", ratio)
                cells.append(shown(ratio))
            rows.append([f"{name}, BS {number}", *cells])
    print_table(f"{num_ranks} ranks: time of a server each / of one server", ["", *OPERATORS], rows)
    print(f"An idle NIC takes {idle:.4%} of a core.")
    return all_figures + records_of("servers", {"figure": "mapped"}, {"idle_nic": idle}, "of a core")


def hidden(
    apart: Sequence[float], together: Sequence[float], shorter: Sequence[float]
) -> tuple[float, float, float]:
    """The share of the shorter of two things that ran beside the other, and its interval.

    Args:
        apart: seconds of a call in which the two follow each other, round by round.
        together: seconds of one that may have them beside each other.
        shorter: seconds of the shorter one.
    """
    rounds = zip(apart, together, shorter, strict=True)
    return median_with_interval([(a - b) / least for a, b, least in rounds])


def overlap(num_ranks: int, tokens: int, iterations: int, wire_share: float) -> list[Record]:
    """Prints a table and returns its figures.

    Args:
        num_ranks: each a server of its own.
        tokens: of each rank.
        iterations: of each route.
        wire_share: the link's time for a call's bytes, and that of its posts, of what the call takes alone.
    """
    rows, figures = [], []
    for route in (BLOCKS, ROWS):
        # Half as many calls tell how slow links and posts are to be.
        alone = run(num_ranks, Setting([route], tokens, TOPK, EXPERTS, iterations=-(-iterations // 2)))
        for operator in OPERATORS:
            wire = _wire(alone, route, operator, wire_share)
            link, posting = replace(wire, post_us=0.0), Wire(post_us=wire.post_us)
            wires = {ALONE: Wire(), LINK: link, POSTS: posting, BOTH: wire}
            routes = [replace(route, name=name, wire=each) for name, each in wires.items()]
            measured = run(num_ranks, Setting(routes, tokens, TOPK, EXPERTS, iterations=iterations))
            times = {name: measured.seconds(operator, name) for name in wires}
            link_s = measured.most(operator, LINK).between / wire.gigabytes_per_s / 1e9
            posts_s = measured.most(operator, POSTS).posts * wire.post_us / 1e6
            case: Case = {"figure": "overlap", "operator": operator, "route": route.name}
            case |= {"ranks": num_ranks, "tokens": tokens, "wire_per_local": wire_share}
            shares = {
                "work_beside_link": _beside_work(times[ALONE], link_s, times[LINK]),
                "work_beside_posts": _beside_work(times[ALONE], posts_s, times[POSTS]),
                "posts_beside_link": _beside_link(times, min(link_s, posts_s)),
            }
            cells = []
            for metric, share in shares.items():
                figures += records(case, metric, share)
                cells.append(shown(share))
            alone_s = statistics.median(times[ALONE])
            sizes = [f"{1e3 * each:.1f}" for each in (alone_s, link_s, posts_s)]
            rows.append([f"{route.name}, {operator}", *sizes, *cells])
    title = f"{num_ranks} servers of one rank, BS {tokens}: the share that is hidden of the shorter of two"
    columns = ["", "alone ms", "link ms", "posts ms", "work, link", "work, posts", "posts, link"]
    print_table(title, columns, rows)
    return figures


def _beside_work(
    alone: Sequence[float], other_s: float, together: Sequence[float]
) -> tuple[float, float, float]:
    return hidden([a + other_s for a in alone], together, [min(a, other_s) for a in alone])


def _beside_link(times: dict[str, list[float]], shorter_s: float) -> tuple[float, float, float]:
    """Hidden share of the shorter of posts and link; each comes on top of a call that has neither of them."""
    rounds = zip(times[LINK], times[POSTS], times[ALONE], strict=True)
    apart = [link + posts - alone for link, posts, alone in rounds]
    return hidden(apart, times[BOTH], [shorter_s] * len(apart))


def _wire(alone: Measured, route: Route, operator: str, share: float) -> Wire:
    """A link, and a time for each post, that take as long as a call does without them, times the share."""
    wanted_s = share * statistics.median(alone.seconds(operator, route.name))
    most = alone.most(operator, route.name)
    return Wire(most.between / wanted_s / 1e9, post_us=1e6 * wanted_s / most.posts)


def hierarchy(
    servers: int,
    per_server: int,
    tokens: Sequence[int],
    experts: int,
    limit: int | None,
    iterations: int,
    wire_share: float,
    plot: Path | None = None,
) -> list[Record]:
    """Prints a table and returns its figures.

    Args:
        servers: of the group.
        per_server: ranks of each.
        tokens: of each rank.
        experts: M.
        limit: servers that the experts of a token lie in; None for any.
        iterations: of each route.
        wire_share: the link's time for a call of the hierarchy, of what it takes without a link: at least.
        plot: folder for a picture; None for none.
    """
    routes = [Route(name, "A2", name, per_server) for name in ("hierarchy", "fullmesh")]
    rows: list[list[str]] = []
    figures: list[Record] = []
    lines: Lines = {}
    limits = None if limit is None else (servers, limit)
    for number in tokens:
        setting = Setting(routes[:1], number, TOPK, experts, Wire(), iterations, limits)
        alone = run(servers * per_server, setting)
        local = {o: statistics.median(alone.seconds(o, "hierarchy")) for o in OPERATORS}
        least = min(alone.most(o, "hierarchy").between for o in OPERATORS)
        wire = Wire(least / (wire_share * max(local.values())) / 1e9)
        both = run(servers * per_server, Setting(routes, number, TOPK, experts, wire, iterations, limits))
        for operator in OPERATORS:
            ours, theirs = (both.seconds(operator, route.name) for route in routes)
            our_bytes, their_bytes = (both.most(operator, route.name).between for route in routes)
            gain, predicted = ratios(theirs, ours), their_bytes / our_bytes
            # gloo sends the same rows as fullmesh, and nothing else: what they take on the link, and no more.
            gloo_s = wire.us(0, both.most(operator, "fullmesh").payload) / 1e6
            over_gloo = ratios([gloo_s] * len(ours), ours)
            case: Case = {"figure": "hierarchy", "operator": operator, "servers": servers, "tokens": number}
            case |= {"ranks_per_server": per_server, "experts": experts, "limit": limit}
            figures += records(case, "gain_over_fullmesh", gain)
            figures += records(case, "gain_over_gloo_by_arithmetic", over_gloo)
            by_bytes = {"predicted_by_bytes": predicted, "reached": gain[0] / predicted}
            figures += records_of("servers", case, by_bytes)
            lines.setdefault((operator, "measured"), []).append((number, gain[0]))
            lines.setdefault((operator, "counted bytes"), []).append((number, predicted))
            link_s = wire.us(0, our_bytes) / 1e6
            sizes = [f"{our_bytes / 1e6:.2f}", f"{their_bytes / 1e6:.2f}", f"{local[operator] / link_s:.0%}"]
            result = [f"{predicted:.2f}", shown(gain), f"{gain[0] / predicted:.0%}", shown(over_gloo)]
            rows.append([f"{operator}, BS {number}", *sizes, *result])
    where = "any servers" if limit is None else f"{limit} servers"
    title = f"hierarchy, {servers} servers of {per_server}, K {TOPK}, M {experts}, tokens to {where}"
    against = ["bytes predict", "fullmesh / this", "reached", "gloo / this"]
    print_table(title, ["", "MB", "MB, fullmesh", "without link", *against], rows)
    print(
        "gloo: all-to-all-v, by arithmetic: the rows between servers over the link's pace, and nothing else"
    )
    if plot is not None:
        path = plot / f"hierarchy_{servers}x{per_server}_{limit or 'any'}.svg"
        draw_lines(path, lines, HIERARCHY_LOOKS, ylabel="fullmesh / hierarchy", ylim=0)
    return figures
