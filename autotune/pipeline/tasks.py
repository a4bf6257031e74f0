"""What is searched of one group: its schemes, and the settings of a scheme. Tasks of `autotune.search`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import moe_triton
from autotune.intervals import Interval
from autotune.kernels.versions import digest_of, digest_of_values
from autotune.pipeline.candidate import Candidate, Sizes
from autotune.pipeline.race import Result
from autotune.search import Outcome, Task
from moe_triton.core.capabilities import Capabilities
from moe_triton.core.space import Settings, Space, text_of
from moe_triton.schemes import scheme_type
from moe_triton.tables import FOLDER

SCHEME = "scheme"
_PACKAGE = Path(moe_triton.__file__).parent
_CODE = ".py", ".h", ".cpp", ".asc", ".toml", ".json"

Price = Callable[[Candidate, Candidate, int], Result]
"""Prices a candidate against a default, both given, with inputs of a seed."""


@dataclass(frozen=True)
class PipelineTask(Task):
    """Candidates of one group against their default. A value is the high end of the ratio to it.

    Attributes:
        candidate_of: what settings stand for.
        price: of a candidate.
        seed: of inputs.
        only: the only candidate beside the default, if not all of the space.
    """

    candidate_of: Callable[[Settings], Candidate] = field(kw_only=True)
    price: Price = field(kw_only=True)
    seed: int = field(default=0, kw_only=True)
    only: Settings | None = field(default=None, kw_only=True)

    def candidates(self) -> list[dict[str, int]]:
        """Lists every combination that is allowed, or the task's own and the only other one."""
        return super().candidates() if self.only is None else [dict(self.own), dict(self.only)]

    def first(self, known: Mapping[str, Outcome | None]) -> list[dict[str, int]]:
        """Lists settings one by one, then what is best by itself of all of them together."""
        own = dict(self.own)
        ones = [each for each in self.candidates() if len(each.items() - own.items()) <= 1]
        outcomes = {text_of(each): known.get(text_of(each)) for each in ones}
        if not all(outcomes.values()):
            return ones
        best = dict(own)
        for each in sorted(ones, key=lambda one: _value(outcomes[text_of(one)]), reverse=True):
            if _value(outcomes[text_of(each)]) < 1:
                best.update(each.items() - own.items())
        return [*ones, best] if self.space.allows(best) else ones

    def evaluate(self, settings: Settings, best: float | None) -> Outcome:
        """Prices a candidate against the default, by the high end of the ratio of their times."""
        default, candidate = self.candidate_of(self.own), self.candidate_of(settings)
        priced = self.price(default, candidate, self.seed)
        if priced.refused:
            return Outcome.infeasible(priced.refused)
        ratio = Interval.exact(1.0) if candidate == default else priced.ratio
        if not math.isfinite(ratio.high):
            return Outcome.infeasible("too few iterations to tell: give a race more seconds")
        return Outcome(ratio.high, facts={"ns": priced.ns, **ratio._asdict()})

    def result(self, settings: Settings, outcome: Outcome) -> Result:
        """What an outcome says of a candidate."""
        candidate, facts = self.candidate_of(settings), outcome.facts
        if outcome.value is None:
            return Result(candidate, 0, Interval.exact(1.0), outcome.reason)
        return Result(candidate, facts["ns"], Interval(*(facts[name] for name in Interval._fields)))

    def once_more(self, best: Settings) -> PipelineTask:
        """The best against the default, with other inputs: of many candidates it is in part the luckiest."""
        name = f"{self.name}: {sorted(best.items())} once more"
        return replace(self, name=name, seed=self.seed + 1, only=best)


def schemes_task(sizes: Sizes, price: Price, source: str, seed: int) -> PipelineTask:
    """Every scheme whose bits are those of the product's own, which comes first, with its defaults.

    Args:
        sizes: of the group.
        price: of a candidate.
        source: where prices come from.
        seed: of inputs.
    """
    names = sizes.alike
    name = _named(sizes, "schemes", source, seed, names)
    return PipelineTask(
        name,
        Space({SCHEME: tuple(range(len(names)))}),
        {SCHEME: 0},
        candidate_of=lambda settings: Candidate(names[settings[SCHEME]]),
        price=price,
        seed=seed,
    )


def settings_task(
    sizes: Sizes, scheme: str, capabilities: Capabilities, cores: int, price: Price, source: str, seed: int
) -> PipelineTask:
    """A scheme's settings, as it declares them.

    Args:
        sizes: of the group.
        scheme: its name.
        capabilities: of the back end.
        cores: see `Scheme.space`.
        price: of a candidate.
        source: where prices come from.
        seed: of inputs.
    """
    config = sizes.config(scheme)
    space = scheme_type(config).space(config, capabilities, cores)
    own = {name: space.usual.get(name, values[0]) for name, values in space.choices.items()}

    def candidate_of(settings: Settings) -> Candidate:
        return Candidate(scheme, {name: value for name, value in settings.items() if value != own[name]})

    name = _named(sizes, scheme, source, seed, space.choices, own)
    return PipelineTask(name, space, own, candidate_of=candidate_of, price=price, seed=seed)


def _value(outcome: Outcome | None) -> float:
    return math.inf if outcome is None or outcome.value is None else outcome.value


def _named(sizes: Sizes, what: str, *decides: object) -> str:
    """A task's name, with a digest of all that decides its outcomes."""
    return f"{sizes}: {what} [{digest_of_values((sizes, code(), *decides))}]"


@functools.cache
def code() -> str:
    """A digest of the package: of kernels, plans, and the model; what was found before is none of it."""
    files = (path for path in _PACKAGE.rglob("*") if path.suffix in _CODE and path.parent != FOLDER)
    return digest_of(sorted(files))
