"""Which scheme ``comm_alg`` stands for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moe_triton.core.errors import ArgumentError
from moe_triton.core.hccl import SWITCHES, SWITCHES_SET
from moe_triton.limits.rule import use_one
from moe_triton.schemes import SCHEMES, class_at


class Choice(NamedTuple):
    """A scheme, and who says so.

    Attributes:
        scheme: its name.
        asked: what it was asked for as, for messages.
        product: whose it is.
        is_other: whether it is another one than was asked for.
    """

    scheme: str
    asked: str
    product: str
    is_other: bool = False

    @property
    def source(self) -> str:
        """Who says so."""
        if self.is_other:
            return f"a group inside one server is {self.scheme} on {self.product}, also with {self.asked}"
        return self.asked

    def explained(self, error: ArgumentError) -> ArgumentError:
        """An error about the scheme or its rules, with who chose it where that was not the caller."""
        value, rule = error.value, error.rule
        if SWITCHES_SET not in self.asked:
            return error
        if error.argument == "comm_alg":
            value = f"{value} (that is {self.asked})"
        elif self.scheme in rule:
            rule = f"{rule} ({self.scheme} is {self.asked})"
        return ArgumentError(error.argument, value, rule, error.remedy, code=error.code)


def between_servers(schemes: Mapping[str, str]) -> str:
    """The name of the scheme that is a way between servers, of those of a product; "" where none is."""
    return next((name for name, place in schemes.items() if class_at(place).between_servers), "")


def scheme_of(
    product: str, comm_alg: str | None, num_servers: int, environment: Mapping[str, str] = os.environ
) -> Choice:
    """The scheme that ``comm_alg`` selects; "" and None stand for the product's default.

    A way between servers is none inside one: such a group has the default, as the original's does.

    Args:
        product: whose.
        comm_alg: what the user asked for. Any other name is returned as it is: the rules judge it.
        num_servers: of the group.
        environment: with HCCL_INTRA_PCIE_ENABLE=1 and HCCL_INTRA_ROCE_ENABLE=0 the default is the product's
            way between servers, if it has one.
    """
    schemes, asked = SCHEMES.get(product, {}), f"comm_alg={comm_alg!r}"
    default = next(iter(schemes or SCHEMES["A3"]))
    scheme = comm_alg or default
    if not comm_alg and all(environment.get(name) == value for name, value in SWITCHES.items()):
        other = between_servers(schemes)
        scheme, asked = (other, f"{asked} with {SWITCHES_SET}") if other else (scheme, asked)
    if num_servers == 1 and scheme in schemes and class_at(schemes[scheme]).between_servers:
        return Choice(default, asked, product, is_other=True)
    return Choice(scheme, asked, product)


def offering(error: ArgumentError, names: Sequence[str]) -> ArgumentError:
    """An error, which names what the caller may choose from where it is about the name of a scheme.

    Args:
        error: any.
        names: that the caller takes as ``comm_alg``. Rules name the schemes that there are.
    """
    if error.argument != "comm_alg":
        return error
    return ArgumentError(error.argument, error.value, error.rule, use_one(names), code=error.code)
