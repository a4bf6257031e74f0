"""What `EPBuffer` refuses of the features that few calls have, and what its halves and outputs promise."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_triton import ArgumentError, BufferStateError, DispatchOutput, EPBuffer, Pending
from moe_triton.processes import RankGroup
from moe_triton.runtime import arguments
from moe_triton.tools.selftest.cases import expected_round, one_round
from tests.distributed.cases import experts_of, inputs_of, small_case
from tests.distributed.failures import not_refused
from tests.distributed.workers import make_buffer

Groups = Callable[[int], RankGroup]


def refusals(rank: int, num_ranks: int, scheme: str) -> list[str]:
    """Wrong messages of features that the scheme lacks, or that contradict a call."""
    case, wrong = small_case(num_ranks, scheme), []
    own = inputs_of(case, rank, 0)
    with make_buffer(case) as buffer:
        one_round(buffer, case, own, None)
        output = buffer.dispatch(own.x, own.topk_idx)
        y = experts_of(case, rank, output.tokens)

        def d(**options: Any) -> Callable[[], object]:
            return lambda: buffer.dispatch(own.x, own.topk_idx, **options)

        def c(**options: Any) -> Callable[[], object]:
            return lambda: buffer.combine(y, output.handle, **options)

        mask, waits = torch.ones(4, dtype=torch.bool), torch.zeros(num_ranks, dtype=torch.int64)
        calls = {
            "active_mask is of shape": d(active_mask=mask[:3]),
            "active_mask is of dtype": d(active_mask=mask.int()),
            "active_mask is True at token 1 after a False": d(active_mask=torch.arange(4) > 0),
            "performance_info is of shape": d(performance_info=waits[1:]),
            "performance_info is strided": d(performance_info=waits.repeat(2)[::2]),
            "cumulative_local_expert_recv_stats is of dtype": d(cumulative_local_expert_recv_stats=waits),
            "cumulative_local_expert_recv_stats is of shape": d(
                cumulative_local_expert_recv_stats=torch.zeros(9, dtype=torch.int32)
            ),
            "wait is 'no'": d(wait="no"),
            "comm_quantize is 'fp8'": c(comm_quantize="fp8"),
            "shared_expert_x is of shape": c(shared_expert_x=own.x[:1]),
            "out is of shape": c(out=own.x[:1].clone()),
            "out is in the memory of y": c(out=y[:4]),
        }
        if scheme == "fullmesh":
            calls |= {
                "active_mask is of shape (4, 2, 1)": d(active_mask=torch.ones(4, 2, 1, dtype=torch.bool)),
                "comm_quantize is 'int8', but A2 quantises results with hierarchy only. Leave it out": c(
                    comm_quantize="int8"
                ),
                "shared_expert_x is given, but A2": c(shared_expert_x=own.x),
            }
        if scheme == "direct":
            del calls["active_mask is True at token 1 after a False"]
            lacks = {"active_mask": mask, "performance_info": waits}
            calls = {f"{name} is given, but comm_alg='direct'": d(**{name: t}) for name, t in lacks.items()}
            calls |= {
                "wait is False, but comm_alg='direct' has no halves": d(wait=False),
                "out is given, but with comm_alg='direct'": d(out=torch.empty_like(output.tokens)),
                "comm_quantize is 'int8', but comm_alg='direct'": c(comm_quantize="int8"),
                "shared_expert_x is given, but comm_alg='direct'": c(shared_expert_x=own.x),
            }
        wrong += not_refused(calls.items())
        if not torch.equal(buffer.combine(y, output.handle), buffer.combine(y, output.handle)):
            wrong.append("other bits after what was refused")
    return wrong


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "direct", "fullmesh"])
def test_features_are_refused_by_name_before_anything_is_sent(ranks: Groups, scheme: str) -> None:
    assert ranks(2).run(refusals, scheme) == [[], []]


def constructions(rank: int, num_ranks: int) -> list[str]:
    """Messages of what cannot be constructed, the same mistake on every rank."""
    sizes = {"num_max_tokens_per_rank": 4, "hidden": 64, "num_topk": 2, "num_experts": 4, "relaxed": True}
    messages = []
    pair, alone = dist.new_group([0, 1]), [dist.new_group([each]) for each in range(2)][rank]
    for options in (
        {"num_zero_experts": -1},
        {"num_copy_experts": 1, "comm_alg": "direct"},
        {"num_const_experts": 1, "product": "A2"},
        {"tp_group": pair, "comm_alg": "direct"},
        {"tp_group": pair},
        {"lost_ranks": [5]},
        {"lost_ranks": 0},
        {"tp_group": "pair"},
        {"tp_group": dist.group.WORLD},
        {"tp_group": alone},
    ):
        with pytest.raises(ArgumentError) as caught:
            EPBuffer(**sizes, **options)
        messages.append(str(caught.value).partition(",")[0])
    return messages


def test_constructions_are_refused_by_name(ranks: Groups) -> None:
    for messages in ranks(2).run(constructions):
        assert messages == [
            "num_zero_experts is -1",
            "num_zero_experts + num_copy_experts + num_const_experts is 1",
            "num_const_experts is 1",
            "tp_group is given",
            "tp_group is given",
            "lost_ranks is [5] (a list)",
            "lost_ranks is 0 (a int)",
            "tp_group is a str",
            "tp_group is the group itself",
            "tp_group is of 1 ranks",
        ]


def halves(rank: int, num_ranks: int, scheme: str) -> list[bool]:
    """What is true of a dispatch and a combine in halves, and of the calls between them."""
    case = small_case(num_ranks, scheme)
    own = inputs_of(case, rank, 0)
    with make_buffer(case) as buffer:
        x, ids = own.x.clone(), own.topk_idx.clone()
        pending = buffer.dispatch(x, ids, own.topk_weights, wait=False)
        x.zero_()  # what was sent is free again
        ids.zero_()
        with pytest.raises(BufferStateError, match=r"a dispatch was sent .* Call wait\(\) on"):
            buffer.dispatch(own.x, own.topk_idx)
        output = pending.wait()
        good = [isinstance(pending, Pending), pending.wait() is output]
        y = experts_of(case, rank, output.tokens)
        out = torch.empty_like(own.x)
        summing = buffer.combine(y, output.handle, own.topk_weights, out=out, wait=False)
        y.zero_()
        good += [summing.wait() is out, torch.equal(out, expected_round(case, 0)[1][rank])]
        # Whole calls go on, natively too.
        again = [one_round(buffer, case, own, None)[1] for _ in range(4)]
        return [*good, all(torch.equal(each, out) for each in again)]


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh"])
def test_halves_give_the_same_and_free_their_inputs(ranks: Groups, scheme: str) -> None:
    assert ranks(2).run(halves, scheme) == [[True] * 5] * 2


def halves_after_whole_calls(rank: int, num_ranks: int, scheme: str) -> list[bool]:
    """What is true of calls beside one that is under way, where native code has run such calls before."""
    case = small_case(num_ranks, scheme)
    own, want = inputs_of(case, rank, 0), expected_round(case, 0)[1][rank]
    given = own.x, own.topk_idx, own.topk_weights
    with make_buffer(case) as buffer:

        def combined(output: DispatchOutput, **options: Any) -> Any:
            return buffer.combine(
                experts_of(case, rank, output.tokens), output.handle, own.topk_weights, **options
            )

        for _ in range(4):
            combined(buffer.dispatch(*given))
        pending = buffer.dispatch(*given, wait=False)
        with pytest.raises(BufferStateError, match=r"Call wait\(\) on"):
            buffer.dispatch(*given)
        output = pending.wait()
        summing = combined(output, wait=False)
        with pytest.raises(BufferStateError, match=r"a combine was sent"):
            combined(output)
        good = [torch.equal(summing.wait(), want)]
        # What nobody can wait for any more does not stay in the way.
        for _ in range(3):
            pending = buffer.dispatch(*given, wait=False)
            del pending
            output = buffer.dispatch(*given)
            summing = combined(output, wait=False)
            del summing
            good.append(torch.equal(combined(buffer.dispatch(*given)), want))
        pending = buffer.dispatch(*given, wait=False)
        del pending
        return [*good, torch.equal(combined(buffer.dispatch(*given, wait=False).wait()), want)]


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "fullmesh"])
def test_one_call_of_a_kind_is_under_way(ranks: Groups, scheme: str) -> None:
    assert ranks(2).run(halves_after_whole_calls, scheme) == [[True] * 5] * 2


def halves_in_the_same_blocks(rank: int, num_ranks: int) -> bool:
    """Whether combine is the reference's after one that was refused, because a dispatch was under way."""
    case = small_case(num_ranks, "fullmesh")
    own = inputs_of(case, rank, 0)
    with make_buffer(case) as buffer:
        before = buffer.dispatch(own.x, own.topk_idx, own.topk_weights)
        rows = before.tokens.clone()
        pending = buffer.dispatch(own.x, own.topk_idx, own.topk_weights, wait=False)
        with pytest.raises(BufferStateError, match="a combine would use the same memory"):
            buffer.combine(rows, before.handle)
        output = pending.wait()
        y = experts_of(case, rank, output.tokens)
        combined = buffer.combine(y, output.handle, own.topk_weights)
        return torch.equal(combined, expected_round(case, 0)[1][rank])


