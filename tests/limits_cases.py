"""Cases of the tests of limits: a value that just passes, and one that just fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from moe_triton.core.config import Config
from moe_triton.core.errors import NULL_ARGUMENT, TILING_FAILED, ArgumentError
from moe_triton.limits import GENERATIONS, Call
from moe_triton.schemes.rules import check_rules

A3 = Config(num_ranks=8, num_max_tokens_per_rank=64, hidden=7168, num_topk=8, num_experts=64)
INBAND = replace(A3, scheme="fullmesh_v2")
V1 = replace(A3, version=1)
SHARED_V1 = replace(V1, num_shared_experts=1, num_shared_ranks=4)
A2 = replace(A3, product="A2", scheme="fullmesh", num_ranks=16)
A2_V1 = replace(A2, version=1)
HIERARCHY = replace(A2, scheme="hierarchy")
HIERARCHY_V1 = replace(HIERARCHY, version=1)
A3_HIERARCHY = replace(A3, scheme="hierarchy", num_ranks=16)

# One of each product, version and scheme.
FAMILIES = (A3, INBAND, V1, A2, A2_V1, HIERARCHY, HIERARCHY_V1, A3_HIERARCHY)


def in_all_generations(*bases: Config) -> tuple[Config, ...]:
    """Each of them in the limits that either generation accepts, in those of v3, and in those of v4.

    Those of v3 are older than A3's hierarchy.
    """
    return tuple(
        replace(base, generation=generation)
        for base in bases
        for generation in GENERATIONS
        if not (base == A3_HIERARCHY and generation == "v3")
    )


def family_of(config: Config) -> Config:
    """The same, whatever its generation."""
    return replace(config, generation=None)


# And of each generation of the limits: every rule that applies to one has a case on it.
VARIANTS = in_all_generations(*FAMILIES)

CALL = Call(num_tokens=64, group="ep", has_topk_weights=True)


class ConfigCase(NamedTuple):
    """The sizes that just pass and those that just fail."""

    shown: str  # argument and value, as the message begins
    passes: dict[str, Any]
    fails: dict[str, Any]
    base: Config


class CallCase(NamedTuple):
    """The same for the other arguments of a call."""

    shown: str
    passes: dict[str, Any]
    fails: dict[str, Any]
    base: Config
    code: int


def size(field: str, passing: int, failing: int, base: Config = A3, **also: Any) -> ConfigCase:
    """One field at its edge; other fields as given, the same on both sides."""
    return ConfigCase(f"{field} is {failing}", {field: passing, **also}, {field: failing, **also}, base)


def sizes(shown: str, passes: dict[str, Any], fails: dict[str, Any], base: Config = A3) -> ConfigCase:
    """Several fields at once."""
    return ConfigCase(shown, passes, fails, base)


def argument(
    field: str,
    passing: Any,
    failing: Any,
    base: Config = A3,
    shown: str = "",
    code: int = TILING_FAILED,
    **also: Any,
) -> CallCase:
    """One argument at its edge; other arguments as given, the same on both sides."""
    shown = shown or f"{field} is {failing!r}"
    return CallCase(shown, {field: passing, **also}, {field: failing, **also}, base, code)


def arguments(
    shown: str, passes: dict[str, Any], fails: dict[str, Any], base: Config = A3, code: int = TILING_FAILED
) -> CallCase:
    """Several arguments at once."""
    return CallCase(shown, passes, fails, base, code)


def refused(name: str, base: Config = A3, code: int = TILING_FAILED, **also: Any) -> CallCase:
    """A tensor that may not be given."""
    return argument(f"has_{name}", False, True, base, f"{name} is given", code, **also)


def needed(name: str, field: str, base: Config = A3, **also: Any) -> CallCase:
    """A tensor that must be given."""
    return argument(field, True, False, base, f"{name} is None", NULL_ARGUMENT, **also)


def call_of(case: CallCase, changes: dict[str, Any]) -> Call:
    """The call of a case, in its version."""
    return replace(CALL, version=case.base.version, **changes)


def variant_of(config: Config) -> tuple[str, int, str, str | None]:
    """What decides which rules apply."""
    return config.product, config.version, config.scheme, config.generation


def name_of(case: ConfigCase | CallCase) -> str:
    """A case as pytest shows it."""
    product, version, scheme, generation = variant_of(case.base)
    return f"{product}-{version}-{scheme}-{generation}: {case.shown[:50]}"


def check_message(error: ArgumentError, shown: str, code: int) -> None:
    """Argument, value, rule, remedy and code: all are in the message."""
    assert str(error) == f"{shown}, but {error.rule}. {error.remedy} [{code}]"
    assert f"{error.argument} is {error.value}" == shown
    assert error.code == code
    assert error.rule
    assert error.remedy.endswith(".")


def check_edge(case: ConfigCase) -> None:
    """A value passes that just may, and one fails that just may not."""
    check_rules(replace(case.base, **case.passes))
    with pytest.raises(ArgumentError) as caught:
        check_rules(replace(case.base, **case.fails))
    check_message(caught.value, case.shown, TILING_FAILED)
