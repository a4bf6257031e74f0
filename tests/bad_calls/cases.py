"""The list of bad calls, from the declarations of the functions of a chain."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from moe_triton.core.errors import ArgumentError, MoeTritonError
from moe_triton.torch_npu_ops.declared import Argument, arguments_of
from tests.bad_calls.chains import Arguments, Step
from tests.bad_calls.values import FAKE, Mutation, bad_values

# Neither read nor written: whatever it is, if it is a tensor.
NEVER_READ = ("x_ref",)


@dataclass(frozen=True)
class BadCall:
    """A call with one bad argument.

    Attributes:
        step: what is called.
        declared: the argument that is bad.
        label: what is bad about it.
        strict: whether the error must be about this argument, and not about another that it contradicts.
        mutation: passes the bad value on.
    """

    step: Step
    declared: Argument
    label: str
    strict: bool
    mutation: Mutation

    @property
    def name(self) -> str:
        """Which call it is, in words."""
        return f"{self.step.name}({self.declared.name}: {self.label})"

    def wrong(self, good: Arguments) -> str | None:
        """Makes the call and says what is wrong with how it ended, or None."""
        basis = _good_of(self.declared, good)

        def use(bad: Any) -> None:
            self.step.function(**{**good, self.declared.name: bad})

        try:
            self.mutation(basis, use)
        except MoeTritonError as error:
            return self._wrong_error(error)
        except BaseException as error:
            return f"{self.name}: {type(error).__name__}: {str(error).splitlines()[:1]}"
        return f"{self.name}: not refused"

    def _wrong_error(self, error: MoeTritonError) -> str | None:
        if not isinstance(error, ArgumentError):
            return f"{self.name}: {type(error).__name__}: {error}"
        about = set(re.findall(r"\w+", error.argument))
        names = {argument.name for argument in arguments_of(self.step.function)}
        if not about & ({self.declared.name} if self.strict else names):
            return f"{self.name}: about {error.argument}: {error}"
        return None if error.rule and error.remedy else f"{self.name}: no rule or remedy: {error}"


def bad_calls(step: Step, good: Arguments) -> list[BadCall]:
    """Every bad call of a step, from the declarations of its arguments."""
    return [
        BadCall(step, argument, label, strict, mutation)
        for argument in arguments_of(step.function)
        for label, strict, mutation in bad_values(argument, _good_of(argument, good))
        if (argument.name, label) not in step.accepted and not _is_traced(step, label)
        if argument.name not in NEVER_READ or not isinstance(good.get(argument.name), torch.Tensor)
    ]


def _good_of(argument: Argument, good: Arguments) -> Any:
    value = good.get(argument.name, argument.default)
    # What is refused whatever it is, as another product has it: then it is a tensor that is refused.
    return torch.zeros(2, 2) if value is None and argument.kind is torch.Tensor else value


def _is_traced(step: Step, label: str) -> bool:
    """Whether a call is traced instead: torch_npu's functions are operators, and take fake tensors."""
    return label == FAKE and "npu" in step.name
