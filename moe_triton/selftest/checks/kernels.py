"""Each Triton kernel against its torch fallback, bit for bit."""

from __future__ import annotations

import functools

from moe_triton.selftest.check import Check, Finding, Place
from moe_triton.selftest.checks.environment import BACKEND
from moe_triton.selftest.kernel_cases import KernelCase, check_case, kernel_cases
from moe_triton.selftest.settings import Settings

STAGE = "kernels"
TOKENS = 16
MOST_DETAILS = 5


def kernel_checks(settings: Settings) -> list[Check]:
    """A check for each kernel."""
    names = sorted({case.kernel.name for case in kernel_cases(0, TOKENS, 256, settings.backend)})
    return [Check(f"kernel {name}", STAGE, check_kernel, (name,), needs=(BACKEND,)) for name in names]


@functools.lru_cache(maxsize=3)
def _cases(seed: int, hidden: int, target: str) -> list[KernelCase]:
    return kernel_cases(seed, TOKENS, hidden, target)


def check_kernel(place: Place, name: str) -> Finding:
    """Runs all cases of one kernel, on as many blocks as the device has and on one."""
    backend, settings = place.backend, place.settings
    wrong: list[str] = []
    number = 0
    for hidden in settings.hidden_sizes:
        for case in _cases(settings.seed, hidden, backend.name):
            if case.kernel.name != name:
                continue
            for blocks in sorted({1, backend.num_blocks(1)}):
                number += 1
                found = check_case(case, backend, blocks)
                wrong += [f"H {hidden}, {blocks} block(s): {text}" for text in found]
    if len(wrong) > MOST_DETAILS:
        wrong = [*wrong[:MOST_DETAILS], f"and {len(wrong) - MOST_DETAILS} more"]
    return Finding(wrong=tuple(wrong), figures={"launches": number})
