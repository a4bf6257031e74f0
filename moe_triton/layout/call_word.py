"""The call word: what a status entry says of the call that posted it, so that ranks notice that calls differ.

One int32 of packed fields, word `CALL_WORD` of an entry (`moe_triton.layout`). It holds what peers have to
agree on and nothing else: masks, smooth scales and whatever a rank does with rows that it has may differ. A
dispatch's word also says what the combine before it was, since a combine's flags are summed and carry no
word. This is the only place that knows the fields; kernels compare whole words, and join them with a bitwise
or.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moe_triton.core.records import PROTOCOL_VERSION
from moe_triton.core.row_formats import QUANTIZED

WORD_BITS = 32

OPERATORS = ("none", "dispatch", "combine", "barrier", "tensor-parallel exchange")
ROW_FORMATS = ("none", "bf16", "fp16", *QUANTIZED)
YES_NO = ("no", "yes")
# What every rank passes, or none does: with one of them a call's counts go ahead of it.
ANNOUNCED_NAMES = ("no", "yes", "the routing of a handle")
BY_HANDLE = 2
ANNOUNCED = "num_max_tokens_per_rank, num_recv_tokens or a layout"


@dataclass(frozen=True)
class Field:
    """Some bits of a call word.

    Attributes:
        key: the argument of `Kind` or `encode` that they hold.
        title: what messages call them.
        bits: how many there are.
        names: of values, by number; None where the number is shown as it is.
    """

    key: str
    title: str
    bits: int
    names: tuple[str, ...] | None = None

    def show(self, value: int) -> str:
        """A value as messages show it."""
        if self.names is None:
            return str(value)
        return self.names[value] if value < len(self.names) else f"unknown ({value})"


@dataclass(frozen=True)
class Kind:
    """What ranks have to agree on in a dispatch or a combine.

    Attributes:
        row_format: of `ROW_FORMATS`.
        comm_quant_mode: of combine: how results are quantised on their way.
        weights: whether routing weights travel with a dispatch.
        elastic: whether there is an elastic_info.
        announced: 1 where every rank says what the whole call has before it begins, `BY_HANDLE` where that
            is known.
        per_rank: of dispatch: whether a token is sent once to each rank (do_expand=False).
    """

    row_format: str = "none"
    comm_quant_mode: int = 0
    weights: bool = False
    elastic: bool = False
    announced: int = 0
    per_rank: bool = False


def _fields_of_kind(suffix: str, prefix: str) -> tuple[Field, ...]:
    return (
        Field(f"{prefix}row_format", f"row format{suffix}", 4, ROW_FORMATS),
        Field(f"{prefix}comm_quant_mode", f"comm_quant_mode{suffix}", 3),
        Field(f"{prefix}weights", f"weights{suffix}", 1, YES_NO),
        Field(f"{prefix}elastic", f"elastic_info{suffix}", 1, YES_NO),
        Field(f"{prefix}announced", f"{ANNOUNCED}{suffix}", 2, ANNOUNCED_NAMES),
    )


# From the lowest bit on. What is left of the word is 0.
FIELDS = (
    Field("version", "protocol version", 5),
    Field("operator", "operator", 3, OPERATORS),
    *_fields_of_kind("", ""),
    *_fields_of_kind(" of the combine before", "before_"),
    # A combine follows the dispatch before it.
    Field("per_rank", "do_expand", 1, ("yes", "no")),
)
_SPARE = Field("spare", "spare bits", WORD_BITS - sum(field.bits for field in FIELDS))
SHIFTS = {field.key: sum(f.bits for f in FIELDS[:i]) for i, field in enumerate(FIELDS)}
SHIFTS[_SPARE.key] = WORD_BITS - _SPARE.bits


def call_word(operator: str, kind: Kind | None = None) -> int:
    """The word of a call, without what was before it.

    Args:
        operator: of `OPERATORS`.
        kind: of a dispatch, combine or exchange.
    """
    word = {"version": PROTOCOL_VERSION, "operator": OPERATORS.index(operator)}
    return _pack(word | {"per_rank": int(kind is not None and kind.per_rank)}) | _bits_of(kind, "")


def combine_bits(kind: Kind) -> int:
    """What a combine adds to the word of the dispatch after it."""
    return _bits_of(kind, "before_")


def values_of(word: int) -> dict[str, int]:
    """The number in each field of a word, whatever it holds, by key."""
    bits = word % (1 << WORD_BITS)
    return {f.key: bits >> SHIFTS[f.key] & (1 << f.bits) - 1 for f in (*FIELDS, _SPARE)}


def operator_of(word: int) -> str:
    """The name of the operator that a word tells of."""
    return next(field for field in FIELDS if field.key == "operator").show(values_of(word)["operator"])


def differences(words: Mapping[int, int]) -> list[str]:
    """Each field that is not the same on all ranks, with its values and who has them.

    Args:
        words: by rank.
    """
    numbers = {rank: values_of(word) for rank, word in sorted(words.items())}
    lines = []
    for field in (*FIELDS, _SPARE):
        ranks_of: dict[str, list[int]] = {}
        for rank, values in numbers.items():
            ranks_of.setdefault(field.show(values[field.key]), []).append(rank)
        if len(ranks_of) > 1:
            shown = ", ".join(f"{value} on rank(s) {ranks}" for value, ranks in ranks_of.items())
            lines.append(f"{field.title}: {shown}")
    return lines


def _bits_of(kind: Kind | None, prefix: str) -> int:
    if kind is None:
        return 0
    values = {
        name: int(getattr(kind, name)) for name in ("comm_quant_mode", "weights", "elastic", "announced")
    }
    values["row_format"] = ROW_FORMATS.index(kind.row_format)
    return _pack({f"{prefix}{name}": value for name, value in values.items()})


def _pack(values: Mapping[str, int]) -> int:
    bits = {field.key: field.bits for field in FIELDS}
    word = 0
    for key, value in values.items():
        assert 0 <= value < 1 << bits[key], (key, value)
        word |= value << SHIFTS[key]
    return word
