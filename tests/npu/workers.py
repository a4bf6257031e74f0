"""What ranks run on the stand-in. Each function is called as ``f(rank, num_ranks, ...)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moe_triton import EPBuffer
from moe_triton.backends.npu import library
from moe_triton.core.abi import struct_words
from moe_triton.core.plan import (
    Launch,
    Part,
    Placeholder,
    device_launches,
    fused_kernel_of,
    num_blocks,
    num_first_blocks,
)
from moe_triton.core.soc import SOC_OF_PRODUCT
from moe_triton.core.tuning import Tuning
from moe_triton.operators.variants import Mask
from moe_triton.tools.selftest.cases import combined, dispatched, wrong_received
from tests.distributed.cases import Case, experts_of, inputs_of, smooth_scales_of
from tests.distributed.workers import expected_round, patient_buffer
from tests.npu import standin
from tests.npu.device import Device


def start(case: Case, policy: str, rank: int, **options: Any) -> tuple[Device, EPBuffer]:
    device = standin.install(policy, seed=case.seed + rank, soc=SOC_OF_PRODUCT[case.config.product])
    return device, patient_buffer(case, backend="npu", **options)


def compare_rounds(
    rank: int,
    num_ranks: int,
    case: Case,
    policy: str,
    tuning: Tuning | None,
    written_over: bool = False,
) -> list[str]:
    """Runs a case and names everything that is not bit-equal to the reference.

    With ``written_over`` each dispatch writes over the output of the one before it.
    """
    wrong, output = [], None
    smooth = smooth_scales_of(case)
    _, buffer = start(case, policy, rank, tuning=tuning)
    with buffer:
        for number in range(case.rounds):
            inputs = inputs_of(case, rank, number)
            output = dispatched(buffer, case, inputs, smooth, output if written_over else None)
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


def copied_ids(rank: int, num_ranks: int, case: Case, dtype: torch.dtype, mask: Mask) -> list[str]:
    """What is wrong in a round after whose dispatch the caller writes over ids and mask."""
    _, buffer = start(case, "random", rank)
    inputs = inputs_of(case, rank, 0)
    taken, given = inputs.topk_idx.clone(), inputs.topk_idx.to(dtype)
    far = torch.iinfo(dtype).min + torch.arange(given.numel()).view(given.shape)
    given = torch.where(given < 0, far.to(dtype), given)
    left = torch.ones(len(taken) if mask == "tokens" else taken.shape, dtype=torch.bool)
    if mask != "none":
        left[-2:] = False
        taken[-2:] = -1
    with buffer:
        call = {"active_mask": left} if mask != "none" else {}
        weights = inputs.topk_weights
        output = buffer.dispatch(inputs.x, given, weights, quantize=case.quantize, **call)
        buffer.synchronize()
        for written in (given, left):
            written.fill_(1)
        out = buffer.combine(experts_of(case, rank, output.tokens), output.handle, weights)
        buffer.synchronize()
    _, sums = expected_round(case, 0)
    wanted = torch.where((taken >= 0).any(1)[:, None], sums[rank], 0)
    copy = output.handle.topk_idx
    is_same = (copy < 0) == (taken < 0), copy.clamp(min=-1) == taken
    wrong = [] if all(bool(same.all()) for same in is_same) else [f"{copy} instead of {taken}"]
    return wrong if torch.equal(out, wanted) else [*wrong, "combined"]


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
    library.blocks_start_together = lambda: schedule_mode == 1
    device, buffer = start(case, "random", rank, tuning=tuning)
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


ANY = -1  # each phase has a report of its own


def _expected_words(
    phases: Sequence[Launch], brought: Mapping[str, torch.Tensor | int], num_tokens: int
) -> list[int]:
    """Blocks and arguments; of several phases, their bits, no place for times, and each phase's arguments."""
    own = [_expected_arguments(launch, brought, num_tokens) for launch in phases]
    if len(phases) == 1:
        return [num_blocks(phases), *own[0]]
    kernel, mask = fused_kernel_of(phases)
    words = [mask, 0, num_first_blocks(phases)]
    for number, phase in enumerate(kernel.phases):
        words += own.pop(0) if mask >> number & 1 else [0] * struct_words(phase)
    return [num_blocks(phases), *words]


def _expected_arguments(
    launch: Launch, brought: Mapping[str, torch.Tensor | int], num_tokens: int
) -> list[int]:
    expected: list[int] = []
    for value in launch.values:
        if isinstance(value, Placeholder) and value.name == "report":
            expected.append(ANY)
        elif isinstance(value, Part):
            expected.append(value.of(num_tokens))
        elif isinstance(value, Placeholder):
            held = brought[value.name]
            expected.append((held if isinstance(held, int) else held.data_ptr()) + value.offset)
        else:
            expected.extend(value if isinstance(value, tuple) else (value % (1 << 64),))
    return expected


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
        plan = executable.plan
        brought: dict[str, torch.Tensor | int] = {
            "x": inputs.x,
            "topk_idx": output.handle.topk_idx,
            "given_ids": inputs.topk_idx,
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
        for phases, work in zip(device_launches(plan.launches), device.launches()[since:], strict=True):
            expected = _expected_words(phases, brought, len(inputs.x))
            got = list(work.words)
            if len(got) != len(expected) or any(
                word not in (have, ANY) for word, have in zip(expected, got, strict=True)
            ):
                wrong.append(f"{phases[0].step}: {got} instead of {expected}")
    return wrong
