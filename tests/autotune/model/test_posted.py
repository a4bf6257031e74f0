"""Plans that post: against the closed form, and what makes them slower."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autotune.cli.model.page import SERVERS, SERVERS_TOKENS
from autotune.model.clusters import a2
from autotune.model.clusters.group import OPERATORS, Group, OperatorName
from autotune.model.clusters.posted import compare, stages
from autotune.model.clusters.prices import Call
from autotune.model.constants import NETWORK, Machine, machine_named
from autotune.model.cost import Cost, Messages, NoNetworkError
from autotune.model.kernel_costs.kernel_cost import kernel_cost_of
from autotune.model.kernel_costs.pulls import with_pulls
from autotune.model.kernel_costs.remembered import OfArguments
from autotune.model.timelines.arrivals import Ports
from autotune.model.timelines.timeline import walk_ranks
from moe_triton.core.errors import ArgumentError
from moe_triton.schemes import rank_context

A2 = machine_named("A2")
KERNEL_COSTS = OfArguments(kernel_cost_of)
TOLERANCE = 0.12
"""Of the plan to the closed form, which knows nothing of launches and has a constant for them, and which has
a barrier of all cores before posts.
"""
BLOCKS = Group(16, 16, comm_alg="fullmesh", product="A2")
ROWS = Group(16, 16, comm_alg="fullmesh_v1", ranks_per_server=8)


def is_long(ranks: int, tokens: int) -> tuple[pytest.MarkDecorator, ...]:
    """The page of figures has all of these sizes; two of them are enough in `make test`."""
    return () if (ranks, tokens) in ((16, 16), (64, 16)) else (pytest.mark.long,)


@pytest.mark.parametrize(
    ("ranks", "tokens"),
    [
        pytest.param(ranks, tokens, marks=is_long(ranks, tokens))
        for ranks in SERVERS
        for tokens in SERVERS_TOKENS
    ],
)
def test_the_plan_of_blocks_takes_what_the_closed_form_says(ranks: int, tokens: int) -> None:
    for found in compare(ranks, tokens, A2, KERNEL_COSTS):
        assert abs(found.difference) < TOLERANCE, found
        assert sum(mine for mine, _ in found.stages.values()) == pytest.approx(found.timeline_us)
        assert sum(its for _, its in found.stages.values()) == pytest.approx(found.closed_us)


@pytest.mark.parametrize("group", [BLOCKS, ROWS], ids=["blocks", "rows"])
def test_some_ranks_stand_for_all(group: Group) -> None:
    """But for who meets whom at a port, which depends on when each of their cores has rung."""
    ids = group.draw()
    call = Call.of(group, KERNEL_COSTS, ids, *range(group.ranks))
    traffics = [group.traffic(ids, rank) for rank in range(group.ranks)]
    for operator in OPERATORS:
        lines = walk_ranks(group.plans(A2)[operator], traffics, A2, kernel_costs=with_pulls(KERNEL_COSTS))
        most = max(priced.us for priced in call.priced(operator, A2))
        assert most == pytest.approx(max(line.total_us for line in lines), rel=0.08)


@pytest.mark.parametrize("group", [BLOCKS, ROWS], ids=["blocks", "rows"])
@pytest.mark.parametrize("constant", ["rdma_gb_per_s", "rdma_latency_us", "post_aicpu_us", "post_aiv_us"])
def test_it_depends_on_the_network_and_on_its_poster(group: Group, constant: str) -> None:
    call = Call.of(group, KERNEL_COSTS, group.draw(), 0)
    value = A2.constants[constant].value
    slower = A2.replaced({constant: value / 100 if constant == "rdma_gb_per_s" else value * 100})
    posts_from_cores = group is ROWS
    is_read = posts_from_cores != (constant == "post_aicpu_us") or not constant.startswith("post")
    is_read = is_read and (not constant.endswith("aiv_us") or posts_from_cores)
    for operator in OPERATORS:
        before, after = (call.priced(operator, machine)[0].us for machine in (A2, slower))
        assert (after > 1.5 * before) == is_read
        assert (after == before) != is_read


def test_blocks_are_posted_while_others_are_made() -> None:
    call = Call.of(BLOCKS, KERNEL_COSTS, BLOCKS.draw(), 0)
    for operator in OPERATORS:
        spans = call.priced(operator, A2)[0].timeline.spans
        (messages,) = [span.cost.messages for span in spans if span.cost.messages is not None]
        posted = messages.posted_us
        assert posted[0] < 0 < posted[-1]
        assert (np.diff(posted) >= A2.post_aicpu_us - 1e-9).all()


def test_in_one_part_nothing_is_posted_before_all_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def times() -> list[tuple[float, float]]:
        call = Call.of(big, OfArguments(kernel_cost_of), big.draw(), 0)
        lines = [call.priced(operator, A2)[0].timeline for operator in OPERATORS]
        firsts = [next(s.cost.messages for s in line.spans if s.cost.messages).posted_us[0] for line in lines]
        return [(line.total_us, float(first)) for line, first in zip(lines, firsts, strict=True)]

    big = replace(BLOCKS, tokens=128)
    in_parts = times()
    monkeypatch.setattr(rank_context, "POST_PARTS", 1)
    for (us, first), (whole_us, whole_first) in zip(in_parts, times(), strict=True):
        assert first < -6 * A2.post_aicpu_us < -3 * A2.post_aicpu_us < whole_first
        assert us < whole_us


def test_no_row_is_packed_while_messages_travel() -> None:
    """One launch after the other, and what posts comes behind all that makes what it posts."""
    call = Call.of(ROWS, KERNEL_COSTS, ROWS.draw(), 0)
    for operator in OPERATORS:
        spans = call.priced(operator, A2)[0].timeline.spans
        assert not any(span.launch.alongside for span in spans)
        posting = next(i for i, span in enumerate(spans) if span.cost.messages is not None)
        assert all(span.end_us <= spans[posting].begin_us for span in spans[:posting])
        assert not {"send", "route", "route + pack", "pack", "quantize"} & {
            span.launch.step for span in spans[posting:]
        }


def test_a_machine_without_a_network_says_so() -> None:
    call = Call.of(ROWS, KERNEL_COSTS, ROWS.draw(), 0)
    a3 = machine_named("A3")
    for missing in NETWORK:
        known = {name: entry for name, entry in a3.constants.items() if name != missing}
        said = rf"dispatch_post: A3 has no constants of a network \({missing}\)"
        with pytest.raises(NoNetworkError, match=said):
            call.priced("dispatch", Machine("A3", known))


@pytest.mark.parametrize(("operator", "step"), [("dispatch", "relay"), ("combine", "return")])
def test_two_cards_of_a_server_have_one_link(operator: OperatorName, step: str) -> None:
    """All that a card passes on, or gives back, is for the other one of its server."""
    group = Group(4, 128, experts=16, comm_alg="hierarchy", product="A2", ranks_per_server=2)
    (priced,) = Call.typical(group, KERNEL_COSTS).priced(operator, A2)
    costs = [span.cost for span in priced.timeline.spans if span.launch.step == step]
    for cost in costs:
        assert cost.sent > 1 << 20
        assert cost.parts["wire"] == pytest.approx(cost.sent / A2.pair_write_gb_per_s / 1e3)


@pytest.mark.parametrize("operator", OPERATORS)
def test_rows_between_machines_of_a3_have_a_price_on_its_own_network(operator: OperatorName) -> None:
    """Like on A2's, whose port is as fast; inside a server A3 is faster."""
    call = Call.of(ROWS, KERNEL_COSTS, ROWS.draw(), 0)
    on_a3, on_a2 = (call.priced(operator, machine_named(name))[0].us for name in ("A3", "A2"))
    assert 0.6 < on_a3 / on_a2 < 1.0


