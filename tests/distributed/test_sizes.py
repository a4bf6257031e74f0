"""Sizes that only an `EPBuffer` takes, bit for bit as the reference model has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from moe_triton import Tuning
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


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("hidden", ODD)
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
