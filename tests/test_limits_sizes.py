"""Every rule on sizes, where it just holds and where it just does not (docs/limits.md, "Limits")."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_triton.core.config import Config
from moe_triton.core.errors import ArgumentError
from moe_triton.limits import GENERATIONS
from moe_triton.limits.rule import ConfigRule, Rule
from moe_triton.schemes.rules import check_rules, rules_for
from tests.limits_cases import (
    A2,
    A2_V1,
    A3,
    A3_HIERARCHY,
    FAMILIES,
    HIERARCHY,
    HIERARCHY_V1,
    INBAND,
    SHARED_V1,
    V1,
    VARIANTS,
    ConfigCase,
    check_edge,
    family_of,
    in_all_generations,
    name_of,
    size,
    sizes,
    variant_of,
)


def common_sizes(base: Config) -> list[ConfigCase]:
    each = base.num_experts // base.num_ranks
    uneven = [each + 1, each - 1, *[each] * (base.num_ranks - 2)]
    more, fewer = [each + 2, *uneven[1:]], uneven[:-1]
    shared = {"num_shared_experts": 1, "num_shared_ranks": 1}
    good = {"experts_per_rank": uneven}
    return [
        sizes(f"experts_per_rank is {more}", good, {"experts_per_rank": more}, base),
        sizes(f"experts_per_rank is {fewer}", good, {"experts_per_rank": fewer}, base),
        sizes(f"experts_per_rank is {uneven}", good, {**good, **shared}, base),
        sizes("product is 'A5'", {}, {"product": "A5"}, base),
        size("version", base.version, {1: 0, 2: 3}[base.version], base),
        sizes("generation is 'v5'", {}, {"generation": "v5"}, base),
        sizes(
            "ranks_per_server is (2, 3)",
            {"ranks_per_server": (base.num_ranks // 2,) * 2, "relaxed": True},
            {"ranks_per_server": (2, 3), "relaxed": True},
            base,
        ),
    ]


def a3_sizes(base: Config) -> list[ConfigCase]:
    """What both schemes of V2 have in common."""
    half_shared = {"num_shared_experts": 1, "num_experts": 1024}
    by_one = {"num_shared_experts": 1, "num_shared_ranks": 1, "num_experts": 63}
    return [
        sizes("comm_alg is 'fullmesh'", {}, {"scheme": "fullmesh"}, base),
        sizes("num_shared_experts is 1", by_one, {**by_one, "scheme": "hierarchy"}, base),
        size("num_ranks", 1, 0, base),
        size("num_ranks", 1, 0, base, relaxed=True),
        sizes(
            "num_ranks is 769",
            {"num_ranks": 768, "num_experts": 768},
            {"num_ranks": 769, "num_experts": 769},
            base,
        ),
        size("num_max_tokens_per_rank", 1, 0, base),
        size("hidden", 1024, 992, base),
        size("hidden", 8192, 8224, base),
        size("hidden", 32, 0, base, relaxed=True),
        size("hidden", 8192, 8224, base, relaxed=True),
        size("hidden", 1056, 1040, base),
        size("num_topk", 1, 0, base),
        size("num_experts", 1, 0, base, num_ranks=2, num_shared_experts=1, num_shared_ranks=1, num_topk=1),
        size("num_experts", 1024, 1025, base),
        size("num_topk", 8, 9, base, num_experts=8),
        size("num_topk", 8, 9, base, num_experts=8, relaxed=True),
        sizes(
            "num_shared_experts is 5",
            {"num_shared_experts": 4, "num_shared_ranks": 4},
            {"num_shared_experts": 5, "num_shared_ranks": 5, "num_experts": 63},
            base,
        ),
        size("num_shared_experts", 0, -1, base),
        size("num_shared_ranks", 7, 8, base, num_shared_experts=1),
        size("num_shared_ranks", 0, -1, base),
        size("num_shared_ranks", 4, 0, base, num_shared_experts=2),
        size("num_shared_ranks", 0, 4, base),
        size("num_shared_ranks", 6, 4, base, num_shared_experts=3, num_experts=60),
        size("num_shared_ranks", 6, 7, base, num_shared_experts=3, num_experts=60),
        size("num_experts", 72, 70, base),
        size("num_experts", 72, 70, base, relaxed=True),
        sizes(
            "num_experts is 1024",
            {"num_ranks": 512, "num_shared_ranks": 256, **half_shared},
            {"num_ranks": 520, "num_shared_ranks": 264, **half_shared},
            base,
        ),
    ]


def fullmesh_v1_sizes(base: Config) -> list[ConfigCase]:
    return [
        size("num_max_tokens_per_rank", 512, 513, base),
        size("num_topk", 16, 17, base),
        size("num_topk", 9, 10, base, num_experts=8, num_special_experts=1),
    ]


def fullmesh_v2_sizes(base: Config) -> list[ConfigCase]:
    special = [size("num_special_experts", 0, 1, base)] if base.generation == "v3" else []
    return [
        # The general limit of V2 is asked first, and its message does not offer a scheme that takes no more.
        size("num_max_tokens_per_rank", 256, 513, base),
        size("num_topk", 12, 17, base),
        size("num_max_tokens_per_rank", 256, 257, base),
        size("num_max_tokens_per_rank", 256, 257, base, relaxed=True),
        size("num_topk", 12, 13, base),
        *special,
    ]


V1_SIZES = [
    sizes("comm_alg is 'fullmesh_v2'", {"scheme": "fullmesh_v1"}, {"scheme": "fullmesh_v2"}, V1),
    *(
        sizes(f"num_ranks is {n + step}", {"num_ranks": n, "num_experts": n}, {"num_ranks": n + step}, V1)
        for n in (8, 16, 32, 64, 128, 144, 256, 288)
        for step in (-1, 1)
    ),
    size("num_ranks", 2, 1, V1, relaxed=True),
    sizes(
        "num_ranks is 289",
        {"num_ranks": 288, "num_experts": 288, "relaxed": True},
        {"num_ranks": 289, "num_experts": 289, "relaxed": True},
        V1,
    ),
    sizes("num_ranks is 9", {"num_ranks": 9, "num_experts": 9, "relaxed": True}, {"num_ranks": 9}, V1),
    size("num_max_tokens_per_rank", 1, 0, V1),
    size("num_max_tokens_per_rank", 512, 513, V1),
    size("hidden", 7168, 7136, V1),
    size("hidden", 7168, 7200, V1),
    size("hidden", 7168, 7200, V1, relaxed=True),
    size("hidden", 32, 0, V1, relaxed=True),
    size("hidden", 64, 48, V1, relaxed=True),
    size("num_topk", 1, 0, V1),
    size("num_topk", 8, 9, V1),
    size("num_topk", 1, 0, V1, relaxed=True),
    size("num_topk", 16, 17, V1, relaxed=True),
    size(
        "num_experts",
        1,
        0,
        V1,
        num_ranks=2,
        num_shared_experts=1,
        num_shared_ranks=1,
        num_topk=1,
        relaxed=True,
    ),
    size("num_experts", 512, 513, V1),
    size("num_special_experts", 0, 1, V1),
    size("num_topk", 2, 3, V1, num_ranks=2, num_experts=2, relaxed=True),
    size("num_shared_experts", 1, 2, SHARED_V1),
    size("num_shared_experts", 1, 0, SHARED_V1),
    size("num_shared_ranks", 4, 8, SHARED_V1),
    size("num_shared_ranks", 0, -1, SHARED_V1),
    size("num_shared_ranks", 2, 3, SHARED_V1, num_experts=60),
    size("num_shared_ranks", 4, 5, SHARED_V1, num_experts=60),
    size("num_experts", 64, 66, SHARED_V1),
]


def a2_sizes(base: Config) -> list[ConfigCase]:
    """What both schemes and versions have in common."""
    wide = is_wide(base)
    most = 10240 if wide or (base.scheme == "hierarchy" and base.version == 2) else 7168
    experts = 1024 if wide and base.scheme == "fullmesh" else 512
    tokens = 512 if wide and base.scheme == "hierarchy" else 256
    least = 1 if base.generation is None and base.scheme == "fullmesh" else 2
    return [
        sizes("comm_alg is 'fullmesh_v1'", {}, {"scheme": "fullmesh_v1"}, base),
        size("num_max_tokens_per_rank", 1, 0, base),
        size("num_max_tokens_per_rank", tokens, tokens + 1, base),
        size("hidden", most, most + 32, base),
        size("hidden", most, most + 32, base, relaxed=True),
        size("hidden", 32, 0, base),
        size("hidden", 7136, 7152, base),
        size("num_topk", 1, 0, base),
        size("num_topk", 16, 17, base),
        size("num_experts", 16, 0, base),
        # In fullmesh of v3, 512 experts need more ranks than 16.
        size("num_experts", experts, experts + 1, base, num_ranks=32),
        size("num_experts", 2, 0, base, num_ranks=2, num_topk=2, relaxed=True),
        size("num_topk", 8, 9, base, num_ranks=8, num_experts=8, relaxed=True),
        sizes(
            "num_shared_experts is 1",
            {"num_shared_experts": 1, "num_shared_ranks": 0},
            {"num_shared_experts": 1, "num_shared_ranks": 1},
            base,
        ),
        size("num_shared_experts", 0, 2, base),
        size("num_shared_ranks", 0, 1, base),
        size("num_experts", 64, 65, base),
        size("num_ranks", least, least - 1, base, relaxed=True, num_experts=8),
        size("ranks_per_server", 8, 4, base),
        size("ranks_per_server", 8, 16, base),
        sizes("ranks_per_server is (7, 9)", {"ranks_per_server": (8, 8)}, {"ranks_per_server": (7, 9)}, base),
    ]


def is_wide(base: Config) -> bool:
    """Whether the limits of v4 hold, which leave V1 as it was."""
    return base.version == 2 and base.generation != "v3"


def a2_fullmesh_sizes(base: Config) -> list[ConfigCase]:
    ranks = (16, 32, 64, 128, 192, 256)
    if base.generation is None:  # as host checks have it, in both versions
        ranks = (*range(1, 9), *range(16, 385, 8))
    elif is_wide(base):
        ranks = (*range(2, 9), *ranks, 384)
    most = ranks[-1]
    cases = [
        *(
            sizes(
                f"num_ranks is {n + step}",
                {"num_ranks": n, "num_experts": 8 * n if n < 16 else n},
                {"num_ranks": n + step},
                base,
            )
            for n in ranks
            for step in {-1, 1, 9 - n}
            if n + step not in ranks and n + step >= 0
        ),
        size("num_ranks", most, most + 1, base, relaxed=True, num_experts=most),
    ]
    if is_wide(base):
        return cases
    return [*cases, size("num_experts", 384, 400, base), size("num_experts", 384, 400, base, relaxed=True)]


def hierarchy_sizes(base: Config) -> list[ConfigCase]:
    return [
        *(
            size("num_ranks", n, n + step, base, num_experts=64 if 64 % n == 0 else n)
            for n in (range(16, 65, 8) if base.generation is None else (16, 32, 64))
            for step in (-1, 1)
        ),
        size("num_ranks", 64, 128, base, num_experts=128),
        size("num_ranks", 64, 65, base, relaxed=True),
        sizes(
            "ranks_per_server is [2, 14]",
            {"ranks_per_server": (4, 4, 4, 4), "relaxed": True},
            {"ranks_per_server": (2, 14), "relaxed": True},
            base,
        ),
        size("num_special_experts", 0, 1, base),
    ]


def a3_hierarchy_sizes(base: Config) -> list[ConfigCase]:
    """Rules of all of A3's schemes, whose numbers other cases try, and those of this one."""
    more = {"num_ranks": 32}
    shared = {"num_shared_experts": 1, "num_shared_ranks": 1}
    cases = [
        sizes("comm_alg is 'fullmesh'", {}, {"scheme": "fullmesh"}, base),
        size("num_ranks", 16, 0, base),
        size("num_max_tokens_per_rank", 256, 513, base),
        size("num_max_tokens_per_rank", 1, 0, base),
        size("hidden", 7168, 8224, base),
        size("hidden", 1056, 1040, base),
        size("num_topk", 16, 17, base),
        size("num_experts", 512, 1025, base, **more),
        size("num_topk", 8, 9, base, num_ranks=8, num_experts=8, relaxed=True),
        sizes("num_shared_experts is 1", {"num_shared_experts": 1}, shared, base),
        size("num_shared_experts", 0, -1, base),
        size("num_shared_ranks", 0, -1, base),
        size("num_shared_ranks", 0, 4, base),
        size("num_experts", 64, 65, base),
        # Its own.
        *(
            sizes(
                f"num_ranks is {n + step}",
                {"num_ranks": n, "num_experts": n},
                {"num_ranks": n + step, "num_experts": n + step},
                base,
            )
            for n in (16, 32, 240, 256)
            for step in (-1, 1, 8, *([16] if n == 256 else []))
        ),
        size("num_ranks", 1, 0, base, num_experts=16, relaxed=True),
        sizes(
            "num_ranks is 257",
            {"num_ranks": 256, "num_experts": 256, "relaxed": True},
            {"num_ranks": 257, "num_experts": 257, "relaxed": True},
            base,
        ),
        size("num_max_tokens_per_rank", 256, 257, base),
        size("num_max_tokens_per_rank", 256, 257, base, relaxed=True),
        size("hidden", 1024, 992, base),
        size("hidden", 7168, 7200, base),
        size("hidden", 7168, 7200, base, relaxed=True),
        size("hidden", 32, 0, base, relaxed=True),
        size("num_experts", 512, 513, base, **more),
        size("num_experts", 512, 544, base, **more),
        size("num_experts", 1, 0, base, num_ranks=1, num_topk=1, relaxed=True),
        size("ranks_per_server", 16, 8, base),
        sizes(
            "ranks_per_server is [2, 14]",
            {"ranks_per_server": (4, 4, 4, 4), "relaxed": True},
            {"ranks_per_server": (2, 14), "relaxed": True},
            base,
        ),
        size("num_special_experts", 0, 1, base),
    ]
    return [*cases, *([size("num_experts", 384, 400, base)] if base.generation == "v4" else [])]


