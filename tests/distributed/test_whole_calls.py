"""Usual calls in one native call each: as Python makes them, bit for bit, or left to it."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch

from moe_triton import BufferStateError, DispatchHandle, DispatchOutput
from moe_triton.backends.cpu import extension
from moe_triton.core.row_formats import QUANTIZED
from moe_triton.core.tuning import Tuning
from moe_triton.processes import RankGroup
from moe_triton.schemes import product_of
from tests.distributed.cases import Case, Inputs, experts_of, inputs_of, small_case, smooth_scales_of
from tests.distributed.native_calls import pythons_runs, same
from tests.distributed.workers import compare_rounds, make_buffer, one_round
from tests.headers import needs_headers

pytestmark = needs_headers

Groups = Callable[[int], RankGroup]
SCHEMES = ("fullmesh_v1", "fullmesh_v2", "direct", "fullmesh")
PREPARED = 2  # rounds after which there is a plan for each zone


def contents(output: DispatchOutput) -> dict[str, object]:
    """Whatever of a dispatch's output is defined."""
    handle, rows = output.handle, output.handle.num_received()
    return {
        "tokens": output.tokens[:rows].clone(),
        "scales": None if output.scales is None else output.scales[:rows].clone(),
        "tokens_per_expert": output.tokens_per_expert.clone(),
        "weights": None if output.weights is None else output.weights[:rows].clone(),
        "shapes": [None if t is None else (t.shape, t.dtype, t.is_contiguous()) for t in output[:4]],
        "topk_idx": handle.topk_idx.clone(),
        "expand_idx": handle.expand_idx.clone(),
        "recv_offsets": handle.recv_offsets.clone(),
        "origins": handle.origins[:rows].clone(),
        "assist_info": (handle.assist_info.shape, handle.assist_info.dtype),
        "dtype": handle.dtype,
        "number": handle.number,
    }


def both_ways(rank: int, num_ranks: int, case: Case, wide: bool) -> list[str]:
    """Rounds on a buffer that may call natively, and on one that may not, with the same inputs."""
    wrong = []
    smooth = smooth_scales_of(case)
    with make_buffer(case) as native, make_buffer(case) as python:
        assert native._calls is not None
        python._calls = None
        # where both operators take turns in two zones, each is always in the same one
        prepared = PREPARED if product_of(case.config.scheme) == "A3" else 1
        for number in range(prepared + 3):
            inputs = inputs_of(case, rank, number)
            if wide:
                inputs = replace(inputs, topk_idx=inputs.topk_idx.long())
            with pythons_runs() as seen:
                output, combined = one_round(native, case, inputs, smooth)
            if len(seen) != (2 if number < prepared else 0):
                wrong.append(f"round {number}: Python ran {seen}")
            have = contents(output)
            output, expected = one_round(python, case, inputs, smooth)
            want = contents(output)
            wrong += [f"round {number}: {name}" for name in want if not same(have[name], want[name])]
            if not torch.equal(combined, expected) or combined.shape != expected.shape:
                wrong.append(f"round {number}: combined")
    return wrong


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("quantize", "smooth", "weights", "dtype", "wide"),
    [
        (None, False, True, torch.bfloat16, False),
        (None, False, False, torch.float16, True),
        *((name, False, True, torch.float16, False) for name in QUANTIZED),
        *((name, True, False, torch.bfloat16, True) for name in QUANTIZED),
    ],
)
def test_native_calls_give_what_pythons_give(
    ranks: Groups,
    scheme: str,
    quantize: str | None,
    smooth: bool,
    weights: bool,
    dtype: torch.dtype,
    wide: bool,
) -> None:
    case = small_case(
        3,
        scheme,
        tokens=(4, 0, 3),
        routing="sparse",
        quantize=quantize,
        smooth=smooth,
        weights=weights,
        dtype=dtype,
    )
    assert ranks(3).run(both_ways, case, wide) == [[]] * 3


