"""Calls over a slow link against what their bytes take on it."""

from __future__ import annotations

import statistics
from typing import Literal

from benchmarks.harness import Record, print_table
from benchmarks.servers.runs import OPERATORS, Case, Route, Setting, Wire, ratios, records, run, shown

TOPK, EXPERTS, LATENCY_US = 8, 64, 5.0


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
    setting = Setting(routes, tokens, TOPK, EXPERTS, Wire(), iterations)
    alone = run(num_ranks, setting)
    slowest = max(statistics.median(alone.seconds(operator, "plain")) for operator in OPERATORS)
    most = max(alone.most(operator, "plain").between for operator in OPERATORS)
    wire = Wire(most / (wire_share * slowest) / 1e9, LATENCY_US)
    paced = run(num_ranks, Setting(routes, tokens, TOPK, EXPERTS, wire, iterations))
    rows, found = [], []
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
            found += records(case, "time_vs_link", over_link) + records(case, "gain_of_int8", gain)
            sizes = [f"{num_bytes / 1e6:.2f}", f"{1e3 * link_s:.1f}", f"{local / link_s:.0%}"]
            against = [shown(over_link), f"{plain_bytes / num_bytes:.2f}", shown(gain)]
            rows.append([f"{operator}, {route.name}", *sizes, *against])
    at = f"{num_ranks} ranks, {per_server} a server, BS {tokens}, {wire.gigabytes_per_s:.4f} GB/s"
    title = f"fullmesh of A2, {at}"
    columns = [
        "",
        "MB",
        "link ms",
        "without link",
        "time / link",
        "bytes, plain / this",
        "time, plain / this",
    ]
    print_table(title, columns, rows)
    return found
