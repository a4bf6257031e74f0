"""A day step by step: rows of the busiest rank under each policy, what moves, and what a step takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks.balance import costs, policies
from benchmarks.balance.loads import bounded, physical, rows_of_ranks, skew_of
from benchmarks.balance.policies import BOUNDED, INITIAL, NONE, ORACLE, PERFECT, PERIODIC, REFINE
from benchmarks.balance.routing import Day, Ints
from moe_triton.balance import Placement
from moe_triton.core.replicas import COUNTED_BY

MODES = COUNTED_BY[::-1]  # by token first, which is the default
ANY, NODE_LIMITED = "any experts", "node-limited"
SHORTEST_REFINED = 1_000
MOST_REFINED_OFTEN = 64
"""Ranks above which `refine_placement` is not tried with shorter periods: a change takes it up to 0.25 s, and
the day has 500."""


PlacementAt = Callable[[int, str], Placement]
"""By step, and who chooses replicas."""


@dataclass
class Outcome:
    """A policy over a day, on one number of ranks.

    Attributes:
        ranks: W.
        policy: its name.
        period: steps from one change to the next, 1 for MoonEP's; 0 where there is none.
        slots_per_rank: of experts and replicas.
        routing: `ANY` or `NODE_LIMITED`.
        tokens: T.
        steps: that were looked at.
        skew: most rows over mean in each, by who chooses replicas; a bound has one alone.
        rows: of the busiest rank in each, by token.
        changes: of the placement that were looked at.
        copies, most_copies: of experts' weights in a change, to all ranks and to one; means.
        dispatch_us, combine_us: by the model, at the step with the median skew.
    """

    ranks: int
    policy: str
    period: int
    slots_per_rank: int
    routing: str = ANY
    tokens: int = 0
    steps: list[int] = field(default_factory=list)
    skew: dict[str, list[float]] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)
    changes: int = 0
    copies: float = 0.0
    most_copies: float = 0.0
    dispatch_us: float = 0.0
    combine_us: float = 0.0

    @property
    def name(self) -> str:
        """The policy, and its period."""
        return f"{self.policy}, {self.period:,}" if self.policy in PERIODIC else self.policy

    @property
    def key(self) -> tuple[str, int, int, str]:
        """Routing, ranks, tokens, and the name."""
        return self.routing, self.ranks, self.tokens, self.name

    def mean(self, mode: str = "token") -> float:
        """Of most rows over mean."""
        return float(np.mean(self.skew[mode]))

    def p99(self, mode: str = "token") -> float:
        """Of most rows over mean."""
        return float(np.percentile(self.skew[mode], 99))

    @property
    def experts_us(self) -> float:
        """Mean over the steps, of the busiest rank."""
        return costs.experts_us(self.slots_per_rank, float(np.mean(self.rows)))

    @property
    def moves_us(self) -> float:
        """Of a change, over the steps of a period."""
        return costs.moves_us(self.most_copies) / self.period if self.period else 0.0

    @property
    def mapping_us(self) -> float:
        """The launch that maps ids of experts to slots, where experts have replicas."""
        return 0.0 if self.policy == NONE else costs.MACHINE.launch_graph_us

    @property
    def step_us(self) -> float:
        """All of it, mean over the steps."""
        return self.dispatch_us + self.combine_us + self.experts_us + self.moves_us + self.mapping_us

    @property
    def document(self) -> dict[str, Any]:
        """As JSON's types; the inverse of ``Outcome(**document)``."""
        return asdict(self)


def sampled_steps(day: Day, number: int) -> list[int]:
    """Steps of a day, ascending: one at random in each of as many equal parts, the same for the same seed."""
    part = day.steps // number
    offsets = np.random.default_rng([day.seed, number]).integers(0, part, number)
    return [int(step) for step in np.arange(number) * part + offsets]


