"""Outputs that a dispatch's and a combine's caller gives: an earlier call's, in place of new tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_triton import DispatchOutput
from moe_triton.processes import RankGroup
from moe_triton.tools.selftest.cases import expected_round, wrong_received
from tests.distributed.cases import Case, experts_of, inputs_of, small_case, smooth_scales_of
from tests.distributed.failures import message_of, not_refused
from tests.distributed.workers import by_turns, make_buffer

Groups = Callable[[int], RankGroup]
TENSORS = "tokens", "scales", "tokens_per_expert", "weights"


def addresses(output: DispatchOutput) -> dict[str, int]:
    """Where each tensor of an output is."""
    given = {name: getattr(output, name) for name in TENSORS}
    return {name: tensor.data_ptr() for name, tensor in given.items() if tensor is not None}


def written_over(rank: int, num_ranks: int, case: Case) -> list[str]:
    """Names what is not the reference's, or not where it was asked for, as each call writes over the last."""
    wrong = []
    expected = by_turns(lambda number: expected_round(case, number), case.rounds)
    smooth = smooth_scales_of(case)
    with make_buffer(case) as buffer:
        output: Any = None
        for number in range(case.rounds):
            inputs, given = inputs_of(case, rank, number), output
            weights = inputs.topk_weights if case.weights else None
            options = {"quantize": case.quantize, "smooth_scales": smooth, "out": given}
            if number % 2 and case.config.scheme != "hierarchy":
                sent = buffer.dispatch(inputs.x, inputs.topk_idx, weights, wait=False, **options)
                output = sent.wait()
            else:
                output = buffer.dispatch(inputs.x, inputs.topk_idx, weights, **options)
            if given is not None and addresses(output) != addresses(given):
                wrong.append(f"round {number}: elsewhere")
            received, sums = expected[number]
            wrong += [f"round {number}: {name}" for name in wrong_received(output, received[rank])]
            out = torch.full((len(inputs.x) + number, case.config.hidden), 7, dtype=case.dtype)
            y = buffer.expert_output()
            y.copy_(experts_of(case, rank, output.tokens))
            combined = buffer.combine(y, output.handle, weights, out=out)
            if combined.data_ptr() != out.data_ptr() or not torch.equal(combined, sums[rank]):
                wrong.append(f"round {number}: combined")
            if not (out[len(inputs.x) :] == 7).all():
                wrong.append(f"round {number}: rows behind the sums")
    return wrong


def case_of(scheme: str, **changes: Any) -> Case:
    config = changes.pop("config", {})
    case = small_case(2, scheme, rounds=4, tokens=(4, 3), **changes)
    return replace(case, config=replace(case.config, **config))


CASES = {
    "fullmesh_v1": case_of("fullmesh_v1"),
    "fullmesh_v2": case_of("fullmesh_v2"),
    "fullmesh": case_of("fullmesh"),
    "hierarchy": case_of("hierarchy", config={"ranks_per_server": 1}),
    "no weights": case_of("fullmesh_v1", weights=False),
    "int8": case_of("fullmesh_v1", quantize="int8", smooth=True),
    "int8_128": case_of("fullmesh_v2", quantize="int8_128"),
    "padded": case_of("fullmesh_v1", config={"hidden": 65}),
    "padded int8": case_of("fullmesh_v2", quantize="int8", config={"hidden": 1001}),
    "own numbers": case_of("fullmesh_v1", config={"experts_per_rank": (3, 1)}),
    "padded own numbers": case_of(
        "fullmesh_v2", quantize="int8_128", config={"hidden": 130, "experts_per_rank": (1, 3)}
    ),
    "in torch": case_of("fullmesh_v1", quantize="int8", kernels="torch"),
}


@pytest.mark.parametrize("name", CASES)
def test_an_earlier_output_is_written_over(ranks: Groups, name: str) -> None:
    assert ranks(2).run(written_over, CASES[name]) == [[], []]


