"""What ranks run in the tests of the direct scheme, each called as ``f(rank, num_ranks, ...)``."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any, Literal, get_args

import pytest
import torch

from moe_triton import ArgumentError, BufferStateError, CommunicationTimeoutError, EPBuffer, reference
from moe_triton.core.handle import DispatchOutput
from moe_triton.core.plan import Plan
from moe_triton.schemes.direct.scheme import Dispatch
from moe_triton.tools.selftest.cases import wrong_received
from tests.distributed.cases import (
    Case,
    Inputs,
    experts_of,
    inputs_of,
    small_case,
    smooth_scales_of,
    with_scheme,
)
from tests.distributed.workers import by_turns, expected_round, make_buffer, patient_buffer
from tests.patience import seconds

Way = Literal["in place", "in place, no more rows", "elsewhere", "elsewhere, no more rows"]


def dispatch(buffer: EPBuffer, case: Case, inputs: Inputs) -> DispatchOutput:
    return buffer.dispatch(
        inputs.x,
        inputs.topk_idx,
        inputs.topk_weights if case.weights else None,
        quantize=case.quantize,
        smooth_scales=smooth_scales_of(case),
    )


def offer(buffer: EPBuffer, output: DispatchOutput, y: torch.Tensor, way: Way) -> torch.Tensor:
    """The results ``y`` as a user may hold them."""
    number = output.handle.num_received()
    if way.startswith("elsewhere"):
        return y[:number].clone() if "no more" in way else y
    place = buffer.expert_output(y.dtype)
    place[:number] = y[:number]
    return place[:number] if "no more" in way else place


def combine(buffer: EPBuffer, case: Case, inputs: Inputs, output: DispatchOutput, way: Way) -> torch.Tensor:
    y = offer(buffer, output, experts_of(case, buffer.rank, output.tokens), way)
    return buffer.combine(y, output.handle, inputs.topk_weights if case.weights else None)


def bits(tensor: torch.Tensor | None, rows: int | None = None) -> bytes:
    return b"" if tensor is None else tensor[:rows].contiguous().view(torch.uint8).numpy().tobytes()


def everything(output: DispatchOutput, combined: torch.Tensor) -> list[bytes]:
    """All that a round gives its user, to the bit."""
    n, handle = output.handle.num_received(), output.handle
    of_rows = [bits(t, n) for t in (output.tokens, output.scales, output.weights, handle.origins)]
    whole = [bits(t) for t in (output.tokens_per_expert, handle.expand_idx, handle.recv_offsets, combined)]
    return [*of_rows, *whole]


def compare_schemes(rank: int, num_ranks: int, case: Case, ways: list[Way]) -> list[str]:
    """Names what differs from the reference, and rounds that differ from fullmesh."""
    wrong = []
    expected = by_turns(lambda number: expected_round(case, number), max(case.rounds, len(ways)))
    with make_buffer(case) as buffer, make_buffer(with_scheme(case, "fullmesh_v1")) as fullmesh:
        for number, (received, sums) in enumerate(expected):
            inputs, way = inputs_of(case, rank, number), ways[number % len(ways)]
            output = dispatch(buffer, case, inputs)
            combined = combine(buffer, case, inputs, output, way)
            wrong += [f"round {number}: {name}" for name in wrong_received(output, received[rank])]
            if not torch.equal(combined, sums[rank]):
                wrong.append(f"round {number}: combined, {way}")
            other = dispatch(fullmesh, case, inputs)
            if everything(output, combined) != everything(
                other, combine(fullmesh, case, inputs, other, "elsewhere")
            ):
                wrong.append(f"round {number}: not what fullmesh gives")
    return wrong


def sums_of(case: Case, number: int, factor: float) -> tuple[list[reference.Received], list[torch.Tensor]]:
    """What a round delivers, and the sums of the experts' results times a power of two."""
    everyone = [inputs_of(case, rank, number) for rank in range(case.config.num_ranks)]
    weights = [i.topk_weights for i in everyone] if case.weights else None
    received, _ = expected_round(case, number)
    y = [experts_of(case, rank, r.tokens) * factor for rank, r in enumerate(received)]
    return received, reference.combine(case.config, y, received, [i.topk_idx for i in everyone], weights)


def run_schedule(rank: int, num_ranks: int, case: Case, schedule: str, straggle_every: int) -> list[str]:
    """Operators in any order, "D" and "C", in which ranks fall behind; each combine has results of its own.

    What the last dispatch delivered must still be there after each operator, and what the one before it
    delivered until the next one begins.
    """
    ways: tuple[Way, ...] = get_args(Way)
    different, chance, wrong = 4, random.Random(rank), []
    expected = by_turns(lambda n: {f: sums_of(case, n, f) for f in (1.0, 2.0, 0.5)}, different)
    outputs: list[DispatchOutput] = []

    def check_outputs(how_many: int) -> None:
        for n in range(max(0, len(outputs) - how_many), len(outputs)):
            received, _ = expected[n % different][1.0]
            wrong.extend(f"dispatch {n}: {name}" for name in wrong_received(outputs[n], received[rank]))

    with make_buffer(case) as buffer:
        for number, operator in enumerate(schedule):
            if chance.randrange(straggle_every) == 0:
                time.sleep(chance.random() * 0.004)
            if operator == "D":
                check_outputs(2)
                outputs.append(dispatch(buffer, case, inputs_of(case, rank, len(outputs) % different)))
            else:
                pick, factor = (len(outputs) - 1) % different, (1.0, 2.0, 0.5)[number % 3]
                inputs, output = inputs_of(case, rank, pick), outputs[-1]
                y = offer(buffer, output, experts_of(case, rank, output.tokens) * factor, chance.choice(ways))
                out = buffer.combine(y, output.handle, inputs.topk_weights if case.weights else None)
                if not torch.equal(out, expected[pick][factor][1][rank]):
                    wrong.append(f"operator {number}: combined")
            check_outputs(1)
            if len(wrong) > 5:
                break
    return wrong


