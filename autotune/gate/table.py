"""The whole table: every kernel in the sizes that are supported, as the gate compiles it.

H is combined with the ends and the middle of K; otherwise one size changes at a time from H = 7168, K = 8,
bf16. Every variant that a plan can launch is included at H = 8192, where the unified buffer is fullest, and
the main ones at every H. K = 32, which only an `EPBuffer` takes, goes with the largest H, of the main ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random

from autotune.npu_compiler.socs import SOC_OF_PRODUCT, SOCS
from moe_triton.kernels import Case, Family, Shape, families
from moe_triton.limits.common import MAX_TOPK_OF_BUFFER

HIDDEN = (1024, 2048, 2880, 4096, 5120, 7168, 8192)
TOPK = (1, 2, 4, 6, 8, 16)
MOST_TOPK = MAX_TOPK_OF_BUFFER
SHARED = (0, 1, 4)
DTYPES = ("bf16", "fp16")

BASE = Shape()


def _with(features: tuple[str, ...], **sizes: object) -> Shape:
    return replace(BASE, features=frozenset(features), **sizes)  # type: ignore[arg-type]


def _shapes(family: Family) -> Iterator[Shape]:
    """May yield shapes that only differ in sizes that the family does not depend on."""
    main = family.main
    # tiles have H elements, loops K iterations
    yield from (_with(main, hidden=h, topk=k) for h, k in product(HIDDEN, (TOPK[0], BASE.topk, TOPK[-1])))
    yield from (_with(main, dtype=d, hidden=h) for d, h in product(DTYPES, HIDDEN))
    yield from (_with(main, topk=k, shared=s) for k, s in product(TOPK, SHARED))
    yield from (_with(main, hidden=h, shared=SHARED[-1]) for h in HIDDEN)
    yield _with(main, hidden=HIDDEN[-1], topk=MOST_TOPK, shared=SHARED[-1])
    for features in family.shown:
        yield from (_with(features, hidden=h) for h in HIDDEN)
        yield from (_with(features, topk=k) for k in (TOPK[0], TOPK[-1]))
        yield from (_with(features, dtype=d, shared=s) for d, s in product(DTYPES, SHARED[:2]))
        yield _with(features, hidden=HIDDEN[-1], topk=TOPK[-1], shared=SHARED[-1])
    # where the unified buffer is fullest
    yield from (_with(features, hidden=HIDDEN[-1], shared=1) for features in family.variants)


@functools.cache
def table() -> dict[str, Case]:
    """Every case by name."""
    pairs = ((family, shape) for family in families().values() for shape in _shapes(family))
    cases = (Case(family, family.as_launched(shape)) for family, shape in pairs)
    return {case.name: case for case in cases}


@functools.cache
def shown_cases() -> tuple[Case, ...]:
    """The kernels of the docs: H = 7168, K = 8, bf16, without shared experts."""
    return tuple(Case(family, _with(features)) for family in families().values() for features in family.shown)


def sample(seed: int, others: int) -> list[tuple[str, Case]]:
    """The cases that a quick test compiles: those of the docs for A3, and some of the whole table for every
    chip.

    Args:
        others: number of the latter, for each chip.

    Returns:
        (soc, case), in order.
    """
    random, names = Random(seed), sorted(table())
    pairs = [(SOC_OF_PRODUCT["A3"], case) for case in shown_cases()]
    pairs += [(soc, table()[name]) for soc in SOCS for name in random.sample(names, others)]
    return list(dict.fromkeys(pairs))
