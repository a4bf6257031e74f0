"""The same ranks as one server and as a server each; and what NICs take that have nothing to do."""

from __future__ import annotations

from benchmarks.harness import Record, print_table, records_of
from benchmarks.servers.runs import OPERATORS, Case, Route, Setting, ratios, records, run, shown

TOPK, EXPERTS, IDLE_S = 8, 64, 5.0


def mapped(num_ranks: int, tokens: list[int], iterations: int) -> list[Record]:
    """Prints a table and returns its figures."""
    schemes = ("A2", "fullmesh"), ("A3", "fullmesh_v1")
    rows, found, idle = [], [], 0.0
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
                found += records(case, "queued_vs_mapped", ratio)
                cells.append(shown(ratio))
            rows.append([f"{name}, BS {number}", *cells])
    print_table(f"{num_ranks} ranks: time of a server each / of one server", ["", *OPERATORS], rows)
    print(f"An idle NIC takes {idle:.4%} of a core.")
    return found + records_of("servers", {"figure": "mapped"}, {"idle_nic": idle}, "of a core")
