"""Sizes that only an `EPBuffer` takes, bit for bit as the reference model has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from moe_triton import ConfigMismatchError, EPBuffer, Tuning
from moe_triton.balance import ExpertCounts, adopt
from moe_triton.core.config import Config
from moe_triton.core.row_formats import ROW_FORMATS
from moe_triton.processes import RankGroup
from moe_triton.schemes import product_of
from tests.distributed.cases import Case, experts_of, inputs_of
from tests.distributed.failures import message_of
from tests.distributed.workers import by_turns, compare_rounds, expected_round, make_buffer
from tests.patience import seconds

Groups = Callable[[int], RankGroup]
SCHEMES = "fullmesh_v1", "fullmesh_v2", "direct", "fullmesh", "hierarchy"
RANKS = 4
ODD = 1, 33, 130, 1000, 4097
"""No whole units of 32 elements; 1000 and 4097 without `relaxed` too."""


def config_of(scheme: str, tokens: int, hidden: int, topk: int, experts: int, shared: int = 0) -> Config:
    """A group of four ranks, of which as many as there are shared experts hold nothing else."""
    servers = 2 if product_of(scheme) == "A2" else None
    sizes = RANKS, tokens, hidden, topk, experts, shared, shared
    return Config(*sizes, product=product_of(scheme), scheme=scheme, relaxed=True, ranks_per_server=servers)


def check(ranks: Groups, case: Case, tuning: Tuning | None = None) -> None:
    results = ranks(RANKS).run(compare_rounds, case, tuning, timeout_s=seconds(120.0))
    assert results == [[]] * RANKS


def _pairs(values: Sequence[Any]) -> list[Any]:
    """Of each value and scheme; each value and each scheme in one that is not long, at least."""
    return [
        pytest.param(value, scheme, marks=() if (n + k) % len(SCHEMES) == 0 else pytest.mark.long)
        for n, value in enumerate(values)
        for k, scheme in enumerate(SCHEMES)
    ]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_most_experts_and_choices(ranks: Groups, scheme: str) -> None:
    config = config_of(scheme, 5, 64, 32, 2048)
    check(ranks, Case(config, 7, "uniform", (5, 0, 3, 5), num_blocks=2, rounds=3))


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "direct"])
def test_more_results_of_a_token_than_a_word_has_bits(ranks: Groups, scheme: str) -> None:
    """Of 34, those of shared experts come last. Entries of 2,048 experts on 2 of 4 ranks go beyond 64 KB."""
    config = config_of(scheme, 5, 64, 32, 2048, shared=2)
    check(ranks, Case(config, 8, "sparse", (5, 0, 3, 5), quantize="int8", num_blocks=2, rounds=3))


def test_more_results_than_a_word_has_bits_in_parts_of_those_that_are_complete(ranks: Groups) -> None:
    case = Case(config_of("fullmesh_v1", 9, 64, 32, 64, shared=2), 9, "sparse", (9, 0, 4, 7), rounds=4)
    check(ranks, replace(case, num_blocks=3), Tuning(combine_tokens=2, communication_blocks=1))


@pytest.mark.parametrize(("hidden", "scheme"), _pairs(ODD))
def test_rows_of_any_length(ranks: Groups, scheme: str, hidden: int) -> None:
    number = ODD.index(hidden) + SCHEMES.index(scheme)
    case = Case(config_of(scheme, 5, hidden, 3, 8), number, "sparse", (5, 0, 3, 5), num_blocks=1 + number % 2)
    formats = [r.name for r in ROW_FORMATS.values() if scheme != "hierarchy" or r.elements_per_scale is None]
    quantize = formats[number % len(formats)]
    dtype = (torch.bfloat16, torch.float16)[number % 2]
    takes_smooth = scheme != "hierarchy" and quantize is not None
    check(ranks, replace(case, quantize=quantize, dtype=dtype, smooth=takes_smooth and number % 2 == 0))


def in_place(rank: int, num_ranks: int, case: Case) -> list[str]:
    """Experts' outputs where the buffer has room for them: what combine need not copy."""
    wrong = []
    hidden, padded = case.config.hidden, case.config.padded.hidden
    expected = by_turns(lambda number: expected_round(case, number), case.rounds)
    with make_buffer(case) as buffer:
        for number in range(case.rounds):
            inputs = inputs_of(case, rank, number)
            received = buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)
            results = buffer.expert_output()
            for tensor in (received.tokens, results):
                if tuple(tensor.shape) != (buffer.capacity, hidden) or tensor.stride() != (padded, 1):
                    wrong.append(f"{tuple(tensor.shape)} strided {tensor.stride()}")
            results.copy_(experts_of(case, rank, received.tokens))
            out = buffer.combine(results, received.handle, inputs.topk_weights)
            if not torch.equal(out, expected[number][1][rank]) or not out.is_contiguous():
                wrong.append(f"round {number}")
    return wrong