def test_blocks_need_an_aicpu_that_posts() -> None:
    """Of A3 nothing says what one takes for it."""
    call = Call.of(BLOCKS, KERNEL_COSTS, BLOCKS.draw(), 0)
    with pytest.raises(NoNetworkError, match=r"A3 has no AICPU that posts \(post_aicpu_us\); A2 has"):
        call.priced("dispatch", machine_named("A3"))


def test_what_leaves_a_rank_is_counted() -> None:
    """All rows but the own ones, those for the same server too; and for each a header and FLAG2."""
    ids = BLOCKS.draw()
    call = Call.of(BLOCKS, KERNEL_COSTS, ids, 3)
    spans = call.priced("combine", A2)[0].timeline.spans
    received = call.traffics[0].received
    rows = sum(span.cost.leaving for span in spans) - 15 * (512 + 32)
    assert rows == (received.sum() - received[3]) * 2 * BLOCKS.hidden


@pytest.mark.parametrize("tokens", [16, 128])
def test_stages_of_a_hierarchy_take_what_their_closed_forms_do_not_know(tokens: int) -> None:
    """Launches, tables, and barriers; of a token that cores post by themselves the plan hides as much."""
    second = Group(16, tokens, comm_alg="hierarchy", product="A2", posts="aicpu")
    third, ids = replace(second, posts="aiv"), second.draw()
    one_by_one = replace(third, message_tokens=1)
    forms = {
        id(second): a2.price(replace(second, posts=None), A2, ids),
        id(third): a2.price(replace(second, comm_alg="hierarchy-aiv", posts=None), A2, ids, 8),
        id(one_by_one): a2.price(replace(second, comm_alg="hierarchy-aiv", posts=None), A2, ids),
    }
    for group in (second, third, one_by_one):
        call = Call.of(group, KERNEL_COSTS, ids, 0)
        for operator in OPERATORS:
            line, form = call.priced(operator, A2)[0].timeline, forms[id(group)].operators[operator]
            assert 0.9 < line.total_us / form.us < 1.6
            assert line.total_us == pytest.approx(sum(line.parts.values()))


