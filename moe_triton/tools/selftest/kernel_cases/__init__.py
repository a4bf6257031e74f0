"""The table of launches that a selftest compares with torch: every Triton kernel, in every variant.

Data is random but follows from a seed; unlike those of the benchmarks, inputs have what correctness hangs
on: entries without an expert, masked tokens, ranges that begin late, counts that nobody can have sent.
"""

from __future__ import annotations

from moe_triton.tools.selftest.kernel_cases.case import KernelCase, ReadyCase, check_case, prepare
from moe_triton.tools.selftest.kernel_cases.moves import move_cases
from moe_triton.tools.selftest.kernel_cases.sums import sum_cases
from moe_triton.tools.selftest.kernel_cases.tables import table_cases

__all__ = ["KernelCase", "ReadyCase", "check_case", "kernel_cases", "prepare"]


def kernel_cases(seed: int, tokens: int, hidden: int, target: str) -> list[KernelCase]:
    """Cases of one hidden size, or those whose work does not depend on it.

    Args:
        seed: of the data.
        tokens: T, at least 8.
        hidden: H, a multiple of 256; 0 for the cases that have none.
        target: what kernels are specialised for: the back end's name.
    """
    if not hidden:
        return table_cases(seed, tokens, target)
    return [*move_cases(seed, tokens, hidden, target), *sum_cases(seed, tokens, hidden, target)]
