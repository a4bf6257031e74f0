"""How many parts pay on an NPU, by the model, where half of the cores communicate in more than one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from autotune.model.clusters.group import INSIDE, OPERATORS, PLANNED, Group, OperatorName
from autotune.model.clusters.prices import Call
from autotune.model.constants import machine_named
from autotune.model.kernel_costs.remembered import KernelCosts
from moe_triton.core.errors import ArgumentError

PARTS = 1, 2, 4
HIDDEN, RANKS, TOKENS = (2048, 4096, 7168), (8, 16, 64, 256), (16, 64, 128, 256, 512)


@dataclass(frozen=True)
class Priced:
    """One operator on one group.

    Attributes:
        group: the group.
        operator: its name.
        us: by number of parts.
    """

    group: Group
    operator: OperatorName
    us: Mapping[int, float]

    @property
    def parts(self) -> int:
        """What takes the least time; of as good ones the fewest."""
        return min(self.us, key=lambda parts: (self.us[parts], parts))


def groups() -> Iterator[Group]:
    """Groups of int8 rows, which dispatch quantises by parts, in the sizes that schemes take."""
    for name in PLANNED:
        for comm_alg, hidden, ranks, tokens in product(INSIDE[name], HIDDEN, RANKS, TOKENS):
            group = Group(ranks, tokens, hidden, comm_alg=comm_alg, product=name)
            if _is_taken(group):
                yield group


def _is_taken(group: Group) -> bool:
    try:
        return bool(group.config)
    except ArgumentError:
        return False


def priced(group: Group, kernel_costs: KernelCosts) -> list[Priced]:
    """Both operators, each if it can be cut."""
    machine = machine_named(group.product)
    call = Call.typical(replace(group, parts=1), kernel_costs)
    if not group.may_be_captured(machine):
        call = replace(call, group=replace(call.group, mode="stream"))
    priced_operators = []
    for operator in OPERATORS:
        calls = {parts: replace(call, group=replace(call.group, parts=parts)) for parts in PARTS}
        if len({len(each.plan(operator, machine).launches) for each in calls.values()}) > 1:
            us = {parts: each.priced(operator, machine)[0].us for parts, each in calls.items()}
            priced_operators.append(Priced(group, operator, us))
    return priced_operators
