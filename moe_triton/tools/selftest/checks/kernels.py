"""Each Triton kernel against its torch fallback, bit for bit."""

from __future__ import annotations

import functools

from moe_triton.kernels import Case, Sizes, families, kernel_cases
from moe_triton.tools.selftest.check import Check, Finding, Place, Settings, few
from moe_triton.tools.selftest.checks.environment import BACKEND
from moe_triton.tools.selftest.kernel_cases import check_case

STAGE = "kernels"


def kernel_checks(settings: Settings) -> list[Check]:
    """A check for each kernel and hidden size: on an NPU, compiling a kernel takes long."""
    own = functools.partial(Check, stage=STAGE, function=check_kernel, needs=(BACKEND,))
    return [
        own(f"kernel {name}, H {hidden}" if hidden else f"kernel {name}", arguments=(name, hidden))
        for hidden in (0, *settings.hidden_sizes)
        for name, family in families().items()
        if ("hidden" in family.axes) == bool(hidden)
    ]


@functools.lru_cache(maxsize=1)
def _cases(seed: int, hidden: int, target: str) -> list[Case]:
    return kernel_cases(Sizes(seed=seed), hidden, target)


def check_kernel(place: Place, name: str, hidden: int) -> Finding:
    """Runs all cases of one kernel, on as many blocks as the device has and on one.

    Args:
        place: where it runs.
        name: of the kernel's family.
        hidden: H, or 0 for a kernel that does not depend on it.
    """
    backend = place.backend
    wrong: list[str] = []
    launches = 0
    for case in _cases(place.settings.seed, hidden, backend.name):
        if case.family.name != name:
            continue
        for blocks in sorted({1, backend.num_blocks(1)}):
            launches += 1
            wrong += [f"{blocks} block(s): {text}" for text in check_case(case, backend, blocks)]
    return Finding(wrong=few(wrong), figures={"launches": launches})
