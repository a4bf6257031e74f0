"""Checks of the selftest on the stand-in; each function as ``f(rank, num_ranks, ...)``."""

from __future__ import annotations

from moe_triton.backends.npu.backend import NpuBackend
from moe_triton.tools.selftest import check as checks
from moe_triton.tools.selftest.check import Check, Finding, Settings, run_on_rank
from tests.npu import standin

BLOCKS = 2  # a host has no 48 cores


def run(rank: int, num_ranks: int, check: Check, settings: Settings, policy: str) -> Finding | None:
    """A check as the battery runs it; nothing on a rank that it does not need."""
    standin.install(policy, seed=rank)
    NpuBackend.num_blocks = lambda self, num_ranks: BLOCKS  # type: ignore[method-assign]
    checks._backend.cache_clear()
    if rank >= check.ranks:
        return None
    return run_on_rank(rank, num_ranks, check.function, check.arguments, settings, check.on_device)