def in_parts(rank: int, num_ranks: int, case: Case) -> list[int]:
    """How many operators Python runs in each round, when batches are cut into different numbers of parts."""
    counts = []
    with make_buffer(case, tuning=Tuning(dispatch_tokens=1, combine_tokens=2)) as buffer:
        for number in range(3 * num_ranks):
            inputs = inputs_of(case, rank, number)
            with pythons_runs() as seen:
                one_round(buffer, case, inputs, None)
            counts.append(len(seen))
    return counts


def test_each_number_of_parts_has_a_plan_of_its_own(ranks: Groups) -> None:
    counts = ranks(3).run(in_parts, small_case(3, tokens=(4, 2, 1), quantize="int8"))
    # Sizes come round every third round, zones every second: the seventh has all.
    assert all(of_rank[:3] == [2, 2, 2] and of_rank[6:] == [0, 0, 0] for of_rank in counts)


def mixed(rank: int, num_ranks: int, scheme: str) -> list[str]:
    """Rounds in which something is not as usual, among others; all numbers against the reference."""
    case = small_case(num_ranks, scheme)
    wrong = []
    with make_buffer(case) as buffer:
        inputs = inputs_of(case, rank, 0)
        _, usual = one_round(buffer, case, inputs, None)

        def round_with(changed: Inputs) -> torch.Tensor:
            return one_round(buffer, case, changed, None)[1]

        def combined(output: DispatchOutput, handle: DispatchHandle) -> torch.Tensor:
            y = experts_of(case, rank, output.tokens)
            return buffer.combine(y, handle, inputs.topk_weights)

        def copied_handle() -> torch.Tensor:
            output = buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)
            return combined(output, copy.deepcopy(output.handle))

        def again() -> torch.Tensor:
            output = buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)
            for _ in range(4):  # more than there are zones
                last = combined(output, output.handle)
            return last

        unusual: dict[str, Callable[[], torch.Tensor]] = {
            "a parameter": lambda: round_with(
                replace(inputs, x=torch.nn.Parameter(inputs.x, requires_grad=False))
            ),
            "wide ids": lambda: round_with(replace(inputs, topk_idx=inputs.topk_idx.long())),
            "a view": lambda: round_with(replace(inputs, x=torch.cat([inputs.x, inputs.x])[4:])),
            "a copied handle": copied_handle,
            "combined again": again,
        }
        for _ in range(2):
            for name, call in unusual.items():
                for what, run in ((name, call), (f"after {name}", lambda: round_with(inputs))):
                    if not torch.equal(run(), usual):
                        wrong.append(what)
    return wrong


@pytest.mark.parametrize("scheme", SCHEMES)
def test_usual_and_unusual_calls_may_follow_each_other(ranks: Groups, scheme: str) -> None:
    assert ranks(2).run(mixed, scheme) == [[], []]


def outlive(rank: int, num_ranks: int) -> list[str]:
    """What a native call gave is its holder's: after later calls, and after the buffer."""
    case = small_case(num_ranks)
    wrong = []
    with make_buffer(case) as buffer:
        for _ in range(PREPARED):
            one_round(buffer, case, inputs_of(case, rank, 0), None)
        held = []
        for number in range(8):
            output, combined = one_round(buffer, case, inputs_of(case, rank, number), None)
            copies = [t.clone() for t in (output.tokens, output.tokens_per_expert, combined)]
            held.append((output, combined, copies, output.handle.num_received()))
        addresses = {output.tokens.data_ptr() for output, *_ in held}
        if len(addresses) != len(held):
            wrong.append("memory that is held was handed out again")
        topk_idx = held[-1][0].handle  # its tensors are made after the buffer is gone
    del buffer
    gc.collect()
    for number, (output, combined, copies, rows) in enumerate(held):
        now = output.tokens[:rows], output.tokens_per_expert, combined
        if not all(torch.equal(t, c[: len(t)]) for t, c in zip(now, copies, strict=True)):
            wrong.append(f"round {number} has changed")
    if not torch.equal(topk_idx.topk_idx, inputs_of(case, rank, 7).topk_idx):
        wrong.append("the handle's routing has changed")
    return wrong


