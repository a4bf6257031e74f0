"""One kernel with its data, and what is measured about it."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from benchmarks.harness import Record, interleave, median_ratio
from moe_triton.backends.cpu.triton import prepare
from moe_triton.core.kernel import TritonKernel

VS_TORCH, VS_MEMCPY = 4.0, 2.5

TOPK = 8
NUM_EXPERTS = 256
NUM_RANKS = 8


@dataclass(frozen=True)
class Case:
    """One kernel with its data.

    Attributes:
        variant: dtype or feature.
        tokens: or rows, or entries: what the time is divided by.
        outputs: what the kernel writes.
        torch_run: the same work in torch; returns what ``outputs`` must hold then.
        computes: torch computes here; otherwise it only moves.
        moved: bytes read and written, half of which the copy reads and half it writes.
    """

    kernel: str
    variant: str
    tokens: int
    run: Callable[[], None]
    outputs: Sequence[torch.Tensor]
    torch_run: Callable[[], Sequence[torch.Tensor]]
    computes: bool
    moved: int

    @property
    def name(self) -> str:
        return f"{self.kernel} ({self.variant})"


Arguments: TypeAlias = list[torch.Tensor | int]
Tensors: TypeAlias = tuple[torch.Tensor, ...]


def make_case(
    kernel: TritonKernel,
    arguments: Arguments,
    outputs: Sequence[torch.Tensor],
    torch_run: Callable[[], Sequence[torch.Tensor]],
    *,
    variant: str,
    tokens: int,
    moved: int | None = None,
    computes: bool = True,
) -> Case:
    """A case of a kernel, which knows itself how much it moves unless that depends on data."""
    if moved is None:
        assert kernel.bytes_moved is not None
        numbers = {
            arg.name: value
            for arg, value in zip(kernel.args, arguments, strict=True)
            if isinstance(value, int)
        }
        moved = kernel.bytes_moved(**numbers)
    run = prepare(kernel, arguments)
    return Case(kernel.name, variant, tokens, run, outputs, torch_run, computes, moved)


def check(case: Case) -> None:
    """Both routes give the same, but for the order in which torch adds and rounds."""
    case.run()
    for got, want in zip(case.outputs, case.torch_run(), strict=True):
        tolerance = 2e-2 if got.dtype.is_floating_point else 0
        torch.testing.assert_close(
            got, want, rtol=tolerance, atol=tolerance, msg=lambda text: f"{case.name}: {text}"
        )


class _Eviction:
    """Reads and writes more memory than the last cache holds."""

    def __init__(self) -> None:
        self._memory = torch.zeros(96 << 20, dtype=torch.int8).view(torch.int64)

    def __call__(self) -> None:
        self._memory.add_(1)


def measure(case: Case, hidden: int, iterations: int, *, cold: bool) -> list[Record]:
    """Times of the three routes, in turn.

    Args:
        cold: nothing that a call reads or writes is in any cache when it starts.
    """
    check(case)
    half = max(case.moved // 2, 1)
    source, target = torch.ones(half, dtype=torch.int8), torch.ones(half, dtype=torch.int8)
    to, from_ = target.data_ptr(), source.data_ptr()
    routes = {
        "ours": case.run,
        "memcpy": lambda: ctypes.memmove(to, from_, half),
        "torch": case.torch_run,
    }
    seconds = interleave(routes, iterations, between=_Eviction() if cold else None)
    figures = [
        ("us_per_token", statistics.median(seconds["ours"]) / case.tokens * 1e6, "us"),
        ("vs_torch", median_ratio(seconds["torch"], seconds["ours"]), "ratio"),
        ("vs_memcpy", median_ratio(seconds["ours"], seconds["memcpy"]), "ratio"),
    ]
    about: dict[str, object] = {
        "kernel": case.kernel,
        "dtype": case.variant,
        "hidden": hidden,
        "tokens": case.tokens,
        "computes": case.computes,
        "cold": cold,
    }
    return [
        {"benchmark": "kernels", "case": about, "metric": metric, "value": value, "unit": unit}
        for metric, value, unit in figures
    ]


def meets_target(case: Case, vs_torch: float, vs_memcpy: float) -> bool:
    """Whether both bounds hold, or the one that counts."""
    return vs_memcpy <= VS_MEMCPY and (vs_torch >= VS_TORCH or not case.computes)
