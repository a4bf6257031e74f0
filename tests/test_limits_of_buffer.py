"""Limits that an `EPBuffer` has instead of torch_npu's, where they just hold and where they just do not."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from moe_triton.core.config import Config
from moe_triton.core.errors import ArgumentError
from moe_triton.schemes.rules import check_rules, rules_for
from tests.limits_cases import (
    A2,
    A3,
    A3_HIERARCHY,
    HIERARCHY,
    INBAND,
    ConfigCase,
    check_edge,
    name_of,
    size,
    sizes,
)

BASES = tuple(replace(base, is_of_buffer=True) for base in (A3, INBAND, A2, HIERARCHY, A3_HIERARCHY))
DIRECT = replace(A3, scheme="direct", is_of_buffer=True)


def most_hidden(base: Config) -> int:
    if base.product == "A3":
        return 7168 if base.scheme == "hierarchy" else 8192
    return 10240


def cases_of(base: Config) -> list[ConfigCase]:
    return [
        size("hidden", 1, 0, base),
        size("hidden", 1, 0, base, relaxed=True),
        size("hidden", most_hidden(base), most_hidden(base) + 1, base),
        size("num_topk", 32, 33, base),
        size("num_topk", 32, 33, base, relaxed=True),
        size("num_topk", 1, 0, base),
        size("num_experts", 2048, 2049, base),
        size("num_experts", base.num_ranks, 0, base),
    ]


CASES = [
    *(case for base in (*BASES, DIRECT) for case in cases_of(base)),
    # More status entries than the products' area has.
    *(
        sizes("num_experts is 2049", {"num_experts": 2048, **shared}, {"num_experts": 2049, **shared}, base)
        for shared in ({"num_ranks": 12, "num_shared_experts": 1, "num_shared_ranks": 4},)
        for base in (*BASES[:2], DIRECT)
    ),
]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_each_size_at_its_edge(case: ConfigCase) -> None:
    check_edge(case)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_torch_npus_functions_keep_theirs(case: ConfigCase) -> None:
    with pytest.raises(ArgumentError):
        check_rules(replace(case.base, is_of_buffer=False, **case.fails))


@pytest.mark.parametrize("hidden", [7, 1000, 4097])
@pytest.mark.parametrize("base", [*BASES, DIRECT], ids=lambda base: base.scheme)
def test_rows_need_no_whole_units(base: Config, hidden: int) -> None:
    check_rules(replace(base, hidden=hidden))
    assert replace(base, hidden=hidden).padded == replace(base, hidden=-(-hidden // 32) * 32)
    assert base.padded is base


@pytest.mark.parametrize("base", [*BASES, DIRECT], ids=lambda base: base.scheme)
def test_every_number_of_a_buffers_limit_is_tried(base: Config) -> None:
    spans: dict[str, tuple[int, int]] = {}  # what all rules on an argument leave
    for rule in rules_for(base):
        if numbers := [int(number) for number in re.findall(r"\d+", rule.of_buffer)]:
            least, most = spans.get(rule.argument, (min(numbers), max(numbers)))
            spans[rule.argument] = max(least, min(numbers)), min(most, max(numbers))
    for argument, (least, most) in spans.items():
        cases = [case for case in CASES if case.base == base and argument in case.fails]
        assert most in {case.passes[argument] for case in cases}
        assert {least - 1, most + 1} <= {case.fails[argument] for case in cases}