def test_outputs_are_their_holders(ranks: Groups) -> None:
    assert ranks(2).run(outlive) == [[], []]


def references(rank: int, num_ranks: int, scheme: str) -> dict[str, int]:
    """By how much references grow in many rounds, and in how many places outputs lie."""
    case = small_case(num_ranks, scheme, quantize="int8")
    with make_buffer(case) as buffer:
        inputs = inputs_of(case, rank, 0)
        watched = {
            "None": None,
            "dtype": case.dtype,
            "output": DispatchOutput,
            "handle": DispatchHandle,
            "x": inputs.x,
            "ids": inputs.topk_idx,
            "counts": buffer._communicator.counts,
            "executable": buffer._communicator._last,
        }

        def rounds(number: int) -> set[int]:
            return {
                one_round(buffer, case, inputs, None)[0].tokens_per_expert.data_ptr() for _ in range(number)
            }

        rounds(10)
        gc.collect()
        before = {name: sys.getrefcount(value) for name, value in watched.items()}
        places = rounds(500)
        gc.collect()
        grown = {name: sys.getrefcount(value) - before[name] for name, value in watched.items()}
    return {**grown, "places": len(places)}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_native_calls_keep_no_references(ranks: Groups, scheme: str) -> None:
    for grown in ranks(2).run(references, scheme):
        assert grown.pop("places") <= 3
        assert all(abs(by) < 100 for by in grown.values()), grown


def without_extension(rank: int, num_ranks: int, case: Case) -> list[str]:
    with mock.patch.object(extension, "why_not", return_value="not here"):
        extension.extension.cache_clear()
        try:
            with make_buffer(case) as buffer:
                assert buffer._calls is None
            return compare_rounds(rank, num_ranks, case)
        finally:
            extension.extension.cache_clear()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_without_the_extension_python_makes_every_call(ranks: Groups, scheme: str) -> None:
    assert ranks(2).run(without_extension, small_case(2, scheme, rounds=4)) == [[], []]


def refuse_while_held(rank: int, num_ranks: int) -> list[str]:
    case = small_case(num_ranks)
    said = []
    with make_buffer(case) as buffer:
        inputs = inputs_of(case, rank, 0)
        for _ in range(PREPARED + 1):
            output, _ = one_round(buffer, case, inputs, None)
        y = experts_of(case, rank, output.tokens)
        with buffer._communicator._lock:
            for call in (
                lambda: buffer.dispatch(inputs.x, inputs.topk_idx),
                lambda: buffer.combine(y, output.handle, inputs.topk_weights),
            ):
                with pytest.raises(BufferStateError, match="another thread") as caught:
                    call()
                said.append(type(caught.value).__name__)
        one_round(buffer, case, inputs, None)
    return said


def test_a_buffer_that_is_in_use_is_left_alone(ranks: Groups) -> None:
    assert ranks(2).run(refuse_while_held) == [["BufferStateError"] * 2] * 2


def steps(rank: int, num_ranks: int) -> tuple[list[str], list[str]]:
    case = small_case(num_ranks)
    with make_buffer(case) as buffer:
        for _ in range(PREPARED + 2):
            one_round(buffer, case, inputs_of(case, rank, 0), None)
        return list(buffer.durations_us("dispatch")), list(buffer.durations_us("combine"))


def test_the_steps_of_native_calls_are_timed(ranks: Groups) -> None:
    for dispatch, combine in ranks(2).run(steps):
        assert {"send", "wait", "arrange"} <= set(dispatch)
        assert {"send", "wait", "sum"} <= set(combine)
