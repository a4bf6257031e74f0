"""Operators on groups: representatives against all ranks, conservation, and what is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.model.clusters import a2, fused
from autotune.model.clusters.cluster import Load, price
from autotune.model.clusters.group import OPERATORS, Group, Routing
from autotune.model.clusters.routing import KINDS
from autotune.model.constants import Machine, machine_named
from autotune.model.cost import Cost, KernelCost, Work
from autotune.model.kernel_costs.pulls import with_pulls
from autotune.model.kernel_costs.remembered import OfArguments
from autotune.model.timelines.timeline import Mode, walk_ranks
from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import AscendCKernel, TritonKernel
from tests.autotune.model.simple_kernel_costs import simple_kernel_costs

MACHINE, A2 = machine_named("A3"), machine_named("A2")
SCHEMES = ("fullmesh_v1", "fullmesh_v2", "direct")


def _small(scheme: str, ranks: int, tokens: int = 16, **more: object) -> Group:
    given = {"hidden": 1024, "comm_alg": scheme, "mode": "stream", **more}
    return Group(ranks, tokens, **given)  # type: ignore[arg-type]


def _a2(scheme: str, ranks: int, tokens: int, routing: str = "uniform", mode: Mode = "graph") -> Group:
    return Group(ranks, tokens, comm_alg=scheme, product="A2", mode=mode, routing=Routing(routing))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("routing", KINDS)
@pytest.mark.parametrize("ranks", [8, 16])
def test_representatives_say_what_all_ranks_say(scheme: str, routing: str, ranks: int) -> None:
    group, within = (
        _small(scheme, ranks, routing=Routing(routing)),
        0.005 if scheme == "fullmesh_v1" else 0.01,
    )
    some = price(group, MACHINE, simple_kernel_costs)
    ids = group.draw()
    traffics = [group.traffic(ids, r) for r in range(ranks)]
    for operator, plan in group.plans(MACHINE).items():
        lines = walk_ranks(
            plan, traffics, MACHINE, mode=group.mode, kernel_costs=with_pulls(simple_kernel_costs)
        )
        slowest = max(line.total_us for line in lines)
        # Waits of some are as if every sender was the slowest, and as far away as the farthest. What a rank's
        # blocks add up for a direct send, and for entries, which each rank begins elsewhere, by the receivers
        # that each happens on, is in no number of its load.
        assert some.operators[operator].us == pytest.approx(slowest, rel=within)
    every = price(group, MACHINE, simple_kernel_costs, ids, range(ranks))
    assert [some.operators[o].us for o in OPERATORS] == pytest.approx(
        [every.operators[o].us for o in OPERATORS], rel=within
    )


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(KINDS), st.sampled_from([2, 4, 8, 24]), st.integers(1, 12), st.integers(0, 9))
def test_what_is_sent_is_received(routing: str, ranks: int, tokens: int, seed: int) -> None:
    group = _small("fullmesh_v1", ranks, tokens, routing=Routing(routing, seed), experts=ranks * 8)
    ids = group.draw()
    load = Load.of(group, ids, MACHINE)
    assert (load.sent.sum(axis=1) == tokens * group.topk).all()
    assert load.received.sum() == ids.size
    assert load.imbalance >= 1
    for rank in range(ranks):
        traffic = group.traffic(ids, rank)
        assert np.array_equal(load.sent[rank], traffic.sent)
        assert np.array_equal(load.sent[:, rank], traffic.received)
    assert {int(load.received.argmax()), int(load.away.sum(axis=1).argmax())} <= set(load.representatives())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_are_those_that_launches_send(scheme: str) -> None:
    """One row between ranks: what the slot of a scheme takes, and the flags."""
    group = Group(16, 128, comm_alg=scheme, mode="stream")
    point = price(group, MACHINE, simple_kernel_costs)
    load = Load.of(group, group.draw(), MACHINE)
    rows = int(load.away.sum(axis=1).max())
    # int8 and a scale, with a stamp or in it; in-band 512 bytes for each 480 of them.
    least = {"fullmesh_v1": 7168 + 32 + 32, "fullmesh_v2": 512 * -(-(7168 + 32) // 480), "direct": 7168 + 32}
    dispatch, combine = (point.operators[operator] for operator in OPERATORS)
    # A launch that has a part of the tokens counts whole rows.
    assert least[scheme] * 0.999 <= dispatch.egress_bytes / rows < least[scheme] * 1.02
    assert 2 * 7168 <= combine.ingress_bytes / rows < 2 * 7168 * 1.02
    assert dispatch.ingress_bytes >= dispatch.egress_bytes


@pytest.mark.parametrize("scheme", SCHEMES)
def test_more_is_never_faster(scheme: str) -> None:
    def took(machine: object = MACHINE, **change: object) -> float:
        return price(_small(scheme, 16, **change), machine, simple_kernel_costs).us  # type: ignore[arg-type]

    assert took(tokens=64) > took(tokens=16)
    if scheme != "direct":
        assert took(mode="stream") > took(mode="graph")
    assert took(hidden=2048) > took(hidden=1024)
    assert took(MACHINE.replaced({"remote_write_gb_per_s": 20.0})) > took()
    assert took(MACHINE.replaced({"hop_node_us": 5.0})) > took()
    assert took(MACHINE.replaced({"cores": 24.0}), tokens=128) > took(tokens=128)


def test_the_most_loaded_rank_is_the_slowest() -> None:
    """Zipf loads the ranks of popular experts; the imbalance says how much."""
    even, uneven = (
        price(
            _small("fullmesh_v1", 16, 64, routing=Routing("zipf", exponent=e)), MACHINE, simple_kernel_costs
        )
        for e in (0.0, 1.5)
    )
    assert even.imbalance < 1.3 < uneven.imbalance
    assert uneven.us > even.us
    load = Load.of(uneven.group, uneven.group.draw(), MACHINE)
    assert uneven.operators["dispatch"].slowest == int(load.received.argmax())


def test_experts_are_those_of_a_published_model_or_the_next_multiple() -> None:
    assert Group(64, 1).num_experts == 256
    assert Group(768, 1).num_experts == 768
    assert Group(48, 1).num_experts == 288


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("ranks", {"ranks": 1}),
        ("ranks", {"ranks": 769}),
        ("tokens", {"tokens": 0}),
        ("experts", {"experts": 65}),
        ("mode", {"mode": "async"}),
        ("routing", {"routing": Routing("random")}),
        ("topk", {"topk": 300}),
        ("quantize", {"quantize": "int4"}),
        ("comm_alg", {"comm_alg": "ring"}),
        ("mode", {"comm_alg": "direct", "mode": "graph"}),
    ],
)
def test_what_is_not_there_is_refused(argument: str, change: dict) -> None:
    usual = {"ranks": 8, "tokens": 4}
    with pytest.raises(ArgumentError) as error:
        price(Group(**{**usual, **change}), MACHINE, simple_kernel_costs)
    assert (error.value.argument, bool(error.value.rule), bool(error.value.remedy)) == (argument, True, True)


class TestA2:
    """Closed forms on a group."""

    def test_every_rank_is_computed(self) -> None:
        group = _a2("hierarchy", 32, 16, "zipf")
        point = a2.price(group, A2)
        assert point.walked == tuple(range(32))
        flows = a2.flows_of(group.draw(), 256, 8)
        call = fused.Call("A2", 32, 16, 8, 256, 7168, 0)
        for operator in OPERATORS:
            times = [fused.total(a2.phases("hierarchy", operator, call, flow, A2)) for flow in flows]
            assert point.operators[operator].us == pytest.approx(max(times))
            assert point.operators[operator].slowest == int(np.argmax(times))

    def test_bytes_of_fullmesh_are_rows_to_others(self) -> None:
        group = _a2("fullmesh", 32, 16)
        load = Load.of(group, group.draw(), A2)
        dispatch, combine = (a2.price(group, A2).operators[o] for o in OPERATORS)
        assert dispatch.egress_bytes == load.away.sum(axis=1).max() * (7168 + 64)
        assert dispatch.ingress_bytes == load.away.sum(axis=0).max() * (7168 + 64)
        assert combine.egress_bytes == load.away.sum(axis=0).max() * 2 * 7168

    def test_node_limited_routing_helps_the_hierarchy_only(self) -> None:
        took = {
            (scheme, routing): a2.price(_a2(scheme, 64, 64, routing), A2).us
            for scheme in a2.SCHEMES
            for routing in ("uniform", "node-limited")
        }
        for scheme in a2.SCHEMES:
            gain = took[scheme, "uniform"] / took[scheme, "node-limited"]
            assert (gain > 1.1) == (scheme != "fullmesh")

    @pytest.mark.parametrize("ranks", [16, 32, 64])
    def test_runs_of_tokens_put_stage_3_ahead_of_stage_2(self, ranks: int) -> None:
        """With one token a message, as published, it is in front where tokens go to many servers, if the port
        takes next to nothing for a message beside its bytes.
        """
        bytes_alone = A2.replaced({"rdma_message_us": 0.0})
        for tokens, least in ((16, 1.0), (64, 1.09), (128, 1.1)):
            second = _a2("hierarchy", ranks, tokens)
            ids = second.draw()
            us = a2.price(second, A2, ids).us
            third = replace(second, comm_alg="hierarchy-aiv")
            assert us / a2.fastest(third, A2, ids)[1].us >= least
            assert us < a2.price(third, A2, ids).us
            second_us, third_us = (a2.price(group, bytes_alone, ids).us for group in (second, third))
            assert (second_us > third_us) == (ranks == 64)

    def test_messages_are_refused_where_there_are_none(self) -> None:
        for ranks in (8, 16):
            with pytest.raises(ArgumentError, match="tokens_per_message"):
                a2.price(_a2("hierarchy", ranks, 16), A2, tokens_per_message=2)
        assert a2.fastest(_a2("hierarchy", 16, 16), A2)[0] == 1

    def test_a_launch_by_the_host_is_added(self) -> None:
        graph, stream = (a2.price(_a2("fullmesh", 8, 8, mode=mode), A2).us for mode in ("graph", "stream"))
        assert stream - graph == pytest.approx(2 * A2.launch_stream_us)

    @pytest.mark.parametrize(
        ("argument", "change"),
        [
            ("comm_alg", {"comm_alg": "fullmesh_v1"}),
            ("quantize", {"quantize": None}),
            ("ranks", {"ranks": 12}),
        ],
    )
    def test_what_is_not_there_is_refused(self, argument: str, change: dict) -> None:
        usual = {"comm_alg": "hierarchy", "ranks": 16, "tokens": 4, "product": "A2"}
        with pytest.raises(ArgumentError) as error:
            a2.price(Group(**{**usual, **change}), A2)
        assert error.value.argument == argument


class TestOfArguments:
    """A kernel is priced once for all ranks that bring the same."""

    def test_the_same_arguments_are_priced_once(self) -> None:
        seen: list[tuple[str, int]] = []

        def counted(kernel: AscendCKernel | TritonKernel) -> KernelCost:
            def kernel_cost(work: Work, machine: Machine) -> Cost:
                seen.append((kernel.name, work.traffic.rank))
                return simple_kernel_costs(kernel)(work, machine)

            return kernel_cost

        group = _small("fullmesh_v1", 8)
        drawn, ranks = group.draw(), group.ranks
        alike = np.repeat(drawn[:1], ranks, axis=0)
        for ids, most in ((drawn, ranks), (alike, 1)):
            plain = price(group, MACHINE, counted, ids, range(ranks))
            seen.clear()
            assert price(group, MACHINE, OfArguments(counted), ids, range(ranks)) == plain
            names = Counter(name for name, _ in seen)
            # route_pack reads each rank's experts; Ascend C kernels ask for the traffic, whatever their
            # arguments are.
            assert (names["route_pack"], names["dispatch_send"]) == (most, ranks)

    def test_another_machine_is_priced_again(self) -> None:
        group, kernel_costs = _small("fullmesh_v1", 8, 64), OfArguments(simple_kernel_costs)
        slower = MACHINE.replaced({"stream_bytes_per_cycle": 9.0})
        assert price(group, slower, kernel_costs).us > price(group, MACHINE, kernel_costs).us
