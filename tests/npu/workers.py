"""What ranks run on the stand-in. Each function is called as ``f(rank, num_ranks, ...)``."""

from __future__ import annotations

from typing import Any

import torch

from moe_triton import EPBuffer
from moe_triton.backends.npu import library
from moe_triton.core.plan import Hole, Part
from moe_triton.core.tuning import Tuning
from moe_triton.tools.selftest.cases import combined, dispatched
from moe_triton.tools.selftest.comparison import wrong_received
from tests.distributed.cases import Case, experts_of, inputs_of, smooth_scales_of
from tests.distributed.workers import expected_round, make_buffer
from tests.npu import standin
from tests.npu.device import Device


def start(case: Case, policy: str, rank: int, **options: Any) -> tuple[Device, EPBuffer]:
    device = standin.install(policy, seed=case.seed + rank)
    return device, make_buffer(case, backend="npu", **options)


def compare_rounds(rank: int, num_ranks: int, case: Case, policy: str, tuning: Tuning | None) -> list[str]:
    """Runs a case and names everything that is not bit-equal to the reference."""
    wrong = []
    smooth = smooth_scales_of(case)
    _, buffer = start(case, policy, rank, tuning=tuning)
    with buffer:
        for number in range(case.rounds):
            inputs = inputs_of(case, rank, number)
            output = dispatched(buffer, case, inputs, smooth)
            buffer.synchronize()
            out = combined(buffer, case, inputs, output)
            if number % 2:  # or the next dispatch comes while this combine is on its way
                buffer.synchronize()
            received, sums = expected_round(case, number)
            wrong += [f"round {number}: {name}" for name in wrong_received(output, received[rank])]
            buffer.synchronize()
            if not torch.equal(out, sums[rank]):
                wrong.append(f"round {number}: combined")
    return wrong


def describe(device: Device, since: int = 0) -> list[str]:
    """What reached the streams, a line each: stream, kind, and the index of an event in the call."""
    events: dict[int, int] = {}
    lines = []
    for work in device.log[since:]:
        if isinstance(work, str):
            lines.append(work)
            continue
        what = work.name
        if work.event is not None:
            what = f"event {events.setdefault(id(work.event), len(events))}"
        lines.append(f"{work.stream.name}: {work.kind} {what}".rstrip())
    return lines


def sequences(
    rank: int, num_ranks: int, case: Case, tuning: Tuning | None, schedule_mode: int = 1
) -> dict[str, list[str]]:
    """What one dispatch and one combine put on the streams, after both have run before."""
    device, buffer = start(case, "random", rank, tuning=tuning)
    library.library().moe_schedule_mode = lambda: schedule_mode  # type: ignore[method-assign]
    said = {}
    with buffer:
        for number in range(2):
            inputs = inputs_of(case, rank, number)
            buffer.synchronize()
            since = len(device.log)
            output = buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, quantize="int8")
            device.hand_over()
            said["dispatch"] = describe(device, since)
            buffer.synchronize()
            y = experts_of(case, rank, output.tokens)
            since = len(device.log)
            out = buffer.combine(y, output.handle, inputs.topk_weights)
            device.hand_over()
            said["combine"] = describe(device, since)
            buffer.synchronize()
        assert out.shape == inputs.x.shape
    return said


def words_of_a_call(rank: int, num_ranks: int, case: Case) -> list[str]:
    """Which words of a dispatch's launches are not what its plan and its tensors say."""
    device, buffer = start(case, "random", rank)
    wrong = []
    with buffer:
        inputs, since = inputs_of(case, rank, 0), len(device.launches())
        output = buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, quantize="int8")
        buffer.synchronize()
        fixed = buffer._communicator._fixed
        executable = buffer._communicator._last["dispatch"]
        plan = executable._plan  # type: ignore[attr-defined]
        brought: dict[str, torch.Tensor | int] = {
            "x": inputs.x,
            "topk_idx": output.handle.topk_idx,
            "topk_weights": inputs.topk_weights,
            "expand_idx": output.handle.expand_idx,
            "recv_offsets": output.handle.recv_offsets,
            "origins": output.handle.assist_info,
            "tokens": output.tokens,
            "scales": output.scales,
            "tokens_per_expert": output.tokens_per_expert,
            "num_tokens": len(inputs.x),
            "num_ids": inputs.topk_idx.numel(),
            **fixed,
        }
        if output.weights is not None:
            brought["weights"] = output.weights
        for launch, work in zip(plan.launches, device.launches()[since:], strict=True):
            expected = [launch.blocks]
            for value in launch.values:
                if isinstance(value, Hole) and value.name == "report":
                    expected.append(-1)  # each launch has one of its own
                elif isinstance(value, Part):
                    expected.append(value.of(len(inputs.x)))
                elif isinstance(value, Hole):
                    held = brought[value.name]
                    address = held if isinstance(held, int) else held.data_ptr()
                    expected.append(address + value.offset)
                else:
                    expected.extend(value if isinstance(value, tuple) else (value % (1 << 64),))
            got = list(work.words)
            if len(got) != len(expected) or any(
                word not in (have, -1) for word, have in zip(expected, got, strict=True)
            ):
                wrong.append(f"{launch.step}: {got} instead of {expected}")
    return wrong
