"""What runs beside what, over queues: a rank's own work, its posts and its link."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.harness import Record, median_with_interval, print_table
from benchmarks.servers.posts import BLOCKS, ROWS
from benchmarks.servers.runs import OPERATORS, Case, Measured, Route, Setting, Wire, records, run, shown

TOPK, EXPERTS = 8, 64
ALONE, LINK, POSTS, BOTH = "alone", "link", "posts", "both"


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
    rows, found = [], []
    for route in (BLOCKS, ROWS):
        # Half as many calls tell how slow links and posts are to be.
        alone = run(num_ranks, Setting([route], tokens, TOPK, EXPERTS, iterations=-(-iterations // 2)))
        for operator in OPERATORS:
            wire = _wire(alone, route, operator, wire_share)
            wires = {
                ALONE: Wire(),
                LINK: replace(wire, post_us=0.0),
                POSTS: Wire(post_us=wire.post_us),
                BOTH: wire,
            }
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
                found += records(case, metric, share)
                cells.append(shown(share))
            alone_s = statistics.median(times[ALONE])
            sizes = [f"{1e3 * each:.1f}" for each in (alone_s, link_s, posts_s)]
            rows.append([f"{route.name}, {operator}", *sizes, *cells])
    title = f"{num_ranks} servers of one rank, BS {tokens}: the share that is hidden of the shorter of two"
    columns = ["", "alone ms", "link ms", "posts ms", "work, link", "work, posts", "posts, link"]
    print_table(title, columns, rows)
    return found


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