def test_halves_that_share_memory_do_not_overlap(ranks: Groups) -> None:
    assert ranks(2).run(halves_in_the_same_blocks) == [True, True]


def counted(rank: int, num_ranks: int) -> bool:
    """Whether counts add up over calls in Python and native ones."""
    case = small_case(num_ranks)
    own = inputs_of(case, rank, 0)
    with make_buffer(case) as buffer:
        stats, total = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
        for _ in range(6):
            output = buffer.dispatch(own.x, own.topk_idx, None, stats)
            total += output.tokens_per_expert
            buffer.combine(output.tokens, output.handle)
        return torch.equal(stats.long(), total) and bool(total.sum())


def test_counts_add_up_over_calls(ranks: Groups) -> None:
    assert ranks(2).run(counted) == [True, True]


def what_native_calls_leave_to_python(rank: int, num_ranks: int) -> dict[str, bool]:
    """Whether each argument that native code does not take has its effect, once plain calls are native."""
    case = small_case(num_ranks)
    own = inputs_of(case, rank, 0)
    x, ids = own.x, own.topk_idx
    with make_buffer(case) as buffer:

        def dispatched() -> tuple[torch.Tensor, Any]:
            output = buffer.dispatch(x, ids)
            return experts_of(case, rank, output.tokens), output.handle

        def combined(**options: Any) -> Any:
            return buffer.combine(*dispatched(), **options)

        total = [combined() for _ in range(4)][-1].clone()
        found: dict[str, bool] = {}
        # dispatch
        waits = torch.full((num_ranks,), -1)
        buffer.dispatch(x, ids, performance_info=waits)
        found["waits of dispatch"] = bool((waits >= 0).all())
        masked = buffer.dispatch(x, ids, active_mask=torch.zeros(len(x), dtype=torch.bool))
        found["mask"] = int(masked.tokens_per_expert.sum()) == 0
        pending = buffer.dispatch(x, ids, wait=False)
        found["dispatch in halves"] = isinstance(pending, Pending)
        output = pending.wait()
        rows = torch.full_like(output.tokens, float("nan"))
        output = buffer.dispatch(x, ids, out=rows)
        found["out of dispatch"] = output.tokens.data_ptr() == rows.data_ptr()
        # combine
        waits.fill_(-1)
        combined(performance_info=waits)
        found["waits of combine"] = bool((waits >= 0).all())
        own_out = torch.full_like(total, float("nan"))
        found["out of combine"] = combined(out=own_out) is own_out
        found["its sums"] = torch.equal(own_out, total)
        quantized = combined(comm_quantize="int8")
        found["int8 results"] = not torch.equal(quantized, total)
        shared = combined(shared_expert_x=torch.full_like(x, 64.0))
        found["shared expert"] = bool((shared.float() > total.float()).all())
        summing = combined(wait=False)
        found["combine in halves"] = isinstance(summing, Pending) and torch.equal(summing.wait(), total)
        return found


def test_what_native_code_does_not_take_python_does(ranks: Groups) -> None:
    for found in ranks(2).run(what_native_calls_leave_to_python):
        assert len(found) == 10
        assert [name for name, is_so in found.items() if not is_so] == []


@pytest.mark.parametrize("rows", [4, 7, 8])
def test_tensor_parallel_ranks_pass_all_rows_that_may_have_come(rows: int) -> None:
    group: Any = SimpleNamespace(capacity=4, context=SimpleNamespace(exchange_rank=0))
    handle: Any = None  # nobody counts what has come
    y = torch.empty(rows, 32, dtype=torch.bfloat16)
    if rows == 8:
        arguments.check_results(y, handle, group)
        return
    with pytest.raises(ArgumentError, match=f"y is of {rows} rows, but .*all 8 rows"):
        arguments.check_results(y, handle, group)
