"""What a rule is. The tables of rules are in the modules beside this one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, ParamSpec, TypeAlias

from moe_triton.config import Config
from moe_triton.errors import TILING_FAILED, ArgumentError
from moe_triton.limits.call import Call

Subject = ParamSpec("Subject")


@dataclass(frozen=True, eq=False)
class Rule(Generic[Subject]):
    """One rule: what it is about, when it holds, and what to say when it does not.

    Attributes:
        argument: what it is about: a field of `Config`, or an argument of the torch_npu functions.
        limit: the rule without any value in it, for the documentation.
        holds: whether it does.
        value: what the argument is, for the message.
        rule: the rule as the message says it of this value, after "but".
        remedy: what to do about it.
        relaxed: the limit with ``relaxed=True``, where that is another one.
        code: status code of the error.
    """

    argument: str
    limit: str
    holds: Callable[Subject, bool]
    value: Callable[Subject, object]
    rule: Callable[Subject, str]
    remedy: str
    relaxed: str = ""
    code: int = TILING_FAILED

    def check(self, *subject: Subject.args, **named: Subject.kwargs) -> None:
        """Checks it.

        Raises:
            ArgumentError: it does not hold.
        """
        if not self.holds(*subject, **named):
            value, rule = self.value(*subject, **named), self.rule(*subject, **named)
            raise ArgumentError(self.argument, value, rule, self.remedy, code=self.code)


ConfigRule: TypeAlias = Rule[[Config]]
CallRule: TypeAlias = Rule[[Config, Call]]


@dataclass(frozen=True, eq=False)
class RuleSet:
    """The rules of one product, generation or scheme, in the order in which they are checked.

    A later rule may rely on the earlier ones (no division by zero), and the rules on a call rely on all of
    the rules on its `Config`.

    Attributes:
        title: what they are the rules of.
        config: rules on a `Config`.
        call: rules on a call's other arguments.
    """

    title: str
    config: tuple[ConfigRule, ...] = ()
    call: tuple[CallRule, ...] = ()


def between(field: str, low: int, high: int, remedy: str, *, relaxed_low: int | None = None) -> ConfigRule:
    """The rule that a field of `Config` lies between two numbers, both allowed.

    Args:
        field: its name.
        low: the least.
        high: the most.
        remedy: what to do about it.
        relaxed_low: the least with ``relaxed=True``, where that is another one.
    """
    least = low if relaxed_low is None else relaxed_low

    def lower(c: Config) -> int:
        return least if c.relaxed else low

    def span(lowest: int) -> str:
        return f"{lowest} to {high}" if lowest < high else f"{high}"

    return Rule(
        field,
        span(low),
        lambda c: lower(c) <= getattr(c, field) <= high,
        lambda c: getattr(c, field),
        lambda c: f"{c.product} takes {span(lower(c))}",
        remedy,
        relaxed="" if relaxed_low is None else span(least),
    )


def one_of(field: str, choices: tuple[int, ...], remedy: str, *, relaxed_low: int) -> ConfigRule:
    """The rule that a field of `Config` is one of some sizes; with ``relaxed=True``, any up to the largest.

    Args:
        field: its name.
        choices: what it may be, ascending.
        remedy: what to do about it.
        relaxed_low: the least with ``relaxed=True``.
    """
    sizes = ", ".join(str(choice) for choice in choices)
    wide = f"{relaxed_low} to {choices[-1]}"
    return Rule(
        field,
        sizes,
        lambda c: (
            relaxed_low <= getattr(c, field) <= choices[-1] if c.relaxed else getattr(c, field) in choices
        ),
        lambda c: getattr(c, field),
        lambda c: f"{c.product} takes {wide if c.relaxed else sizes} here",
        remedy,
        relaxed=wide,
    )


def absent(
    argument: str, given: Callable[[Call], bool], why: str, remedy: str, *, code: int = TILING_FAILED
) -> CallRule:
    """The rule that an argument is left out.

    Args:
        argument: its name in torch_npu.
        given: whether it was given.
        why: the reason, after "but".
        remedy: what to do about it.
        code: status code of the error.
    """
    return Rule(
        argument,
        "None",
        lambda c, call: not given(call),
        lambda c, call: "given",
        lambda c, call: why,
        remedy,
        code=code,
    )
