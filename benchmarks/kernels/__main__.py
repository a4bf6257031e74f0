"""The command line: what is measured about every kernel, one at a time."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable

import torch

from benchmarks import harness
from benchmarks.kernels.eager import eager_of
from moe_triton.backends.cpu.triton import launch, prepare
from moe_triton.kernels import Case, Sizes, kernel_cases
from moe_triton.tools.progress import progress

VS_TORCH, VS_MEMCPY = 4.0, 2.5


def check(case: Case) -> None:
    """Kernel and model give the same bits."""
    expected = case.model()
    for name, actual in case.run(launch).items():
        same = torch.equal(actual.view(-1).view(torch.uint8), expected[name].view(-1).view(torch.uint8))
        assert same, f"{case.name}: {name} is not what the model gives"


class _Eviction:
    """Reads and writes more memory than the last cache holds."""

    def __init__(self) -> None:
        self._memory = torch.zeros(96 << 20, dtype=torch.int8).view(torch.int64)

    def __call__(self) -> None:
        self._memory.add_(1)


def measure(case: Case, iterations: int, *, cold: bool) -> list[harness.Record]:
    """Times of the three routes, in turn.

    Args:
        cold: nothing that a call reads or writes is in any cache when it starts.
    """
    check(case)
    arguments = case.arguments(case.memory)
    eager = eager_of(case)
    routes: dict[str, Callable[[], object]] = {
        "ours": prepare(case.kernel, list(arguments.values())),
        "torch": (lambda: eager(case))
        if eager
        else lambda: case.kernel.fallback(1, **arguments, **case.kernel.constants),
    }
    half = (case.bytes_moved or 0) // 2
    if half:
        source, target = torch.ones(half, dtype=torch.int8), torch.ones(half, dtype=torch.int8)
        to, from_ = target.data_ptr(), source.data_ptr()
        routes["memcpy"] = lambda: ctypes.memmove(to, from_, half)
    seconds = harness.interleave(routes, iterations, between=_Eviction() if cold else None)
    tokens = case.sizes.tokens
    figures = {
        "us_per_token": statistics.median(seconds["ours"]) / tokens * 1e6,
        "vs_torch": harness.median_ratio(seconds["torch"], seconds["ours"]),
    }
    if half:
        figures["vs_memcpy"] = harness.median_ratio(seconds["ours"], seconds["memcpy"])
    about = {
        "kernel": case.family.name,
        "case": case.name,
        "tokens": tokens,
        "computes": case.family.computes,
        "cold": cold,
        "baseline": "eager" if eager else "model",
    }
    return harness.records_of("kernels", about, figures)


def main() -> None:
    arguments = harness.parser("Triton kernels on one core")
    arguments.add_argument("--hidden", type=harness.at_least(1), default=7168)
    arguments.add_argument("--tokens", type=harness.at_least(1), default=64)
    arguments.add_argument("--iterations", type=harness.at_least(1), default=50)
    arguments.add_argument("--only", default="", help="kernels whose name holds this")
    arguments.add_argument("--cold", action="store_true", help="empty the caches before each call")
    options = arguments.parse_args()
    harness.keep_freed_memory()
    torch.set_num_threads(1)
    sizes = Sizes(options.tokens, num_experts=256, num_ranks=8, unrouted=0, first_token=0)
    records: list[harness.Record] = []
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
            met = (not known or known[0] <= VS_MEMCPY) and (vs_torch >= VS_TORCH or not case.family.computes)
            ratio = f"{vs_torch:.1f}" if eager_of(case) else f"({vs_torch:.1f})"
            figures = [f"{us:.3f}", ratio, f"{known[0]:.2f}" if known else "-"]
            does = "computes" if case.family.computes else "moves"
            lines.append([case.name, *figures, does, "yes" if met else "no"])
    title = f"Triton kernels, {sizes.tokens} tokens, one core{', from cold memory' if options.cold else ''}"
    columns = ["kernel", "us/token", "torch / ours", "ours / memcpy", "it", "target met"]
    harness.print_table(title, columns, lines)
    print(f"Target: ours / memcpy <= {VS_MEMCPY}, and torch / ours >= {VS_TORCH:g} where it computes.")
    harness.write_records(options.json, records)


if __name__ == "__main__":
    harness.run_main(main)
