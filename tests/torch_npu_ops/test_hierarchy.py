"""torch_npu's functions with hierarchy: bits, what ep_recv_counts carries, and what is refused."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_triton import ArgumentError, Tuning, reference
from moe_triton import torch_npu_ops as ops
from moe_triton.core.config import Config, Product
from moe_triton.core.hccl import SWITCHES
from moe_triton.core.tuning import Posts
from moe_triton.processes import RankGroup
from moe_triton.reference.arithmetic import add_rms_norm
from moe_triton.reference.hierarchy import sums_by_servers, tables
from moe_triton.schemes.buffer_size import needed_buffer_bytes
from moe_triton.schemes.hierarchy.relay_tables import RelayTables
from moe_triton.torch_npu_ops import registry
from moe_triton.torch_npu_ops.plans import FunctionPlan
from tests.distributed.hierarchy_runs import wrong_tables_of
from tests.patience import seconds
from tests.torch_npu_ops.setting import HIDDEN, TOKENS, TOPK, Round, experts_of, make_round

Groups = Callable[[int], RankGroup]
NULL, TILING = 161001, 561002
RANKS, CARDS = 4, 2


@contextmanager
def on_servers(
    ranks_per_server: Any = CARDS, product: Product = "A2", megabytes: str | None = None, **options: Any
) -> Iterator[None]:
    """Servers of a product, with what A3's windows need by the published formula."""
    given = {"relaxed": True, "timeout_s": seconds(20.0), "ranks_per_server": ranks_per_server, **options}
    with pytest.MonkeyPatch.context() as patch:
        if product == "A3":
            patch.setenv("HCCL_BUFFSIZE", megabytes or "405")
        ops.configure(product=product, **given)
        try:
            yield
        finally:
            ops.release(ops.group_name())
            ops.configure()


def config_of(r: Round, version: int = 2, product: Product = "A2") -> Config:
    _, size, _, experts = r.group
    sizes = size, TOKENS, HIDDEN, TOPK, experts
    return Config(
        *sizes, product=product, scheme="hierarchy", relaxed=True, version=version, ranks_per_server=CARDS
    )


def whole_round(
    rank: int,
    num_ranks: int,
    version: int,
    posts: Posts,
    mode: int,
    product: Product = "A2",
    **options: Any,
) -> list[str]:
    """What is wrong: of two rounds, whose batches differ."""
    wrong = []
    with on_servers(**{"tuning": Tuning(posts=posts), "product": product, **options}):
        for seed, quant_mode in ((1, 0), (2, 2)):
            everyone = [make_round(r, num_ranks, seed=seed) for r in range(num_ranks)]
            for each in everyone:
                each.ids[1, 0] = -1
            wrong += _compare(everyone, rank, version, mode, quant_mode, product=product)
    return wrong


def _compare(
    everyone: list[Round],
    rank: int,
    version: int,
    mode: int,
    quant_mode: int,
    masks: list[torch.Tensor] | None = None,
    product: Product = "A2",
) -> list[str]:
    r, c = everyone[rank], config_of(everyone[0], version, product)
    if masks:  # what they leave out is rubbish
        everyone = [_left(each, mask) for each, mask in zip(everyone, masks, strict=True)]
    v1 = version == 1
    dispatch = ops.npu_moe_distribute_dispatch if v1 else ops.npu_moe_distribute_dispatch_v2
    combine = ops.npu_moe_distribute_combine if v1 else ops.npu_moe_distribute_combine_v2
    named: dict[str, Any] = {} if v1 else {"comm_alg": "hierarchy"}
    if masks:
        named["x_active_mask"] = masks[rank]
    x, scales, index, numbers, counts, _, weights = dispatch(
        r.x, r.ids, *r.group, expert_scales=r.weights, quant_mode=quant_mode, **named
    )
    sums = combine(
        experts_of(x, scales if quant_mode else None),
        *(r.ids, index, counts, r.weights),
        *r.group,
        comm_quant_mode=mode,
        **named,
    )
    all_x, ids, all_weights = ([getattr(e, name) for e in everyone] for name in ("x", "ids", "weights"))
    received = reference.dispatch(c, all_x, ids, all_weights, quantize="int8" if quant_mode else None)
    own = received[rank]
    y = [experts_of(e.tokens, e.scales) for e in received]
    expected = reference.combine(c, y, received, ids, all_weights, comm_quant_mode=mode)[rank]
    n, entries = len(own.tokens), len(own.recv_offsets)
    kept = counts[entries:]
    pairs = {
        "x": (x[:n], own.tokens),
        "index": (
            (index[: 3 * n].view(-1, 3), own.origins)
            if product == "A3"
            else (index[: TOKENS * TOPK], own.expand_idx)
        ),
        "numbers": (numbers, own.tokens_per_expert),
        "counts": (counts[:entries], own.recv_offsets),
        "weights": (weights[:n], own.weights),
        "sums": (sums, expected),
    }
    wrong = [name for name, (have, want) in pairs.items() if not torch.equal(have, want)]
    # by servers of 8, as published, where A3's have 16
    if len(kept) != 2 * TOKENS * RANKS * TOPK * c.topology.num_servers * (2 if product == "A3" else 1):
        wrong.append(f"{len(kept)} words behind the counts")
    return wrong + wrong_tables_of(c, rank, kept, tables(c, ids, all_weights)[rank])


