"""What the project asks of each metric, and whether a figure meets it."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.compare.cases import Case


@dataclass(frozen=True)
class Target:
    """A bound on one figure.

    Attributes:
        bound: the worst that is good enough.
        at_most: whether less is better.
    """

    bound: float
    at_most: bool = False

    def is_met(self, value: float) -> bool:
        """Whether a figure is good enough."""
        return value <= self.bound if self.at_most else value >= self.bound

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.bound:g}"


# By tokens per rank.
BY_TOKENS: dict[str, tuple[dict[int, float], bool]] = {
    "vs_gloo_alltoallv": ({16: 10.0, 64: 6.0, 256: 5.0}, False),
    "vs_mpi_best": ({16: 3.0, 64: 3.0, 256: 3.0}, False),
    "vs_mpi_native": ({16: 2.0, 64: 2.0, 256: 2.0}, False),
    "vs_nowait": ({16: 1.3, 64: 1.25, 256: 1.25}, True),
    "direct_vs_slots": ({16: 1.2, 64: 1.5, 256: 1.8}, False),
}
RANKS = (2, 4, 8)
# More ranks than cores take turns on them, which memcpy on as many ranks does not need to wait for.
MEMCPY_CASE, MEMCPY_FRACTION = (2, 256), 0.75

# Of the scaling run.
TIME_PER_BYTE_SPREAD = Target(1.2, at_most=True)
GROWTH_PER_BYTE = Target(1.0, at_most=True)


def target_of(metric: str, case: Case) -> Target | None:
    """The target of a metric in a case, where there is one."""
    if metric == "fraction_of_memcpy":
        return Target(MEMCPY_FRACTION) if (case.ranks, case.tokens) == MEMCPY_CASE else None
    by_tokens, at_most = BY_TOKENS.get(metric, ({}, False))
    bound = by_tokens.get(case.tokens) if case.ranks in RANKS else None
    return None if bound is None else Target(bound, at_most)


def verdict(metric: str, case: Case, value: float | None) -> str:
    """ "met", "missed" or "", the latter where nothing is asked; "absent" where there is no figure."""
    if value is None:
        return "absent"
    target = target_of(metric, case)
    if target is None:
        return ""
    return "met" if target.is_met(value) else "missed"