CASES = [
    *(case for base in VARIANTS for case in common_sizes(base)),
    *(case for base in in_all_generations(A3, INBAND) for case in a3_sizes(base)),
    *(case for base in in_all_generations(A3) for case in fullmesh_v1_sizes(base)),
    *(case for base in in_all_generations(INBAND) for case in fullmesh_v2_sizes(base)),
    *(case._replace(base=replace(case.base, generation=g)) for case in V1_SIZES for g in GENERATIONS),
    *(case for base in in_all_generations(A2, A2_V1, HIERARCHY, HIERARCHY_V1) for case in a2_sizes(base)),
    *(case for base in in_all_generations(A2, A2_V1) for case in a2_fullmesh_sizes(base)),
    *(case for base in in_all_generations(HIERARCHY, HIERARCHY_V1) for case in hierarchy_sizes(base)),
    *(case for base in in_all_generations(A3_HIERARCHY) for case in a3_hierarchy_sizes(base)),
]


def broken_rule(case: ConfigCase) -> ConfigRule:
    """The rule that a case's failing side breaks first."""
    config = replace(case.base, **case.fails).normalized()
    return next(rule for rule in rules_for(config) if not rule.holds(config))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_each_size_at_its_edge(case: ConfigCase) -> None:
    check_edge(case)


