"""On which constants an answer depends, and how far off it may be because nobody has measured them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.model.constants import Constant, Machine
from autotune.model.kernel_costs.remembered import NotedMachine

Answer = Callable[[Machine], float]
"""Something in us that depends on a machine."""

STEP = 1.01  # of a constant whose range is a point


@dataclass(frozen=True)
class Sensitivity:
    """How an answer depends on one constant.

    Attributes:
        name: of the constant.
        constant: its value and range.
        elasticity: relative change of the answer per relative change of the constant, over its range; of 1%
            where the range is a point.
        at_low, at_high: the answer with the constant at either end of its range.
    """

    name: str
    constant: Constant
    elasticity: float
    at_low: float
    at_high: float

    @property
    def swing(self) -> float:
        """How far apart the answers at the ends of the range are."""
        return abs(self.at_high - self.at_low)


@dataclass(frozen=True)
class Judged:
    """An answer, and what it hangs on.

    Attributes:
        value: the answer.
        below, above: how far the true one may lie below and above it: the root of the sum of squares of what
            each constant's range does on that side.
        sensitivities: of every constant that was read, the largest swing first.
    """

    value: float
    below: float
    above: float
    sensitivities: tuple[Sensitivity, ...]

    @property
    def read(self) -> frozenset[str]:
        """Names of the constants that the answer depends on."""
        return frozenset(each.name for each in self.sensitivities)


def constants_read(answer: Answer, machine: Machine) -> frozenset[str]:
    """Names of the constants that are read for an answer."""
    noted = NotedMachine(machine)
    answer(noted)
    return frozenset(noted.read)


def judged(answer: Answer, machine: Machine) -> Judged:
    """An answer with its sensitivities and its error bar.

    Constants are taken to be wrong independently of one another, and the answer is computed twice for each
    one that it reads: at the low and at the high end of its range.

    Args:
        answer: what is asked; it reads constants from the machine that it is given, and from no other one.
        machine: whose constants.
    """
    noted = NotedMachine(machine)
    value = answer(noted)
    sensitivities = [_sensitivity(answer, machine, name, value) for name in sorted(noted.read)]
    sensitivities.sort(key=lambda each: each.swing, reverse=True)
    sides = [(each.at_low - value, each.at_high - value) for each in sensitivities]
    below = math.hypot(*(min(0.0, *side) for side in sides))
    return Judged(value, below, math.hypot(*(max(0.0, *side) for side in sides)), tuple(sensitivities))


def _sensitivity(answer: Answer, machine: Machine, name: str, value: float) -> Sensitivity:
    constant = machine.constants[name]

    def at(number: float) -> float:
        return value if number == constant.value else answer(machine.replaced({name: number}))

    at_low, at_high = at(constant.low), at(constant.high)
    if constant.low < constant.high:
        ends = (constant.low, at_low), (constant.high, at_high)
    else:
        ends = (constant.value, value), (constant.value * STEP, at(constant.value * STEP))
    return Sensitivity(name, constant, _elasticity(ends, constant.value, value), at_low, at_high)


def _elasticity(ends: Sequence[tuple[float, float]], constant: float, value: float) -> float:
    """Relative change of an answer per that of a constant: by logarithms, or differences if one may be 0."""
    (low, at_low), (high, at_high) = ends
    if min(low, at_low, at_high) > 0:
        return math.log(at_high / at_low) / math.log(high / low)
    if high == low or value == 0 or constant == 0:
        return 0.0
    return (at_high - at_low) / value / ((high - low) / constant)
