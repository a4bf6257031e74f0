"""`Task`: one thing whose settings are searched. `Outcome`: what one candidate came to."""

from __future__ import annotations

import json
import reprlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_triton.core.errors import MoeTritonError
from moe_triton.core.space import Settings, Space

TIMES = "ns", "default_ns"
"""Facts that are times in nanoseconds."""
FAR_WORSE = 1.5
"""A multiple of the best value so far: a candidate beyond it need not be known exactly."""


class WrongBitsError(MoeTritonError):
    """A candidate gives other results than the default: a bug of the kernel or of a compiler."""


@dataclass(frozen=True)
class Outcome:
    """What one candidate came to.

    Attributes:
        value: what is made small; None if the candidate cannot be had.
        reason: why it cannot be had, or why it was given up before its value was known exactly.
        facts: figures of it, of JSON's types; "ns" is its time in nanoseconds.
    """

    value: float | None
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """Whether it was priced to the end."""
        return self.value is not None and not self.reason

    @staticmethod
    def from_json(text: str) -> Outcome:
        """What a study keeps.

        Raises:
            ValueError: it is none.
            TypeError: likewise.
        """
        outcome = Outcome(**json.loads(text))
        value, reason, facts = outcome.value, outcome.reason, outcome.facts
        is_known = value is None or (type(value) in (int, float) and _is_finite(value))
        times = [facts[name] for name in TIMES if name in facts] if isinstance(facts, dict) else [None]
        are_times = all(type(ns) in (int, float) for ns in times) and _is_finite(facts)
        if not (is_known and are_times and isinstance(reason, str)):
            raise ValueError(f"{reprlib.repr(text)} must have a finite value, a reason and facts")
        return outcome

    @staticmethod
    def infeasible(reason: str) -> Outcome:
        """The outcome of a candidate that cannot be had."""
        return Outcome(None, reason)


def _is_finite(fact: Any) -> bool:
    """Whether all numbers in a fact are floats or could be."""
    if isinstance(fact, dict | list):
        return all(map(_is_finite, fact.values() if isinstance(fact, dict) else fact))
    return not isinstance(fact, int | float) or abs(fact) <= sys.float_info.max


@dataclass(frozen=True)
class Task(ABC):
    """One thing whose settings are searched.

    Attributes:
        name: of its study: the same name means the same outcomes.
        space: its settings.
        own: those that it has by itself.
    """

    name: str
    space: Space
    own: Settings

    @abstractmethod
    def evaluate(self, settings: Settings, best: float | None) -> Outcome:
        """Prices a candidate.

        Args:
            settings: the candidate.
            best: the smallest value so far, to give up early by; None if there is none.

        Raises:
            WrongBitsError: it gives other results.
        """

    def candidates(self) -> list[dict[str, int]]:
        """Every combination that is allowed, the task's own first."""
        return list(self.space.candidates(self.own))

    def first(self, known: Mapping[str, Outcome | None]) -> list[dict[str, int]]:
        """Candidates that are priced before any of a large space is sampled.

        Args:
            known: outcomes by settings as `text_of` has them; None for those that are being priced.
        """
        return [dict(self.own)]

    def choices(self) -> dict[str, list[int]]:
        """The values of each setting, in ascending order, with the task's own among them."""
        return {name: sorted({self.own[name], *values}) for name, values in self.space.choices.items()}
