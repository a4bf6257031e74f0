"""Which scheme ``comm_alg`` stands for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from moe_triton.core.errors import ArgumentError
from moe_triton.core.hccl import INTRA_PCIE, INTRA_ROCE
from moe_triton.schemes import SCHEMES

HIERARCHY_SWITCHES = {INTRA_PCIE: "1", INTRA_ROCE: "0"}
"""What A2's "" is hierarchy with."""
_SET = " and ".join(f"{name}={value}" for name, value in HIERARCHY_SWITCHES.items())


class Choice(NamedTuple):
    """A scheme, and who says so.

    Attributes:
        scheme: its name.
        asked: what it was asked for as, for messages.
        is_other: whether it is another one than was asked for.
    """

    scheme: str
    asked: str
    is_other: bool = False

    @property
    def source(self) -> str:
        """Who says so."""
        if self.is_other:
            return f"a group inside one server is {self.scheme} on A2, also with {self.asked}"
        return self.asked

    def explained(self, error: ArgumentError) -> ArgumentError:
        """An error about the scheme or its rules, with who chose it where that was not the caller."""
        value, rule = error.value, error.rule
        if _SET not in self.asked:
            return error
        if error.argument == "comm_alg":
            value = f"{value} (that is {self.asked})"
        elif self.scheme in rule:
            rule = f"{rule} ({self.scheme} is {self.asked})"
        return ArgumentError(error.argument, value, rule, error.remedy, code=error.code)


def scheme_of(
    product: str, comm_alg: str | None, num_servers: int, environment: Mapping[str, str] = os.environ
) -> Choice:
    """The scheme that ``comm_alg`` selects; "" and None stand for the product's default.

    On A2 hierarchy is a way between servers: a group inside one has fullmesh, as the original's does.

    Args:
        product: whose.
        comm_alg: what the user asked for. Any other name is returned as it is: the rules judge it.
        num_servers: of the group.
        environment: A2's default is hierarchy if and only if it has HCCL_INTRA_PCIE_ENABLE=1 and
            HCCL_INTRA_ROCE_ENABLE=0.
    """
    asked = f"comm_alg={comm_alg!r}"
    scheme = comm_alg or next(iter(SCHEMES.get(product, SCHEMES["A3"])))
    if product != "A2":
        return Choice(scheme, asked)
    if not comm_alg and all(environment.get(name) == value for name, value in HIERARCHY_SWITCHES.items()):
        scheme, asked = "hierarchy", f"{asked} with {_SET}"
    if scheme == "hierarchy" and num_servers == 1:
        return Choice("fullmesh", asked, is_other=True)
    return Choice(scheme, asked)
