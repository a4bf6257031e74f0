"""What ranks run in the tests of calls in rounds, and of outputs with places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from moe_triton import EPBuffer
from moe_triton.core.errors import ArgumentError, MoeTritonError
from moe_triton.core.handle import DispatchOutput, PlacedHandle
from moe_triton.core.tuning import Tuning
from moe_triton.tools.selftest.cases import Inputs, difference, wrong_received
from tests.distributed.cases import Case, experts_of, inputs_of, smooth_scales_of
from tests.distributed.workers import by_turns, expected_round, make_buffer

Options = dict[str, Any]


def beside(case: Case) -> Tuning | None:
    """One block of several communicates while the others compute, in parts: rounds are then sent ahead."""
    has_streams = case.config.scheme in ("fullmesh_v1", "fullmesh_v2") and (case.num_blocks or 1) > 1
    return Tuning(communication_blocks=1, dispatch_tokens=1) if has_streams else None


def compact(output: DispatchOutput) -> DispatchOutput:
    """The same with the rows of an expert right behind those of the one before, as a model has them."""
    handle = output.handle
    if not isinstance(handle, PlacedHandle):
        return output
    begins, begin = [], 0
    for count in output.tokens_per_expert.tolist():
        begins.append(torch.arange(begin, begin + count))
        begin += handle.stride or -(-count // handle.alignment) * handle.alignment
    rows = torch.cat(begins) if begins else torch.zeros(0, dtype=torch.int64)
    flat = {
        name: None if tensor is None else (tensor.flatten(0, 1) if handle.stride else tensor)[rows]
        for name, tensor in output._asdict().items()
        if name in ("tokens", "scales", "weights")
    }
    origins = handle.origins[rows]
    # Each round counts anew there.
    state = {
        **handle._state(),
        "assist_info": torch.cat([origins.flatten(), torch.zeros(2, dtype=torch.int32)]),
    }
    return output._replace(**flat, handle=PlacedHandle(**state))


def results_of(case: Case, rank: int, output: DispatchOutput) -> torch.Tensor:
    """What experts give, and NaN in the gaps, which combine must not look at."""
    handle = output.handle
    y = experts_of(case, rank, output.tokens)
    if isinstance(handle, PlacedHandle):
        rows = y.view(-1, y.shape[-1])
        is_gap = torch.ones(len(rows), dtype=torch.bool)
        for each in handle.rounds:
            is_gap[each.places[: int(each.recv_offsets[-1])].long()] = False
        rows[is_gap] = float("nan")
    return y


def wrong_of(output: DispatchOutput, received: Any) -> list[str]:
    """What differs from the model's large round."""
    of_rounds = isinstance(output.handle, PlacedHandle)
    if of_rounds:  # each round's own, which combine is tried with
        received = replace(received, expand_idx=output.handle.expand_idx)
    wrong = wrong_received(compact(output), received)
    if output.handle.tokens_per_expert_list != output.tokens_per_expert.tolist():
        wrong.append("tokens_per_expert_list")
    return wrong


def dispatched(buffer: EPBuffer, case: Case, inputs: Inputs, **options: Any) -> DispatchOutput:
    weights = inputs.topk_weights if case.weights else None
    smooth = smooth_scales_of(case)
    return buffer.dispatch(
        inputs.x, inputs.topk_idx, weights, quantize=case.quantize, smooth_scales=smooth, **options
    )


def compare(
    rank: int,
    num_ranks: int,
    case: Case,
    options: Sequence[Options],
    combine: Options,
    repeats: bool,
    cached_bytes: int | None = None,
) -> list[str]:
    """Runs calls by turns with each of these options, and names what is not bit-equal to the model.

    Args:
        rank: this one.
        num_ranks: of the group.
        case: whose tokens may be more than a round takes.
        options: of `EPBuffer.dispatch`, of one call each.
        combine: of `EPBuffer.combine`.
        repeats: whether other tokens go by each call's routing, and earlier handles combine again.
        cached_bytes: of `Tuning`.
    """
    wrong = []
    expected = by_turns(lambda number: expected_round(case, number), len(options))
    tuning = beside(case) if cached_bytes is None else Tuning(cached_bytes=cached_bytes)
    with make_buffer(case, tuning=tuning) as buffer:
        done: list[tuple[DispatchOutput, torch.Tensor, torch.Tensor, Inputs]] = []
        for number, given in enumerate(options):
            inputs = inputs_of(case, rank, number)
            received, sums = expected[number]
            output = dispatched(buffer, case, inputs, **given)
            wrong += [f"call {number}: {text}" for text in wrong_of(output, received[rank])]
            y = results_of(case, rank, output)
            weights = inputs.topk_weights if case.weights else None
            out = buffer.combine(y, output.handle, weights, **combine)
            if not combine:
                wrong += [f"call {number}: {text}" for text in [difference("sums", out, sums[rank])] if text]
            done.append((output, y, out, inputs))
            if repeats:
                again = buffer.dispatch(
                    inputs.x,
                    handle=output.handle,
                    topk_weights=weights,
                    quantize=case.quantize,
                    smooth_scales=smooth_scales_of(case),
                )
                wrong += [f"call {number} again: {text}" for text in wrong_of(again, received[rank])]
                y_again = results_of(case, rank, again)
                out_again = buffer.combine(y_again, again.handle, weights, **combine)
                if not torch.equal(out_again, out):
                    wrong.append(f"call {number} again: sums")
        if repeats:
            for number, (output, y, out, inputs) in enumerate(done):
                weights = inputs.topk_weights if case.weights else None
                if not torch.equal(buffer.combine(y, output.handle, weights, **combine), out):
                    wrong.append(f"call {number}, combined later")
    return wrong


