"""Cases in which every two values of two features that can occur together do so at least once.

allpairspy does this where combinations are free. Under rules like ours its search gives up early (a quarter
of the values never occurred), so pairs are covered greedily here: a missing pair is completed at random in a
few ways, each is changed, value by value, while it covers more missing pairs, and the best of them is kept.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.distributed.operator_cases import FEATURES, OperatorCase, is_valid

Setting = tuple[str, Any]
Pair = frozenset[Setting]
CANDIDATES = 3
# A value, or a pair, that so many completions do not make valid is taken to be impossible.
TRIES_OF_A_VALUE, TRIES = 300, 40


@functools.cache
def pairwise(seed: int = 1, **fixed: tuple[Any, ...]) -> list[OperatorCase]:
    """Cases that cover every possible pair.

    Args:
        seed: of the choices.
        fixed: values of a feature to use in place of those in `FEATURES`.
    """
    rng = random.Random(seed)
    features: dict[str, Sequence[Any]] = {**FEATURES, **fixed}
    # An impossible value makes many pairs impossible: they need not be tried.
    with_value: dict[Setting, OperatorCase] = {}
    for name, values in features.items():
        for value in values:
            for case in itertools.islice(_completions({name: value}, features, rng, TRIES_OF_A_VALUE), 1):
                with_value[name, value] = case
    features = {name: [v for v in values if (name, v) in with_value] for name, values in features.items()}
    missing = dict.fromkeys(_pairs_of(features))  # ordered: the same cases in every run
    cases = []
    while missing:
        pair = next(iter(missing))
        near = [replace(with_value[setting], **dict(pair)) for setting in sorted(pair, key=repr)]
        completions = itertools.chain(filter(is_valid, near), _completions(dict(pair), features, rng, TRIES))
        candidates = [
            _improved(case, dict(pair), missing, features, rng)
            for case in itertools.islice(completions, CANDIDATES)
        ]
        if not candidates:
            del missing[pair]
            continue
        best = max(candidates, key=lambda case: _gain(case, missing, features))
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


def _completions(
    fixed: Mapping[str, Any], features: Mapping[str, Sequence[Any]], rng: random.Random, tries: int
) -> Iterator[OperatorCase]:
    """Valid cases with these values: the others at random, or at their defaults where rules forbid them."""
    for _ in range(tries):
        chosen = {name: rng.choice(values) for name, values in features.items()} | fixed
        for name in (None, *rng.sample(list(features), len(features))):
            if name is not None and name not in fixed:
                chosen[name] = features[name][0]
            case = OperatorCase(**chosen)
            if is_valid(case):
                yield case
                break


def _improved(
    case: OperatorCase,
    fixed: Mapping[str, Any],
    missing: Collection[Pair],
    features: Mapping[str, Sequence[Any]],
    rng: random.Random,
) -> OperatorCase:
    """A case near this one that covers more of what is missing, if there is one."""
    gain = _gain(case, missing, features)
    for name in rng.sample(list(features), len(features)):
        for value in features[name]:
            other = replace(case, **{name: value})
            if name not in fixed and is_valid(other):
                of_other = _gain(other, missing, features)
                if of_other > gain:
                    case, gain = other, of_other
    return case


def _gain(case: OperatorCase, missing: Collection[Pair], features: Mapping[str, Sequence[Any]]) -> int:
    """How many missing pairs it covers."""
    return sum(pair in missing for pair in pairs_in(case, features))