@pytest.mark.parametrize("base", VARIANTS, ids=variant_of)
def test_every_rule_has_a_case(base: Config) -> None:
    """So that a new rule is not forgotten: each needs a case for each variant that it applies to."""
    covered = {broken_rule(case) for case in CASES if variant_of(case.base) == variant_of(base)}
    missed = {(rule.argument, rule.limit) for rule in rules_for(base) if rule not in covered}
    assert missed == (OF_SHARED_EXPERTS if family_of(base) == A3_HIERARCHY else set())


# What A3's other schemes are asked with shared experts alone.
OF_SHARED_EXPERTS = {
    ("num_shared_ranks", "a multiple of the shared experts"),
    ("num_experts", "experts per rank times ranks at most 2048"),
}
# By A2's pages experts are dealt to at least two ranks, none of which has shared ones: one cannot be dealt.
OUT_OF_REACH = {("A2", "num_experts", 1)}


def numeric_limits() -> list[tuple[Config, ConfigRule, str, bool]]:
    """Every limit that is a number, a list or a span of them; and whether it is the one with ``relaxed``."""
    return [
        (base, rule, limit, relaxed)
        for base in VARIANTS
        for rule in rules_for(base)
        for limit, relaxed in ((rule.limit, False), (rule.relaxed, True))
        if re.fullmatch(r"\d+( to \d+|(, \d+)*)", limit)
    ]


