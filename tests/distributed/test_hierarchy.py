"""hierarchy: both stages equal to the reference bit for bit, what they post, and whom they name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.servers.traces import relayed as relayed_in
from moe_triton import ConfigMismatchError, EPBuffer, Tuning
from moe_triton.backends import CAPABILITIES
from moe_triton.backends.cpu.nic import NicSettings
from moe_triton.core.config import Product
from moe_triton.core.tuning import POSTS, Posts
from moe_triton.operators.variants import CombineVariant, DispatchVariant
from moe_triton.processes import RankFailedError, RankGroup, run_ranks
from moe_triton.schemes import make_scheme
from moe_triton.schemes.hierarchy.relay_tables import RelayTables
from moe_triton.schemes.rank_context import RankContext
from tests.distributed.failures import not_refused
from tests.distributed.hierarchy_runs import (
    Relayed,
    compare,
    copies_of,
    die_at,
    held_back,
    make,
    one_round,
    passed_on_by,
    relayed,
    straggle,
    traffic_of,
)
from tests.patience import seconds
from tests.trace.test_traces import check_nesting, read, spans_of

Groups = Callable[[int], RankGroup]
ORDERED, UNORDERED = NicSettings(seed=21), NicSettings(seed=22, keeps_order=False)


def few_cases(servers: int, cards: int, product: Product = "A2") -> list[Relayed]:
    """What differs most. By both products the same code runs."""
    found = _few_cases(servers, cards)
    return [replace(of, case=replace(of.case, config=replace(of.config, product=product))) for of in found]


def _few_cases(servers: int, cards: int) -> list[Relayed]:
    count = servers * cards
    some, many = (tuple(each[rank % 4] for rank in range(count)) for each in ((4, 0, 1, 3), (70, 0, 33, 3)))
    return [
        relayed(servers, cards),
        relayed(servers, cards, nic=UNORDERED, routing="sparse", tokens=some, num_blocks=3),
        relayed(servers, cards, "server 1", ORDERED, quantize="int8"),
        relayed(servers, cards, 1, UNORDERED, dtype=torch.float16, num_blocks=2),
        relayed(servers, cards, nic=ORDERED, routing="none"),
        # Partial rows of a server in several pieces, some of them empty.
        relayed(servers, cards, nic=UNORDERED, max_tokens=70, tokens=many, rounds=2),
        # Rows that are streamed, those with a flag in their head among them.
        relayed(servers, cards, nic=UNORDERED, hidden=2080, cached_bytes=0, num_blocks=3),
        relayed(servers, cards, nic=ORDERED, hidden=4160, cached_bytes=0, quantize="int8"),
    ]


def many_cases(servers: int, cards: int) -> list[Relayed]:
    """Every routing, with other settings for each."""
    count = servers * cards
    tokens = tuple(rank % 5 for rank in range(count))
    plain: list[dict[str, Any]] = [{}, {"dtype": torch.float16, "num_blocks": 2}, {"quantize": "int8"}]
    of = [
        relayed(servers, cards, limit, nic, **changes)
        for limit in (None, 2, "server 1")
        for nic, changes in zip((NicSettings(), UNORDERED, ORDERED), plain, strict=True)
    ]
    of += [
        relayed(servers, cards, nic=UNORDERED, routing=routing, tokens=tokens, num_blocks=3)
        for routing in ("skewed", "one expert set", "sparse", "none")
    ]
    return of


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize(("servers", "cards"), [(2, 2), (4, 2)])
def test_bits_and_tables_are_the_references(ranks: Groups, servers: int, cards: int, part: int) -> None:
    count, of = servers * cards, few_cases(servers, cards)[part::3]
    assert of
    assert ranks(count).run(compare, of, timeout_s=seconds(240)) == [[]] * count


@pytest.mark.parametrize(("servers", "cards", "part"), [(2, 2, 2), (1, 4, 1), (1, 1, 2)])
def test_bits_and_tables_on_a3_too(ranks: Groups, servers: int, cards: int, part: int) -> None:
    """A group inside one machine is a hierarchy there, which posts nothing."""
    count, of = servers * cards, few_cases(servers, cards, "A3")[part::3]
    assert of
    assert ranks(count).run(compare, of, timeout_s=seconds(240)) == [[]] * count


@pytest.mark.long
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize(("servers", "cards"), [(2, 2), (4, 2), (2, 4), (3, 1), (8, 2)])
def test_every_routing(ranks: Groups, servers: int, cards: int, part: int) -> None:
    count, of = servers * cards, many_cases(servers, cards)[part::3]
    assert of
    assert ranks(count).run(compare, of, timeout_s=seconds(900)) == [[]] * count


def test_late_ranks_change_nothing(ranks: Groups) -> None:
    of = relayed(2, 2, nic=UNORDERED)
    assert ranks(4).run(straggle, of, 24, timeout_s=seconds(240)) == [[]] * 4


@pytest.mark.parametrize("posts", POSTS)
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_traffic_follows_from_the_routing(ranks: Groups, posts: Posts, quantize: str | None) -> None:
    """A token once to each other server, a row back from each; a message for some, or for all of a server."""
    of = relayed(2, 2, quantize=quantize)
    c = of.config
    tokens = 3 if posts == "aiv" else None
    found = ranks(4).run(traffic_of, of, posts, tokens)
    copies = copies_of(of)
    others = c.topology.num_servers - 1
    for rank, (sent, returned) in enumerate(found):
        server = c.topology.servers[rank]
        to = [q for q in range(others + 1) if q != server]
        out = copies[rank, to]
        # Rows go back for the tokens of those of this rank's rail.
        back = torch.stack([copies[peer, server] for peer in c.topology.rail(rank) if peer != rank])
        row = c.hidden if quantize else 2 * c.hidden
        for traffic, counts, row_bytes in ((sent, out, row), (returned, back, 2 * c.hidden)):
            messages = int((-(-counts // (tokens or c.num_max_tokens_per_rank))).sum())
            assert traffic.posts.between == messages + others
            assert traffic.payload_bytes.between == int(counts.sum()) * row_bytes
            assert traffic.posts.inside == traffic.framing_bytes.inside == 0


def test_a_token_crosses_once_however_many_experts_it_has(ranks: Groups) -> None:
    """BS * H * 2 * D between servers, D those of a token without its own one; inside, rows relayed."""
    of = relayed(2, 2, 1, topk=4)
    found = ranks(4).run(traffic_of, of, "aiv")
    passed_on = passed_on_by(of)
    for rank, (sent, returned) in enumerate(found):
        row = 2 * of.config.hidden
        assert sent.payload_bytes.inside == row * int(passed_on[rank].sum())
        assert returned.payload_bytes.inside == row * int(passed_on[:, rank].sum())
        away = copies_of(of)[rank, 1 - of.config.topology.servers[rank]]
        assert sent.payload_bytes.between == int(away) * 2 * of.config.hidden


@pytest.mark.parametrize("posts", POSTS)
def test_what_is_passed_on_while_a_servers_last_token_is_under_way(
    ranks: Groups, tmp_path: Path, posts: Posts
) -> None:
    of, trace = relayed(2, 2, rounds=1, topk=4, tokens=(4,) * 4), tmp_path / "trace.json"
    seen = ranks(4).run(held_back, of, posts, 1.5, str(trace), timeout_s=seconds(60))[0]
    assert not seen.is_over
    assert (seen.own_rows, seen.own_entries) == (posts == "aiv",) * 2
    assert seen.slow_rows == (posts == "aiv")
    check_links(of, read(trace))
    (dispatch,), (combine,) = (relayed_in(trace, operator, 1) for operator in ("dispatch", "combine"))
    assert min(dispatch.us) > 0
    assert min(combine.us) > 0
    assert (dispatch.hidden > 0) == (posts == "aiv")
    if posts == "aicpu":
        assert combine.hidden == 0


def check_links(of: Relayed, events: list[dict[str, Any]]) -> None:
    """Those of the last server, which are paced, carry what each call has posted, one message at a time."""
    check_nesting(events)
    topology = of.config.topology
    slow = topology.ranks_on(topology.num_servers - 1)
    assert {e["pid"] for e in events if e["args"].get("name") == "link"} == set(slow)
    for rank in slow:
        carried = spans_of(events, pid=rank, cat="link")
        assert {span["args"]["rank"] for span in carried} == set(topology.rail(rank)) - {rank}
        for operator in ("dispatch #1", "combine #1"):
            (whole,) = spans_of(events, pid=rank, name=operator)
            messages = [span for span in carried if span["args"]["of"] == operator]
            assert len(messages) == whole["args"]["posts between"]


# Bad input.


def refusals(rank: int, num_ranks: int) -> list[str]:
    """What was taken, or refused in other words."""
    of = relayed(2, 2, quantize="int8_128")
    inputs = of.inputs(rank, 0)
    x, ids, weights = inputs.x, inputs.topk_idx, inputs.topk_weights
    wrong = []
    with make(of, "aiv") as buffer:
        output = buffer.dispatch(x, ids, weights)
        y, handle = output.tokens, output.handle
        other = weights.clone()
        other[1, 2] += 1.0
        short = replace(handle)
        short.__dict__["tables"] = handle.tables[:-1]  # type: ignore[index]
        lacking = replace(handle)
        lacking.__dict__["tables"] = None
        # As a hostile relay leaves them, or who writes over them afterwards.
        tables, origins = handle.tables.clone(), handle.assist_info.clone()  # type: ignore[union-attr]
        RelayTables(of.config).of(tables, "outer_rows").fill_(7)
        origins[1] = of.config.num_max_tokens_per_rank
        shifted, unknown = replace(handle, tables=tables), replace(handle, assist_info=origins)
        c = of.config
        calls: dict[str, Callable[[], object]] = {
            "topk_weights is None, but hierarchy sums inside": lambda: buffer.dispatch(x, ids),
            "topk_weights is None, but hierarchy sums": lambda: buffer.combine(y, handle),
            f"topk_weights is {float(other[1, 2])} at token 1, k 2": lambda: buffer.combine(y, handle, other),
            "active_mask is of shape": lambda: buffer.dispatch(
                x, ids, weights, active_mask=torch.ones(len(x) + 1, dtype=torch.bool)
            ),
            "smooth_scales is given": lambda: buffer.dispatch(
                x, ids, weights, quantize="int8", smooth_scales=torch.ones(c.num_experts, c.hidden)
            ),
            "quantize is 'int8_128', but with comm_alg='hierarchy' a row has one": lambda: buffer.dispatch(
                x, ids, weights, quantize="int8_128"
            ),
            "performance_info is given": lambda: buffer.dispatch(
                x, ids, weights, performance_info=torch.zeros(num_ranks, dtype=torch.int64)
            ),
            "wait is False": lambda: buffer.dispatch(x, ids, weights, wait=False),
            "handle.tables is of shape": lambda: buffer.combine(y, short, weights),
            "handle.tables is None": lambda: buffer.combine(y, lacking, weights),
            "handle.tables is 7 in outer_rows at [": lambda: buffer.combine(y, shifted, weights),
            f"handle.assist_info is {origins[1]} in a row's source, token and k at [0, 1]": lambda: (
                buffer.combine(y, unknown, weights)
            ),
        }
        wrong += not_refused(calls.items())
        # Nothing was sent. Weights of entries without an expert do not matter.
        one_round(buffer, of, inputs)
        none = ids.clone()
        none[0, 1] = -1
        output = buffer.dispatch(x, none, weights)
        other = weights.clone()
        other[0, 1] = float("nan")
        sums = buffer.combine(output.tokens, output.handle, other)
        # Nor do those that a mask leaves out; which says the same as ids of -1 do.
        for given, mask in ((ids, none >= 0), (none, torch.arange(len(x)) < 1)):
            output = buffer.dispatch(x, given, weights, active_mask=mask)
            left_out = ~(mask if mask.dim() == 2 else mask[:, None])
            unread = weights.masked_fill(left_out, float("nan"))
            found = buffer.combine(output.tokens, output.handle, unread)
            if not torch.equal(found[:1], sums[:1]) or (mask.dim() == 1 and found[1:].any()):
                wrong.append(f"sums with {mask}")
    return wrong


def test_what_a_hierarchy_does_not_take(ranks: Groups) -> None:
    assert ranks(4).run(refusals) == [[]] * 4


def refused_groups(rank: int, num_ranks: int, product: Product) -> list[str]:
    of = relayed(2, 2, product=product)
    sizes: dict[str, Any] = {"num_max_tokens_per_rank": 4, "hidden": 64, "num_topk": 2, "num_experts": 8}
    sizes |= {"product": product, "comm_alg": "hierarchy", "relaxed": True}

    def build(**options: Any) -> Callable[[], object]:
        return lambda: EPBuffer(**sizes, **options)

    hint = EPBuffer.get_buffer_size_hint(num_ranks, ranks_per_server=2, **sizes)
    calls = {
        "ranks_per_server is [3, 1], but hierarchy sends to": build(ranks_per_server=[3, 1]),
        "num_zero_experts + num_copy_experts + num_const_experts is 1": build(
            ranks_per_server=2, num_zero_experts=1
        ),
        f"num_bytes is {hint - 1}, but these sizes need {hint}": build(
            ranks_per_server=2, num_bytes=hint - 1
        ),
        "tuning.dispatch_tokens is 1": build(ranks_per_server=2, tuning=Tuning(dispatch_tokens=1)),
    }
    if product == "A3":
        shared = {"num_shared_experts": 1, "num_shared_ranks": 1, "ranks_per_server": 2}
        calls["num_shared_experts is 1, but comm_alg='hierarchy' has no ranks of"] = build(**shared)
        calls["tuning.message_tokens is 1, but only hierarchy between servers"] = build(
            tuning=Tuning(message_tokens=1)
        )
    wrong = not_refused(calls.items())
    with make(of, "aicpu") as buffer:
        if buffer.layout.data_bytes != EPBuffer.get_buffer_size_hint(
            num_ranks, ranks_per_server=2, **sizes | {"num_topk": of.config.num_topk}
        ):
            wrong.append("hint")
    return wrong


@pytest.mark.parametrize("product", ["A2", "A3"])
def test_groups_that_a_hierarchy_does_not_serve(ranks: Groups, product: Product) -> None:
    assert ranks(4).run(refused_groups, product) == [[]] * 4


def disagree(rank: int, num_ranks: int) -> str:
    posts = POSTS[rank == 2]
    try:
        make(relayed(2, 2), posts).close()
    except ConfigMismatchError as error:
        return str(error)
    return "nothing"


def test_ranks_that_post_in_other_ways_are_told(ranks: Groups) -> None:
    for said in ranks(4).run(disagree):
        assert "tuning.posts: 'aiv' on rank(s) [0, 1, 3], 'aicpu' on rank(s) [2]" in said


def in_super_nodes(rank: int, num_ranks: int, of: Relayed, ids: tuple[str | None, ...]) -> str:
    """What a rank is told that HCCL takes for one of a super node, None for none."""
    with pytest.MonkeyPatch.context() as patch:
        if ids[rank] is not None:
            patch.setenv("HCCL_LOGIC_SUPERPOD_ID", str(ids[rank]))
        try:
            make(of, "aiv").close()
        except ConfigMismatchError as error:
            return str(error)
    return "constructed"


@pytest.mark.parametrize(
    ("product", "ids", "said"),
    [
        ("A3", ("0", "0", "1", "1"), ""),
        ("A3", ("0", "0", None, None), ""),
        ("A3", ("0", "1", "1", "1"), "'0' on rank(s) [0], '1' on rank(s) [1], of server 0"),
        ("A3", ("0", "0", "1", None), "'1' on rank(s) [2], None on rank(s) [3], of server 1"),
        ("A2", ("0", "1", "1", "1"), ""),
    ],
)
def test_the_ranks_of_a_server_are_of_one_super_node(
    ranks: Groups, product: Product, ids: tuple[str | None, ...], said: str
) -> None:
    """HCCL would not let its ranks write to each other's memory. What connects servers needs no id."""
    for found in ranks(4).run(in_super_nodes, relayed(2, 2, product=product), ids):
        if said:
            assert f"HCCL_LOGIC_SUPERPOD_ID: {said}: its ranks write to each other's memory" in found
        else:
            assert found == "constructed"


