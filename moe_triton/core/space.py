"""`Space`: the settings of a kernel that change its speed and never its results.

A kernel's module declares its space beside its code; `autotune` searches it, and tables keep what was found.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from moe_triton.core.errors import ArgumentError

Settings = Mapping[str, int]
"""Values by the names of settings."""

PROGRAMS = "PROGRAMS"
"""Most programs of a launch; 0 for as many as there are blocks. Not a constant of the kernel."""

MULTIBUFFER = "MULTIBUFFER"
"""Whether an NPU's compiler double-buffers what loops load and store. An option, not a constant."""

MOST = 2**63 - 1
"""The largest value of a setting: native code counts bytes in 64 bits."""

_NO_CONSTANTS = {PROGRAMS: 0, MULTIBUFFER: 1}


@dataclass(frozen=True)
class Space:
    """The settings of one kernel, and what tables know it by.

    Attributes:
        choices: values that each setting may have, by the name of a constant of the kernel, of `PROGRAMS` or
            of `MULTIBUFFER`. The kernel's own value need not be among them.
        variant: what the kernel does beyond the plain one: its features' names with dashes between them.
        dtype: of tokens, ``"bf16"`` or ``"fp16"``; empty if the code does not depend on it.
        sizes: sizes that the code depends on: "hidden", "topk".
        allows: whether values go together.
        derived: constants of the kernel that follow from its settings.
        usual: of a scheme's settings the values where nobody says anything; the first of the choices for
            those that it does not name. Of a kernel its constants say that.
    """

    choices: Mapping[str, tuple[int, ...]]
    variant: str = ""
    dtype: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    allows: Callable[[Settings], bool] = lambda values: True
    derived: Callable[[Settings], Settings] = lambda values: {}
    usual: Settings = field(default_factory=dict)

    def candidates(self, own: Settings) -> Iterator[dict[str, int]]:
        """Every combination that is allowed, the kernel's own values first.

        Args:
            own: the kernel's.
        """
        yield dict(own)
        pools = [dict.fromkeys((own[name], *values)) for name, values in self.choices.items()]
        for values in itertools.product(*pools):
            candidate = dict(zip(self.choices, values, strict=True))
            if candidate != dict(own) and self.allows(candidate):
                yield candidate

    def own(self, constants: Mapping[str, object]) -> dict[str, int]:
        """The settings of a kernel with these constants."""
        values = {name: constants.get(name, _NO_CONSTANTS.get(name)) for name in self.choices}
        return {name: int(value) for name, value in values.items()}  # type: ignore[call-overload]

    def check(self, kernel: str, values: Settings) -> None:
        """Checks settings that somebody brings.

        Args:
            kernel: its name, for the message.
            values: all of its settings or some.

        Raises:
            ArgumentError: the kernel has no such setting, or the values do not go together.
        """
        remedy = "Leave it out, or tune again: moe-triton tune kernels."
        for name, value in values.items():
            if name not in self.choices:
                rule = f"{kernel} has the settings {', '.join(self.choices) or 'none'}"
                raise ArgumentError(f"setting {name}", value, rule, remedy)
        try:
            is_allowed = self.allows(values)
        except ArithmeticError:  # a size that is 0
            is_allowed = False
        if not is_allowed:
            raise ArgumentError("settings", text_of(values), f"{kernel} cannot have these together", remedy)


def double_buffers(
    target: str, variant: str = "", dtype: str = "", sizes: Mapping[str, int] | None = None
) -> Space | None:
    """The space of a kernel that has no setting but the NPU's compiler's; None on a CPU, which has none.

    Double buffers cost room and flags: they pay where a kernel computes between loads and stores for long
    enough. Kernels that only copy always gain, and have no space.

    Args:
        target: name of the back end.
        variant, dtype, sizes: see `Space`.
    """
    return None if target == "cpu" else Space({MULTIBUFFER: (0, 1)}, variant, dtype, sizes or {})


def named_features(**features: int) -> str:
    """A variant's name: what it does with dashes between, a number behind what there are several of."""
    return "-".join(f"{name}{value}" if value > 1 else name for name, value in features.items() if value)


def text_of(values: Settings) -> str:
    """Settings as tables have them: ``TILE=3584 UNROLL=0``; "default" for none."""
    return " ".join(f"{name}={value}" for name, value in values.items()) or "default"


def settings_of(text: str) -> dict[str, int]:
    """What `text_of` wrote.

    Raises:
        ValueError: it did not.
    """
    pairs = [] if text == "default" else [word.partition("=") for word in text.split(" ")]
    if not all(name.isidentifier() and equals and value.isdecimal() for name, equals, value in pairs):
        raise ValueError(f"settings {text!r} must be words NAME=NUMBER with spaces between them")
    if any(len(value) > len(str(MOST)) or int(value) > MOST for _, _, value in pairs):
        raise ValueError(f"settings {text!r} must have numbers up to {MOST}")
    return {name: int(value) for name, _, value in pairs}
