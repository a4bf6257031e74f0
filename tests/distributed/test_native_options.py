"""Native calls with options: as Python makes them, bit for bit, or left to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from moe_triton import ArgumentError, DispatchOutput, EPBuffer
from moe_triton.core.handle import PlacedHandle
from moe_triton.processes import RankGroup
from moe_triton.runtime.placed_outputs import Outputs
from tests.distributed.cases import Case, Inputs, experts_of, inputs_of, small_case
from tests.distributed.native_calls import pythons_runs, same
from tests.distributed.workers import make_buffer
from tests.headers import needs_headers

pytestmark = needs_headers

Groups = Callable[[int], RankGroup]
Options = dict[str, Any]
PREPARED = 4  # pairs after which there is a plan for each zone of each option of a pair


def rows_of(tensor: torch.Tensor, output: DispatchOutput) -> torch.Tensor:
    """What is defined of an output that has a row for each that was received."""
    handle = output.handle
    if not isinstance(handle, PlacedHandle):
        return tensor[: handle.num_received()].clone()
    flat = tensor.flatten(0, 1) if handle.stride else tensor
    return flat[handle.origins[:, 0] >= 0].clone()


def contents(output: DispatchOutput) -> dict[str, object]:
    """Whatever of a dispatch's output is defined."""
    handle = output.handle
    rows = {
        name: None if (tensor := getattr(output, name)) is None else rows_of(tensor, output)
        for name in ("tokens", "scales", "weights")
    }
    names = ["number", "dtype", "digest", "topk_idx", "expand_idx", "recv_offsets", "active_mask"]
    names += ["num_ranks", "num_local_experts", "buffer_id", "tokens_per_expert_list"]
    if isinstance(handle, PlacedHandle):
        names += ["num_rows", "stride", "alignment", "tokens_of_round", "tokens_per_expert"]
        names += ["first_starts", "limits"]
        (only,) = handle.rounds
        count = int(only.recv_offsets[-1])
        rows |= {"places": only.places[:count].clone(), "send_counts": only.send_counts.clone()}
        rows |= {"of round": only.recv_offsets.clone(), "first token": only.first_token}
    kept = {name: getattr(handle, name) for name in names}
    kept["buffer_id"] = None  # another one's
    shapes = [None if t is None else (t.shape, t.dtype, t.is_contiguous()) for t in output[:4]]
    return {
        **rows,
        **{name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in kept.items()},
        "tokens_per_expert of output": output.tokens_per_expert.clone(),
        "origins": rows_of(handle.origins, output) if not isinstance(handle, PlacedHandle) else None,
        "shapes": shapes,
        "type": type(handle),
    }


class Pairs:
    """Dispatches and combines of a buffer, with options.

    Each of `WAYS` names what it adds to both.
    """

    def __init__(self, buffer: EPBuffer, case: Case, inputs: Inputs) -> None:
        self.buffer, self.case, self.inputs = buffer, case, inputs
        tokens, topk = len(inputs.x), case.config.num_topk
        self.by_token = torch.arange(tokens) < max(1, tokens - 1)
        self.by_entry = (torch.arange(tokens * topk) % 3 != 1).view(tokens, topk)
        self.first: DispatchOutput | None = None
        self.into: torch.Tensor | None = None

    def run(self, dispatch: Options, combine: Options) -> tuple[DispatchOutput, torch.Tensor]:
        """One pair."""
        inputs, options = self.inputs, dict(dispatch)
        ids: torch.Tensor | None = inputs.topk_idx
        mask = options.pop("mask", "")
        if mask:
            assert ids is not None
            options["active_mask"] = active = self.by_token if mask == "tokens" else self.by_entry
            # What an inactive entry holds does not matter.
            ids = torch.where(active if mask == "entries" else active[:, None], ids, 1 << 20)
        if "handle" in options:
            if self.first is None:
                more = {} if mask == "" else {"active_mask": options["active_mask"]}
                self.first = self.buffer.dispatch(inputs.x, ids, **more)
                self.combine(self.first, {})
            options.pop("active_mask", None)
            options["handle"], ids = self.first.handle, None
        if (out := options.get("out")) is not None:
            if self.first is None:
                self.first = self.buffer.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)
                self.combine(self.first, {})
            options["out"] = self.first if out == "all" else self.first.tokens
        output = self.buffer.dispatch(inputs.x, ids, inputs.topk_weights, **options)
        return output, self.combine(output, combine)

    def combine(self, output: DispatchOutput, options: Options) -> torch.Tensor:
        """The second half of a pair."""
        options = dict(options)
        if "out" in options:
            if self.into is None:
                self.into = torch.empty_like(self.inputs.x)
            options["out"] = self.into
        y = experts_of(self.case, self.buffer.rank, output.tokens)
        return self.buffer.combine(y, output.handle, self.inputs.topk_weights, **options)