@pytest.mark.parametrize(
    ("base", "rule", "limit", "relaxed"),
    numeric_limits(),
    ids=lambda value: value.argument if isinstance(value, Rule) else None,
)
def test_every_number_in_a_limit_is_tried_from_both_sides(
    base: Config, rule: ConfigRule, limit: str, relaxed: bool
) -> None:
    """Each number passes and the neighbours outside fail. Cases of every scheme that has the rule count."""
    field = rule.argument
    cases = [
        case
        for case in CASES
        if rule in rules_for(case.base)
        and broken_rule(case).argument == field
        and (not rule.relaxed or bool(case.fails.get("relaxed")) == relaxed)
    ]
    passing = {case.passes.get(field, getattr(case.base, field)) for case in cases}
    failing = {case.fails[field] for case in cases}
    numbers = {int(number) for number in re.findall(r"\d+", limit)}
    step = 32 if field == "hidden" else 1
    outside = {min(numbers) - step, max(numbers) + step}
    if numbers == {0}:
        outside.remove(-1)
    assert {n for n in numbers if (base.product, field, n) not in OUT_OF_REACH} <= passing
    assert outside <= failing


def test_messages_speak_to_both_kinds_of_callers() -> None:
    """Only the argument is renamed, so rules and remedies hold no name of a field of `Config`."""
    fields = [name for name in Config.__dataclass_fields__ if "_" in name]
    for case in CASES:
        with pytest.raises(ArgumentError) as caught:
            check_rules(replace(case.base, **case.fails))
        said = f"{caught.value.rule} {caught.value.remedy}"
        assert not [name for name in fields if name in said]


