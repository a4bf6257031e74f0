"""Atlas A2 in closed form: a published example's figures, and what any such form has to keep."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.model.clusters import a2
from autotune.model.clusters.a2 import SCHEMES, Flow, flows_of, mean_flow, operator_cost
from autotune.model.clusters.group import OPERATORS
from autotune.model.clusters.routing import KINDS, draw_ids
from autotune.model.constants import Machine, machine_named
from autotune.model.kernel_costs import movement
from moe_triton.core.errors import ArgumentError

MIB = 1 << 20
ROW = 7168 * 2


@pytest.fixture
def machine() -> Machine:
    """With the rate that the published example was computed with, which knows bytes only."""
    return machine_named("A2").replaced({"rdma_gb_per_s": 20.97, "rdma_message_us": 0.0})


@pytest.fixture
def example() -> Flow:
    """8 servers of 8 cards, 16 tokens of fp16, top 8, experts in 4 servers: the published example's."""
    return mean_flow(servers=8, cards=8, tokens=16, topk=8, servers_per_token=4)


class TestPublishedExample:
    """Wire times only: it counts neither posts nor memory."""

    def test_fullmesh(self, example: Flow, machine: Machine) -> None:
        cost = operator_cost("fullmesh", "dispatch", example, machine, row_bytes=ROW)
        assert cost.sent == 16 * 7168 * 8 * 2 * 63 // 64 == 1_806_336
        assert cost.sent / MIB == pytest.approx(1.7227, abs=5e-5)
        assert movement.rdma_us(machine, cost.sent) == pytest.approx(86.1, abs=0.05)

    def test_hierarchy(self, example: Flow, machine: Machine) -> None:
        links = {"pair_write_gb_per_s": 200.7 / 7, "pair_read_gb_per_s": 200.7 / 7}
        peak = machine.replaced({"remote_write_gb_per_s": 200.7, **links})
        between = np.delete(example.copies, example.server).sum() * ROW
        inside = np.delete(example.relayed, example.card).sum() * ROW
        # 7/8 twice: without the own one of 8 servers, and without the own one of 8 cards.
        assert between / MIB == pytest.approx(0.7656, abs=5e-5)
        assert inside / MIB == pytest.approx(1.53125)
        assert movement.rdma_us(peak, between) == pytest.approx(38.3, abs=0.05)
        assert movement.wire(peak, inside) == pytest.approx(8.0, abs=0.05)
        cost = operator_cost("hierarchy", "dispatch", example, peak, row_bytes=ROW)
        assert cost.parts["rdma"] + cost.parts["hccs"] == pytest.approx(46.3, abs=0.05)
        assert cost.sent == between + inside

    def test_the_two_seven_eighths_are_not_the_same(self, machine: Machine) -> None:
        flow = mean_flow(servers=4, cards=2, tokens=16, topk=8, servers_per_token=3)
        assert np.delete(flow.copies, 0).sum() == 16 * 3 * (1 - 1 / 4)
        assert np.delete(flow.relayed, 0).sum() == 16 * 8 * (1 - 1 / 2)

    @pytest.mark.parametrize(("post_us", "posts"), [(1.0, 63), (2.0, 126)])
    def test_posts_bound_the_fullmesh(
        self, example: Flow, machine: Machine, post_us: float, posts: float
    ) -> None:
        cost = operator_cost(
            "fullmesh", "dispatch", example, machine.replaced({"post_aicpu_us": post_us}), row_bytes=ROW
        )
        wire = 86.1
        waits = max(posts - post_us, wire * 62 / 63)
        assert cost.parts["posts"] + cost.parts["rdma"] == pytest.approx(waits + post_us + wire / 63, abs=0.1)
        assert (cost.bound == "posts") == (post_us == 2.0)

    def test_stage_3_gains_over_stage_2(self, example: Flow, machine: Machine) -> None:
        """Published: 10% and more on average."""
        second, third = (
            operator_cost(scheme, "dispatch", example, machine, row_bytes=ROW).us
            for scheme in ("hierarchy", "hierarchy-aiv")
        )
        assert 1.05 < second / third < 1.5


def test_fullmesh_is_bound_by_posts_from_64_ranks_on(machine: Machine) -> None:
    """At 1.5 us a post, as published for 16 tokens of fp16: 63 posts take as long as the wire."""
    bounds = {}
    for servers in (2, 4, 8, 16):
        flow = mean_flow(servers, 8, 16, 8, min(servers, 4))
        bounds[servers * 8] = operator_cost("fullmesh", "dispatch", flow, machine, row_bytes=ROW).bound
    assert bounds == {16: "rdma", 32: "rdma", 64: "posts", 128: "posts"}