def of_other_buffers(rank: int, num_ranks: int, case: Case) -> list[str]:
    """Outputs of a larger buffer: which of its rows are written, and what becomes of its own handle."""
    wrong = []
    larger = replace(case.config, num_max_tokens_per_rank=9, num_experts=2 * case.config.num_experts)
    own = inputs_of(case, rank, 0)
    (received, sums), inputs = expected_round(case, 0), (own.x, own.topk_idx, own.topk_weights)
    with make_buffer(case) as buffer, make_buffer(replace(case, config=larger)) as other:
        for _ in range(3):
            first = other.dispatch(*inputs, quantize="int8")
            want = other.combine(experts_of(case, rank, first.tokens), first.handle).clone()
            y, counts = experts_of(case, rank, first.tokens), first.tokens_per_expert.clone()
            # A plain call leaves the scales alone.
            rows = torch.full((len(first.tokens), case.config.hidden), 7, dtype=case.dtype)
            before, given = first.scales.view(torch.int32).clone(), first._replace(tokens=rows)
            output = buffer.dispatch(*inputs, out=given)
            if not torch.equal(first.scales.view(torch.int32), before) or output.scales is not None:
                wrong.append("scales")
            wrong += wrong_received(output, received[rank])
            if addresses(output) != {k: v for k, v in addresses(given).items() if k != "scales"}:
                wrong.append("elsewhere")
            if len(output.tokens) != buffer.capacity or not (rows[buffer.capacity :] == 7).all():
                wrong.append("rows behind")
            combined = buffer.combine(experts_of(case, rank, output.tokens), output.handle, own.topk_weights)
            if not torch.equal(combined, sums[rank]):
                wrong.append("combined")
            # Nothing of the other handle is written over.
            if int(counts.sum()) != first.handle.num_received():
                wrong.append("the other handle")
            if not torch.equal(other.combine(y, first.handle), want):
                wrong.append("by the other handle")
    return wrong


def test_outputs_of_another_buffer_may_be_larger_and_its_handle_goes_on(ranks: Groups) -> None:
    assert ranks(2).run(of_other_buffers, small_case(2)) == [[], []]


def handles(rank: int, num_ranks: int, case: Case) -> list[bool]:
    """What is true of a handle whose output was written over."""
    own, later = inputs_of(case, rank, 0), inputs_of(case, rank, 1)
    with make_buffer(case) as buffer:
        good = []
        for _ in range(3):
            earlier = buffer.dispatch(own.x, own.topk_idx, own.topk_weights)
            y = experts_of(case, rank, earlier.tokens)
            summing = buffer.combine(y, earlier.handle, own.topk_weights, wait=False)
            origins, received = earlier.handle.origins.clone(), earlier.handle.num_received()
            output = buffer.dispatch(later.x, later.topk_idx, later.topk_weights, out=earlier)
            good.append(torch.equal(summing.wait(), expected_round(case, 0)[1][rank]))
            again = buffer.combine(y, earlier.handle, own.topk_weights)
            good.append(torch.equal(again, expected_round(case, 0)[1][rank]))
            same = torch.equal(earlier.handle.origins[:received], origins[:received])
            good.append(same and earlier.handle.num_received() == received)
            y = experts_of(case, rank, output.tokens)
            sums = buffer.combine(y, output.handle, later.topk_weights)
            good.append(torch.equal(sums, expected_round(case, 1)[1][rank]))
        return good


def test_an_earlier_handle_keeps_what_it_has(ranks: Groups) -> None:
    assert ranks(2).run(handles, small_case(2)) == [[True] * 12] * 2