def _left(r: Round, mask: torch.Tensor) -> Round:
    """A round as a mask leaves it: ids of -1 for the rest. The round itself gets rubbish there."""
    entries = mask[:, None].expand_as(r.ids) if mask.dim() == 1 else mask
    left = replace(r, ids=torch.where(entries, r.ids, -1), weights=torch.where(entries, r.weights, 0.0))
    r.ids[~entries], r.weights[~entries] = 2**30, float("nan")
    return left


def masked_rounds(rank: int, num_ranks: int, version: int, product: Product = "A2") -> list[str]:
    """What is wrong in rounds of which masks leave some, all and nothing: by token, and on A2 by entry."""
    wrong = []
    some = [torch.arange(TOKENS) < active for active in (2, TOKENS, 0, 3)]
    generator = torch.Generator().manual_seed(4)
    entries = [torch.rand(TOKENS, TOPK, generator=generator) < 0.5 for _ in range(num_ranks)]
    for each in entries:
        each[2] = False
    with on_servers(product=product):
        for seed, masks in enumerate((some, entries) if product == "A2" else (some,)):
            everyone = [make_round(r, num_ranks, seed=seed) for r in range(num_ranks)]
            wrong += _compare(everyone, rank, version, 0, 0, masks, product)
    return wrong


@pytest.mark.parametrize(("product", "version"), [("A2", 1), ("A2", 2), ("A3", 2)])
def test_what_a_mask_leaves_out_is_not_sent_and_gives_zeros(
    ranks: Groups, product: Product, version: int
) -> None:
    call = (masked_rounds,) if version == 2 else (with_switches, masked_rounds)
    assert ranks(RANKS).run(*call, version, product) == [[]] * RANKS


@pytest.mark.parametrize("mode", [0, 2])
@pytest.mark.parametrize(
    ("product", "version", "posts"),
    [("A2", 1, "aiv"), ("A2", 2, "aiv"), ("A2", 2, "aicpu"), ("A3", 2, "aiv")],
)
def test_outputs_and_what_is_kept_are_the_references(
    ranks: Groups, product: Product, version: int, posts: Posts, mode: int
) -> None:
    arguments = version, posts, mode, product
    if version == 1:  # which has no comm_alg
        assert ranks(RANKS).run(with_switches, whole_round, *arguments) == [[]] * RANKS
    else:
        assert ranks(RANKS).run(whole_round, *arguments) == [[]] * RANKS


def unknown_servers(rank: int, num_ranks: int) -> list[str]:
    """What is said of calls that A3's servers refuse and hosts would not; and what is wrong in others."""
    said = []
    with on_servers(None, "A3", relaxed=False):
        r = make_round(rank, num_ranks)
        wide = r.x.repeat(1, 16)
        for tokens in (r.ids, r.ids[:2]):
            try:
                ops.npu_moe_distribute_dispatch_v2(
                    wide[: len(tokens)],
                    tokens,
                    *r.group,
                    expert_scales=r.weights[: len(tokens)],
                    comm_alg="hierarchy",
                )
            except ArgumentError as error:
                said.append(str(error))
    with on_servers():
        everyone = [make_round(each, num_ranks) for each in range(num_ranks)]
        return said + _compare(everyone, rank, 2, 0, 0)