@pytest.mark.parametrize("scheme", SCHEMES)
def test_results_in_place(ranks: Groups, scheme: str) -> None:
    case = Case(config_of(scheme, 5, 1001, 3, 8), 3, "sparse", (5, 0, 3, 5), rounds=3)
    assert ranks(RANKS).run(in_place, case, timeout_s=seconds(120.0)) == [[]] * RANKS


def misshapen(rank: int, num_ranks: int, case: Case) -> list[str]:
    """What is said of tensors that have the columns of kernels, or others."""
    config, said = case.config, []
    with make_buffer(case) as buffer:
        inputs = inputs_of(case, rank, 0)
        padded = torch.zeros(len(inputs.x), config.padded.hidden, dtype=case.dtype)
        apart = torch.zeros(len(inputs.x), config.hidden + 1, dtype=case.dtype)[:, : config.hidden]
        for x in (padded, apart):
            said.append(message_of(lambda x=x: buffer.dispatch(x, inputs.topk_idx)))  # type: ignore[misc]
        received = buffer.dispatch(inputs.x, inputs.topk_idx)
        rows = torch.zeros(buffer.capacity, config.padded.hidden, dtype=case.dtype)
        few = received.tokens[:1].contiguous()
        for y in (rows, rows[:, 1 : config.hidden], rows.float()[:, : config.hidden], few):
            said.append(message_of(lambda y=y: buffer.combine(y, received.handle)))  # type: ignore[misc]
        out = torch.zeros_like(padded)
        said.append(message_of(lambda: buffer.combine(received.tokens, received.handle, out=out)))
        buffer.combine(received.tokens, received.handle)
    return said


def test_other_columns_are_refused(ranks: Groups) -> None:
    case = Case(config_of("fullmesh_v1", 5, 1001, 3, 8), 3, "uniform", (5,) * RANKS)
    for said in ranks(RANKS).run(misshapen, case):
        assert [text.split(",")[0] for text in said] == [
            "x is of shape (5",
            "x is strided (1002",
            "y is of shape (40",
            "y is of shape (40",
            "y is of dtype torch.float32",
            "y is of 1 rows",
            "out is of shape (5",
        ]


UNEVEN = ((3, 0, 1, 3), (0, 0, 7, 0), (1, 2, 3, 1))
"""Of four ranks, seven experts."""


@pytest.mark.parametrize(("counts", "scheme"), _pairs(UNEVEN))
def test_different_numbers_of_experts(ranks: Groups, scheme: str, counts: tuple[int, ...]) -> None:
    number = UNEVEN.index(counts) + SCHEMES.index(scheme)
    config = replace(config_of(scheme, 5, (64, 1000)[number % 2], 3, 7), experts_per_rank=counts)
    case = Case(config, number, ("sparse", "uniform")[number % 2], (5, 0, 3, 5), num_blocks=1 + number % 2)
    quantize = (None, "int8")[number % 2]
    smooth = quantize is not None and scheme != "hierarchy"
    check(ranks, replace(case, quantize=quantize, smooth=smooth, rounds=3))


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "direct"])
def test_different_numbers_beside_ranks_of_shared_experts(ranks: Groups, scheme: str) -> None:
    config = replace(config_of(scheme, 5, 64, 3, 5, shared=2), experts_per_rank=(0, 0, 1, 4))
    check(ranks, Case(config, 4, "sparse", (5, 0, 3, 5), "int8", smooth=True, rounds=3))


def own_sizes(rank: int, num_ranks: int, case: Case) -> list[Any]:
    """What a rank sees of its own number of experts, by a mask, halves, statistics and its own tensors."""
    config, table = case.config, torch.tensor([[1, 2, 0, 6, 5, 4, 3]], dtype=torch.int32)
    with make_buffer(case) as buffer:
        inputs = inputs_of(case, rank, 0)
        stats = torch.arange(buffer.num_local_experts, dtype=torch.int32)
        mask = torch.arange(len(inputs.x)) < 3
        out = torch.empty(buffer.capacity, config.hidden, dtype=case.dtype)
        options = {"active_mask": mask, "eplb_table": table, "eplb_mode": "row", "wait": False}
        more = {"cumulative_local_expert_recv_stats": stats, "out": out}
        sent = buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, **options, **more)
        received = sent.wait()
        y = experts_of(case, rank, received.tokens)
        sums = buffer.combine(y, received.handle, inputs.topk_weights)
        plain = buffer.dispatch(inputs.x[:3], table[0][inputs.topk_idx[:3].long()], inputs.topk_weights[:3])
        number = plain.handle.num_received()
        y = experts_of(case, rank, plain.tokens)
        others = buffer.combine(y, plain.handle, inputs.topk_weights[:3])
        counts = plain.tokens_per_expert
        assert received.tokens is out
        assert plain.weights is not None
        assert torch.equal(received.tokens_per_expert, counts)
        assert torch.equal(stats, torch.arange(len(counts), dtype=torch.int32) + counts)
        assert torch.equal(received.tokens[:number], plain.tokens[:number])
        assert torch.equal(sums[:3], others)
        assert not sums[3:].any()
        shapes = [plain.tokens, plain.weights, counts, buffer.expert_output()]
        return [buffer.num_local_experts, buffer.capacity, *(tuple(tensor.shape) for tensor in shapes)]


