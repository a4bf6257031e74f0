"""What a rule is. The tables of rules are in the modules beside this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, ParamSpec, TypeAlias

from moe_triton.core.config import Config, Generation
from moe_triton.core.errors import TILING_FAILED, ArgumentError
from moe_triton.limits.call import Call

Subject = ParamSpec("Subject")

# For which `Config.generation` a rule holds. Where only one generation has a limit, or the narrower one, None
# goes with the other.
Generations: TypeAlias = tuple[Generation | None, ...]
EITHER: Generations = (None, "v3", "v4")
NONE_CHOSEN: Generations = (None,)
CHOSEN: Generations = ("v3", "v4")
ONLY_V3: Generations = ("v3",)
ONLY_V4: Generations = ("v4",)
UNTIL_V3: Generations = (None, "v3")
SINCE_V4: Generations = (None, "v4")


@dataclass(frozen=True, eq=False)
class Rule(Generic[Subject]):
    """One rule: what it is about, when it holds, and what to say when it does not.

    Attributes:
        argument: what it is about: mostly a field of `Config` or of `Call`.
        limit: the rule without any value in it, for the documentation.
        holds: whether it does.
        rule: the rule as the message says it of this value, after "but".
        remedy: what to do about it; of this value where that depends on it.
        value: what the argument is, for the message; "" for what the call or the `Config` has under its name.
        relaxed: the limit with ``relaxed=True``, where that is another one.
        of_buffer: the limit that `EPBuffer` has instead, relaxed or not, where that is another one.
        code: status code of the error.
        generations: of the published limits that have it; None among them: it holds where none is chosen.
    """

    argument: str
    limit: str
    holds: Callable[Subject, bool]
    rule: Callable[Subject, str] | str
    remedy: Callable[Subject, str] | str
    value: Callable[Subject, object] | str = ""
    relaxed: str = ""
    of_buffer: str = ""
    code: int = TILING_FAILED
    generations: Generations = EITHER

    def check(self, *subject: Subject.args, **named: Subject.kwargs) -> None:
        """Checks it.

        Raises:
            ArgumentError: it does not hold.
        """
        if not self.holds(*subject, **named):
            value = self.value(*subject, **named) if callable(self.value) else self.value
            rule = self.rule(*subject, **named) if callable(self.rule) else self.rule
            remedy = self.remedy(*subject, **named) if callable(self.remedy) else self.remedy
            raise ArgumentError(self.argument, value or self._found(*subject), rule, remedy, code=self.code)

    def _found(self, *subject: object) -> object:
        value = value_of(self.argument, *subject)
        return repr(value) if isinstance(value, str) or value is None else value

    def of(self, generations: Generations) -> Rule[Subject]:
        """The same rule of fewer generations of the published limits."""
        return replace(self, generations=generations)


ConfigRule: TypeAlias = Rule[[Config]]
CallRule: TypeAlias = Rule[[Config, Call]]


@dataclass(frozen=True, eq=False)
class RuleSet:
    """The rules of one product, version or scheme, in the order in which they are checked.

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


def value_of(argument: str, *subject: object) -> Any:
    """An argument's value in a `Config`, or in a `Config` and a `Call`."""
    field = "scheme" if argument == "comm_alg" else argument
    return next(getattr(each, field) for each in reversed(subject) if hasattr(each, field))


def use_one(names: Sequence[str]) -> str:
    """The remedy of a name that is none of these."""
    *others, last = map(repr, names)
    return f"Use {', '.join(others)} or {last}."


def between(
    field: str,
    low: int,
    high: int,
    remedy: str,
    *,
    too_small: str = "",
    relaxed_low: int | None = None,
    relaxed_high: int | None = None,
    buffer_low: int | None = None,
    buffer_high: int | None = None,
) -> ConfigRule:
    """The rule that a field of `Config` lies between two numbers, both allowed.

    Args:
        field: its name.
        low: the least.
        high: the most.
        remedy: what to do about a larger one.
        too_small: what to do about a smaller one without ``relaxed``; pass the least if not given.
        relaxed_low: the least with ``relaxed=True``, where that is another one.
        relaxed_high: the most with ``relaxed=True``, where that is another one.
        buffer_low: the least that `EPBuffer` takes, where that is another one.
        buffer_high: the most that it takes, where that is another one.
    """
    usual = low, high
    relaxed = low if relaxed_low is None else relaxed_low, high if relaxed_high is None else relaxed_high
    of_buffer = low if buffer_low is None else buffer_low, high if buffer_high is None else buffer_high

    def limits(c: Config) -> tuple[int, int]:
        if c.is_of_buffer and of_buffer != usual:
            return of_buffer
        return relaxed if c.relaxed else usual

    def span(least: int, most: int) -> str:
        return f"{least} to {most}" if least < most else f"{most}"

    def holds(c: Config) -> bool:
        least, most = limits(c)
        return bool(least <= getattr(c, field) <= most)

    def what_to_do(c: Config) -> str:
        least, most = limits(c)
        if getattr(c, field) >= least:
            return remedy
        if too_small and not c.relaxed and not c.is_of_buffer:
            return too_small
        return f"Pass {least} or more." if least < most else f"Pass {least}."

    return Rule(
        field,
        span(*usual),
        holds,
        lambda c: f"{c.product} takes {span(*limits(c))}",
        what_to_do,
        relaxed="" if relaxed == usual else span(*relaxed),
        of_buffer="" if of_buffer == usual else span(*of_buffer),
    )


def not_of_buffer(rule: ConfigRule) -> ConfigRule:
    """A rule that `EPBuffer` does not have."""
    return replace(rule, holds=lambda c: c.is_of_buffer or rule.holds(c), of_buffer="any")


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
        lambda c: f"{c.product} takes {wide if c.relaxed else sizes} here",
        remedy,
        relaxed=wide,
    )


def only(
    argument: str,
    choices: Sequence[object],
    rule: Callable[..., str] | str,
    remedy: str,
    *,
    limit: str = "",
    code: int = TILING_FAILED,
) -> Rule[...]:
    """The rule that an argument has one of a few values.

    Args:
        argument: its name.
        choices: the values.
        rule: as in `Rule`.
        remedy: as in `Rule`.
        limit: for the documentation; the values if not given.
        code: status code of the error.
    """
    limit = limit or " or ".join(str(choice) for choice in choices)
    return Rule(
        argument, limit, lambda *subject: value_of(argument, *subject) in choices, rule, remedy, code=code
    )


def absent(argument: str, why: str, remedy: str, *, code: int = TILING_FAILED) -> CallRule:
    """The rule that an argument is left out.

    Args:
        argument: its name.
        why: the reason, after "but".
        remedy: what to do about it.
        code: status code of the error.
    """
    field = f"has_{argument}"
    return Rule(
        argument, "None", lambda c, call: not getattr(call, field), why, remedy, value="given", code=code
    )
