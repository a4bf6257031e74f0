"""The command line: every kernel, one at a time."""

from __future__ import annotations

import torch

from benchmarks.harness import (
    Record,
    at_least,
    keep_freed_memory,
    parser,
    print_table,
    run_main,
    write_records,
)
from benchmarks.kernels.case import VS_MEMCPY, VS_TORCH, measure, meets_target
from benchmarks.kernels.eager import eager_of
from moe_triton.kernels import Case, Sizes, kernel_cases
from moe_triton.tools.progress import progress


def main() -> None:
    arguments = parser("Triton kernels on one core")
    arguments.add_argument("--hidden", type=at_least(1), default=7168)
    arguments.add_argument("--tokens", type=at_least(1), default=64)
    arguments.add_argument("--iterations", type=at_least(1), default=50)
    arguments.add_argument("--only", default="", help="kernels whose name holds this")
    arguments.add_argument("--cold", action="store_true", help="empty the caches before each call")
    options = arguments.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    sizes = Sizes(options.tokens, num_experts=256, num_ranks=8, unrouted=0, first_token=0)
    records: list[Record] = []
    lines = []
    listed = [case for hidden in (0, options.hidden) for case in kernel_cases(sizes, hidden, "cpu")]
    wanted = [case for case in listed if options.only in case.name]
    with progress("kernels", len(wanted)) as work:
        for each in wanted:
            work.begin(each.name)
            case = Case(each.family, each.shape, sizes)  # one case's data in memory at a time
            measured = measure(case, options.iterations, cold=options.cold)
            work.advance()
            records += measured
            us, vs_torch, *known = (record["value"] for record in measured)
            met = meets_target(case, vs_torch, known[0] if known else None)
            ratio = f"{vs_torch:.1f}" if eager_of(case) else f"({vs_torch:.1f})"
            figures = [f"{us:.3f}", ratio, f"{known[0]:.2f}" if known else "-"]
            does = "computes" if case.family.computes else "moves"
            lines.append([case.name, *figures, does, "yes" if met else "no"])
    title = f"Triton kernels, {sizes.tokens} tokens, one core{', from cold memory' if options.cold else ''}"
    columns = ["kernel", "us/token", "torch / ours", "ours / memcpy", "it", "target met"]
    print_table(title, columns, lines)
    print(f"Target: ours / memcpy <= {VS_MEMCPY}, and torch / ours >= {VS_TORCH:g} where it computes.")
    write_records(options.json, records)


if __name__ == "__main__":
    run_main(main)