def test_a_rank_sees_its_own_experts(ranks: Groups) -> None:
    config = replace(config_of("fullmesh_v1", 5, 64, 2, 7), experts_per_rank=(3, 0, 1, 3))
    case = Case(config, 2, "uniform", (5, 5, 5, 5))
    for rank, found in enumerate(ranks(RANKS).run(own_sizes, case, timeout_s=seconds(120.0))):
        experts = (3, 0, 1, 3)[rank]
        rows = 5 * RANKS * min(experts, 2)
        assert found == [experts, rows, (rows, 64), (rows,), (experts,), (rows, 64)]


def without_some(rank: int, num_ranks: int, case: Case) -> list[Any]:
    if rank == 1:
        return []
    with make_buffer(case, lost_ranks=[1]) as buffer:
        inputs = inputs_of(case, rank, 0)
        received = buffer.dispatch(inputs.x, torch.tensor([[4, 2]]).repeat(len(inputs.x), 1))
        out = buffer.combine(received.tokens, received.handle)
        return [buffer.config.experts_per_rank, buffer.config.num_experts, torch.equal(out, inputs.x * 2)]


def test_ranks_that_are_lost_take_their_experts_along(ranks: Groups) -> None:
    config = replace(config_of("fullmesh_v1", 5, 64, 2, 7), experts_per_rank=(3, 2, 1, 1))
    case = Case(config, 2, "uniform", (5, 5, 5, 5), dtype=torch.float16)
    for rank, found in enumerate(ranks(RANKS).run(without_some, case, timeout_s=seconds(120.0))):
        assert found == ([] if rank == 1 else [(3, 1, 1), 5, True])


BAD = {
    "experts_per_rank is [1, 2, 3], but the group has 4 ranks": [1, 2, 3],
    "experts_per_rank is [1, 2, 3, 0], but these are 6 routed experts, and there are 7": [1, 2, 3, 0],
    "experts_per_rank is [-1, 2, 3, 3] (a list), but it counts experts": [-1, 2, 3, 3],
    "experts_per_rank is 1.0 (a float), but it must be an integer": [1.0, 2, 3, 1],
    "experts_per_rank is 7 (a int), but it must be a list of integers": 7,
    "experts_per_rank is '1231', but it must be a list of integers": "1231",
}


def bad_numbers(rank: int, num_ranks: int) -> list[str]:
    """What is said of bad numbers, and of ranks of shared experts that have some."""
    sizes: dict[str, Any] = {"num_max_tokens_per_rank": 4, "hidden": 64, "num_topk": 2, "num_experts": 7}
    said = [message_of(lambda v=v: EPBuffer(**sizes, experts_per_rank=v)) for v in BAD.values()]  # type: ignore[misc]
    shared = {"num_shared_experts": 1, "num_shared_ranks": 1, "experts_per_rank": [1, 2, 3, 1]}
    said.append(message_of(lambda: EPBuffer(**sizes, **shared)))
    said.append(message_of(lambda: EPBuffer(**sizes)))
    other = [3, 0, 1, 3] if rank else [3, 1, 0, 3]
    said.append(message_of(lambda: EPBuffer(**sizes, experts_per_rank=other), ConfigMismatchError))
    with EPBuffer(**sizes, experts_per_rank=np.array([3, 0, 1, 3])) as buffer:
        for make in (lambda: adopt(buffer, []), lambda: ExpertCounts(buffer, 1)):
            said.append(message_of(make))
        ids = torch.tensor([[7, 0]])
        x = torch.zeros(1, 64, dtype=torch.bfloat16)
        said.append(message_of(lambda: buffer.dispatch(x, ids)))
    return said


def test_bad_numbers_of_experts_are_named(ranks: Groups) -> None:
    for said in ranks(RANKS).run(bad_numbers):
        *bad, shared, none, other, adopted, counts, ids = said
        assert [text[: len(start)] for text, start in zip(bad, BAD, strict=True)] == list(BAD)
        assert shared.startswith(
            "experts_per_rank is [1, 2, 3, 1], but the first 1 ranks hold shared experts"
        )
        assert "num_experts is 7" in none
        assert "or pass experts_per_rank." in none
        assert "experts_per_rank: [3, 1, 0, 3] on rank(s) [0], [3, 0, 1, 3] on rank(s) [1, 2, 3]" in other
        for text in (adopted, counts):
            assert text.startswith("buffer is with experts_per_rank=[3, 0, 1, 3], but each rank has as many")
        assert ids.startswith("topk_idx is 7 at token 0, k 0, but ids are 0 to 6")
