"""Phases of operators that run one behind the other without Python in between.

Between two rounds of a call megabytes of rows have passed through the caches, and Python, which would begin
the next one, has to come from memory: it takes several times as long there as in a loop of small calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moe_triton.backends.base import Bindings, Turn
from moe_triton.core.plan import BEGINNING, ENDING
from moe_triton.operators.variants import DispatchVariant, Variant
from moe_triton.runtime.executables import Executables, Phase
from moe_triton.runtime.rounds import Rounds
from moe_triton.schemes.rank_context import OPERATORS, Operator, RankContext

WHOLE: Phase = "whole"
_IN_PARTS = ("ring", "round", WHOLE)
_NUMBERS: dict[Operator, int] = {operator: number for number, operator in enumerate(OPERATORS)}


def operator_of(variant: Variant) -> Operator:
    """The operator that a plan of a variant is of."""
    return "dispatch" if isinstance(variant, DispatchVariant) else "combine"


class PhaseRun(NamedTuple):
    """A phase of an operator, or all of one, and what it runs with.

    Attributes:
        variant: what it is specialised for.
        bindings: a tensor or an integer for each placeholder of its plan that is not scratch.
        phase: which one.
        zone: that it works in; None for the zone of the round that goes on.
    """

    variant: Variant
    bindings: Bindings
    phase: Phase = WHOLE
    zone: int | None = None

    @property
    def operator(self) -> Operator:
        """Whose phase it is."""
        return operator_of(self.variant)

    def parts(self, context: RankContext) -> int:
        """Parts that it is cut into."""
        if self.phase not in _IN_PARTS:
            return 1
        tokens = self.bindings["num_tokens"]
        assert isinstance(tokens, int)
        return context.parts(self.operator, tokens)


def turns_of(
    phases: Sequence[PhaseRun], rounds: Rounds, executables: Executables, context: RankContext
) -> list[Turn]:
    """What runs phases, with the full waits that have to come between.

    Args:
        phases: in their order.
        rounds: as they are before the first one.
        executables: of the rank.
        context: of the rank.
    """
    ahead, turns = rounds.copy(), []
    for each in phases:
        operator = each.operator
        begins, ends = (each.phase == WHOLE or each.phase in some for some in (BEGINNING, ENDING))
        if each.phase == WHOLE and ahead.needs_wait(operator, False):
            waiting = executables.barrier(ahead.zone("barrier"), None)
            turns.append(Turn(_NUMBERS["barrier"], waiting, {}, True, True))
            ahead.begin("barrier")
            ahead.end("barrier", succeeded=True, capturing=False)
        if begins:
            ahead.begin(operator)
        zone = ahead.zone(operator) if each.zone is None else each.zone
        executable = executables.operator(each.variant, zone, each.phase, each.parts(context))
        turns.append(Turn(_NUMBERS[operator], executable, each.bindings, begins, ends))
        if ends:
            ahead.end(operator, succeeded=True, capturing=False)
    return turns