WAYS: dict[str, tuple[Options, Options]] = {
    "mask of tokens": ({"mask": "tokens"}, {}),
    "mask of entries": ({"mask": "entries"}, {"out": True}),
    "rows that are given": ({"out": "rows"}, {"out": True}),
    "outputs that are given": ({"out": "all"}, {}),
    "int8 results": ({}, {"comm_quantize": "int8"}),
    "int8 results of some tokens": (
        {"mask": "tokens", "out": "rows"},
        {"comm_quantize": "int8", "out": True},
    ),
    "a handle": ({"handle": True}, {}),
    "a handle with a mask": ({"handle": True, "mask": "entries"}, {"out": True}),
    "a handle and rows": ({"handle": True, "out": "rows"}, {}),
    "exact": ({"num_recv_tokens": "exact"}, {}),
    "exact and masked": ({"num_recv_tokens": "exact", "mask": "entries"}, {"out": True}),
    "aligned": ({"expert_alignment": 4}, {}),
    "aligned exactly": ({"expert_alignment": 3, "num_recv_tokens": "exact"}, {}),
    "a capacity": ({"num_recv_tokens": 64}, {}),
    "padded": ({"layout": "padded", "num_max_tokens_per_rank": 4}, {}),
    "padded exactly": ({"layout": "padded", "num_recv_tokens": "exact", "mask": "tokens"}, {}),
    "padded to a capacity": ({"layout": "padded", "num_recv_tokens": 16}, {"out": True}),
}


def pairs_both_ways(
    rank: int, num_ranks: int, case: Case, way: str, infos: bool
) -> tuple[list[str], list[int]]:
    """Pairs on a buffer that may call natively, and on one that may not: what differs, and Python's runs."""
    dispatch, combine = WAYS[way]
    wrong, runs = [], []
    inputs = inputs_of(case, rank, 0)
    with make_buffer(case) as native, make_buffer(case) as python:
        assert native._calls is not None
        python._calls = None
        stats = [torch.zeros(native.num_local_experts, dtype=torch.int32) for _ in range(2)]
        waited = [torch.zeros(2, num_ranks, dtype=torch.int64) for _ in range(2)]

        def with_counters(number: int) -> tuple[Options, Options]:
            if not infos:
                return dispatch, combine
            added = {"cumulative_local_expert_recv_stats": stats[number]}
            of_dispatch, of_combine = ({"performance_info": row} for row in waited[number])
            return dispatch | added | of_dispatch, combine | of_combine

        makers = Pairs(native, case, inputs), Pairs(python, case, inputs)
        for number in range(PREPARED + 3):
            with pythons_runs() as seen:
                output, combined = makers[0].run(*with_counters(0))
            runs.append(len(seen))
            have, have_sums = contents(output), combined.clone()
            output, combined = makers[1].run(*with_counters(1))
            want = contents(output)
            wrong += [f"pair {number}: {name}" for name in want if not same(have[name], want[name])]
            if not torch.equal(have_sums, combined):
                wrong.append(f"pair {number}: combined")
        if infos:
            if not torch.equal(*stats):
                wrong.append("counts of rows")
            if not all(bool((each > 0).all()) for each in waited):
                wrong.append("waits")
    return wrong, runs


