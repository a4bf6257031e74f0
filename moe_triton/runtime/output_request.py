"""What a caller says of a dispatch's outputs, and of how many tokens there are: checked, and what follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from moe_triton.core.checks import check_choice, check_flag, check_integer
from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError
from moe_triton.core.records import MAX_CALL_TOKENS as MAX_COUNT

MAX_ALIGNMENT = 1 << 16
OutputLayout = Literal["rows", "padded"]
LAYOUTS: tuple[OutputLayout, ...] = ("rows", "padded")


@dataclass(frozen=True)
class Request:
    """What a dispatch is asked for besides rows.

    Attributes:
        max_tokens: that any rank passes, or None where nobody says.
        received: rows that there is room for: "bound" for as many as there can be, "exact" for as many as
            come, a number, or None for what is usual.
        alignment: experts' rows begin at multiples of it.
        is_padded: experts have as many rows each.
        zeroes: gaps are zeros.
        is_per_rank: a token is sent once to each rank (``do_expand=False``).
    """

    max_tokens: int | None = None
    received: Literal["bound", "exact"] | int | None = None
    alignment: int = 1
    is_padded: bool = False
    zeroes: bool = False
    is_per_rank: bool = False

    @property
    def is_announced(self) -> bool:
        """Whether every rank has to ask for the like, so that a call's counts can go ahead of it."""
        is_sized = self.received not in (None, "bound")
        return self.max_tokens is not None or is_sized or self.has_gaps

    @property
    def given(self) -> list[tuple[str, object]]:
        """The arguments that ask for something, and their values."""
        values = {
            "num_max_tokens_per_rank": (self.max_tokens, None),
            "num_recv_tokens": (self.received, None),
            "layout": ("padded" if self.is_padded else "rows", "rows"),
            "expert_alignment": (self.alignment, 1),
            "do_zero_padding": (self.zeroes, False),
        }
        return [(name, value) for name, (value, usual) in values.items() if value != usual]

    @property
    def reason(self) -> tuple[str, object]:
        """One that makes the request what `is_announced` says."""
        return next(
            (name, value) for name, value in self.given if (name, value) != ("num_recv_tokens", "bound")
        )

    @property
    def has_gaps(self) -> bool:
        """Whether rows of an expert may not follow those of the one before."""
        return self.is_padded or self.alignment > 1

    @property
    def capacity(self) -> int:
        """Rows that the caller has set as the most, all experts' or of each where those are padded; or 0."""
        return self.received if isinstance(self.received, int) else 0


USUAL, USUAL_PER_RANK = Request(), Request(is_per_rank=True)


def make_request(
    num_max_tokens_per_rank: Any,
    num_recv_tokens: Any,
    expert_alignment: Any,
    layout: Any,
    do_zero_padding: Any,
    do_expand: Any,
) -> Request:
    """The request of these arguments of `EPBuffer.dispatch`.

    Raises:
        ArgumentError: one is of another type, or out of its range; or two exclude each other.
    """
    most = None
    if num_max_tokens_per_rank is not None:
        most = _in_range("num_max_tokens_per_rank", num_max_tokens_per_rank, 0, MAX_COUNT)
    received: Any = num_recv_tokens
    if isinstance(received, str) or received is None:
        received = check_choice("num_recv_tokens", received, ("bound", "exact", None), "Or a number of rows.")
    else:
        received = _in_range("num_recv_tokens", received, 1, (1 << 31) - 1)
    alignment = _in_range("expert_alignment", expert_alignment, 1, MAX_ALIGNMENT)
    is_padded = check_choice("layout", layout, LAYOUTS) == "padded"
    if is_padded and alignment > 1:
        rule = "padded experts begin where the one before has its last row, whatever it holds"
        raise ArgumentError(
            "expert_alignment", alignment, rule, "Leave it out, or leave out layout='padded'."
        )
    zeroes = check_flag("do_zero_padding", do_zero_padding)
    is_per_rank = not check_flag("do_expand", do_expand)
    return Request(most, received, alignment, is_padded, zeroes, is_per_rank)


def _in_range(name: str, value: Any, low: int, high: int) -> int:
    number = check_integer(name, value)
    if not low <= number <= high:
        remedy = "Pass such a number."
        raise ArgumentError(name, number, f"it must be {low} to {high}", remedy, code=INVALID_ARGUMENT)
    return number