def _of_group(kind: str, servers: int, cards: int, tokens: int, seed: int) -> list[Flow]:
    experts = servers * cards * 4
    ids = draw_ids(
        kind, servers * cards, tokens, 4, experts, seed, groups=servers, top_groups=min(2, servers)
    )
    return flows_of(ids, experts, cards)


@given(st.sampled_from(KINDS), st.integers(1, 4), st.integers(1, 4), st.integers(1, 8), st.integers(0, 9))
def test_what_is_sent_is_received(kind: str, servers: int, cards: int, tokens: int, seed: int) -> None:
    flows = _of_group(kind, servers, cards, tokens, seed)
    sent, received = np.array([f.sent for f in flows]), np.array([f.received for f in flows])
    assert np.array_equal(sent, received.T)
    assert (sent.sum(axis=1) == tokens * 4).all()
    copies = np.array([f.copies for f in flows]).reshape(servers, cards, servers)
    arriving = np.array([f.arriving for f in flows]).reshape(servers, cards, servers)
    assert np.array_equal(copies, arriving.transpose(2, 1, 0))
    relayed = np.array([f.relayed for f in flows]).reshape(servers, cards, cards)
    gathered = np.array([f.gathered for f in flows]).reshape(servers, cards, cards)
    assert np.array_equal(relayed, gathered.transpose(0, 2, 1))
    # However a row travels, it ends up at its expert's card.
    assert np.array_equal(gathered.sum(axis=2).ravel(), received.sum(axis=1))
    assert all(np.array_equal(f.reversed.reversed.sent, f.sent) for f in flows)


def test_a_token_goes_to_a_server_once() -> None:
    """By hand: rank 0 of 2 servers of 2 cards has two experts of its token on server 1."""
    ids = np.array([[[2, 3]], [[0, 1]], [[0, 2]], [[3, 1]]], np.int32)
    first, second, third, _ = flows_of(ids, experts=4, cards=2)
    assert first.sent.tolist() == [0, 0, 1, 1]
    assert first.copies.tolist() == [0, 1]
    assert second.copies.tolist() == [1, 0]
    assert third.copies.tolist() == [1, 1]
    # Card 0 of server 1 takes rank 0's token, and its own: to both cards, and to itself.
    assert third.arriving.tolist() == [1, 1]
    assert third.relayed.tolist() == [2, 1]
    assert third.gathered.tolist() == [2, 0]


def test_means_are_what_many_draws_give() -> None:
    flows = _of_group("uniform", 4, 4, 512, seed=1)
    expected = mean_flow(4, 4, 512, 4, np.mean([f.copies.sum() for f in flows]) / 512)
    for name in ("sent", "copies", "relayed"):
        found = np.mean([getattr(f, name) for f in flows], axis=0)
        assert found == pytest.approx(getattr(expected, name), rel=0.05)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("scheme", SCHEMES)
class TestEveryForm:
    """Of every scheme and operator."""

    @pytest.mark.parametrize("servers", [1, 2, 8])
    def test_monotonic(self, scheme: str, operator: str, servers: int, machine: Machine) -> None:
        def took(flow: Flow, used: Machine = machine, row: int = ROW) -> float:
            return operator_cost(scheme, operator, flow, used, row_bytes=row).us

        flow = mean_flow(servers, 8, 64, 8, min(servers, 4))
        assert took(flow, row=ROW + 32) > took(flow)
        assert took(mean_flow(servers, 8, 65, 8, min(servers, 4))) > took(flow)
        for name in machine.constants:
            slower = machine.replaced({name: machine.constants[name].value * 0.8})
            if "_per_" in name:
                assert took(flow, slower) >= took(flow), name
            elif name.endswith("_us"):
                assert took(flow, slower) <= took(flow), name

    def test_parts_are_not_negative(self, scheme: str, operator: str, machine: Machine) -> None:
        for flow in _of_group("zipf", 2, 4, 4, seed=2):
            cost = operator_cost(scheme, operator, flow, machine, row_bytes=ROW)
            assert min(cost.parts.values()) >= 0
            assert cost.us > 0

    def test_a_server_by_itself_has_no_network(self, scheme: str, operator: str, machine: Machine) -> None:
        flow = mean_flow(1, 8, 64, 8, 1)
        cost = operator_cost(scheme, operator, flow, machine, row_bytes=ROW)
        assert not {"rdma", "posts"} & cost.parts.keys()
        assert cost.parts["hccs"] == pytest.approx(movement.wire(machine, 64 * 7 * ROW))

    def test_nobody_sends(self, scheme: str, operator: str, machine: Machine) -> None:
        empty = mean_flow(2, 8, 0, 8, 2)
        cost = operator_cost(scheme, operator, empty, machine, row_bytes=ROW)
        assert cost.sent == 0
        assert 0 < cost.us < 60


