"""The call word: what it holds is what messages say, and no two calls that differ have the same one."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.core.records import PROTOCOL_VERSION
from moe_triton.core.row_formats import AS_THEY_ARE, INT8
from moe_triton.layout import CALL_WORD, STATUS_ENTRY_BYTES, WORD_BYTES
from moe_triton.layout.call_word import (
    FIELDS,
    OPERATORS,
    ROW_FORMATS,
    SHIFTS,
    Field,
    Kind,
    call_word,
    combine_bits,
    differences,
    operator_of,
    values_of,
)
from moe_triton.operators.variants import CombineVariant, DispatchVariant

kinds = st.builds(
    Kind,
    row_format=st.sampled_from(ROW_FORMATS),
    comm_quant_mode=st.integers(0, 7),
    weights=st.booleans(),
    elastic=st.booleans(),
)
any_word = st.integers(-(2**31), 2**31 - 1)


def test_fields_follow_each_other_in_one_int32() -> None:
    bits = [bit for field in FIELDS for bit in range(SHIFTS[field.key], SHIFTS[field.key] + field.bits)]
    assert bits == list(range(len(bits)))
    assert len(bits) < 32  # the sign is not used
    assert all(len(field.names or ()) <= 1 << field.bits for field in FIELDS)
    assert 1 < CALL_WORD < STATUS_ENTRY_BYTES // WORD_BYTES


@given(operator=st.sampled_from(OPERATORS), kind=kinds, before=kinds)
def test_what_goes_in_comes_out(operator: str, kind: Kind, before: Kind) -> None:
    word = call_word(operator, kind) | combine_bits(before)
    assert 0 < word < 2**31
    assert operator_of(word) == operator
    values = values_of(word)
    assert values["version"] == PROTOCOL_VERSION
    for prefix, expected in (("", kind), ("before_", before)):
        rows = ROW_FORMATS[values[f"{prefix}row_format"]]
        numbers = [values[f"{prefix}{name}"] for name in ("comm_quant_mode", "weights", "elastic")]
        assert Kind(rows, numbers[0], bool(numbers[1]), bool(numbers[2])) == expected
    assert values["spare"] == 0


@given(words=st.lists(any_word, min_size=2, max_size=5))
def test_any_two_words_that_differ_differ_in_a_field(words: list[int]) -> None:
    lines = differences(dict(enumerate(words)))
    assert bool(lines) == (len(set(words)) > 1)
    for line in lines:
        ranks = [int(n) for said in re.findall(r"on rank\(s\) \[([\d, ]+)\]", line) for n in said.split(",")]
        assert sorted(ranks) == list(range(len(words)))


@given(word=any_word)
def test_any_word_can_be_shown(word: int) -> None:
    assert operator_of(word)
    assert differences({0: word, 1: call_word("dispatch")}) or word == call_word("dispatch")


def test_messages_name_fields_values_and_ranks() -> None:
    usual, int8 = Kind("bf16"), Kind("int8", weights=True)
    words = {rank: call_word("dispatch", int8 if rank == 2 else usual) for rank in range(4)}
    assert differences(words) == [
        "row format: bf16 on rank(s) [0, 1, 3], int8 on rank(s) [2]",
        "weights: no on rank(s) [0, 1, 3], yes on rank(s) [2]",
    ]
    quantized = {0: call_word("dispatch"), 1: call_word("dispatch") | combine_bits(Kind("bf16", 2))}
    assert differences(quantized) == [
        "row format of the combine before: none on rank(s) [0], bf16 on rank(s) [1]",
        "comm_quant_mode of the combine before: 0 on rank(s) [0], 2 on rank(s) [1]",
    ]


def test_unknown_values_are_shown_as_such() -> None:
    operator = next(field for field in FIELDS if field.key == "operator")
    assert operator.show(6) == "unknown (6)"
    assert Field("", "", 4, ROW_FORMATS).show(9) == "unknown (9)"


DISPATCH = DispatchVariant(torch.bfloat16, row_format=AS_THEY_ARE, smooth=False, weights=False)
COMBINE = CombineVariant(torch.bfloat16, weights=False)
LOCAL = [
    (DISPATCH, {"mask": "tokens"}),
    (DISPATCH, {"cumulative": True}),
    (DISPATCH, {"waits": True}),
    (DISPATCH, {"local_bypass": True}),
    (replace(DISPATCH, row_format=INT8), {"smooth": True}),
    (replace(DISPATCH, row_format=INT8), {"dtype": torch.float16}),
    (COMBINE, {"weights": True}),
    (COMBINE, {"mask": "entries"}),
    (COMBINE, {"shared_x": True}),
    (COMBINE, {"special": (1, 1, 1)}),
    (COMBINE, {"norm": True}),
    (COMBINE, {"waits": True}),
    (COMBINE, {"in_place": True}),
    (COMBINE, {"local_bypass": True}),
]
COMMON = [
    (DISPATCH, {"row_format": INT8}),
    (DISPATCH, {"dtype": torch.float16}),
    (DISPATCH, {"weights": True}),
    (DISPATCH, {"elastic": True}),
    (COMBINE, {"dtype": torch.float16}),
    (COMBINE, {"block_quantize": True}),
    (COMBINE, {"elastic": True}),
]


@pytest.mark.parametrize(("variant", "change"), LOCAL, ids=str)
def test_what_a_rank_may_choose_for_itself_is_not_in_it(
    variant: DispatchVariant, change: dict[str, object]
) -> None:
    assert replace(variant, **change).kind == variant.kind  # type: ignore[arg-type]


@pytest.mark.parametrize(("variant", "change"), COMMON, ids=str)
def test_what_peers_must_have_the_same_is_in_it(variant: DispatchVariant, change: dict[str, object]) -> None:
    assert replace(variant, **change).kind != variant.kind  # type: ignore[arg-type]
