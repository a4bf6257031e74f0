"""Settings that change speed: what is refused, and how operators are cut into parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton import ArgumentError, Tuning
from moe_triton.backends import CAPABILITIES
from moe_triton.backends.cpu import row_copies
from moe_triton.backends.cpu.executable import settings_of
from moe_triton.core.ascendc import MAX_BLOCKS
from moe_triton.core.config import Config
from moe_triton.core.plan import Part, Plan
from moe_triton.core.row_formats import AS_THEY_ARE, INT8
from moe_triton.core.tuning import usual_on_cpu
from moe_triton.operators.variants import CombineVariant, DispatchVariant, Variant
from moe_triton.schemes import product_of, scheme_type
from moe_triton.schemes.fullmesh.scheme import Fullmesh
from moe_triton.schemes.rank_context import RankContext


@pytest.mark.parametrize(
    ("values", "num_blocks", "named"),
    [
        ({"dispatch_tokens": 0}, 1, "tuning.dispatch_tokens"),
        ({"combine_tokens": -1}, 1, "tuning.combine_tokens"),
        ({"cached_bytes": -1}, 1, "tuning.cached_bytes"),
        ({"spins": -1}, 1, "tuning.spins"),
        ({"yields": -1}, 1, "tuning.yields"),
        ({"communication_blocks": 2}, 2, "tuning.communication_blocks"),
        ({"communication_blocks": -1}, 2, "tuning.communication_blocks"),
    ],
)
def test_a_setting_out_of_range_is_refused(values: dict[str, Any], num_blocks: int, named: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        Tuning(**values).check(num_blocks)
    assert raised.value.argument == named


@pytest.mark.parametrize(
    "values",
    [{"dispatch_tokens": 7}, {"combine_tokens": 1}, {"communication_blocks": 1}, {"receiving_blocks": 1}],
    ids=str,
)
def test_what_is_posted_is_not_cut(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(ArgumentError, match="rows are posted once all are written") as raised:
        Tuning(**values).check_posts(8)
    assert raised.value.argument == f"tuning.{name}"
    Tuning(dispatch_tokens=8, combine_tokens=9, receiving_blocks=0).check_posts(8)
    # Nor is it where a table or the back end would.
    config = Config(4, 8, 64, 2, 8, relaxed=True, ranks_per_server=2)
    context = RankContext(config, 1, 4, 1000, CAPABILITIES["cpu"], tuning=Tuning(**values))
    assert not context.overlaps
    assert context.receiving_blocks == 0
    assert [context.parts(operator, 8) for operator in ("dispatch", "combine")] == [1, 1]


def _settings_of(scheme: str) -> tuple[str, frozenset[str]]:
    """A scheme's name, and the settings that its class has."""
    config = Config(4, 8, 64, 2, 8, product=product_of(scheme), scheme=scheme)
    return scheme, scheme_type(config).settings


@pytest.mark.parametrize(
    ("posts", "scheme", "target", "rule"),
    [
        ("aicpu", "fullmesh", "cpu", "only hierarchy between servers has a choice, and here .* by fullmesh"),
        ("aiv", "fullmesh_v1", "npu", "only hierarchy between servers has a choice"),
        ("aicpu", "hierarchy", "npu", "AICPU's batch writes would need HCCL's operator package"),
    ],
)
def test_who_posts_is_a_choice_of_hierarchy_only(posts: Any, scheme: str, target: str, rule: str) -> None:
    with pytest.raises(ArgumentError, match=rule) as raised:
        Tuning(posts=posts).check_poster(*_settings_of(scheme), CAPABILITIES[target].posters)
    assert raised.value.argument == "tuning.posts"
    Tuning().check_poster(*_settings_of(scheme), CAPABILITIES[target].posters)
    Tuning(posts=posts).check_poster(*_settings_of("hierarchy"), CAPABILITIES["cpu"].posters)


