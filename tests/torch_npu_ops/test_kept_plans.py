"""Plans of shapes that have come before: what they take, and that both they and their native programs go."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_triton import torch_npu_ops as ops
from moe_triton.processes import RankGroup
from moe_triton.runtime.plan_cache import LATEST, PlanCache
from moe_triton.runtime.prepared_call import PLAN_BYTES
from moe_triton.torch_npu_ops import registry
from tests.headers import needs_headers
from tests.torch_npu_ops.setting import experts_of, fresh, make_round

Groups = Callable[[int], RankGroup]
MOST = 64
pytestmark = needs_headers


def one_round(rank: int, num_ranks: int, tokens: int) -> tuple[torch.Tensor, ...]:
    r = make_round(rank, num_ranks, tokens=tokens)
    sizes: Any = {"global_bs": MOST * num_ranks}
    out = ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *r.group, **sizes)
    z = experts_of(out[0])
    x = ops.npu_moe_distribute_combine_v2(z, r.ids, out[2], out[4], r.weights, *r.group, **sizes)
    return *out, x


def made() -> Any:
    (found,) = registry._communicators[ops.group_name()].values()
    return found


def programs() -> int:
    """Native programs of the only communicator."""
    return len(made().calls._calls._programs)


def bytes_of_a_plan(rank: int, num_ranks: int) -> float:
    with fresh():
        one_round(rank, num_ranks, 1)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for tokens in range(2, MOST):
                one_round(rank, num_ranks, tokens)
            return (tracemalloc.get_traced_memory()[0] - before) / (2 * (MOST - 2))
        finally:
            tracemalloc.stop()


def test_a_plan_takes_what_is_counted_for_it(ranks: Groups) -> None:
    for measured in ranks(2).run(bytes_of_a_plan):
        assert PLAN_BYTES / 4 < measured < PLAN_BYTES


def programs_of_many_shapes(rank: int, num_ranks: int) -> tuple[int, int, bool]:
    with fresh(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "plans", PlanCache(0))
        wanted = [one_round(rank, num_ranks, tokens) for tokens in range(1, 3 * LATEST)]
        again = one_round(rank, num_ranks, 1)
        rows = int(again[4][-1])
        equal = torch.equal(wanted[0][0][:rows], again[0][:rows]) and torch.equal(wanted[0][-1], again[-1])
        return len(registry.plans), programs(), equal


def test_native_programs_go_with_their_plans(ranks: Groups) -> None:
    assert ranks(2).run(programs_of_many_shapes) == [(LATEST, LATEST, True)] * 2


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def left_after_release(rank: int, num_ranks: int) -> list[Any]:
    with fresh():
        outputs = one_round(rank, num_ranks, 4)
        one_round(rank, num_ranks, 4)
        before = [output.clone() for output in outputs]
        pool = made().backend._outputs.native
        said = [pool.kept_bytes() > 0, len(registry.plans) > 0]
        ops.release(ops.group_name())
        said += [pool.kept_bytes(), len(registry.plans)]
        said += ["/moe_triton-" in Path("/proc/self/maps").read_text(encoding="ascii")]
        rows = int(outputs[4][-1])
        said += [same_bits(a[:rows], b[:rows]) for a, b in zip(outputs, before, strict=True)]
        return said


def test_release_gives_all_memory_back_but_what_callers_hold(ranks: Groups) -> None:
    expected = [True, True, 0, 0, False, *[True] * 8]
    assert ranks(2).run(left_after_release) == [expected] * 2
