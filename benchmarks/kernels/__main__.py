"""The command line: every kernel, one at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.harness import Record, keep_freed_memory, parser, print_table, write_records
from benchmarks.kernels import rows, sums, tables
from benchmarks.kernels.case import TOPK, VS_MEMCPY, VS_TORCH, Case, measure, meets_target
from moe_triton.kernels import SumFeatures

DTYPES = (torch.bfloat16, torch.float16)
SUMS = (
    SumFeatures(masked=True),
    SumFeatures(shared_x=True),
    SumFeatures(special=True),
    SumFeatures(by_expert=True),
    SumFeatures(fp32_out=True),
)


def builders(hidden: int, tokens: int) -> list[Callable[[], Case]]:
    """What makes each case, so that only one case's data is in memory."""
    per_dtype: list[Callable[[torch.dtype], Case]] = [
        lambda dtype: rows.pack_case(dtype, hidden, tokens),
        lambda dtype: rows.pack_smooth_case(dtype, hidden, max(tokens // TOPK, 1)),
        lambda dtype: rows.block_quantize_case(dtype, hidden, tokens),
        lambda dtype: rows.add_rows_case(dtype, hidden, tokens),
        lambda dtype: sums.weighted_sum_case(dtype, hidden, tokens),
        lambda dtype: sums.weighted_sum_case(dtype, hidden, tokens, SumFeatures(quantized=True)),
        lambda dtype: sums.const_alphas_case(dtype, hidden, tokens, per_element=False),
        lambda dtype: sums.const_alphas_case(dtype, hidden, tokens, per_element=True),
    ]
    return [
        lambda: tables.route_case(tokens),
        lambda: tables.offsets_case(tokens),
        lambda: tables.select_case(tokens, per_entry=False),
        lambda: tables.select_case(tokens, per_entry=True),
        lambda: tables.share_case(tokens, masked=False),
        lambda: tables.share_case(tokens, masked=True),
        lambda: tables.share_by_position_case(tokens),
        tables.waits_of_dispatch_case,
        lambda: tables.waits_of_combine_case(tokens),
        lambda: tables.returns_case(tokens),
        lambda: tables.returns_shared_case(tokens),
        lambda: tables.own_offsets_case(tokens),
        lambda: tables.gather_counts_case(tokens),
        lambda: rows.arrange_case(1, hidden, tokens),
        lambda: rows.arrange_case(2, hidden, tokens),
        lambda: rows.append_case(1, hidden, tokens),
        lambda: rows.append_case(2, hidden, tokens),
        *(lambda make=make, dtype=dtype: make(dtype) for make in per_dtype for dtype in DTYPES),  # type: ignore[misc]
        *(
            lambda features=features: sums.weighted_sum_case(torch.bfloat16, hidden, tokens, features)  # type: ignore[misc]
            for features in SUMS
        ),
        lambda: sums.rms_norm_case(hidden, tokens),
    ]


def main() -> None:
    arguments = parser("Triton kernels on one core")
    arguments.add_argument("--hidden", type=int, default=7168)
    arguments.add_argument("--tokens", type=int, default=64)
    arguments.add_argument("--iterations", type=int, default=50)
    arguments.add_argument("--only", default="", help="kernels whose name holds this")
    arguments.add_argument("--cold", action="store_true", help="empty the caches before each call")
    options = arguments.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    records: list[Record] = []
    lines = []
    for build in builders(options.hidden, options.tokens):
        case = build()
        if options.only not in case.name:
            continue
        measured = measure(case, options.hidden, options.iterations, cold=options.cold)
        records += measured
        us, vs_torch, vs_memcpy = (record["value"] for record in measured)
        met = meets_target(case, vs_torch, vs_memcpy)
        figures = [f"{us:.3f}", f"{vs_torch:.1f}", f"{vs_memcpy:.2f}"]
        does = "computes" if case.computes else "moves"
        lines.append([case.name, str(case.tokens), *figures, does, "yes" if met else "no"])
    title = f"Triton kernels, H = {options.hidden}, one core{', from cold memory' if options.cold else ''}"
    columns = ["kernel", "tokens", "us/token", "torch / ours", "ours / memcpy", "torch", "target met"]
    print_table(title, columns, lines)
    print(f"Target: ours / memcpy <= {VS_MEMCPY}, and torch / ours >= {VS_TORCH:g} where torch computes.")
    write_records(options.json, records)


if __name__ == "__main__":
    main()