def test_what_only_hosts_would_allow_is_refused_on_every_rank_of_one(ranks: Groups) -> None:
    for first, second, *wrong in ranks(RANKS).run(unknown_servers):
        assert "ep_world_size is 4, but hierarchy on A3 takes whole machines of 16" in first
        assert (second, wrong) == (first, [])


def with_switches(rank: int, num_ranks: int, call: Callable[..., Any], *arguments: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HCCL_INTRA_PCIE_ENABLE", "1")
        patch.setenv("HCCL_INTRA_ROCE_ENABLE", "0")
        return call(rank, num_ranks, *arguments)


def normed(rank: int, num_ranks: int, mode: int, product: Product) -> list[str]:
    """A residual and a norm behind the sum of the servers, which is not rounded before."""
    with on_servers(product=product):
        everyone = [make_round(r, num_ranks, seed=5) for r in range(num_ranks)]
        r, c = everyone[rank], config_of(everyone[0], product=product)
        residual, gamma = r.x[:, None] * 2, torch.linspace(0.5, 2, HIDDEN).bfloat16()
        x, _, index, _, counts, _, _ = ops.npu_moe_distribute_dispatch_v2(
            r.x, r.ids, *r.group, expert_scales=r.weights, comm_alg="hierarchy"
        )
        found = ops.npu_moe_distribute_combine_add_rms_norm(
            *(experts_of(x), r.ids, index, counts, r.weights, residual, gamma),
            *r.group,
            comm_quant_mode=mode,
            comm_alg="hierarchy",
        )
        all_x, ids, weights = ([getattr(e, name) for e in everyone] for name in ("x", "ids", "weights"))
        received = reference.dispatch(c, all_x, ids, weights)
        y, origins = [experts_of(e.tokens) for e in received], [e.origins for e in received]
        sums = sums_by_servers(c, y, origins, ids, weights, comm_quant_mode=mode)[rank]
        expected = add_rms_norm(sums, residual[:, 0], gamma, 1e-6)
        pairs = zip(("y", "rstd", "x"), found, expected, strict=True)
        return [name for name, have, want in pairs if not torch.equal(have.view(want.shape), want)]


@pytest.mark.parametrize(("product", "mode"), [("A2", 0), ("A2", 2), ("A3", 2)])
def test_a_norm_takes_the_sum_of_the_servers(ranks: Groups, product: Product, mode: int) -> None:
    assert ranks(RANKS).run(normed, mode, product) == [[]] * RANKS


def batches(rank: int, num_ranks: int) -> list[str]:
    """Ranks have 0 to 4 tokens, and what a token's weights are multiplied by is another rank's matter."""
    wrong = []
    with on_servers():
        everyone = [make_round(r, num_ranks, tokens=r + r // 3, seed=3) for r in range(num_ranks)]
        r, c = everyone[rank], config_of(everyone[0])
        options: dict[str, Any] = {"global_bs": TOKENS * num_ranks, "comm_alg": "hierarchy"}
        x, _, index, _, counts, _, _ = ops.npu_moe_distribute_dispatch_v2(
            r.x, r.ids, *r.group, expert_scales=r.weights, **options
        )
        sums = ops.npu_moe_distribute_combine_v2(
            experts_of(x), r.ids, index, counts, r.weights, *r.group, **options
        )
        all_x, ids, weights = ([getattr(e, name) for e in everyone] for name in ("x", "ids", "weights"))
        received = reference.dispatch(c, all_x, ids, weights)
        y = [experts_of(e.tokens) for e in received]
        if not torch.equal(sums, reference.combine(c, y, received, ids, weights)[rank]):
            wrong.append("sums")
    return wrong


def test_ranks_may_have_different_numbers_of_tokens(ranks: Groups) -> None:
    assert ranks(RANKS).run(batches) == [[]] * RANKS


# What the message begins with, and the code.
def refusals(rank: int, num_ranks: int, product: Product) -> list[str]:
    wrong = []
    r = make_round(rank, num_ranks)
    dispatch, combine = ops.npu_moe_distribute_dispatch_v2, ops.npu_moe_distribute_combine_v2
    experts = r.group[-1]

    def d(**options: Any) -> Any:
        given = {"expert_scales": r.weights, "comm_alg": "hierarchy", **options}
        return dispatch(r.x, r.ids, *r.group, **given)

    with on_servers(product=product):
        x, _, index, _, counts, _, _ = d()
        y = experts_of(x)
        other = r.weights.clone()
        other[2, 1] += 1.0
        words = RelayTables(config_of(r, product=product)).num_words
        entries = num_ranks * 2

        def c(weights: Any, sent: torch.Tensor = counts, **options: Any) -> Any:
            return combine(y, r.ids, index, sent, weights, *r.group, comm_alg="hierarchy", **options)

        special = "zero_expert_num + copy_expert_num + const_expert_num is 1"
        calls: list[tuple[str, int, Callable[[], Any]]] = [
            ("expert_scales is None, but hierarchy sums inside", NULL, lambda: d(expert_scales=None)),
            ("expert_scales is None, but hierarchy sums inside", NULL, lambda: c(None)),
            (f"expert_scales is {float(other[2, 1])} at token 2, k 1", TILING, lambda: c(other)),
            (
                "x_active_mask is of 3 dimensions",
                TILING,
                lambda: d(x_active_mask=torch.ones(TOKENS, TOPK, 1, dtype=torch.bool)),
            ),
            (
                "scales is given, but with hierarchy a row goes once to each server",
                TILING,
                lambda: d(quant_mode=2, scales=torch.ones(experts, HIDDEN)),
            ),
            (special, TILING, lambda: d(zero_expert_num=1)),
            (special, TILING, lambda: c(r.weights, zero_expert_num=1)),
            (f"ep_send_counts is of {entries} elements", TILING, lambda: c(r.weights, counts[:entries])),
            (
                f"ep_send_counts is of {entries + words - 1} elements",
                TILING,
                lambda: c(r.weights, counts[: entries + words - 1]),
            ),
            (
                "performance_info is given",
                TILING,
                lambda: d(performance_info=torch.zeros(num_ranks, dtype=torch.int64)),
            ),
            ("expert_scales is of shape", TILING, lambda: d(expert_scales=r.weights[:, :1])),
        ]
        if product == "A3":
            calls += _refused_on_a3(r, d, c)
        wrong += _told(calls)
        # nothing was sent: the round goes on
        c(r.weights)
    return wrong


def _refused_on_a3(
    r: Round, dispatch: Callable[..., Any], combine: Callable[..., Any]
) -> list[tuple[str, int, Callable[[], Any]]]:
    """What A3's other schemes take, or A2's hierarchy."""
    _, num_ranks, _, experts = r.group
    mask = torch.ones(TOKENS, TOPK, dtype=torch.bool)
    elastic = torch.zeros(4 + 2 * num_ranks, dtype=torch.int32)
    shared = {"shared_expert_num": 1, "shared_expert_rank_num": 1}
    by_three = *r.group[:3], 3 * experts // num_ranks
    call = ops.npu_moe_distribute_dispatch_v2
    given = {"expert_scales": r.weights, "comm_alg": "hierarchy", **shared}
    setup = ops.npu_moe_distribute_dispatch_setup
    return [
        (
            "x_active_mask is of 2 dimensions, but hierarchy takes",
            TILING,
            lambda: dispatch(x_active_mask=mask),
        ),
        ("x_active_mask is of 2 dimensions", TILING, lambda: combine(r.weights, x_active_mask=mask)),
        ("global_bs is 32, but with hierarchy every rank", TILING, lambda: dispatch(global_bs=8 * num_ranks)),
        ("elastic_info is given, but hierarchy takes none", TILING, lambda: dispatch(elastic_info=elastic)),
        ("tp_world_size is 2", TILING, lambda: dispatch(group_tp="pair", tp_world_size=2)),
        (
            "shared_expert_num is 1, but comm_alg='hierarchy' has no",
            TILING,
            lambda: call(r.x, r.ids, *by_three, **given),
        ),
        ("shared_expert_x is given, but", TILING, lambda: combine(r.weights, shared_expert_x=r.x)),
        ("comm_alg is 'hierarchy'", TILING, lambda: setup(r.x, r.ids, *r.group, comm_alg="hierarchy")),
    ]


def _told(calls: list[tuple[str, int, Callable[[], Any]]]) -> list[str]:
    wrong = []
    for start, code, call in calls:
        try:
            call()
            wrong.append(f"{start!r} was taken")
        except ArgumentError as error:
            if not str(error).startswith(start) or error.code != code:
                wrong.append(f"expected {start!r} ({code}), got {error} ({error.code})")
    return wrong


@pytest.mark.parametrize("product", ["A2", "A3"])
def test_what_a_hierarchy_does_not_take(ranks: Groups, product: Product) -> None:
    assert ranks(RANKS).run(refusals, product) == [[]] * RANKS


def refused_groups(rank: int, num_ranks: int) -> list[str]:
    """Servers that are no equal ranges, groups that are too small, a window that is."""
    wrong = []
    r = make_round(rank, num_ranks)

    def d(tokens: int = TOKENS, topk: int = TOPK, **options: Any) -> Any:
        given = r.x[:tokens], r.ids[:tokens, :topk].contiguous()
        weights = r.weights[:tokens, :topk].contiguous()
        call = ops.npu_moe_distribute_dispatch_v2
        return call(*given, *r.group, expert_scales=weights, comm_alg="hierarchy", **options)

    with on_servers([3, 1]):
        start = "ranks_per_server is [3, 1], but hierarchy sends to the rank of the same number"
        wrong += _told([(start, TILING, d)])
    with on_servers(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("HCCL_BUFFSIZE", "1")
        wrong += _told([("HCCL_BUFFSIZE is 1 MB", TILING, lambda: d(tokens=3))])
        patch.delenv("HCCL_BUFFSIZE")
        small = lambda: d(tokens=1, topk=1)  # noqa: E731
        wrong += _told([("ep_world_size is 4, but", TILING, small)])
        setup = ops.npu_moe_distribute_dispatch_setup
        half = lambda: setup(r.x, r.ids, *r.group, comm_alg="hierarchy")  # noqa: E731
        wrong += _told([("comm_alg is 'hierarchy'", TILING, half)])
    with on_servers(tuning=Tuning(posts="aiv")):
        call = ops.npu_moe_distribute_dispatch_v2
        wrong += _told([("tuning.posts is 'aiv'", TILING, lambda: call(r.x, r.ids, *r.group))])
    return wrong


def without_lost_ranks(rank: int, num_ranks: int) -> None:
    r = make_round(rank, num_ranks)
    said = "on_lost is mask, but with comm_alg='hierarchy' only a handle says what was summed without a rank"
    with on_servers(on_lost="mask"), pytest.raises(ArgumentError, match=re.escape(said)):
        ops.npu_moe_distribute_dispatch_v2(
            r.x, r.ids, *r.group, expert_scales=r.weights, comm_alg="hierarchy"
        )


def test_a_hierarchy_has_no_way_to_say_what_is_lost(ranks: Groups) -> None:
    ranks(RANKS).run(without_lost_ranks)


def test_groups_that_a_hierarchy_does_not_serve(ranks: Groups) -> None:
    assert ranks(RANKS).run(refused_groups) == [[]] * RANKS


def too_small_on_a3(rank: int, num_ranks: int) -> list[str]:
    """What is refused for its window is what the published formula says, not what is taken here."""
    r = make_round(rank, num_ranks)
    call = ops.npu_moe_distribute_dispatch_v2
    with on_servers(product="A3", megabytes="404"):
        needed = needed_buffer_bytes(config_of(r, 2, "A3"))
        start = f"HCCL_BUFFSIZE is 404 MB, but the window of A3 hierarchy needs {needed} bytes"
        plan = lambda: call.plan(r.x, r.ids, *r.group, expert_scales=r.weights, comm_alg="hierarchy")  # noqa: E731
        return _told([(start, TILING, plan)])


def test_a_window_on_a3_needs_what_is_published(ranks: Groups) -> None:
    assert ranks(RANKS).run(too_small_on_a3) == [[]] * RANKS


def environments(rank: int, num_ranks: int) -> list[str]:
    """What a group's calls do when HCCL's variables change between them."""
    r, dispatch = make_round(rank, num_ranks), ops.npu_moe_distribute_dispatch_v2
    name, wrong = "renamed", []

    def given(tokens: int = TOKENS) -> dict[str, Any]:
        tensors = {"x": r.x[:tokens], "expert_ids": r.ids[:tokens], "expert_scales": r.weights[:tokens]}
        attributes = "group_ep", "ep_world_size", "ep_rank_id", "moe_expert_num"
        return tensors | dict(zip(attributes, (name, *r.group[1:]), strict=True))

    def check(when: str, scheme: str, *calls: Callable[..., Any]) -> None:
        found = [call(**given(tokens)) for call in calls for tokens in (TOKENS, 3)]
        schemes = {plan.config.scheme for plan in found if isinstance(plan, FunctionPlan)}
        schemes |= {place.config.scheme for place, _ in registry._communicators.get(name, {})}
        if schemes != {scheme}:
            wrong.append(f"{when}: {schemes} and not {scheme}")

    with on_servers(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._registered, name, weakref.ref(dist.new_group(range(num_ranks))))
        check("at first", "fullmesh", dispatch.plan)
        for switch, value in SWITCHES.items():
            patch.setenv(switch, value)
        check("without a window", "hierarchy", dispatch.plan, dispatch)
        patch.delenv("HCCL_INTRA_PCIE_ENABLE")
        patch.setenv("HCCL_BUFFSIZE", "1")
        check("with one", "hierarchy", dispatch, dispatch.plan)
        patch.delenv("HCCL_BUFFSIZE")
        check("with the first window's", "hierarchy", dispatch, dispatch.plan)
        ops.release(name)
        check("with windows given back", "fullmesh", dispatch, dispatch.plan)
        patch.setenv("HCCL_INTRA_PCIE_ENABLE", "1")
        check("with new windows", "fullmesh", dispatch.plan, dispatch)
        patch.setitem(registry._registered, name, weakref.ref(dist.new_group(range(num_ranks))))
        check("in another group of that name", "hierarchy", dispatch, dispatch.plan)
        ops.release(name)
    return wrong


def test_a_group_goes_by_the_variables_of_its_first_window(ranks: Groups) -> None:
    assert ranks(RANKS).run(environments) == [[]] * RANKS


CHECKED = (
    *("outer_ids", "outer_rows", "outer_counts"),
    *("rail_counts", "inner_active_index", "inner_ids", "inner_positions"),
)
NONSENSE = (2**31 - 1, -(2**31), -5, 1000)


def damaged(rank: int, num_ranks: int) -> list[str]:
    """Each table full of numbers that name no place is refused by its name, and nothing is sent.

    Kernels that nobody guards sum something else, and nothing else happens.
    """
    wrong = []
    r = make_round(rank, num_ranks)
    with on_servers():
        x, _, index, _, counts, _, _ = ops.npu_moe_distribute_dispatch_v2(
            r.x, r.ids, *r.group, expert_scales=r.weights, comm_alg="hierarchy"
        )
        parts, kept = RelayTables(config_of(r)), counts[num_ranks * 2 :]

        def c() -> torch.Tensor:
            args = experts_of(x), r.ids, index, counts, r.weights
            return ops.npu_moe_distribute_combine_v2(*args, *r.group, comm_alg="hierarchy")

        sums = c()
        for name in CHECKED:
            table = parts.of(kept, name)
            whole = table.clone()
            for value in NONSENSE:
                table.fill_(value)
                wrong += _told([(f"ep_send_counts is {value} in {name} at [", TILING, c)])
            table.copy_(whole)
        table = parts.of(kept, "rail_counts")
        table -= 1  # which may be, but not with the places that are said to be taken
        wrong += _told([("ep_send_counts is 0 in inner_active_index at [0, ", TILING, c)])
        table += 1
        wrong += [] if torch.equal(c(), sums) else ["sums"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RelayTables, "check", lambda *_: None)
            for name in ("inner_ids", "inner_positions", "outer_ids", "outer_rows"):
                table = parts.of(kept, name)
                table[torch.rand(table.shape) < 0.5] = 2**31 - 1
                table[torch.rand(table.shape) < 0.2] = -(2**31)
            wrong += [] if c().shape == r.x.shape else ["shape"]
    return wrong


def test_damaged_tables_are_refused_and_lead_nowhere(ranks: Groups) -> None:
    assert ranks(RANKS).run(damaged) == [[]] * RANKS
