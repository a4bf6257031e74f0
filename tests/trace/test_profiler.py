"""torch's profiler sees operators and their steps by name, at no cost where none looks."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from moe_triton import Tuning
from moe_triton import torch_npu_ops as ops
from moe_triton.backends.cpu import native
from moe_triton.processes import RankGroup
from tests.distributed.cases import Case, inputs_of, small_case
from tests.distributed.workers import compare_rounds, make_buffer
from tests.npu import workers as npu_workers
from tests.torch_npu_ops.setting import experts_of, fresh, make_round

Groups = Callable[[int], RankGroup]
Range = tuple[str, str]  # its name, and that of the range around it
ROUNDS = 4  # native code makes calls by itself from the third on
DISPATCH, COMBINE = "moe_triton::dispatch", "moe_triton::combine"
STEPS = {
    "fullmesh_v1": (
        ["route + pack", "send", "wait", "offsets", "rows", "arrange"],
        ["send", "wait", "sum"],
    ),
    "fullmesh_v2": (
        ["route + pack", "send", "wait", "offsets", "arrange"],
        ["send", "wait", "sum"],
    ),
    "direct": (
        ["route + pack", "send counts", "wait for counts", "send", "flag", "offsets", "wait", "stamps"],
        ["copy", "flag", "wait", "sum"],
    ),
}


def cpu_profile(**options: Any) -> profile:
    return profile(activities=[ProfilerActivity.CPU], **options)


def ranges_of(profiled: profile) -> Counter[Range]:
    return Counter(
        (event.name, event.cpu_parent.name if event.cpu_parent else "")
        for event in profiled.events()
        if event.name.startswith("moe_triton::")
    )


def profiled_rounds(
    rank: int, num_ranks: int, case: Case, options: dict[str, Any]
) -> tuple[list[str], Counter[Range]]:
    """What is wrong in rounds that a profiler looks at, and what it has seen of them."""
    with cpu_profile(**options) as profiled:
        wrong = compare_rounds(rank, num_ranks, case)
    return wrong, ranges_of(profiled)


def expected(scheme: str) -> Counter[Range]:
    found = Counter({(DISPATCH, ""): ROUNDS, (COMBINE, ""): ROUNDS})
    for operator, steps in zip((DISPATCH, COMBINE), STEPS[scheme], strict=True):
        found.update({(f"{operator}: {step}", operator): ROUNDS for step in steps})
    return found


@pytest.mark.parametrize(
    ("scheme", "kernels"),
    [("fullmesh_v1", "triton"), ("fullmesh_v2", "triton"), ("direct", "triton"), ("fullmesh_v1", "torch")],
)
def test_operators_and_their_steps_are_ranges(ranks: Groups, scheme: str, kernels: str) -> None:
    case = small_case(2, scheme, "int8", rounds=ROUNDS, num_blocks=1, kernels=kernels)
    for wrong, seen in ranks(2).run(profiled_rounds, case, {}):
        assert wrong == []
        assert seen == expected(scheme)


def test_a_profile_with_stacks_and_shapes_sees_the_same(ranks: Groups) -> None:
    case = small_case(2, "fullmesh_v1", "int8", rounds=ROUNDS, num_blocks=1)
    options = {"with_stack": True, "record_shapes": True, "profile_memory": True}
    for wrong, seen in ranks(2).run(profiled_rounds, case, options):
        assert wrong == []
        assert {name for name, _ in seen} == {name for name, _ in expected("fullmesh_v1")}


def profiled_cores(rank: int, num_ranks: int, case: Case, all_threads: bool) -> dict[str, int]:
    """On how many threads a profile has each step of a combine whose parts are summed while others come."""
    with make_buffer(case, tuning=Tuning(communication_blocks=1, combine_tokens=2)) as buffer:
        inputs = inputs_of(case, rank, 0)
        out = buffer.dispatch(inputs.x, inputs.topk_idx)
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=all_threads)
        with cpu_profile(experimental_config=config) as profiled:
            buffer.combine(out.tokens, out.handle, inputs.topk_weights)
    threads: dict[str, set[int]] = {}
    for event in profiled.events():
        threads.setdefault(event.name, set()).add(event.thread)
    return {name: len(found) for name, found in threads.items() if name.startswith(COMBINE)}


@pytest.mark.parametrize(("all_threads", "threads"), [(False, 1), (True, 2)])
def test_a_profile_of_all_threads_sees_what_other_cores_do(
    ranks: Groups, all_threads: bool, threads: int
) -> None:
    case = small_case(2, num_blocks=2)
    for seen in ranks(2).run(profiled_cores, case, all_threads):
        steps = {f"{COMBINE}: {step}": 1 for step in ("send", "wait")}
        assert seen == {COMBINE: 1, **steps, f"{COMBINE}: sum": threads}


def profiled_functions(rank: int, num_ranks: int) -> set[str]:
    """What a profile has of torch_npu's functions, whole and in halves."""
    with fresh():
        one = make_round(rank, num_ranks)
        with cpu_profile() as profiled:
            out = ops.npu_moe_distribute_dispatch_v2(one.x, one.ids, *one.group)
            ops.npu_moe_distribute_combine_v2(
                experts_of(out[0]), one.ids, out[2], out[4], one.weights, *one.group
            )
    return {name for name, _ in ranges_of(profiled)}


