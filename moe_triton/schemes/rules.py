"""Which rules apply to what, and the checks themselves: of a product's rules, and of its scheme's own."""

from __future__ import annotations

import functools
import itertools

from moe_triton.core.config import Config
from moe_triton.core.errors import ArgumentError
from moe_triton.limits import a2, a3, a3_v1
from moe_triton.limits.call import Call
from moe_triton.limits.common import COMMON, GENERATIONS
from moe_triton.limits.rule import CallRule, ConfigRule, RuleSet
from moe_triton.operators.description import Symbols
from moe_triton.schemes import SCHEMES, class_at, scheme_type
from moe_triton.schemes.choice import between_servers
from moe_triton.schemes.scheme import Scheme


# Rules of a product are made once of the schemes that there are: which is a way between servers, classes say.
@functools.cache
def _of_a2(*schemes: tuple[str, str]) -> RuleSet:
    places = dict(schemes)
    return a2.rules(tuple(places), between_servers(places))


@functools.cache
def _of_a3(is_version_1: bool, *schemes: tuple[str, str]) -> RuleSet:
    refused = {name: class_at(place).refuses.get("shared experts") for name, place in schemes}
    return a3_v1.rules(refused) if is_version_1 else a3.rules(refused)


def rule_sets() -> tuple[RuleSet, ...]:
    """Every set, in the order of the documentation."""
    each = (
        (product, version, scheme) for product in SCHEMES for version in (2, 1) for scheme in SCHEMES[product]
    )
    return tuple(dict.fromkeys(itertools.chain.from_iterable(rule_sets_for(*one) for one in each)))


def rule_sets_for(product: str, version: int, scheme: str) -> tuple[RuleSet, ...]:
    """The sets that apply, in the order in which they are checked."""
    applicable, schemes = [COMMON], SCHEMES.get(product, {})
    if schemes:
        items = schemes.items()
        applicable.append(_of_a2(*items) if product == "A2" else _of_a3(version == 1, *items))
    if scheme in schemes and (own := class_at(schemes[scheme]).rules.get(version)):
        applicable.append(own)
    return tuple(applicable)


def rules_for(config: Config) -> tuple[ConfigRule, ...]:
    """The rules on this `Config`."""
    sets = rule_sets_for(config.product, config.version, config.scheme)
    return tuple(rule for rule_set in sets for rule in rule_set.config if _is_of(rule, config))


def call_rules_for(config: Config, call: Call) -> tuple[CallRule, ...]:
    """The rules on this call."""
    sets = rule_sets_for(config.product, call.version, config.scheme)
    return tuple(rule for rule_set in sets for rule in rule_set.call if _is_of(rule, config))


def _is_of(rule: ConfigRule | CallRule, config: Config) -> bool:
    """Whether a rule belongs to the generation that a `Config` names."""
    # Of a generation that there is not, every rule holds: the one that refuses it among them.
    return config.generation not in GENERATIONS or config.generation in rule.generations


def check_rules(config: Config) -> None:
    """Checks every rule on a `Config`.

    Raises:
        ArgumentError: the first rule that does not hold.
    """
    config = config.normalized()
    for rule in rules_for(config):
        rule.check(config)


def check_config(config: Config) -> None:
    """Checks every rule on a `Config`, and then that its ranks reach each other.

    Raises:
        ArgumentError: the first rule that does not hold, under the name of the field of `Config`.
    """
    check_rules(config)
    scheme_type(config).check_reaches(config)


def check_argument(argument: str, config: Config, call: Call) -> None:
    """Checks the rules on one argument of a call of which nothing else is known yet.

    Args:
        argument: its name in torch_npu.
        config: the group's settings, which may break rules.
        call: what is asked for, as far as this argument goes.

    Raises:
        ArgumentError: the first rule that does not hold.
    """
    for rule in call_rules_for(config.normalized(), call):
        if rule.argument == argument:
            rule.check(config, call)


def check_call(config: Config, call: Call) -> None:
    """Checks the rules on the arguments of a call that `Config` does not hold.

    Args:
        config: one that keeps every rule.
        call: what is asked for.

    Raises:
        ArgumentError: the first rule that does not hold, under torch_npu's name of the argument.
    """
    config = config.normalized()
    for rule in call_rules_for(config, call):
        rule.check(config, call)


def check_given(scheme: Scheme | type[Scheme], config: Config, s: Symbols) -> None:
    """Checks that a scheme takes each tensor that a call gives it.

    Args:
        scheme: which one.
        config: of the group.
        s: of the call.

    Raises:
        ArgumentError: the scheme has no use for one, under the name that the caller has for it.
    """
    for argument in s.operator.tensors:
        if not s.is_given(argument.name):
            continue
        called = s.operator.called(argument.name)
        scheme.check_offers(called, called, "given")
        if argument.by_scheme and argument.name not in scheme.takes:
            schemes = SCHEMES[config.product].items()
            others = [name for name, place in schemes if argument.name in class_at(place).takes]
            instead = f", or use comm_alg={' or '.join(map(repr, others))}" if others else ""
            rule = f"comm_alg={config.scheme!r} takes none"
            raise ArgumentError(called, "given", rule, f"Leave it out{instead}.")