@settings(max_examples=300)
@given(
    base=st.sampled_from(FAMILIES),
    num_ranks=st.sampled_from([2, 7, 8, 16, 128, 256, 384]),
    hidden=st.sampled_from([32, 1024, 7168, 7200, 8192, 10240]),
    num_experts=st.sampled_from([2, 64, 384, 512, 768, 1024]),
    num_max_tokens_per_rank=st.sampled_from([1, 256, 257, 512, 513]),
    num_special_experts=st.integers(0, 1),
)
def test_what_either_generation_accepts_is_accepted_where_none_is_chosen(base: Config, **chosen: int) -> None:
    def accepts(generation: str | None) -> bool:
        try:
            check_rules(replace(base, generation=generation, **chosen))
        except ArgumentError:
            return False
        return True

    assert accepts(None) >= (accepts("v3") or accepts("v4"))


def test_limits_that_are_older_than_a3s_hierarchy_refuse_it() -> None:
    with pytest.raises(
        ArgumentError, match="comm_alg is 'hierarchy', but the limits of v3 have no hierarchy"
    ):
        check_rules(replace(A3_HIERARCHY, generation="v3"))


def test_more_than_24_experts_of_a_rank_are_refused_by_the_page_alone() -> None:
    """No host check has it."""
    many = replace(A3_HIERARCHY, num_experts=512)
    check_rules(many)
    with pytest.raises(ArgumentError, match="at most 24 experts with hierarchy, and it would hold 32"):
        check_rules(replace(many, generation="v4"))