def test_torch_npus_functions_are_seen(ranks: Groups) -> None:
    for seen in ranks(2).run(profiled_functions):
        assert seen >= {name for name, _ in expected("fullmesh_v1") if "pack" not in name}


def profiled_halves(rank: int, num_ranks: int, case: Case) -> set[str]:
    with make_buffer(case) as buffer, cpu_profile() as profiled:
        inputs = inputs_of(case, rank, 0)
        out = buffer.dispatch(inputs.x, inputs.topk_idx, wait=False).wait()
        buffer.combine(out.tokens, out.handle, inputs.topk_weights, wait=False).wait()
    return {name for name, _ in ranges_of(profiled)}


def test_halves_are_told_apart(ranks: Groups) -> None:
    for seen in ranks(2).run(profiled_halves, small_case(2)):
        assert seen >= {
            f"{operator} {half}" for operator in (DISPATCH, COMBINE) for half in ("setup", "teardown")
        }
        assert seen >= {f"{DISPATCH} setup: send", f"{DISPATCH} teardown: wait", f"{COMBINE} teardown: sum"}


def profiled_on_standin(rank: int, num_ranks: int, case: Case) -> tuple[list[str], Counter[Range]]:
    with cpu_profile() as profiled:
        wrong = npu_workers.compare_rounds(rank, num_ranks, case, "random", None)
    return wrong, ranges_of(profiled)


def test_launches_of_the_npus_back_end_are_ranges() -> None:
    case = small_case(2, "fullmesh_v1", rounds=2, num_blocks=2)
    with RankGroup(2) as group:
        for wrong, seen in group.run(profiled_on_standin, case):
            assert wrong == []
            assert seen[DISPATCH, ""] == seen[COMBINE, ""] == 2
            steps = {name.partition(": ")[2] for name, around in seen if around == COMBINE}
            assert steps == {"send, wait", "sum"}


IS_ON, START = ctypes.CFUNCTYPE(ctypes.c_bool), ctypes.CFUNCTYPE(ctypes.c_int32)


def questions(rank: int, num_ranks: int, case: Case) -> tuple[int, int]:
    """How often native code asks for a profiler in calls that none looks at, and begins a range."""
    asked, begun = [], []
    is_on, start = IS_ON(lambda: bool(asked.append(1))), START(lambda: begun.append(1) or 1)
    with make_buffer(case) as buffer:
        inputs = inputs_of(case, rank, 0)
        use = native.library().moe_use_profiler
        use(ctypes.cast(is_on, ctypes.c_void_p), ctypes.cast(start, ctypes.c_void_p), None)
        try:
            for _ in range(ROUNDS):
                out = buffer.dispatch(inputs.x, inputs.topk_idx)
                buffer.combine(out.tokens, out.handle, inputs.topk_weights)
        finally:
            use(*native.profiler_functions())
    return len(asked), len(begun)


def test_where_no_profiler_looks_a_call_asks_once_and_does_nothing(ranks: Groups) -> None:
    assert ranks(2).run(questions, small_case(2)) == [(2 * ROUNDS, 0)] * 2


def test_a_torch_that_lacks_a_function_has_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = native.profiler_functions.__wrapped__
    assert all(functions())
    monkeypatch.setattr(native, "PROFILER_SYMBOLS", (*native.PROFILER_SYMBOLS[:2], "aoti_none_such"))
    assert functions() == (None, None, None)


def test_a_profile_in_the_middle_of_calls(ranks: Groups) -> None:
    """Calls before it and after it are no part of it, and every call has the reference's bits."""
    case = replace(small_case(2, quantize="int8", num_blocks=1), rounds=1)
    for wrong, seen in ranks(2).run(profiled_middle, case):
        assert wrong == []
        assert seen[DISPATCH, ""] == 1


def profiled_middle(rank: int, num_ranks: int, case: Case) -> tuple[list[str], Counter[Range]]:
    before = compare_rounds(rank, num_ranks, case)
    wrong, seen = profiled_rounds(rank, num_ranks, case, {})
    return [*before, *wrong, *compare_rounds(rank, num_ranks, case)], seen
