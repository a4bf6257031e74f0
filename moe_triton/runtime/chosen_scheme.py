"""The scheme that ``comm_alg`` asks for, "auto" among them: decided once, before ranks compare settings."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from moe_triton.backends import check_name
from moe_triton.core.checks import check_choice, check_text
from moe_triton.core.config import Config
from moe_triton.core.errors import ArgumentError
from moe_triton.runtime.arguments import left_of
from moe_triton.schemes import SCHEMES, scheme_type
from moe_triton.schemes.choice import offering, scheme_of
from moe_triton.tables import machine_of
from moe_triton.tables.schemes import OUTPUTS, named

AUTO = "auto"


class Asked(NamedTuple):
    """What a caller says of how tokens travel.

    Attributes:
        comm_alg: a scheme, "" for the product's, or "auto", which None is too.
        outputs: "own" or "window": where outputs may lie.
        backend: name of the back end, whose machine "auto" goes by.
        folder: of tables that go before the package's; None for the user's own.
    """

    comm_alg: str | None
    outputs: str = "own"
    backend: str = "cpu"
    folder: str | os.PathLike[str] | None = None


class ChosenScheme(NamedTuple):
    """What was decided.

    Attributes:
        config: with the scheme.
        source: who says so.
    """

    config: Config
    source: str


def choose_scheme(asked: Asked, whole: Config, members: Sequence[int], exchange: bool) -> ChosenScheme:
    """A group's settings with the scheme that was asked for.

    With "auto" it is the first that takes the group of: what tables name, where it gives the same bits, and
    the product's own scheme.

    Args:
        asked: by the caller.
        whole: of the group, with any scheme.
        members: its ranks that are left.
        exchange: whether there is a tensor-parallel group.

    Raises:
        ArgumentError: an argument or setting is none, or a table cannot be used.
    """
    comm_alg = AUTO if asked.comm_alg is None else check_text("comm_alg", asked.comm_alg)
    outputs = check_choice("outputs", asked.outputs, OUTPUTS)
    backend = check_name(asked.backend)
    is_auto = comm_alg == AUTO
    # "auto" is not the original's, whose switches mean "".
    name, environment = ("", {}) if is_auto else (comm_alg, os.environ)
    choice = scheme_of(whole.product, name, whole.servers_of(members), environment)
    usual = replace(whole, scheme=choice.scheme).normalized()
    try:
        taken = left_of(usual, members, exchange)
    except ArgumentError as error:
        names = AUTO, "", *SCHEMES.get(whole.product, ())
        raise choice.explained(offering(error, names)) from None
    if not is_auto:
        return ChosenScheme(taken, f"{choice.scheme}: {choice.source}")
    machine = machine_of(backend, usual.product)
    for name, source in named(machine, usual, outputs, SCHEMES, asked.folder):
        if not scheme_type(replace(usual, scheme=name)).sums_alike:
            continue  # its bits would depend on a table
        with contextlib.suppress(ArgumentError):  # it lacks what the group needs
            return ChosenScheme(left_of(replace(usual, scheme=name), members, exchange), f"{name}: {source}")
    own = f"{choice.scheme}: the product's own; no table names another that serves the group on {machine}"
    return ChosenScheme(taken, own)