@pytest.mark.parametrize("infos", [False, True], ids=["", "counters"])
@pytest.mark.parametrize("way", WAYS)
def test_options_give_what_pythons_give(ranks: Groups, way: str, infos: bool) -> None:
    quantize = "int8" if infos else None
    case = small_case(2, tokens=(4, 3), quantize=quantize, weights=True)
    for wrong, runs in ranks(2).run(pairs_both_ways, case, way, infos):
        assert wrong == []
        assert runs[-3:] == [0] * 3, f"Python ran some in {runs}"


@pytest.mark.parametrize("scheme", ["fullmesh_v2", "fullmesh"])
@pytest.mark.parametrize("way", ["mask of entries", "a handle with a mask", "padded exactly", "aligned"])
def test_other_schemes_do_too(ranks: Groups, scheme: str, way: str) -> None:
    case = small_case(3, scheme, tokens=(4, 0, 3), quantize="int8_128", dtype=torch.float16)
    gathers = scheme == "fullmesh" and way in ("padded exactly", "aligned")  # which Python does
    for wrong, runs in ranks(3).run(pairs_both_ways, case, way, False):
        assert wrong == []
        assert gathers or runs[-3:] == [0] * 3, f"Python ran some in {runs}"


def zeroed(rank: int, num_ranks: int, options: Options) -> list[bool]:
    """Whether all gaps are zeros, in native calls too."""
    case = small_case(num_ranks, quantize="int8")
    inputs, found = inputs_of(case, rank, 0), []
    with make_buffer(case) as buffer:
        for number in range(PREPARED + 2):
            with pythons_runs() as seen:
                output = buffer.dispatch(
                    *vars(inputs).values(),
                    quantize="int8",
                    num_recv_tokens="exact",
                    do_zero_padding=True,
                    **options,
                )
            assert number < PREPARED or not seen
            is_gap = output.handle.origins[:, 0] < 0
            stride = output.handle.stride
            flat = [t.flatten(0, 1) if stride else t for t in (output.tokens, output.scales, output.weights)]
            found.append(bool(is_gap.any()) and all(not each[is_gap].any() for each in flat))
            for tensor in flat:
                tensor.fill_(5)  # what the pool hands out next
            buffer.combine(torch.zeros(output.tokens.shape, dtype=case.dtype), output.handle)
    return found


@pytest.mark.parametrize("layout", [{"expert_alignment": 8}, {"layout": "padded"}])
def test_native_calls_zero_gaps(ranks: Groups, layout: Options) -> None:
    assert ranks(2).run(zeroed, layout) == [[True] * (PREPARED + 2)] * 2


def refused(rank: int, num_ranks: int) -> list[str]:
    """Calls that native code begins, where a rank has too little room: nothing of them is left."""
    case = small_case(num_ranks)
    inputs, said = inputs_of(case, rank, 0), []
    stats = torch.zeros(2, dtype=torch.int32)
    with make_buffer(case) as buffer:

        def pair(room: int) -> DispatchOutput:
            output = buffer.dispatch(
                *vars(inputs).values(), cumulative_local_expert_recv_stats=stats, num_recv_tokens=room
            )
            buffer.combine(output.tokens, output.handle, inputs.topk_weights)
            return output

        for _ in range(PREPARED):
            output = pair(64)
        before, rows = stats.clone(), contents(output)
        for _ in range(3):
            with pythons_runs() as seen, pytest.raises(ArgumentError, match="rank 0 has room for 1 rows"):
                pair(1 if rank == 0 else 64)
            said += [name for _, name in seen]  # type: ignore[misc]
            assert torch.equal(stats, before)
            again = contents(pair(64))
            assert same(again["tokens"], rows["tokens"])
            assert not torch.equal(stats, before)
            stats.copy_(before)
    return said


