"""Setup and teardown against the whole operators, and every way to use them wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_triton import torch_npu_ops as ops
from moe_triton.core.errors import ArgumentError, BufferStateError
from moe_triton.processes import RankGroup
from tests.torch_npu_ops.setting import HIDDEN, experts_of, fresh, make_round

Groups = Callable[[int], RankGroup]


def compare_with_whole(rank: int, num_ranks: int, options: dict[str, Any], comm_quant_mode: int) -> list[str]:
    wrong = []
    with fresh():
        for seed in range(3):  # both zones, and one again
            r = make_round(rank, num_ranks, seed=seed)
            whole = ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *r.group, **options)
            setup = dict(options)
            if "scales" in options:  # a row for the shared expert, though no rank holds one
                setup["scales"] = torch.cat([torch.full((1, HIDDEN), float("nan")), options["scales"]])
            y, expand_idx, ticket = ops.npu_moe_distribute_dispatch_setup(r.x, r.ids, *r.group, **setup)
            if len(y) != len(r.x) * (r.ids.shape[1] + 1) or len(ticket) % 16:
                wrong.append(f"round {seed}: y of {len(y)} rows, a ticket of {len(ticket)} words")
            sent_x, sent_ids = r.x.clone(), r.ids.clone()
            r.x.zero_()  # setup has sent it: it is the caller's again
            halves = ops.npu_moe_distribute_dispatch_teardown(
                sent_x, y, sent_ids, ticket, *r.group, **{k: v for k, v in options.items() if k != "scales"}
            )
            total = int(whole[4][-1])
            for name, a, b, rows in (
                ("expand_x", whole[0], halves[0], total),
                ("dynamic_scales", whole[1], halves[1], total if options.get("quant_mode") else 0),
                ("assist_info", whole[2], halves[2], 3 * total),
                ("expert_token_nums", whole[3], halves[3], len(whole[3])),
            ):
                if not torch.equal(a[:rows], b[:rows]):
                    wrong.append(f"round {seed}: {name}")
            z = experts_of(whole[0], whole[1] if options.get("quant_mode") else None)
            common = {k: v for k, v in options.items() if k not in ("quant_mode", "scales")}
            common["comm_quant_mode"] = comm_quant_mode
            expected = ops.npu_moe_distribute_combine_v2(
                z, r.ids, whole[2], whole[4], r.weights, *r.group, **common
            )
            # Either dispatch's assist_info tells setup how many rows there are.
            for index in (whole[2], halves[2]):
                quant, ticket = ops.npu_moe_distribute_combine_setup(z, r.ids, index, *r.group, **common)
                out = ops.npu_moe_distribute_combine_teardown(
                    z, quant, r.ids, expand_idx, r.weights, ticket, *r.group, **common
                )
                if not torch.equal(out, expected):
                    wrong.append(f"round {seed}: combine")
    return wrong


@pytest.mark.parametrize("comm_quant_mode", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quant_mode": 2},
        {"quant_mode": 2, "scales": torch.rand(4, HIDDEN, generator=torch.Generator().manual_seed(1)) + 0.5},
        {"comm_alg": "fullmesh_v2"},
        {"comm_alg": "fullmesh_v2", "quant_mode": 2},
        {"shared_expert_rank_num": 1, "quant_mode": 2},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_halves_give_the_bits_of_the_whole(
    ranks: Groups, options: dict[str, Any], comm_quant_mode: int
) -> None:
    # with a shared rank, its two experts are spread over one rank less
    num_ranks = 3 if options.get("shared_expert_rank_num") else 2
    assert ranks(num_ranks).run(compare_with_whole, options, comm_quant_mode) == [[]] * num_ranks


def masked_halves(rank: int, num_ranks: int) -> list[str]:
    wrong = []
    with fresh():
        r = make_round(rank, num_ranks)
        mask = torch.tensor([True, True, False, False])
        whole = ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *r.group, x_active_mask=mask)
        y, expand_idx, ticket = ops.npu_moe_distribute_dispatch_setup(
            r.x, r.ids, *r.group, x_active_mask=mask
        )
        halves = ops.npu_moe_distribute_dispatch_teardown(r.x, y, r.ids, ticket, *r.group)
        total = int(whole[4][-1])
        if not torch.equal(whole[0][:total], halves[0][:total]):
            wrong.append("expand_x")
        z = experts_of(halves[0])
        quant, ticket = ops.npu_moe_distribute_combine_setup(z, r.ids, halves[2], *r.group)
        try:
            ops.npu_moe_distribute_combine_teardown(
                z, quant, r.ids, expand_idx, r.weights, ticket, *r.group, shared_expert_x=r.x
            )
            wrong.append("combine without the mask")
        except ArgumentError as error:
            if not str(error).startswith("expert_ids is other than what the dispatch that returned this"):
                wrong.append(str(error))
        out = ops.npu_moe_distribute_combine_teardown(
            z, quant, r.ids, expand_idx, r.weights, ticket, *r.group, x_active_mask=mask, shared_expert_x=r.x
        )
        expected = ops.npu_moe_distribute_combine_v2(
            z, r.ids, whole[2], whole[4], r.weights, *r.group, x_active_mask=mask, shared_expert_x=r.x
        )
        if not torch.equal(out[:2], expected[:2]):
            wrong.append("combine")
    return wrong


def test_halves_with_a_mask(ranks: Groups) -> None:
    assert ranks(2).run(masked_halves) == [[], []]


def interleaved(rank: int, num_ranks: int) -> list[str]:
    """Combines of another kind each time, begun while a dispatch is on its way: the kind before it counts."""
    wrong = []
    with fresh():
        r = make_round(rank, num_ranks)
        whole = ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *r.group)
        z = experts_of(whole[0])
        expected = [
            ops.npu_moe_distribute_combine_v2(
                z, r.ids, whole[2], whole[4], r.weights, *r.group, comm_quant_mode=mode
            )
            for mode in (0, 2)
        ]
        for number in range(5):
            mode = {"comm_quant_mode": number % 2 * 2}
            y, expand_idx, ticket = ops.npu_moe_distribute_dispatch_setup(r.x, r.ids, *r.group)
            quant, second = ops.npu_moe_distribute_combine_setup(z, r.ids, whole[2], *r.group, **mode)
            rows = ops.npu_moe_distribute_dispatch_teardown(r.x, y, r.ids, ticket, *r.group)
            out = ops.npu_moe_distribute_combine_teardown(
                z, quant, r.ids, expand_idx, r.weights, second, *r.group, **mode
            )
            if not torch.equal(rows[0][: int(whole[4][-1])], whole[0][: int(whole[4][-1])]):
                wrong.append(f"round {number}: rows")
            if not torch.equal(out, expected[number % 2]):
                wrong.append(f"round {number}: sums")
    return wrong


def test_a_combine_may_begin_while_a_dispatch_is_on_its_way(ranks: Groups) -> None:
    assert ranks(2).run(interleaved) == [[], []]


def refused(call: Callable[[], Any], kind: type[Exception], text: str) -> str:
    with pytest.raises(kind, match=text):
        call()
    return text


def misuse(rank: int, num_ranks: int) -> list[str]:
    with fresh():
        r = make_round(rank, num_ranks)
        other = make_round(rank, num_ranks, tokens=3)
        setup = lambda: ops.npu_moe_distribute_dispatch_setup(r.x, r.ids, *r.group)  # noqa: E731
        y, index, first = setup()
        down = lambda ticket, **options: ops.npu_moe_distribute_dispatch_teardown(  # noqa: E731
            r.x, y, r.ids, ticket, *r.group, **options
        )
        refused(setup, BufferStateError, "only one may be")
        whole = lambda: ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *r.group)  # noqa: E731
        refused(whole, BufferStateError, "call dispatch_teardown")
        refused(lambda: down(first, quant_mode=2), ArgumentError, "quant_mode is not what dispatch_setup had")
        refused(lambda: down(torch.zeros_like(first)), ArgumentError, "comm_cmd_info is one that begins with")
        refused(
            lambda: ops.npu_moe_distribute_dispatch_teardown(other.x, y, other.ids, first, *r.group),
            BufferStateError,
            "of this group and shape",
        )
        refused(lambda: down(first, comm_type=2), ArgumentError, "comm_type is 2")
        rows = down(first)
        refused(lambda: down(first), BufferStateError, "Call dispatch_setup first")
        _, _, second = setup()
        refused(lambda: down(first), ArgumentError, "comm_cmd_info is that of dispatch 0")
        again = down(second)
        assert torch.equal(again[3], rows[3])

        z = experts_of(rows[0])
        send = lambda info: ops.npu_moe_distribute_combine_setup(z, r.ids, info, *r.group)  # noqa: E731
        refused(lambda: send(rows[2] * 0), ArgumentError, "without a number of rows")
        refused(lambda: send(rows[2][:-1]), ArgumentError, "assist_info_for_combine is of 2047 elements")
        quant, ticket = send(rows[2])
        sum_up = lambda **options: ops.npu_moe_distribute_combine_teardown(  # noqa: E731
            z, quant, r.ids, index, r.weights, ticket, *r.group, **options
        )
        refused(lambda: send(rows[2]), BufferStateError, "only one may be")
        refused(lambda: sum_up(comm_quant_mode=2), ArgumentError, "comm_quant_mode is not what combine_setup")
        out = sum_up()
        refused(sum_up, BufferStateError, "Call combine_setup first")
        assert out.shape == r.x.shape
    return []


def test_wrong_orders_and_foreign_tickets_are_refused_and_change_nothing(ranks: Groups) -> None:
    assert ranks(2).run(misuse) == [[], []]
