"""Loops of the same calls: once they are steady, none of them takes tensor memory from the system."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from moe_triton import EPBuffer
from moe_triton.processes import RankGroup
from tests.headers import needs_headers
from tests.patience import seconds

Groups = Callable[[int], RankGroup]
pytestmark = needs_headers

ROUNDS, WARM_ROUNDS = 250, 40
"""A round is a dispatch and a combine, and there are two loops: 1,000 calls."""
T, H, K, M = 8, 64, 2, 4


@dataclass
class Feature:
    """What its calls are given, beside tokens, ids and weights.

    Attributes:
        buffer: of the constructor.
        dispatch: of dispatch.
        combine: of combine.
        wait: whether calls are whole.
        weights: dtype, None for a sum without.
        ids: dtype.
        own_rows: whether combine takes dispatch's rows, of which there are others than of `expert_output`.
        repeats: whether each call goes by the routing of the first one.
    """

    buffer: dict[str, Any] = field(default_factory=dict)
    dispatch: dict[str, Any] = field(default_factory=dict)
    combine: dict[str, Any] = field(default_factory=dict)
    wait: bool = True
    weights: torch.dtype | None = torch.float32
    ids: torch.dtype = torch.int32
    own_rows: bool = False
    repeats: bool = False


def features() -> dict[str, Feature]:
    mask = torch.arange(T) < T - 2
    entries = torch.arange(T * K).view(T, K) % 3 > 0
    table = torch.tensor([[1, 0, -1], [2, 1, 3], [1, 2, -1]], dtype=torch.int32)
    alphas = {name: torch.ones(1, H).bfloat16() for name in ("const_expert_alpha_1", "const_expert_alpha_2")}
    special = alphas | {"const_expert_v": torch.ones(1, H).bfloat16(), "ori_x": torch.ones(T, H).bfloat16()}
    smooth = torch.ones(M, H)
    return {
        "plain": Feature(),
        "without weights": Feature(weights=None),
        "halves": Feature(wait=False),
        "int8": Feature(dispatch={"quantize": "int8"}),
        "int8_128": Feature(dispatch={"quantize": "int8_128"}),
        "smooth": Feature(dispatch={"quantize": "int8", "smooth_scales": smooth}),
        "mask": Feature(dispatch={"active_mask": mask}),
        "mask of entries": Feature(dispatch={"active_mask": entries}),
        "waits": Feature(
            dispatch={"performance_info": torch.zeros(2, dtype=torch.int64)},
            combine={"performance_info": torch.zeros(2, dtype=torch.int64)},
        ),
        "half weights": Feature(weights=torch.bfloat16),
        "half weights, int64 ids, strided mask": Feature(
            dispatch={"active_mask": entries.t().contiguous().t()}, weights=torch.float16, ids=torch.int64
        ),
        "hierarchy, mask": Feature(
            buffer={"product": "A2", "comm_alg": "hierarchy", "ranks_per_server": 1},
            dispatch={"active_mask": entries},
        ),
        "counts": Feature(dispatch={"cumulative_local_expert_recv_stats": torch.zeros(2, dtype=torch.int32)}),
        "eplb": Feature(dispatch={"eplb_table": table}),
        "eplb by rank, mask": Feature(
            dispatch={"eplb_table": table, "eplb_mode": "rank", "active_mask": entries}
        ),
        "rows for each rank": Feature(dispatch={"do_expand": False}, weights=None),
        "rows for each rank, mask": Feature(
            dispatch={"do_expand": False, "active_mask": entries}, weights=None
        ),
        "int8 results": Feature(combine={"comm_quantize": "int8"}),
        "shared": Feature(combine={"shared_expert_x": torch.ones(T, H).bfloat16()}),
        "special": Feature(
            buffer={"num_zero_experts": 1, "num_copy_experts": 1, "num_const_experts": 1}, combine=special
        ),
        "padded": Feature(buffer={"hidden": H + 1}),
        "padded, int8 both ways": Feature(
            buffer={"hidden": H + 1}, dispatch={"quantize": "int8"}, combine={"comm_quantize": "int8"}
        ),
        "own numbers": Feature(buffer={"experts_per_rank": (3, 1)}),
        "own numbers, mask, smooth": Feature(
            buffer={"experts_per_rank": (3, 1)},
            dispatch={"quantize": "int8", "smooth_scales": smooth, "active_mask": mask},
        ),
        "one expert each": Feature(buffer={"num_experts": 2}),
        "one expert each, mask": Feature(buffer={"num_experts": 2}, dispatch={"active_mask": mask}),
        "fullmesh_v2": Feature(buffer={"comm_alg": "fullmesh_v2"}),
        "direct": Feature(buffer={"comm_alg": "direct"}),
        "fullmesh": Feature(buffer={"product": "A2", "comm_alg": "fullmesh"}),
        "hierarchy": Feature(buffer={"product": "A2", "comm_alg": "hierarchy", "ranks_per_server": 1}),
        "rounds": Feature(buffer={"num_max_tokens_per_rank": 3}, own_rows=True),
        "rounds, int8 both ways, mask": Feature(
            buffer={"num_max_tokens_per_rank": 3},
            dispatch={"quantize": "int8", "active_mask": entries},
            combine={"comm_quantize": "int8"},
            own_rows=True,
        ),
        "rounds of hierarchy": Feature(
            buffer={
                "product": "A2",
                "comm_alg": "hierarchy",
                "ranks_per_server": 1,
                "num_max_tokens_per_rank": 3,
            },
            own_rows=True,
        ),
        "rounds of fullmesh_v2": Feature(
            buffer={"comm_alg": "fullmesh_v2", "num_max_tokens_per_rank": 3}, own_rows=True
        ),
        "rounds that are known": Feature(
            buffer={"num_max_tokens_per_rank": 3}, dispatch={"num_max_tokens_per_rank": T}, own_rows=True
        ),
        "rounds, rows for each rank": Feature(
            buffer={"num_max_tokens_per_rank": 3}, dispatch={"do_expand": False}, weights=None, own_rows=True
        ),
        "rounds that are known, rows for each rank, mask": Feature(
            buffer={"num_max_tokens_per_rank": 3},
            dispatch={"do_expand": False, "active_mask": entries, "num_max_tokens_per_rank": T},
            weights=None,
            own_rows=True,
        ),
        "known routing in rounds, rows for each rank": Feature(
            buffer={"num_max_tokens_per_rank": 3},
            dispatch={"do_expand": False},
            weights=None,
            own_rows=True,
            repeats=True,
        ),
        "exact": Feature(dispatch={"num_recv_tokens": "exact"}, own_rows=True),
        "aligned, zeroed": Feature(dispatch={"expert_alignment": 8, "do_zero_padding": True}, own_rows=True),
        "padded experts": Feature(dispatch={"layout": "padded"}, own_rows=True),
        "exact, rows for each rank": Feature(
            dispatch={"do_expand": False, "num_recv_tokens": "exact"}, weights=None, own_rows=True
        ),
        "known routing": Feature(repeats=True),
        "known routing, rows for each rank": Feature(
            dispatch={"do_expand": False}, weights=None, repeats=True
        ),
        "known routing in rounds": Feature(
            buffer={"num_max_tokens_per_rank": 3}, own_rows=True, repeats=True
        ),
        "shared rank": Feature(buffer={"num_shared_experts": 1, "num_shared_ranks": 1, "num_experts": 2}),
    }


@contextmanager
def counted(buffer: EPBuffer) -> Iterator[list[int]]:
    """How often memory comes from the system: the buffer's pool's, and torch's."""
    pool, numbers = buffer._backend._outputs.native, [0, 0]  # type: ignore[attr-defined]
    before = pool.allocations()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        yield numbers
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    numbers[0] = pool.allocations() - before
    numbers[1] = sum(event.name() == "[memory]" and event.nbytes() > 0 for event in events)