def refusals(rank: int, num_ranks: int, case: Case) -> list[str]:
    """Wrong messages about outputs."""
    wrong = []
    own, stats = inputs_of(case, rank, 0), torch.zeros(2, dtype=torch.int32)
    given = own.x, own.topk_idx, own.topk_weights, stats
    with make_buffer(case) as buffer:
        plain = buffer.dispatch(own.x, own.topk_idx)
        full = buffer.dispatch(*given, quantize="int8")
        rows, weights, scales = (torch.empty_like(t) for t in (plain.tokens, full.weights, full.scales))
        good = plain._replace(weights=weights)
        within = torch.zeros_like(rows)
        counts = torch.zeros(2, dtype=torch.int64)
        counted = good._replace(tokens_per_expert=counts)
        lies = rows.view(torch.float32).flatten()[3 : 3 + len(weights)]

        def d(out: object, **options: Any) -> Callable[[], object]:
            return lambda: buffer.dispatch(*given, out=out, **options)  # type: ignore[call-overload]

        calls: list[tuple[str, Callable[[], object]]] = [
            ("out is a list", d([rows])),
            ("out is a tuple", d(tuple(good))),
            ("out is of shape", d(rows[1:])),
            ("out is of dtype torch.int8", d(full.tokens)),
            ("out is strided", d(rows.repeat(1, 2)[:, : case.config.hidden])),
            ("out is in the memory of x", lambda: buffer.dispatch(within[:4], *given[1:], out=within)),
            (
                "out.weights is None, but this dispatch gives weights. Pass the output of a dispatch with",
                d(plain),
            ),
            (
                "out.scales is None, but this dispatch gives scales",
                d(full._replace(scales=None), quantize="int8"),
            ),
            ("out.tokens is of dtype torch.bfloat16", d(good, quantize="int8")),
            ("out.tokens is None", d(good._replace(tokens=None))),
            ("out.tokens is a str", d(good._replace(tokens="rows"))),
            ("out.tokens is of shape", d(good._replace(tokens=rows[:-1]))),
            ("out.tokens is of shape", d(good._replace(tokens=rows.view(-1)))),
            ("out.weights is of shape", d(good._replace(weights=weights[1:]))),
            ("out.weights is of dtype", d(good._replace(weights=weights.double()))),
            ("out.weights is strided", d(good._replace(weights=weights.repeat(2)[::2]))),
            ("out.scales is of shape", d(full._replace(scales=scales[:-1]), quantize="int8")),
            (
                "out.tokens_per_expert is of shape",
                d(good._replace(tokens_per_expert=plain.tokens_per_expert[1:])),
            ),
            ("out.tokens_per_expert is of dtype", d(good._replace(tokens_per_expert=stats))),
            ("out.weights is in the memory of out.tokens", d(good._replace(tokens=rows, weights=lies))),
            (
                "out.tokens_per_expert is in the memory of cumulative_local_expert_recv_stats",
                lambda: buffer.dispatch(*given[:3], counts.view(torch.int32)[1:3], out=counted),
            ),
        ]
        wrong += not_refused(calls)
        output = buffer.dispatch(*given[:3], out=good)
        combined = buffer.combine(experts_of(case, rank, output.tokens), output.handle, own.topk_weights)
        if not torch.equal(combined, expected_round(case, 0)[1][rank]):
            wrong.append("other bits after what was refused")
        y = output.tokens
        for start, out in (
            ("out is in the memory of y", y),
            ("out is of shape", own.x[:-1].clone()),
            ("out is of shape", torch.zeros(9, case.config.hidden + 32, dtype=case.dtype)),
        ):
            said = message_of(lambda out=out: buffer.combine(y, output.handle, out=out))  # type: ignore[misc]
            if not said.startswith(start):
                wrong.append(f"expected {start!r}, got {said}")
        buffer.combine(y, output.handle)
    return wrong


def test_bad_outputs_are_refused_by_name(ranks: Groups) -> None:
    assert ranks(2).run(refusals, small_case(2)) == [[], []]


def refused_in_the_window(rank: int, num_ranks: int, case: Case) -> str:
    own = inputs_of(case, rank, 0)
    with make_buffer(case) as buffer:
        output = buffer.dispatch(own.x, own.topk_idx)
        return message_of(lambda: buffer.dispatch(own.x, own.topk_idx, out=output))


def test_direct_has_its_outputs_in_the_window(ranks: Groups) -> None:
    for said in ranks(2).run(refused_in_the_window, small_case(2, "direct")):
        assert said.startswith("out is given, but with comm_alg='direct'")