# Failure.


def steps_of(of: Relayed, operator: str, posts: Posts) -> list[str]:
    """An operator's, in order."""
    scheme = make_scheme(RankContext(of.config, 0, 1, 1000, CAPABILITIES["cpu"], tuning=Tuning(posts=posts)))
    variant = (
        DispatchVariant(torch.bfloat16, weights=True)
        if operator == "dispatch"
        else CombineVariant(torch.bfloat16, weights=True)
    )
    return [launch.step for launch in scheme.whole(variant, 0).launches]


def check_named(of: Relayed, posts: Posts, operator: str, steps: int) -> None:
    victim = of.config.num_ranks - 1
    given = of, posts, victim, operator, steps
    found = run_ranks(die_at, of.config.num_ranks, given, timeout_s=seconds(90), allow_failures=True)
    server = of.config.topology.servers[victim]
    assert isinstance(found[victim], RankFailedError)
    for told in found[:victim]:
        assert not isinstance(told, RankFailedError), f"after {steps} steps: {told}"
        missing, said, took = told
        assert missing in ((victim,), tuple(of.config.topology.ranks_on(server))), f"{steps} steps: {said}"
        assert took < seconds(30), said


@pytest.mark.parametrize(("product", "operator"), [("A2", "dispatch"), ("A3", "combine")])
def test_a_rank_that_dies_halfway_is_named_by_all_others(product: Product, operator: str) -> None:
    of = relayed(2, 2, product=product)
    check_named(of, "aiv", operator, len(steps_of(of, operator, "aiv")) // 2)


@pytest.mark.long
@pytest.mark.parametrize("posts", POSTS)
@pytest.mark.parametrize("operator", ["dispatch", "combine"])
def test_a_rank_that_dies_at_any_step_is_named_by_all_others(operator: str, posts: Posts) -> None:
    of = relayed(2, 2)
    for steps in range(len(steps_of(of, operator, posts))):
        check_named(of, posts, operator, steps)