def test_a_call_that_native_code_has_begun_can_be_refused(ranks: Groups) -> None:
    # Its rows are received, and go nowhere; ranks were heard natively.
    for said in ranks(2).run(refused):
        assert said == ["fill"] * 3


def more_than_a_round(rank: int, num_ranks: int) -> list[str]:
    """Calls that native code begins on rank 0, which has one round, while rank 1 has three."""
    case = small_case(num_ranks)
    inputs, wrong = inputs_of(case, rank, 0), []
    long = {name: torch.cat([value] * (1 + 2 * rank)) for name, value in vars(inputs).items()}
    with make_buffer(case) as native, make_buffer(case) as python:
        python._calls = None
        for number in range(PREPARED + 4):
            given = long if number > PREPARED else vars(inputs)
            outputs = []
            for buffer in (native, python):
                with pythons_runs() as seen:
                    outputs.append(buffer.dispatch(*given.values(), num_recv_tokens="exact"))
                if buffer is native and number > PREPARED and rank == 0:
                    wrong += [f"Python ran {name}" for _, name in seen if name == "ask"]  # type: ignore[misc]
            one, other = outputs
            wrong += [
                name
                for name in ("tokens", "weights")
                if not torch.equal(getattr(one, name), getattr(other, name))
            ]
            if len(one.handle.rounds) != (3 if number > PREPARED else 1):
                wrong.append(f"{len(one.handle.rounds)} rounds")
            sums = [
                buffer.combine(output.tokens, output.handle, given["topk_weights"])
                for buffer, output in zip((native, python), outputs, strict=True)
            ]
            if not torch.equal(*sums):
                wrong.append("combined")
    return wrong


def test_a_call_that_native_code_has_begun_may_have_more_rounds(ranks: Groups) -> None:
    assert ranks(2).run(more_than_a_round) == [[], []]


def no_memory(rank: int, num_ranks: int) -> list[str]:
    """Where rank 0 has no memory for rows of a call that is under way, it is told so; the other goes on."""
    case = small_case(num_ranks)
    inputs, said = inputs_of(case, rank, 0), []
    with make_buffer(case) as buffer:
        for number in range(PREPARED + 3):
            fails = number == PREPARED and rank == 0
            calls = buffer._calls
            assert calls is not None
            asked = buffer._placed.asked(None, "exact", 1, "rows", False)
            assert asked is not None
            if fails:  # more than there is, as native code and Python are told
                huge = asked._replace(num_rows=1 << 40)
                error = mock.patch.object(Outputs, "__init__", side_effect=MemoryError("none left"))
                told = pytest.raises(MemoryError, match="none left")
                with mock.patch.object(buffer._placed, "asked", return_value=huge), error, told:
                    buffer.dispatch(*vars(inputs).values(), num_recv_tokens="exact")
                said.append("told")
                continue
            output = buffer.dispatch(*vars(inputs).values(), num_recv_tokens="exact")
            if number == PREPARED:
                continue  # the other rank has nothing to combine
            buffer.combine(output.tokens, output.handle, inputs.topk_weights)
            said.append("went on")
    return said


def test_a_native_call_without_memory_for_its_rows_leaves_the_others_alone(ranks: Groups) -> None:
    went_on = ["went on"] * (PREPARED + 2)
    first, second = ranks(2).run(no_memory)
    assert first == [*went_on[:PREPARED], "told", *went_on[:2]]
    assert second == went_on


