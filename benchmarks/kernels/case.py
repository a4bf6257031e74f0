"""What is measured about one kernel."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable

import torch

from benchmarks.harness import Record, interleave, median_ratio, records_of
from benchmarks.kernels.eager import eager_of
from moe_triton.backends.cpu.triton import launch, prepare
from moe_triton.kernels import Case

VS_TORCH, VS_MEMCPY = 4.0, 2.5


def check(case: Case) -> None:
    """Kernel and model give the same bits."""
    expected = case.model()
    for name, found in case.run(launch).items():
        same = torch.equal(found.view(-1).view(torch.uint8), expected[name].view(-1).view(torch.uint8))
        assert same, f"{case.name}: {name} is not what the model gives"


class _Eviction:
    """Reads and writes more memory than the last cache holds."""

    def __init__(self) -> None:
        self._memory = torch.zeros(96 << 20, dtype=torch.int8).view(torch.int64)

    def __call__(self) -> None:
        self._memory.add_(1)


def measure(case: Case, iterations: int, *, cold: bool) -> list[Record]:
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
    seconds = interleave(routes, iterations, between=_Eviction() if cold else None)
    tokens = case.sizes.tokens
    figures = {
        "us_per_token": statistics.median(seconds["ours"]) / tokens * 1e6,
        "vs_torch": median_ratio(seconds["torch"], seconds["ours"]),
    }
    if half:
        figures["vs_memcpy"] = median_ratio(seconds["ours"], seconds["memcpy"])
    about = {
        "kernel": case.family.name,
        "case": case.name,
        "tokens": tokens,
        "computes": case.family.computes,
        "cold": cold,
        "baseline": "eager" if eager else "model",
    }
    return records_of("kernels", about, figures)


def meets_target(case: Case, vs_torch: float, vs_memcpy: float | None) -> bool:
    """Whether the bounds that count hold."""
    return (vs_memcpy is None or vs_memcpy <= VS_MEMCPY) and (
        vs_torch >= VS_TORCH or not case.family.computes
    )
