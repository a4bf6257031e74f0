"""Buffers with settings that were found for this machine, against buffers without any: calls in turn, in the
same processes.

``moe-triton tune kernels --soc cpu --output FOLDER`` and ``moe-triton tune pipeline --output FOLDER`` make
the tables. The others read an empty folder; where the package has tables of this machine, they read those.
The same plans in two buffers differ by some percent, because windows lie elsewhere: each case is measured in
several groups.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.harness import MAX_RANKS, Record, at_least, parser, print_table, run_main, write_records
from benchmarks.servers.runs import OPERATORS, Route, Setting, ratios, records, run, shown
from moe_triton.tables import folder_of_user
from moe_triton.tools.progress import progress

TOPK, EXPERTS = 8, 64
TUNED, PLAIN = "tuned", "plain"
ROWS = {"bf16": None, "int8": "int8"}


def tuned(num_ranks: int, tokens: Sequence[int], iterations: int, groups: int, folder: Path) -> list[Record]:
    """Prints a table and returns its figures.

    Args:
        num_ranks: of one server.
        tokens: of each rank.
        iterations: of each buffer in a group.
        groups: of processes, one after the other.
        folder: of the tables.
    """
    rows, figures = [], []
    with tempfile.TemporaryDirectory() as empty:
        for number in tokens:
            for name, quantize in ROWS.items():
                plain = Route(PLAIN, "A3", "fullmesh_v1", num_ranks, quantize, tables=Path(empty))  # type: ignore[arg-type]
                routes = [plain, replace(plain, name=TUNED, tables=folder)]
                setting = Setting(routes, number, TOPK, EXPERTS, iterations=iterations)
                with progress(f"groups, BS {number}, {name}", groups) as work:
                    all_groups = []
                    for _ in range(groups):
                        all_groups.append(run(num_ranks, setting))
                        work.advance()
                cells = []
                for operator in OPERATORS:
                    times = [
                        [each for measured in all_groups for each in measured.seconds(operator, route)]
                        for route in (TUNED, PLAIN)
                    ]
                    ratio = ratios(*times)
                    case: dict[str, object] = {"operator": operator, "ranks": num_ranks, "tokens": number}
                    figures += records(case | {"rows": name}, "tuned_vs_plain", ratio)
                    cells.append(shown(ratio))
                rows.append([f"BS {number}, {name}", *cells])
    print_table(f"tuned / plain, {num_ranks} ranks, fullmesh_v1, K {TOPK}", ["", *OPERATORS], rows)
    return figures


def main() -> None:
    """Measures, and prints a table."""
    arguments = parser("Settings that were found, against the defaults.")
    arguments.add_argument("--ranks", type=at_least(1, MAX_RANKS), nargs="+", default=[2])
    arguments.add_argument("--tokens", type=at_least(1), nargs="+", default=[16, 64, 256])
    arguments.add_argument("--iterations", type=at_least(1), default=40)
    arguments.add_argument("--groups", type=at_least(1), default=5)
    arguments.add_argument("--tables", type=Path, default=folder_of_user(), help="yours by default")
    options = arguments.parse_args()
    figures = []
    for ranks in options.ranks:
        figures += tuned(ranks, options.tokens, options.iterations, options.groups, options.tables)
    write_records(options.json, figures)


if __name__ == "__main__":
    run_main(main)