@pytest.mark.parametrize(
    ("scheme", "servers", "rule"),
    [
        (
            "hierarchy",
            2,
            "only A2's fullmesh between servers posts blocks, and here tokens travel by hierarchy",
        ),
        ("fullmesh_v1", 2, "tokens travel by fullmesh_v1"),
        ("fullmesh", 1, "tokens travel by fullmesh inside one server"),
    ],
)
def test_only_blocks_are_posted_in_parts(scheme: str, servers: int, rule: str) -> None:
    with pytest.raises(ArgumentError, match=rule) as raised:
        Tuning(post_parts=2).check_post_parts(*_settings_of(scheme), servers)
    assert raised.value.argument == "tuning.post_parts"
    Tuning().check_post_parts(*_settings_of(scheme), servers)
    Tuning(post_parts=2).check_post_parts(*_settings_of("fullmesh"), 2)


@pytest.mark.parametrize("name", ["message_tokens", "return_pieces"])
@pytest.mark.parametrize(
    ("scheme", "servers", "posts", "rule"),
    [
        ("fullmesh", 2, None, "only hierarchy between servers has it, and here tokens travel by fullmesh"),
        ("hierarchy", 1, None, "tokens travel by hierarchy inside one server"),
        ("hierarchy", 2, "aicpu", "all tokens for a server are one message"),
    ],
)
def test_messages_are_those_of_a_hierarchy_that_cores_post_for(
    name: str, scheme: str, servers: int, posts: Any, rule: str
) -> None:
    with pytest.raises(ArgumentError, match=rule) as raised:
        Tuning(posts=posts, **{name: 2}).check_messages(*_settings_of(scheme), servers)
    assert raised.value.argument == f"tuning.{name}"
    Tuning(posts=posts).check_messages(*_settings_of(scheme), servers)
    Tuning(posts="aiv", **{name: 2}).check_messages(*_settings_of("hierarchy"), 2)
    with pytest.raises(ArgumentError, match=rf"tuning.{name} is 0"):
        Tuning(**{name: 0}).check(1)


@pytest.mark.parametrize(("posts", "messages"), [(None, (8, 2)), ("aiv", (3, 1)), ("aicpu", (64, 1))])
def test_messages_where_nobody_says_and_where_an_aicpu_posts(posts: Any, messages: tuple[int, int]) -> None:
    config = Config(16, 64, 1024, 2, 16, product="A2", scheme="hierarchy")
    given = {"message_tokens": 3, "return_pieces": 1} if posts == "aiv" else {}
    context = RankContext(config, 0, 8, 1000, CAPABILITIES["npu"], tuning=Tuning(posts=posts, **given))
    assert (context.message_tokens, context.return_pieces) == messages


@pytest.mark.parametrize("parts", [0, -1, 64])
def test_so_many_parts_that_are_posted_there_are_not(parts: int) -> None:
    with pytest.raises(ArgumentError, match=r"tuning.post_parts is .*1 to 63"):
        Tuning(post_parts=parts).check(1)


@pytest.mark.parametrize(("ranks", "given", "parts"), [(2, None, 1), (4, None, 3), (64, None, 8), (4, 9, 4)])
def test_blocks_are_made_in_as_many_parts_as_there_are_ranks_for(
    ranks: int, given: int | None, parts: int
) -> None:
    config = Config(ranks, 8, 64, 2, ranks, relaxed=True, product="A2", scheme="fullmesh", ranks_per_server=1)
    assert (
        RankContext(config, 1, 4, 1000, CAPABILITIES["cpu"], tuning=Tuning(post_parts=given)).post_parts
        == parts
    )


@pytest.mark.parametrize("posts", ["AIV", "", 1, True])
def test_who_posts_is_one_of_two(posts: Any) -> None:
    with pytest.raises(ArgumentError, match="one of \\['aiv', 'aicpu'\\]"):
        Tuning(posts=posts)


