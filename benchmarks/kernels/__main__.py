"""The command line: what is measured about every kernel, one at a time."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable
from dataclasses import dataclass

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


def measure(
    case: Case, iterations: int, cold_iterations: int, evict: harness.Eviction
) -> dict[bool, Measured]:
    """Figures by whether memory was cold: of the kernel, torch and memcpy in turn.

    Warm, each call finds in the caches what the same call has just left there; cold, nothing at all. torch is
    timed warm only.
    """
    check(case)
    arguments = case.arguments(case.memory)
    eager = eager_of(case)
    routes: dict[str, Callable[[], object]] = {"ours": prepare(case.kernel, list(arguments.values()))}
    half = (case.bytes_moved or 0) // 2
    if half:
        source, target = torch.ones(half, dtype=torch.int8), torch.ones(half, dtype=torch.int8)
        to, from_ = target.data_ptr(), source.data_ptr()
        routes["memcpy"] = lambda: ctypes.memmove(to, from_, half)
    torch_route: Callable[[], object] = (
        (lambda: eager(case))
        if eager
        else lambda: case.kernel.fallback(1, **arguments, **case.kernel.constants)
    )
    times = {
        False: harness.interleave({**routes, "torch": torch_route}, iterations, harness.warm),
        True: harness.interleave(routes, cold_iterations, evict),
    }
    return {is_cold: Measured.of(of, case.sizes.tokens) for is_cold, of in times.items()}


def _figures(times: dict[str, harness.Times], tokens: int) -> dict[str, float]:
    ours = times["ours"].seconds
    figures = {"us_per_token": statistics.median(ours) / tokens * 1e6}
    if "torch" in times:
        figures["vs_torch"] = harness.median_ratio(times["torch"].seconds, ours)
    if "memcpy" in times:
        ratios = [a / b for a, b in zip(ours, times["memcpy"].seconds, strict=True)]
        figures |= harness.with_interval("vs_memcpy", ratios)
    return figures


@dataclass(frozen=True)
class Measured:
    """What is known of a case at one temperature.

    Attributes:
        figures: by metric.
        is_shared: whether the kernel or memcpy had to share the core in most calls.
    """

    figures: dict[str, float]
    is_shared: bool

    @staticmethod
    def of(times: dict[str, harness.Times], tokens: int) -> Measured:
        """Of the times of every route."""
        is_shared = any(of.is_shared for name, of in times.items() if name != "torch")
        return Measured(_figures(times, tokens), is_shared)


def _is_met(case: Case, warm: dict[str, float], cold: dict[str, float]) -> bool:
    """Whether a kernel is as fast as is asked, held against memcpy from cold memory."""
    near_memcpy = cold.get("vs_memcpy", 0.0) <= VS_MEMCPY
    return near_memcpy and (warm["vs_torch"] >= VS_TORCH or not case.family.computes)


def _about(case: Case) -> dict[str, object]:
    return {
        "kernel": case.family.name,
        "case": case.name,
        "tokens": case.sizes.tokens,
        "computes": case.family.computes,
        "baseline": "eager" if eager_of(case) else "model",
    }


def _cells(case: Case, warm: Measured, cold: Measured) -> list[str]:
    vs_torch = warm.figures["vs_torch"]
    ratio = f"{vs_torch:.1f}" if eager_of(case) else f"({vs_torch:.1f})"
    cells = [case.name, f"{warm.figures['us_per_token']:.3f}", ratio]
    for measured in (warm, cold):
        if "vs_memcpy" in measured.figures:
            shown = harness.marked(f"{measured.figures['vs_memcpy']:.2f}", measured.is_shared)
            cells += [shown, harness.interval_text(measured.figures, "vs_memcpy")]
        else:
            cells += ["-", "-"]
    does = "computes" if case.family.computes else "moves"
    return [*cells, does, "yes" if _is_met(case, warm.figures, cold.figures) else "no"]


def main() -> None:
    arguments = harness.parser("Triton kernels on one core")
    arguments.add_argument("--hidden", type=harness.at_least(1), default=7168)
    # fewer leave no token of each kind in what the kernels are run on
    arguments.add_argument("--tokens", type=harness.at_least(8), default=64)
    arguments.add_argument("--iterations", type=harness.at_least(1), default=50)
    arguments.add_argument(
        "--cold-iterations", type=harness.at_least(1), default=15, help="each empties the caches twice"
    )
    arguments.add_argument("--only", default="", help="kernels whose name holds this")
    options = arguments.parse_args()
    harness.keep_freed_memory()
    torch.set_num_threads(1)
    sizes = Sizes(options.tokens, num_experts=256, num_ranks=8, unrouted=0, first_token=0)
    records: list[harness.Record] = []
    lines = []
    evict = harness.Eviction()
    listed = [case for hidden in (0, options.hidden) for case in kernel_cases(sizes, hidden, "cpu")]
    wanted = [case for case in listed if options.only in case.name]
    with progress("kernels", len(wanted)) as work:
        for each in wanted:
            work.begin(each.name)
            case = Case(each.family, each.shape, sizes)  # one case's data in memory at a time
            measured = measure(case, options.iterations, options.cold_iterations, evict)
            work.advance()
            for is_cold, of in measured.items():
                about = {**_about(case), "cold": is_cold, "shared": of.is_shared}
                records += harness.records_of("kernels", about, of.figures)
            lines.append(_cells(case, measured[False], measured[True]))
    temperatures = ["warm: ours / memcpy", "95 %", "cold", "95 %"]
    columns = ["kernel", "us/token", "torch / ours", *temperatures, "it", "target met"]
    harness.print_table(f"Triton kernels, {sizes.tokens} tokens, one core", columns, lines)
    print(f"Target: ours / memcpy <= {VS_MEMCPY} cold, and torch / ours >= {VS_TORCH:g} where it computes.")
    print("Of torch / ours in parentheses: torch is the kernel's model, and not what one would write.")
    print(f"Of ours / memcpy {harness.SHARED_NOTE[0].lower()}{harness.SHARED_NOTE[1:]}")
    harness.write_records(options.json, records)


if __name__ == "__main__":
    harness.run_main(main)