def test_the_busiest_core_bounds_posts_of_cores(machine: Machine) -> None:
    flow = mean_flow(3, 8, 64, 8, 3)
    uneven = replace(flow, copies=np.array([64.0, 100.0, 28.0]))
    even, skewed = (
        operator_cost("hierarchy-aiv", "dispatch", f, machine, row_bytes=ROW).parts["posts"]
        for f in (flow, uneven)
    )
    assert even == 64 * machine.post_aiv_us
    assert skewed == 100 * machine.post_aiv_us


class TestCombineOfAHierarchy:
    """64 tokens that go to both of two servers: 64 rows to the other server, 128 sums, 512 results."""

    FLOW = mean_flow(servers=2, cards=8, tokens=64, topk=8, servers_per_token=2)

    def parts(self, scheme: str, machine: Machine, tokens_per_message: int = 1) -> dict[str, float]:
        return operator_cost(
            scheme,
            "combine",
            self.FLOW,
            machine,
            row_bytes=ROW,
            tokens_per_message=tokens_per_message,
        ).parts

    def steps(self, machine: Machine) -> dict[str, float]:
        """All of what stage 3 overlaps but its posts, and what it sums behind that."""
        return {
            "hccs": movement.wire(machine, 512 * 7 / 8 * ROW),
            "sum": a2.memory_us((512 + 128) * ROW, machine),
            "rdma": movement.rdma_us(machine, 64.0 * ROW),
            "behind": a2.memory_us((128 + 64) * ROW, machine),
        }

    def test_stage_2_collects_sums_and_posts_in_series(self, machine: Machine) -> None:
        steps, parts = self.steps(machine), self.parts("hierarchy", machine)
        assert parts["hccs"] == pytest.approx(steps["hccs"])
        assert parts["sum"] == pytest.approx(steps["sum"] + steps["behind"])
        assert parts["rdma"] == pytest.approx(steps["rdma"])
        assert "pack" not in parts

    @pytest.mark.parametrize(("post_us", "longest"), [(0.5, "hccs"), (2.9, "posts")])
    def test_stage_3_does_so_at_once(self, machine: Machine, post_us: float, longest: str) -> None:
        steps, parts = (
            self.steps(machine),
            self.parts("hierarchy-aiv", machine.replaced({"post_aiv_us": post_us})),
        )
        expected = {
            "hccs": steps["hccs"] / (1 if longest == "hccs" else 128),
            "posts": post_us * (64 if longest == "posts" else 1),
            "sum": steps["sum"] / 128 + steps["behind"],
            "rdma": steps["rdma"] / 64,
        }
        assert {name: parts[name] for name in expected} == pytest.approx(expected)

    def test_a_message_may_carry_a_run_of_tokens(self, machine: Machine) -> None:
        """6 of them: 10 messages of 6 and one of 4, and an item is what goes into one message."""
        slow = machine.replaced({"post_aiv_us": 100})
        steps, parts = self.steps(machine), self.parts("hierarchy-aiv", slow, 6)
        expected = {
            "hccs": steps["hccs"] * 6 / 128,
            "posts": 11 * 100,
            "sum": steps["sum"] * 6 / 128 + steps["behind"],
            "rdma": steps["rdma"] * 6 / 64,
        }
        assert {name: parts[name] for name in expected} == pytest.approx(expected)

    def test_in_one_message_nothing_overlaps(self, machine: Machine) -> None:
        steps, parts = self.steps(machine), self.parts("hierarchy-aiv", machine, 128)
        assert parts["posts"] == machine.post_aiv_us
        network = parts["hccs"] + parts["sum"] + parts["rdma"]
        assert network == pytest.approx(sum(steps.values()))

    def test_a_core_for_each_rank_copies_its_results(self, machine: Machine) -> None:
        cycles = movement.load_cycles(machine, ROW, 16) + movement.store_cycles(machine, ROW, 16)
        pack = self.parts("hierarchy-aiv", machine)["pack"]
        assert pack == pytest.approx(movement.us_of(machine, 32 * cycles))
        two_ranks_each = a2.operator_cost(
            "hierarchy-aiv", "combine", mean_flow(10, 8, 64, 8, 4), machine, row_bytes=ROW
        ).parts["pack"]
        cycles = movement.load_cycles(machine, ROW, 40) + movement.store_cycles(machine, ROW, 40)
        assert two_ranks_each == pytest.approx(movement.us_of(machine, 2 * 6.4 * cycles))


MESSAGE_US = 0.5


