"""Calls under torch.compile and export run the same operators to the same bits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_triton import torch_npu_ops as ops
from moe_triton.processes import RankGroup
from tests.patience import seconds
from tests.torch_npu_ops.setting import Round, experts_of, fresh, make_round

Groups = Callable[[int], RankGroup]


def step(r: Round, waited: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Whole, then in halves, a barrier in between; the first dispatch's outputs are dropped."""
    ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *r.group)
    out = ops.npu_moe_distribute_dispatch_v2(
        r.x, r.ids, *r.group, quant_mode=2, expert_scales=r.weights, performance_info=waited
    )
    z = experts_of(out[0], out[1])
    total = ops.npu_moe_distribute_combine_v2(z, r.ids, out[2], out[4], r.weights, *r.group)
    y, index, ticket = ops.npu_moe_distribute_dispatch_setup(r.x, r.ids, *r.group)
    rows, _, info, nums = ops.npu_moe_distribute_dispatch_teardown(r.x, y, r.ids, ticket, *r.group)
    z = experts_of(rows)
    quant, ticket = ops.npu_moe_distribute_combine_setup(z, r.ids, info, *r.group)
    halves = ops.npu_moe_distribute_combine_teardown(
        z, quant, r.ids, index, r.weights, ticket, *r.group, shared_expert_x=total
    )
    halves = ops._npu_distribute_barrier(halves, r.group[0], r.group[1])
    normed, rstd, x = ops.npu_moe_distribute_combine_add_rms_norm(
        z, r.ids, info, out[4], r.weights, r.x[:, None], torch.ones_like(r.x[0]), *r.group
    )
    return total, halves, nums, normed, rstd, x


def first_version(r: Round) -> tuple[torch.Tensor, ...]:
    out = ops.npu_moe_distribute_dispatch(r.x, r.ids, *r.group)
    combined = ops.npu_moe_distribute_combine(experts_of(out[0]), r.ids, out[2], out[4], r.weights, *r.group)
    return out[3], combined


def compiled_against_eager(rank: int, num_ranks: int, dynamic: bool) -> list[str]:
    wrong = []
    torch._dynamo.reset()
    with fresh():
        new = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        old = torch.compile(first_version, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for seed, tokens in enumerate((4, 4, 6)):
            r = make_round(rank, num_ranks, seed=seed, tokens=tokens)
            # the longest wait seen is kept: even one of no time at all is longer than this
            waited = [torch.full((num_ranks,), -1, dtype=torch.int64) for _ in range(2)]
            pairs = zip(step(r, waited[0]) + first_version(r), new(r, waited[1]) + old(r), strict=True)
            wrong += [
                f"tokens {tokens}: output {i}" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)
            ]
            if int(waited[1].min()) < 0:
                wrong.append(f"tokens {tokens}: performance_info was not written to")
    return wrong


def test_compiled_calls_give_the_bits_of_eager_ones(ranks: Groups) -> None:
    assert ranks(2).run(compiled_against_eager, False, timeout_s=seconds(240)) == [[], []]


def test_compiled_calls_with_symbolic_shapes(ranks: Groups) -> None:
    assert ranks(2).run(compiled_against_eager, True, timeout_s=seconds(240)) == [[], []]


class Model(torch.nn.Module):
    def __init__(self, group: tuple[str, int, int, int]) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows, _, index, _, counts, _, _ = ops.npu_moe_distribute_dispatch_v2(x, ids, *self.group)
        return ops.npu_moe_distribute_combine_v2(rows, ids, index, counts, weights, *self.group)


def exported_against_eager(rank: int, num_ranks: int) -> bool:
    with fresh():
        r = make_round(rank, num_ranks)
        model = Model(r.group)
        program = torch.export.export(model, (r.x, r.ids, r.weights))
        inputs = make_round(rank, num_ranks, seed=7)
        arguments = inputs.x, inputs.ids, inputs.weights
        return torch.equal(program.module()(*arguments), model(*arguments))


def test_an_exported_program_gives_the_bits_of_the_model(ranks: Groups) -> None:
    assert ranks(2).run(exported_against_eager, timeout_s=seconds(240)) == [True, True]


def checked_by_torch(rank: int, num_ranks: int) -> list[str]:
    """opcheck's own tests of schemas, fakes and what is written to, of each operator in a round."""
    called = torch.ops.moe_triton
    wrong = []
    with fresh():
        r = make_round(rank, num_ranks)
        waited = torch.zeros(num_ranks, dtype=torch.int64)
        out = ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *r.group)
        z, combine = experts_of(out[0]), (out[2], out[4], r.weights)
        residual, gamma = r.x[:, None], torch.ones_like(r.x[0])
        for operator, arguments, options in (
            (called.npu_moe_distribute_dispatch, (r.x, r.ids), {}),
            (called.npu_moe_distribute_dispatch_v2, (r.x, r.ids), {"performance_info": waited}),
            (called.npu_moe_distribute_combine_v2, (z, r.ids, *combine), {"performance_info": waited}),
            (called.npu_moe_distribute_combine_add_rms_norm, (z, r.ids, *combine, residual, gamma), {}),
        ):
            result = torch.library.opcheck(
                operator.default,
                (*arguments, *r.group),
                options,
                test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
            )
            wrong += [f"{operator}: {name} {said}" for name, said in result.items() if said != "SUCCESS"]
    return wrong


def test_torch_finds_nothing_wrong_with_the_operators(ranks: Groups) -> None:
    assert ranks(2).run(checked_by_torch, timeout_s=seconds(240)) == [[], []]
