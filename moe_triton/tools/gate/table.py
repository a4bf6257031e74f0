"""The whole table: every kernel in the sizes that are supported, as the gate compiles it.

H is crossed with both ends and the middle of K; otherwise one size changes at a time from H = 7168, K = 8,
bf16. Every variant that a plan can launch is there at H = 8192, where the unified buffer is fullest, the main
ones are in every H.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from random import Random

from moe_triton.core.kernel import TritonKernel
from moe_triton.tools.gate.families import FAMILIES, Family, Shape
from moe_triton.tools.gate.socs import SOC_OF_PRODUCT, SOCS

HIDDEN = (1024, 2048, 2880, 4096, 5120, 7168, 8192)
TOPK = (1, 2, 4, 6, 8, 16)
SHARED = (0, 1, 4)
DTYPES = ("bf16", "fp16")

Features = tuple[str, ...]

BASE = Shape()

# Beyond weights. By token all combine; results found by expert (V1) or by offset have fewer of them.
_BY_TOKEN = ("masked", "shared_x", "special", "quantized", "fp32_out")
_BY_EXPERT = ("quantized", "fp32_out")

# Of the sum: what is held at a time differs most between these.
SUMS: tuple[Features, ...] = (
    ("weights",),
    ("weights", "masked"),
    ("weights", "shared_x"),
    ("weights", "fp32_out"),
    ("weights", "special"),
    ("weights", "quantized"),
    ("weights", "masked", "shared_x", "special", "quantized"),
    ("weights", "by_expert"),
    ("weights", "by_expert", "quantized"),
    ("weights", "by_offset"),
)

# The variant whose sizes are crossed, where it is not the plain one.
MAIN: dict[str, Features] = {
    "keep": ("int8", "weights", "smooth"),
    "weighted_sum": ("weights",),
    "const_alphas": ("per_element",),
}

# What the docs show of families whose variants differ in more than a word; of others all variants.
SHOWN: dict[str, tuple[Features, ...]] = {
    "keep": ((), ("weights",), ("int8", "weights"), ("int8", "weights", "smooth")),
    "weighted_sum": SUMS,
}


@dataclass(frozen=True)
class Case:
    """One kernel in one shape."""

    family: Family
    shape: Shape

    @property
    def name(self) -> str:
        """Unique in the table."""
        return self.family.case_name(self.shape)

    @property
    def kernel(self) -> TritonKernel:
        """Built for the NPU."""
        return self.family.build(self.shape)


def _subsets(names: Iterable[str]) -> Iterator[Features]:
    pool = tuple(names)
    return (chosen for size in range(len(pool) + 1) for chosen in combinations(pool, size))


def variants(family: Family) -> list[Features]:
    """Every set of features that plans can launch a family with."""
    if family.name == "weighted_sum":
        by_expert = [("by_expert", *more) for more in _subsets(_BY_EXPERT)]
        sums = [*_subsets(_BY_TOKEN), *by_expert, ("by_offset",)]
        return [(*weights, *more) for weights in (("weights",), ()) for more in sums]
    if family.name == "share":  # V1's, by position, has no mask
        return [(), ("masked",), ("by_position",)]
    if family.name == "keep":  # smooth scales go with int8
        return [chosen for chosen in _subsets(family.features) if "int8" in chosen or "smooth" not in chosen]
    return list(_subsets(family.features))


def shown(family: Family) -> tuple[Features, ...]:
    """The variants that stand for a family in the docs and in the sample."""
    return SHOWN.get(family.name) or tuple(variants(family))


def _with(features: Features, **sizes: object) -> Shape:
    return replace(BASE, features=frozenset(features), **sizes)  # type: ignore[arg-type]


def _shapes(family: Family) -> Iterator[Shape]:
    """May yield shapes that differ in nothing that matters to the family."""
    main = MAIN.get(family.name, ())
    # tiles are of H elements, loops of K turns
    yield from (_with(main, hidden=h, topk=k) for h, k in product(HIDDEN, (TOPK[0], BASE.topk, TOPK[-1])))
    yield from (_with(main, dtype=d, hidden=h) for d, h in product(DTYPES, HIDDEN))
    yield from (_with(main, topk=k, shared=s) for k, s in product(TOPK, SHARED))
    yield from (_with(main, hidden=h, shared=SHARED[-1]) for h in HIDDEN)
    for features in shown(family):
        yield from (_with(features, hidden=h) for h in HIDDEN)
        yield from (_with(features, topk=k) for k in (TOPK[0], TOPK[-1]))
        yield from (_with(features, dtype=d, shared=s) for d, s in product(DTYPES, SHARED[:2]))
        yield _with(features, hidden=HIDDEN[-1], topk=TOPK[-1], shared=SHARED[-1])
    # where the most is held at a time
    yield from (_with(features, hidden=HIDDEN[-1], shared=1) for features in variants(family))


def _as_launched(family: Family, shape: Shape) -> Shape:
    """With as many shared experts as there can be: V1 has one, and rows are kept for them if smoothed."""
    most = shape.shared
    if shape.has("by_expert"):
        most = 1
    elif family.name == "keep" and not shape.has("smooth"):
        most = 0
    return replace(shape, shared=min(shape.shared, most))


@functools.cache
def table() -> dict[str, Case]:
    """Every case by name."""
    families = FAMILIES.values()
    cases = (Case(family, _as_launched(family, shape)) for family in families for shape in _shapes(family))
    return {case.name: case for case in cases}


@functools.cache
def shown_cases() -> tuple[Case, ...]:
    """The kernels at H = 7168, K = 8, bf16, without shared experts: what the docs show."""
    return tuple(Case(family, _with(features)) for family in FAMILIES.values() for features in shown(family))


def sample(seed: int, others: int) -> list[tuple[str, Case]]:
    """What a quick test compiles: the cases of the docs for A3, and some of the whole table for every chip.

    Args:
        others: how many of the latter, for each chip.

    Returns:
        (soc, case), in order.
    """
    random, names = Random(seed), sorted(table())
    pairs = [(SOC_OF_PRODUCT["A3"], case) for case in shown_cases()]
    pairs += [(soc, table()[name]) for soc in SOCS for name in random.sample(names, others)]
    return list(dict.fromkeys(pairs))