def refused(
    rank: int, num_ranks: int, case: Case, options: Sequence[Sequence[Options]], is_last: bool
) -> list[str]:
    """Calls that are refused, each with options by rank, and one behind them that is not.

    Returns:
        What each says, "" of one that says nothing; and what is wrong with the last one, if there is one.
    """
    said = []
    inputs = inputs_of(case, rank, 0)
    with make_buffer(case, tuning=beside(case)) as buffer:
        for of_ranks in options:
            given = dict(of_ranks[rank % len(of_ranks)])
            call = inputs
            if "tokens" in given:
                tokens = given.pop("tokens")
                call = Inputs(inputs.x[:tokens], inputs.topk_idx[:tokens], inputs.topk_weights[:tokens])
            try:
                dispatched(buffer, case, call, **given)
                said.append("")
            except MoeTritonError as error:
                said.append(f"{type(error).__name__}: {error}")
        if is_last:
            output = dispatched(buffer, case, inputs)
            received, sums = expected_round(case, 0)
            said += wrong_of(output, received[rank])
            y = results_of(case, rank, output)
            out = buffer.combine(y, output.handle, inputs.topk_weights if case.weights else None)
            said += [text for text in [difference("sums", out, sums[rank])] if text]
    return said


# What a round of a handle may hold instead of what dispatch left.
_STRANGE: dict[str, Any] = {
    "None": None,
    "a list": [1],
    "another shape": torch.zeros(3, 3, dtype=torch.int32),
    "another dtype": torch.zeros(4),
    "a meta tensor": torch.zeros(4, dtype=torch.int32, device="meta"),
}
_OF_ROUND = "topk_idx", "expand_idx", "recv_offsets", "assist_info", "places", "send_counts"
_OF_HANDLE: dict[str, Sequence[Any]] = {
    "rounds": (None, (), [], (1,)),
    "num_rows": (None, 1.5, -1),
    "stride": ("x", -1),
    "alignment": (0, None),
    "tokens_of_round": (1, None),
    "number": (99, None),
    "buffer_id": (-1, None),
    "topk_idx": (None, torch.zeros(2, 2)),
    "expand_idx": (None, torch.zeros(2, dtype=torch.int32)),
    "active_mask": (torch.ones(1, dtype=torch.bool), 3),
}


def tampered(rank: int, num_ranks: int, case: Case) -> list[str]:
    """Handles of which something is wrong that neither combine nor dispatch refuses as a bad argument.

    Rank 0 has them. Nothing is sent, so that ranks are in step at the end.
    """
    wrong, inputs = [], inputs_of(case, rank, 0)
    with make_buffer(case, tuning=beside(case)) as buffer:
        output = dispatched(buffer, case, inputs)
        y = results_of(case, rank, output)
        good = output.handle
        assert isinstance(good, PlacedHandle)
        bad: dict[str, PlacedHandle] = {}
        for name, values in _OF_HANDLE.items():
            for value in values:
                bad[f"{name}={value!r}"] = PlacedHandle(**{**good._state(), name: value})
        for name in _OF_ROUND:
            for label, value in _STRANGE.items():
                last = good.rounds[-1]._replace(**{name: value})
                bad[f"{name} {label}"] = PlacedHandle(
                    **{**good._state(), "rounds": (*good.rounds[:-1], last)}
                )
        calls = {
            "combine": lambda handle: buffer.combine(y, handle, inputs.topk_weights),
            "dispatch": lambda handle: buffer.dispatch(inputs.x, handle=handle),
        }
        for label, handle in bad.items() if rank == 0 else ():
            for name, call in calls.items():
                try:
                    call(handle)
                    wrong.append(f"{label}: {name} takes it")
                except ArgumentError as error:
                    if "handle" not in error.argument and not label.startswith("num_rows"):
                        wrong.append(f"{label}: {name} says {error}")
        sums = buffer.combine(y, good, inputs.topk_weights)
        expected = expected_round(case, 0)[1][rank]
        return [*wrong, *(text for text in [difference("sums", sums, expected)] if text)]