@pytest.mark.parametrize(
    ("ranks", "tokens"),
    [
        *((16, tokens) for tokens in (16, 64, 128)),
        *((32, tokens) for tokens in (16, 64, 128)),
        *(pytest.param(64, tokens, marks=pytest.mark.long) for tokens in (16, 64, 128)),
    ],
)
def test_stage_3_is_ahead_of_stage_2(ranks: int, tokens: int) -> None:
    """Published: by 10% and more on average. Whatever a post may take, and at 16 tokens nothing is lost."""
    for each in stages(ranks, tokens, A2, KERNEL_COSTS):
        assert each.gain >= (1.1 if tokens >= 64 else 1.0), each


def test_a_core_without_a_queue_goes_on_beside_posts() -> None:
    """A phase begins with the first cores that are through with the one before, and ends with the last."""
    group = Group(16, 128, comm_alg="hierarchy", product="A2", posts="aiv", message_tokens=1)
    (priced,) = Call.typical(group, KERNEL_COSTS).priced("dispatch", A2)
    spans = {span.launch.step: span for span in priced.timeline.spans}
    send, relay = spans["send"], spans["relay"]
    assert send.cost.posting
    assert len(send.cost.posting) < len(send.cost.blocks_us)
    assert relay.begin_us == pytest.approx(send.begin_us + send.cost.others_us)
    assert send.begin_us < relay.begin_us < send.end_us < relay.end_us
    # A core that posts begins to pass on when it has posted.
    last = max(map(sum, zip(send.cost.blocks_us, relay.cost.blocks_us, strict=True)))
    assert relay.end_us >= send.begin_us + last


def test_what_is_passed_on_in_series_begins_with_the_last_message() -> None:
    """And what comes message by message is passed on meanwhile."""
    waits = {}
    for posts in ("aicpu", "aiv"):
        group = Group(16, 128, comm_alg="hierarchy", product="A2", posts=posts)  # type: ignore[arg-type]
        (priced,) = Call.typical(group, KERNEL_COSTS).priced("dispatch", A2)
        relay = next(span for span in priced.timeline.spans if span.launch.step == "relay")
        assert relay.cost.taking_us > 0.9 * relay.cost.us
        waits[posts] = relay.waited_us
    assert waits["aicpu"] > waits["aiv"] + 50


def test_who_posts_is_a_choice_of_hierarchy_between_servers() -> None:
    with pytest.raises(
        ArgumentError, match=r"posts is 'aicpu', but only hierarchy between servers has a choice"
    ):
        _ = replace(BLOCKS, posts="aicpu").config


def messages(peers: list[int], num_bytes: int, post_us: float = 0.0) -> Messages:
    numbers = np.arange(1, len(peers) + 1)
    return Messages(np.array(peers, np.int64), np.full(len(peers), num_bytes), post_us * numbers)


def ports_of(ranks: int, gb_per_s: float, message_us: float = 0.0) -> Ports:
    network = {"rdma_gb_per_s": gb_per_s, "rdma_message_us": message_us, "rdma_latency_us": 3.0}
    return Ports(A2.replaced(network), ranks)


def arrived(orders: list[list[int]]) -> np.ndarray:
    ports = ports_of(len(orders), 1.0)
    return ports.deliver([messages(order, 10_000) for order in orders], np.zeros(len(orders)))


class TestPorts:
    def test_one_begins_behind_the_other(self) -> None:
        found = arrived([[(rank + i) % 4 for i in (1, 2, 3)] for rank in range(4)])
        np.testing.assert_allclose(found, 3 * 10.0 + 3.0)

    def test_all_to_one_first_keeps_the_others_waiting(self) -> None:
        """Why ranks begin with the one behind them."""
        found = arrived([[peer for peer in range(4) if peer != rank] for rank in range(4)])
        assert found.max() > 1.5 * (3 * 10.0 + 3.0)

    def test_a_port_stays_busy(self) -> None:
        ports = ports_of(2, 1.0)
        both = [messages([1], 10_000), messages([0], 10_000)]
        np.testing.assert_allclose(ports.deliver(both, np.zeros(2)), 13.0)
        np.testing.assert_allclose(ports.deliver(both, np.array([2.0, 2.0])), 23.0)

    def test_posts_take_their_time(self) -> None:
        ports = ports_of(3, 1000.0)
        found = ports.deliver([messages([1, 2], 1000, 5.0), messages([], 0), messages([], 0)], np.zeros(3))
        np.testing.assert_allclose(found[1:], [5 + 1e-3 + 3, 10 + 1e-3 + 3])
        assert found[0] == -np.inf

    def test_each_message_takes_a_constant_beside_its_bytes(self) -> None:
        """On ranks that stand for others as well."""
        both = [messages([1, 1, 1], 10_000), messages([0, 0, 0], 10_000)]
        np.testing.assert_allclose(ports_of(2, 1.0, 0.5).deliver(both, np.zeros(2)), 3 * 10.5 + 3)
        alike = ports_of(2, 1.0, 0.5).deliver_alike(both, np.zeros(2), np.full(2, 3 * 10.5))
        np.testing.assert_allclose(alike, 3 * 10.5 + 3)


def test_a_barrier_in_front_of_posts_changes_nothing_of_them() -> None:
    cost = replace(Cost({"items": 2.0}), messages=messages([1], 10))
    assert cost.after_sync(5.0).messages is cost.messages