def simulate(
    day: Day,
    ranks: int,
    tokens: int,
    number: int,
    periods: Sequence[int],
    advance: Callable[[str], None] = lambda _: None,
) -> list[Outcome]:
    """Every policy over the day, on one number of ranks.

    Args:
        day: what tokens want.
        ranks: W.
        tokens: T.
        number: of steps that are looked at.
        periods: steps, of policies that have one.
        advance: called with what has been done.
    """
    steps = sampled_steps(day, number)
    drawn = {step: day.draw(step, ranks, tokens) for step in steps}
    advance(f"EP {ranks}: drawn")
    outcomes = []
    for policy in (NONE, INITIAL):
        placement = policies.fixed(policy, day, ranks)
        outcomes.append(_followed(policy, 0, drawn, _always(placement)))
    for policy in PERIODIC:
        for period in periods:
            if policy == REFINE and period < SHORTEST_REFINED and ranks > MOST_REFINED_OFTEN:
                continue
            changing = policies.Periodic(policy, day, period, ranks, tokens)
            placements = {step: changing.at(step) for step in steps}
            found = _followed(policy, period, drawn, _by_step(placements))
            found.changes = len(changing.moved)
            if changing.moved:
                found.copies = float(np.mean([moved.copies for moved in changing.moved]))
                found.most_copies = float(np.mean([moved.most for moved in changing.moved]))
            outcomes.append(found)
            advance(f"EP {ranks}: {found.name}")
    counts = {step: np.bincount(ids.ravel(), minlength=day.experts) for step, ids in drawn.items()}
    outcomes.append(_followed(ORACLE, 0, drawn, lambda step, mode: policies.known(counts[step], ranks, mode)))
    outcomes += _bounds(day, ranks, tokens, counts)
    for each in outcomes:
        each.routing, each.tokens = NODE_LIMITED if day.is_node_limited else ANY, tokens
    advance(f"EP {ranks}: bounds")
    return outcomes


def _always(placement: Placement) -> PlacementAt:
    return lambda step, mode: placement


def _by_step(placements: dict[int, Placement]) -> PlacementAt:
    return lambda step, mode: placements[step]


def _followed(policy: str, period: int, drawn: dict[int, Ints], placed: PlacementAt) -> Outcome:
    """A policy's rows at each step, and what dispatch and combine take in the middle one."""
    steps = list(drawn)
    rows_by_mode: dict[str, list[Ints]] = {mode: [] for mode in MODES}
    slots_by_step: list[Ints] = []
    for step in steps:
        for mode in MODES:
            placement = placed(step, mode)
            slots = physical(placement, drawn[step], mode)
            rows_by_mode[mode].append(rows_of_ranks(placement, slots))
            if mode == "token":
                slots_by_step.append(slots.astype(np.int16))
    first = placed(steps[0], "token")
    found = Outcome(first.num_ranks, policy, period, first.slots_per_rank, steps=steps)
    found.skew = {mode: [skew_of(each) for each in rows] for mode, rows in rows_by_mode.items()}
    found.rows = [int(each.max()) for each in rows_by_mode["token"]]
    middle = int(np.argsort(found.rows, kind="stable")[len(steps) // 2])
    both = costs.communication(slots_by_step[middle], first.num_replicas)
    found.dispatch_us, found.combine_us = both.dispatch_us, both.combine_us
    return found


def _bounds(day: Day, ranks: int, tokens: int, counts: dict[int, Ints]) -> list[Outcome]:
    """MoonEP with as many slots as the other policies have, and with any number of them.

    Dispatch and combine of both are those of rows that are dealt evenly.
    """
    slots = policies.num_slots(day.experts, ranks)
    spare = (slots - day.experts) // ranks
    both = costs.communication(costs.even_slots(ranks, tokens, day.topk, slots), slots)
    planned = [bounded(each, ranks, spare) for each in counts.values()]
    mean = tokens * day.topk
    limited = Outcome(ranks, BOUNDED, 1, slots // ranks, steps=list(counts))
    limited.skew = {"token": [skew_of(plan.rows) for plan in planned]}
    limited.rows = [int(plan.rows.max()) for plan in planned]
    limited.changes = len(planned)
    limited.copies = float(np.mean([plan.copies for plan in planned]))
    limited.most_copies = float(np.mean([plan.most_copies for plan in planned]))
    perfect = Outcome(ranks, PERFECT, 0, slots // ranks, steps=list(counts))
    perfect.skew = {"token": [1.0] * len(counts)}
    perfect.rows = [mean] * len(counts)
    for each in (limited, perfect):
        each.dispatch_us, each.combine_us = both.dispatch_us, both.combine_us
    return [limited, perfect]


def speed_ups(outcomes: Sequence[Outcome]) -> dict[tuple[str, int, int, str], float]:
    """How many times as long a step takes without replicas, by `Outcome.key`."""
    without = {each.key[:-1]: each.step_us for each in outcomes if each.policy == NONE}
    return {each.key: without[each.key[:-1]] / each.step_us for each in outcomes}