def bad_calls(rank: int, num_ranks: int) -> list[str]:
    """What native code must not take, once there are plans for the like: each is refused, and calls go on."""
    case = small_case(num_ranks)
    inputs, said = inputs_of(case, rank, 0), []
    x, ids = inputs.x, inputs.topk_idx
    with make_buffer(case) as buffer, make_buffer(case) as other:
        masks = torch.ones(len(x), dtype=torch.bool), torch.ones(ids.shape, dtype=torch.bool)

        def good() -> DispatchOutput:
            for mask in masks:
                output = buffer.dispatch(x, ids, active_mask=mask)
                buffer.combine(output.tokens, output.handle, out=torch.empty_like(x))
            given = buffer.dispatch(x, ids, out=output.tokens)
            buffer.combine(given.tokens, given.handle)
            known = buffer.dispatch(x, handle=given.handle)
            buffer.combine(known.tokens, known.handle)
            padded = buffer.dispatch(x, ids, layout="padded", num_recv_tokens="exact")
            buffer.combine(padded.tokens, padded.handle)
            return padded

        for _ in range(PREPARED):
            padded = good()
            others = other.dispatch(x, ids)
        plain = buffer.dispatch(x, ids)
        torn, outside = masks[0].clone(), ids.clone()
        torn[0], outside[0, 0] = False, 1 << 20
        memory = torch.zeros(len(plain.tokens) + len(x), x.shape[1], dtype=x.dtype)
        inside = memory[: len(x)].copy_(x)
        calls: dict[str, Callable[[], object]] = {
            "True at token": lambda: buffer.dispatch(x, ids, active_mask=torn),
            "mask of ints": lambda: buffer.dispatch(x, ids, active_mask=masks[0].int()),
            "a short mask": lambda: buffer.dispatch(x, ids, active_mask=masks[0][1:]),
            "id of no expert": lambda: buffer.dispatch(x, outside, active_mask=masks[0]),
            "id of no expert in an entry": lambda: buffer.dispatch(x, outside, active_mask=masks[1]),
            "out over x": lambda: buffer.dispatch(inside, ids, out=memory[: len(plain.tokens)]),
            "out over itself": lambda: (
                buffer.dispatch(x, ids, out=plain._replace(weights=plain.tokens)) and 1 / 0
            ),
            "out of another dtype": lambda: buffer.dispatch(x, ids, out=plain.tokens.half()),
            "out with too few rows": lambda: buffer.dispatch(x, ids, out=plain.tokens[1:]),
            "another buffer's handle": lambda: buffer.dispatch(x, handle=others.handle),
            "ids and a handle": lambda: buffer.dispatch(x, ids, handle=plain.handle),
            "other tokens than the handle's": lambda: buffer.dispatch(x[1:], handle=plain.handle),
            "alignment of 0": lambda: buffer.dispatch(x, ids, expert_alignment=0),
            "alignment of True": lambda: buffer.dispatch(x, ids, expert_alignment=True),
            "n below the tokens": lambda: buffer.dispatch(x, ids, num_max_tokens_per_rank=1),
            "out over y": lambda: buffer.combine(plain.tokens, plain.handle, out=plain.tokens[: len(x)]),
            "rows that are too few": lambda: buffer.combine(padded.tokens[:, 1:], padded.handle),
            "rows of one expert": lambda: buffer.combine(padded.tokens[:1], padded.handle),
        }
        for name, call in calls.items():
            try:
                call()
                said.append(f"{name} was taken")
            except ArgumentError:
                pass
            except ZeroDivisionError:  # weights are left alone where there are none
                buffer.combine(plain.tokens, plain.handle)
        plain.handle.topk_idx[0, 0] ^= 1
        for call in (
            lambda: buffer.dispatch(x, handle=plain.handle),
            lambda: buffer.combine(plain.tokens, plain.handle, out=torch.empty_like(x)),
        ):
            with pytest.raises(ArgumentError, match="topk_idx"):
                call()
        good()
    return said


def test_bad_calls_are_left_to_python_which_refuses_them(ranks: Groups) -> None:
    assert ranks(2).run(bad_calls) == [[], []]