def combine_the_same_again(rank: int, num_ranks: int, way: Way, times: int) -> list[int]:
    """Which of several combines of one y go wrong. A y in the window is in place in every second one."""
    case = small_case(num_ranks, "direct")
    with make_buffer(case) as buffer:
        inputs = inputs_of(case, rank, 0)
        output = dispatch(buffer, case, inputs)
        y = offer(buffer, output, experts_of(case, rank, output.tokens), way)
        outs = [buffer.combine(y, output.handle, inputs.topk_weights) for _ in range(times)]
        want = expected_round(case, 0)[1][rank]
    return [n for n, out in enumerate(outs) if not torch.equal(out, want)]


def use_expert_output(rank: int, num_ranks: int) -> list[str]:
    """Everything that `EPBuffer.expert_output` promises and refuses."""
    case, wrong = small_case(num_ranks, "direct"), []
    with make_buffer(case) as buffer, make_buffer(with_scheme(case, "fullmesh_v1")) as fullmesh:
        with pytest.raises(BufferStateError, match="there was no dispatch yet"):
            buffer.expert_output()
        for bad in (torch.float32, torch.int8):
            with pytest.raises(ArgumentError, match="dtype is"):
                buffer.expert_output(bad)
        early = buffer.expert_output(torch.bfloat16)
        inputs = inputs_of(case, rank, 0)
        output = dispatch(buffer, case, inputs)
        places = [early, buffer.expert_output()]
        for _ in range(2):
            buffer.combine(buffer.expert_output().zero_(), output.handle)
            places.append(buffer.expert_output())
        addresses = [place.data_ptr() for place in places]
        if not addresses[0] == addresses[1] == addresses[3] != addresses[2]:
            wrong.append(f"zones do not take turns: {addresses}")
        if any(place.shape != output.tokens.shape or place.dtype != torch.bfloat16 for place in places):
            wrong.append("another shape or dtype than the tokens'")
        with pytest.raises(ArgumentError, match="y is of dtype"):
            buffer.combine(buffer.expert_output(torch.float16), output.handle)
        with pytest.raises(ArgumentError, match="y is 128 bytes past the start of expert_output"):
            buffer.combine(buffer.expert_output()[1:], output.handle)
        of_fullmesh = dispatch(fullmesh, case, inputs)
        place = fullmesh.expert_output()
        if place.data_ptr() == fullmesh.expert_output().data_ptr() or place.shape != of_fullmesh.tokens.shape:
            wrong.append("fullmesh's is no tensor of its own")
        fullmesh.combine(place.zero_(), of_fullmesh.handle)
    with pytest.raises(BufferStateError, match="closed"):
        buffer.expert_output(torch.bfloat16)
    output.tokens.sum()  # outputs outlive their buffer
    return wrong


# Ranks that do not come: rank 1, in the second round, at one of the three waits.
Moment = Literal["before counts", "before rows", "before results"]


def _stop_before_rows() -> None:
    """This process's dispatches end when the counts of all have come: no rows, and no flag for them."""
    whole = Dispatch.whole

    def truncated(self: Dispatch) -> Plan:
        steps = whole(self).launches
        return self.plan(steps[: 1 + [step.step for step in steps].index("wait for counts")])

    Dispatch.whole = truncated  # type: ignore[method-assign]


def leave(rank: int, num_ranks: int, moment: Moment, dies: bool) -> Any:
    case = small_case(num_ranks, "direct")
    with patient_buffer(case, timeout_s=seconds(3.0)) as buffer:
        inputs = inputs_of(case, rank, 0)
        combine(buffer, case, inputs, dispatch(buffer, case, inputs), "in place")
        if rank == 1:
            _fail_at(moment, buffer, case, inputs, dies)
            return None
        with pytest.raises(CommunicationTimeoutError) as caught:
            combine(buffer, case, inputs, dispatch(buffer, case, inputs), "elsewhere")
        with pytest.raises(BufferStateError, match="broken"):
            buffer.expert_output()
        error = caught.value
        return error.operator, error.number, error.zone, error.missing_ranks


def _fail_at(moment: Moment, buffer: EPBuffer, case: Case, inputs: Inputs, dies: bool) -> None:
    if moment == "before rows":
        whole = Dispatch.whole
        _stop_before_rows()
        try:
            dispatch(buffer, case, inputs)
        finally:
            Dispatch.whole = whole  # type: ignore[method-assign]
    elif moment == "before results":
        dispatch(buffer, case, inputs)
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
