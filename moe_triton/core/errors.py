"""Errors that moe_triton raises.

Each error names the argument, the value it had, the rule it broke and what to do about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Status codes of the C interface behind torch_npu (docs/operators.md, "Status codes").
NULL_ARGUMENT = 161001
INVALID_ARGUMENT = 161002
TILING_FAILED = 561002


_MOST_CHARACTERS = 400


def _shown(value: object) -> str:
    """A value in a message, whatever it is."""
    try:
        text = str(value)
    except Exception:  # raised by a caller's own class, or for an integer with too many digits
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


class MoeTritonError(Exception):
    """Base of every error raised by this package on purpose."""


class ArgumentError(MoeTritonError, ValueError):
    """An argument breaks a rule. Raised before anything is sent; the buffer stays usable.

    Attributes:
        argument: name of the argument.
        value: what it was.
        rule: what it must be.
        remedy: what to do about it.
        code: published status code: 161001 if something required is missing, or a group's name is empty or
            too long; 161002 for a wrong type, dtype, device or group; 561002 for a wrong shape or number.
    """

    def __init__(
        self, argument: str, value: object, rule: str, remedy: str, *, code: int = TILING_FAILED
    ) -> None:
        self.argument = argument
        self.value = value
        self.rule = rule
        self.remedy = remedy
        self.code = code
        said = f"{argument} is {_shown(value)}, but {rule}. {remedy} [{code}]"
        # What files hold may be no text that can be printed: JSON has halves of characters.
        super().__init__(said.encode(errors="backslashreplace").decode())

    def renamed(self, names: Mapping[str, str]) -> ArgumentError:
        """The same error about the argument as the caller knows it.

        Args:
            names: the caller's name by ours; an argument that is not in it keeps its name.
        """
        name = names.get(self.argument, self.argument)
        return ArgumentError(name, self.value, self.rule, self.remedy, code=self.code)


class ConfigMismatchError(MoeTritonError):
    """Ranks of one group differ in their settings or calls, or one of them could not be constructed.

    It names each field that differs, its values and their ranks. After different calls the buffer is broken.
    """


class WindowError(MoeTritonError):
    """The shared window cannot be made or mapped."""


class BufferStateError(MoeTritonError):
    """The buffer cannot serve this call: closed, broken by an earlier time-out, or in use."""


class RankMaskedError(BufferStateError):
    """The other ranks have masked this one, and go on without it."""


class CopyError(MoeTritonError, TypeError):
    """What belongs to one process, or to one call, cannot be copied or pickled."""


class CommunicationTimeoutError(MoeTritonError, TimeoutError):
    """A wait passed its deadline.

    Attributes:
        operator: "dispatch" or "combine" (or "rendezvous" at construction).
        number: which one since construction, from 0.
        zone: the window zone it used.
        missing_ranks: ranks that held it up: whose data had not arrived, or that those are stuck behind.
        uncertain_ranks: those of them that may only be stuck behind others.
        uncertainty: why that is not known; empty if there are none.
    """

    _what_happened = "timed out waiting for"

    def __init__(
        self,
        operator: str,
        number: int,
        zone: int,
        missing_ranks: Sequence[int],
        detail: str,
        in_words: str = "",
        *,
        uncertain_ranks: Sequence[int] = (),
        uncertainty: str = "",
    ) -> None:
        self.operator, self.number, self.zone = operator, number, zone
        self.missing_ranks = tuple(missing_ranks)
        self.uncertain_ranks, self.uncertainty = tuple(uncertain_ranks), uncertainty
        missing = in_words or f"rank(s) {list(self.missing_ranks)}"
        super().__init__(
            f"{operator} number {number} (zone {zone}) {self._what_happened} {missing}: {detail}"
        )


class RankLostError(CommunicationTimeoutError):
    """Ranks are lost, so that no deadline was waited for: their processes have ended.

    Attributes:
        operator: of the call that waited for them; "call" for one that was refused before it sent anything.
        number: which one since construction, from 0; of a call that was refused, among those of all
            operators.
        zone: the window zone it used; 0 of a call that was refused.
        missing_ranks: those that are lost.
    """

    _what_happened = "cannot go on without"


class ToolchainError(MoeTritonError):
    """A compiler, library or CPU feature that a back end needs is missing or failed."""


class ThreadError(MoeTritonError):
    """This process cannot start a thread, which waits with a deadline need."""