def test_what_is_left_open_suits_the_machine() -> None:
    usual = settings_of(Tuning(), 2)
    assert settings_of(Tuning(spins=3), 2) == usual._replace(spins=3)
    assert settings_of(Tuning(cached_bytes=0, spins=0, yields=0), 2)[:3] == (0, 0, 0)
    assert usual.link is None
    assert usual.cached_bytes == row_copies.chosen().cached_bytes(2)
    # More ranks share, from some number on, the same cores.
    assert settings_of(Tuning(), 1024).yields < settings_of(Tuning(), 1).yields


@pytest.mark.parametrize(
    ("ranks", "cores", "blocks"), [(1, 1, 1), (2, 1, 1), (2, 5, 2), (1, 48, 48), (1, 64, 48), (2, 128, 48)]
)
def test_a_rank_has_a_block_on_each_core_of_its_own_as_far_as_blocks_go(
    ranks: int, cores: int, blocks: int
) -> None:
    assert usual_on_cpu(ranks, cores)["num_blocks"] == blocks <= MAX_BLOCKS


@given(st.integers(0, 600), st.integers(1, 40))
def test_parts_follow_each_other_and_cover_everything(total: int, parts: int) -> None:
    end = 0
    for index in range(parts):
        first = Part("num_tokens", 0, index, parts).of(total)
        assert first == end
        end = first + Part("num_tokens", 0, index, parts, is_count=True).of(total)
    assert end == total


def plan(variant: Variant, parts: int, tuning: Tuning) -> Plan:
    context = RankContext(Config(4, 8, 1024, 2, 8), 1, 4, 1000, CAPABILITIES["cpu"], tuning=tuning)
    return Fullmesh(context).whole(variant, 0, parts)


def steps_of(plan: Plan) -> list[str]:
    return [f"{'&' if launch.alongside else ''}{launch.step}" for launch in plan.launches]


def test_a_part_is_packed_beside_the_sending_of_the_one_before() -> None:
    variant = DispatchVariant(torch.bfloat16, row_format=INT8, smooth=False, weights=True)
    steps = steps_of(plan(variant, 3, Tuning()))
    packed = ["route + pack", "send", "&pack", "send", "&pack", "send"]
    assert steps == [*packed, "wait", "offsets", "rows", "arrange"]
    sends = [launch for launch in plan(variant, 3, Tuning()).launches if launch.step == "send"]
    posts = [dict(zip((a.name for a in s.kernel.args), s.values, strict=True))["post_status"] for s in sends]
    assert posts == [1, 0, 0]


def test_a_part_is_arranged_beside_the_sending_of_the_next() -> None:
    plain = DispatchVariant(torch.bfloat16, row_format=AS_THEY_ARE, smooth=False, weights=True)
    split = Tuning(communication_blocks=1)
    steps = steps_of(plan(plain, 2, split))
    assert steps == ["route", "send", "wait", "offsets", "rows", "arrange", "&send", "rows", "arrange"]
    packed = steps_of(plan(replace(plain, row_format=INT8), 2, split))
    assert packed == ["route + pack", *steps[1:]]


def test_a_part_is_summed_beside_the_wait_for_the_next() -> None:
    steps = steps_of(plan(CombineVariant(torch.bfloat16, True), 3, Tuning()))
    assert steps == ["send", "wait", "sum", "&wait", "sum", "&wait", "sum"]


def test_streams_share_the_blocks_or_have_their_own() -> None:
    variant = CombineVariant(torch.bfloat16, True)
    taking_turns, split = plan(variant, 3, Tuning()), plan(variant, 3, Tuning(communication_blocks=1))
    assert not taking_turns.overlap
    assert {launch.blocks for launch in taking_turns.launches} == {4}
    assert split.overlap
    blocks = {launch.step: launch.blocks for launch in split.launches}
    assert blocks == {"send": 1, "wait": 1, "sum": 3}