def steady(rank: int, num_ranks: int, name: str) -> dict[str, list[int]]:
    """What loops of a feature take from the system once they are warm, by where outputs go."""
    feature = features()[name]
    sizes = {"num_max_tokens_per_rank": T, "hidden": H, "num_topk": K, "num_experts": M}
    options = {"comm_alg": "fullmesh_v1", "timeout_s": seconds(60.0), **sizes, **feature.buffer}
    if num_ranks > 2:  # two groups, of which the same ranks are tensor-parallel
        options["group"] = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
        options["tp_group"] = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(T, options["hidden"], generator=generator).bfloat16()
    num_ids = 3 if "eplb_table" in feature.dispatch else options["num_experts"]
    ids = torch.stack([torch.randperm(num_ids, generator=generator)[:K] for _ in range(T)]).to(feature.ids)
    weights = None
    if feature.weights is not None:
        weights = torch.rand(T, K, generator=generator).to(feature.weights)
    sums, taken = torch.empty_like(x), {}
    with EPBuffer(relaxed=True, **options) as buffer:
        output: Any = None
        first: dict[str, Any] = {}
        results = torch.ones(T * num_ranks * K, options["hidden"]).bfloat16()

        def round_(written_over: bool) -> None:
            nonlocal output
            given = {"out": output} if written_over and buffer.config.scheme != "direct" else {}
            if feature.repeats and output is not None:
                first.setdefault("handle", output.handle)
            routing = first or {"topk_idx": ids}
            made: Any = buffer.dispatch(
                x, topk_weights=weights, wait=feature.wait, **routing, **feature.dispatch, **given
            )
            output = made if feature.wait else made.wait()
            y = output.tokens if feature.own_rows or num_ranks > 2 else buffer.expert_output()
            y = results if y.dtype == torch.int8 else y
            out = sums if written_over else None
            summed: Any = buffer.combine(
                y, output.handle, weights, out=out, wait=feature.wait, **feature.combine
            )
            if not feature.wait:
                summed.wait()

        for way in ("new outputs", "out"):
            for _ in range(WARM_ROUNDS):
                round_(way == "out")
            with counted(buffer) as numbers:
                for _ in range(ROUNDS):
                    round_(way == "out")
            taken[way] = numbers
    return taken


NOTHING = {"new outputs": [0, 0], "out": [0, 0]}


LONG = {name for name in features() if "rounds" in name or "known" in name} - {"rounds", "known routing"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long if n in LONG else ()) for n in features()]
)
def test_a_steady_loop_takes_no_memory(ranks: Groups, name: str) -> None:
    assert ranks(2).run(steady, name, timeout_s=seconds(120.0)) == [NOTHING] * 2


@pytest.mark.parametrize("name", ["one expert each", "one expert each, mask"])
def test_nor_does_one_of_tensor_parallel_ranks(ranks: Groups, name: str) -> None:
    assert ranks(4).run(steady, name, timeout_s=seconds(120.0)) == [NOTHING] * 4
