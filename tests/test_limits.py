from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moe_triton.config import Config
from moe_triton.errors import ArgumentError
from moe_triton.limits import check_config

GOOD = Config(num_ranks=8, num_max_tokens_per_rank=64, hidden=7168, num_topk=8, num_experts=64)

# For each rule: the field it names, the value that just passes and the one that just fails.
RULES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("num_ranks", {"num_ranks": 2}, {"num_ranks": 1}),
    ("num_ranks", {"num_ranks": 768, "num_experts": 768}, {"num_ranks": 769, "num_experts": 769}),
    ("num_max_tokens_per_rank", {"num_max_tokens_per_rank": 1}, {"num_max_tokens_per_rank": 0}),
    ("num_max_tokens_per_rank", {"num_max_tokens_per_rank": 512}, {"num_max_tokens_per_rank": 513}),
    ("hidden", {"hidden": 1024}, {"hidden": 992}),
    ("hidden", {"hidden": 8192}, {"hidden": 8224}),
    ("hidden", {"hidden": 32, "relaxed": True}, {"hidden": 0, "relaxed": True}),
    ("hidden", {"hidden": 1056}, {"hidden": 1040}),
    ("num_topk", {"num_topk": 1}, {"num_topk": 0}),
    ("num_topk", {"num_topk": 16}, {"num_topk": 17}),
    ("num_topk", {"num_topk": 8, "num_experts": 8}, {"num_topk": 9, "num_experts": 8}),
    ("num_experts", {"num_experts": 1024}, {"num_experts": 1032}),
    ("num_experts", {"num_experts": 72}, {"num_experts": 70}),
    (
        "num_experts",
        {"num_ranks": 512, "num_shared_experts": 1, "num_shared_ranks": 256, "num_experts": 1024},
        {"num_ranks": 520, "num_shared_experts": 1, "num_shared_ranks": 264, "num_experts": 1024},
    ),
    (
        "num_shared_experts",
        {"num_shared_experts": 4, "num_shared_ranks": 4},
        {"num_shared_experts": 5, "num_shared_ranks": 5, "num_experts": 63},
    ),
    (
        "num_shared_ranks",
        {"num_shared_experts": 1, "num_shared_ranks": 7},
        {"num_shared_experts": 1, "num_shared_ranks": 8},
    ),
    (
        "num_shared_ranks",
        {"num_shared_experts": 2, "num_shared_ranks": 4},
        {"num_shared_experts": 2, "num_shared_ranks": 0},
    ),
    (
        "num_shared_ranks",
        {"num_shared_experts": 2, "num_shared_ranks": 4},
        {"num_shared_experts": 3, "num_shared_ranks": 4},
    ),
]


@pytest.mark.parametrize(("argument", "passes", "fails"), RULES)
def test_each_rule_at_its_edge(argument: str, passes: dict[str, Any], fails: dict[str, Any]) -> None:
    check_config(replace(GOOD, **passes))
    with pytest.raises(ArgumentError) as caught:
        check_config(replace(GOOD, **fails))
    error = caught.value
    assert error.argument == argument
    assert error.value == getattr(replace(GOOD, **fails), argument)
    assert error.rule in str(error)
    assert error.remedy in str(error)


@pytest.mark.parametrize(
    ("field", "value"), [("product", "A2"), ("scheme", "hierarchy"), ("scheme", "direct")]
)
def test_what_cannot_be_served_yet_is_refused(field: str, value: str) -> None:
    with pytest.raises(ArgumentError, match=value):
        check_config(replace(GOOD, **{field: value}))


def test_the_default_of_torch_npu_means_no_shared_experts() -> None:
    config = replace(GOOD, num_shared_experts=1, num_shared_ranks=0).normalized()
    assert config.num_shared_experts == 0
    check_config(config)


def test_receive_capacity() -> None:
    assert GOOD.receive_capacity(0) == 8 * 64 * 8
    assert replace(GOOD, num_topk=2).receive_capacity(0) == 8 * 64 * 2
    # Three ranks share one replica when five sources are split over two: the rounding up matters.
    shared = Config(5, 4, 1024, 2, 6, num_shared_experts=1, num_shared_ranks=2)
    assert shared.receive_capacity(0) == 4 * 3
