"""Cases in which every two values of two features that can occur together do so at least once.

allpairspy does this where combinations are free. Under rules like ours its search gives up early (a quarter
of the values never occurred), so pairs are covered greedily here: each new case is the one of some random
completions of a missing pair that covers the most missing pairs.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.distributed.operator_cases import FEATURES, OperatorCase, is_valid

Setting = tuple[str, Any]
Pair = frozenset[Setting]
CANDIDATES = 12
# A pair that this many completions do not make valid is taken to be impossible.
TRIES = 60


@functools.cache
def pairwise(seed: int = 1, **fixed: tuple[Any, ...]) -> list[OperatorCase]:
    """Cases that cover every possible pair.

    Args:
        seed: of the choices.
        fixed: values of a feature to use in place of those in `FEATURES`.
    """
    rng = random.Random(seed)
    features: dict[str, Sequence[Any]] = {**FEATURES, **fixed}
    missing = dict.fromkeys(_pairs_of(features))  # ordered: the same cases in every run
    cases = []
    while missing:
        pair = next(iter(missing))
        candidates = [_complete(pair, features, rng) for _ in range(CANDIDATES)]
        valid = [case for case in candidates if case is not None]
        if not valid:
            valid = [case for case in (_complete(pair, features, rng) for _ in range(TRIES)) if case][:1]
        if not valid:
            del missing[pair]
            continue
        best = max(valid, key=lambda case: sum(p in missing for p in pairs_in(case, features)))
        for covered in pairs_in(best, features):
            missing.pop(covered, None)
        cases.append(replace(best, seed=rng.randrange(2**20)))
    return cases


def pairs_in(case: OperatorCase, features: Mapping[str, Sequence[Any]]) -> Iterator[Pair]:
    """The pairs that a case covers."""
    settings = [(name, getattr(case, name)) for name in features]
    return (frozenset(two) for two in itertools.combinations(settings, 2))


def _pairs_of(features: Mapping[str, Sequence[Any]]) -> Iterator[Pair]:
    for (a, values_a), (b, values_b) in itertools.combinations(features.items(), 2):
        for value_a, value_b in itertools.product(values_a, values_b):
            yield frozenset({(a, value_a), (b, value_b)})


def _complete(pair: Pair, features: Mapping[str, Sequence[Any]], rng: random.Random) -> OperatorCase | None:
    """A valid case with this pair: the others at random, or at their defaults where rules forbid them."""
    chosen = {name: rng.choice(values) for name, values in features.items()} | dict(pair)
    for name in rng.sample(list(features), len(features)):
        case = OperatorCase(**chosen)
        if is_valid(case):
            return case
        if name not in dict(pair):
            chosen[name] = features[name][0]
    case = OperatorCase(**chosen)
    return case if is_valid(case) else None