class TestMessages:
    """What a port takes for each message, beside its bytes."""

    def more(self, machine: Machine, scheme: str, flow: Flow, tokens_per_message: int = 1) -> float:
        """Microseconds more of RDMA, where nothing else of the network takes any time."""
        quick = machine.replaced({"post_aicpu_us": 1e-3, "post_aiv_us": 0.0, "memcpy_gb_per_s": 1e5})
        quick = quick.replaced({"remote_write_gb_per_s": 1e5, "pair_write_gb_per_s": 1e5})
        sizes = {"row_bytes": ROW, "tokens_per_message": tokens_per_message}
        before, after = (
            operator_cost(scheme, "dispatch", flow, used, **sizes).parts["rdma"]
            for used in (quick, quick.replaced({"rdma_message_us": MESSAGE_US}))
        )
        return after - before

    def test_a_block_for_each_rank(self, machine: Machine) -> None:
        assert self.more(machine, "fullmesh", mean_flow(2, 8, 64, 8, 2)) == pytest.approx(15 * MESSAGE_US)

    def test_nothing_is_posted_to_who_gets_no_row(self, machine: Machine) -> None:
        flow = mean_flow(2, 8, 64, 8, 2)
        sent = np.r_[flow.sent[:10], np.zeros(6)]
        assert self.more(machine, "fullmesh", replace(flow, sent=sent, received=sent)) == pytest.approx(
            9 * MESSAGE_US
        )

    def test_a_block_for_each_server(self, machine: Machine) -> None:
        assert self.more(machine, "hierarchy", mean_flow(4, 8, 64, 8, 4)) == pytest.approx(3 * MESSAGE_US)

    @pytest.mark.parametrize(("tokens", "messages"), [(1, 3 * 64), (6, 3 * 11), (64, 3)])
    def test_runs_of_tokens(self, machine: Machine, tokens: int, messages: int) -> None:
        flow = mean_flow(4, 8, 64, 8, 4)
        assert self.more(machine, "hierarchy-aiv", flow, tokens) == pytest.approx(messages * MESSAGE_US)


class TestPairsOfCards:
    """Two cards have one link between them, which few peers, or one that gets most, cannot go round."""

    def test_few_cards_are_bound_by_their_links(self, machine: Machine) -> None:
        def hccs(cards: int) -> float:
            return operator_cost(
                "fullmesh", "dispatch", mean_flow(1, cards, 64, 8, 1), machine, row_bytes=ROW
            ).parts["hccs"]

        for cards in (2, 3, 4):
            assert hccs(cards) == pytest.approx(512 / cards * ROW / machine.pair_write_gb_per_s / 1e3)
        for cards in (5, 8):
            assert hccs(cards) == pytest.approx(
                512 * (1 - 1 / cards) * ROW / machine.remote_write_gb_per_s / 1e3
            )

    @pytest.mark.parametrize(
        ("operator", "rate"), [("dispatch", "pair_write_gb_per_s"), ("combine", "pair_read_gb_per_s")]
    )
    def test_a_busy_peer_bounds_a_hierarchy(self, machine: Machine, operator: str, rate: str) -> None:
        """Rows are written to it in dispatch, results are read from it in combine."""
        flow = mean_flow(2, 8, 64, 8, 2)
        rows = np.r_[flow.relayed[:7], 400.0]
        uneven = replace(flow, relayed=rows, gathered=rows)
        parts = operator_cost("hierarchy", operator, uneven, machine, row_bytes=ROW).parts
        assert parts["hccs"] == pytest.approx(400 * ROW / machine.constants[rate].value / 1e3)


def test_token_bytes_are_those_of_the_published_window() -> None:
    assert a2.token_bytes(ROW, 8) == ROW + 16 * 8
    assert a2.token_bytes(ROW, 9) == ROW + 16 * 16


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("comm_alg", lambda flow: operator_cost("ring", "dispatch", flow, machine_named("A2"), row_bytes=1)),
        ("operator", lambda flow: operator_cost("fullmesh", "send", flow, machine_named("A2"), row_bytes=1)),
        (
            "machine",
            lambda flow: operator_cost("fullmesh", "combine", flow, machine_named("A3"), row_bytes=1),
        ),
        (
            "tokens_per_message",
            lambda flow: operator_cost(
                "hierarchy-aiv", "dispatch", flow, machine_named("A2"), row_bytes=1, tokens_per_message=0
            ),
        ),
        (
            "tokens_per_message",
            lambda flow: operator_cost(
                "hierarchy", "combine", flow, machine_named("A2"), row_bytes=1, tokens_per_message=2
            ),
        ),
        ("ranks", lambda _: flows_of(np.zeros((3, 1, 1), np.int32), 6, cards=2)),
        ("experts", lambda _: flows_of(np.zeros((4, 1, 1), np.int32), 6, cards=2)),
    ],
)
def test_what_is_not_there_is_refused(argument: str, call, example: Flow) -> None:
    with pytest.raises(ArgumentError) as error:
        call(example)
    assert error.value.argument == argument
