"""Real ranks write one trace: every rank, every step, and for whom each wait was."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_triton import ArgumentError, BufferStateError, CommunicationTimeoutError, ConfigMismatchError
from moe_triton import torch_npu_ops as ops
from moe_triton.core.tuning import Tuning
from moe_triton.processes import RankFailedError, RankGroup
from moe_triton.runtime import traces as trace_module
from tests.distributed.cases import inputs_of, small_case
from tests.distributed.workers import expected_round, make_buffer, one_round, patient_buffer
from tests.patience import seconds
from tests.torch_npu_ops.setting import experts_of, make_round

Groups = Callable[[int], RankGroup]
Span = dict[str, Any]
# What a straggler sleeps. Where the others were off their core all that time, nobody waited: once more then.
NAPS_S = (0.2, 0.8, 3.2)


def read(path: Path) -> list[Span]:
    events: list[Span] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


def spans_of(events: list[Span], **wanted: Any) -> list[Span]:
    return [e for e in events if e["ph"] == "X" and all(e[key] == value for key, value in wanted.items())]


def check_nesting(events: list[Span]) -> None:
    """On each core a span lies in another one or beside it."""
    open_until: dict[tuple[int, int], list[int]] = {}
    for span in sorted(spans_of(events), key=lambda e: (e["ts"], -e["dur"])):
        begin = round(span["ts"] * 1e3)  # nanoseconds
        end = begin + round(span["dur"] * 1e3)
        stack = open_until.setdefault((span["pid"], span["tid"]), [])
        while stack and stack[-1] <= begin:
            stack.pop()
        assert not stack or end <= stack[-1], span
        stack.append(end)


def straggle(
    rank: int,
    num_ranks: int,
    path: str,
    nap_s: float,
    comm_alg: str,
    changes: dict[str, Any],
    tuning: Tuning | None = None,
) -> None:
    """Two rounds; the last rank comes late to the second dispatch and to the second combine."""
    straggler = num_ranks - 1
    case = small_case(num_ranks, quantize="int8", **changes)
    case = replace(case, config=replace(case.config, scheme=comm_alg))
    with make_buffer(case, trace=path, tuning=tuning) as buffer:
        for number in range(2):
            inputs = inputs_of(case, rank, number)
            dist.barrier()
            if number and rank == straggler:
                time.sleep(nap_s)
            out = buffer.dispatch(inputs.x, inputs.topk_idx, quantize="int8")
            y = (out.tokens.float() * out.scales[:, None]).bfloat16()
            dist.barrier()
            if number and rank == straggler:
                time.sleep(nap_s)
            buffer.combine(y, out.handle, inputs.topk_weights)


def traced_straggler(groups: Groups, num_ranks: int, folder: Path, *settings: Any) -> list[Span]:
    """The events of `straggle`, in which every other rank waited longest for the straggler."""
    *others, straggler = range(num_ranks)
    asked = [(rank, operator) for rank in others for operator in ("dispatch #1", "combine #1")]
    for nap_s in NAPS_S:
        path = folder / f"{nap_s}.json"
        groups(num_ranks).run(straggle, str(path), nap_s, *settings)
        events = read(path)
        longest = [longest_wait(events, *of) for of in asked]
        if all(
            w and w["name"] == f"wait for rank {straggler}" and w["dur"] > nap_s / 2 * 1e6 for w in longest
        ):
            return events
    pytest.fail(f"rank {straggler} was late, and others waited longest elsewhere: {longest}")


def longest_wait(events: list[Span], rank: int, operator: str) -> Span | None:
    (whole,) = spans_of(events, pid=rank, name=operator)
    waits = [s for s in spans_of(events, pid=rank, cat="wait") if s["args"]["of"] == operator]
    assert all(span["dur"] <= whole["dur"] for span in waits)
    return max(waits, key=lambda span: float(span["dur"]), default=None)


STEPS = {
    "fullmesh_v1": {
        "route + pack",
        "send",
        "flag",
        "write + flag",
        "wait",
        "offsets",
        "rows",
        "arrange",
        "sum",
    },
    "fullmesh_v2": {"route + pack", "send", "flag", "write + flag", "wait", "offsets", "arrange", "sum"},
    "direct": {"route + pack", "send", "write", "flag", "wait", "wait for counts", "offsets", "sum"},
}


@pytest.mark.parametrize(
    ("num_ranks", "comm_alg", "num_blocks", "kernels"),
    [
        (3, "fullmesh_v1", 2, "triton"),
        (3, "fullmesh_v2", 2, "triton"),
        (3, "direct", 2, "triton"),
        (2, "fullmesh_v1", 1, "triton"),
        (2, "fullmesh_v1", 1, "torch"),
    ],
)
def test_a_trace_has_every_rank_and_step_and_names_the_straggler(
    ranks: Groups, tmp_path: Path, num_ranks: int, comm_alg: str, num_blocks: int, kernels: str
) -> None:
    changes = {"num_blocks": num_blocks, "kernels": kernels}
    events = traced_straggler(ranks, num_ranks, tmp_path, comm_alg, changes)
    check_nesting(events)
    blocks = range(num_blocks)
    names = {(e["pid"], e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert names == {(r, b, f"core {b}") for r in range(num_ranks) for b in blocks}
    for rank in range(num_ranks):
        operators = [span["name"] for span in spans_of(events, pid=rank, cat="operator")]
        assert operators == ["dispatch #0", "combine #0", "dispatch #1", "combine #1"]
        mine = {span["name"] for span in spans_of(events, pid=rank)}
        assert mine >= STEPS[comm_alg]
        assert {span["tid"] for span in spans_of(events, pid=rank, name="send")} == set(blocks)
    assert not [e for e in events if e["name"] == "process_labels"]


def test_parts_that_run_beside_each_other_have_cores_of_their_own(ranks: Groups, tmp_path: Path) -> None:
    tuning = Tuning(communication_blocks=1, dispatch_tokens=1, combine_tokens=1)
    events = traced_straggler(ranks, 2, tmp_path, "fullmesh_v1", {"num_blocks": 2}, tuning)
    check_nesting(events)
    steps = Counter(s["name"] for s in spans_of(events, pid=0) if s["args"].get("of") == "dispatch #1")
    assert steps["send"] == 4  # parts of one token, each on one core


def write_twice(rank: int, num_ranks: int, path: str) -> list[list[str]]:
    case = small_case(num_ranks)
    seen = []
    with make_buffer(case, trace=path) as buffer:
        for number in range(2):
            _, combined = one_round(buffer, case, inputs_of(case, rank, number), None)
            assert torch.equal(combined, expected_round(case, number)[1][rank])
            buffer.write_trace()
            operators = spans_of(read(Path(path)), pid=rank, cat="operator")
            seen.append([span["name"] for span in operators])
    with pytest.raises(BufferStateError, match="closed"):
        buffer.write_trace()
    return seen


def test_a_trace_can_be_written_before_the_end(ranks: Groups, tmp_path: Path) -> None:
    first = ["dispatch #0", "combine #0"]
    both = [*first, "dispatch #1", "combine #1"]
    path = tmp_path / "trace.json"
    assert ranks(2).run(write_twice, str(path)) == [[first, both]] * 2
    assert len(spans_of(read(path), cat="operator")) == 8


def few_events(rank: int, num_ranks: int, path: str) -> None:
    case = small_case(num_ranks, num_blocks=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_module, "MAX_EVENTS", 64)
        with make_buffer(case, trace=path) as buffer:
            for number in range(20):
                one_round(buffer, case, inputs_of(case, rank, number), None)


def test_old_calls_are_dropped_and_their_number_is_said(ranks: Groups, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    ranks(2).run(few_events, str(path))
    events = read(path)
    for rank in range(2):
        operators = [span["name"] for span in spans_of(events, pid=rank, cat="operator")]
        (said,) = [e for e in events if e["name"] == "process_labels" and e["pid"] == rank]
        assert said["args"]["dropped_calls"] + len(operators) == 40
        assert operators[-1] == "combine #19"
        assert 2 <= len(operators) <= 8


def not_traced(rank: int, num_ranks: int, folder: str) -> list[str]:
    case = small_case(num_ranks)
    with make_buffer(case) as buffer:
        one_round(buffer, case, inputs_of(case, rank, 0), None)
        assert buffer._communicator._trace is None
        executables = buffer._communicator._executables
        assert executables.keys()
        for key in list(executables.keys()):
            executable = executables.operator(*key)  # type: ignore[arg-type]
            assert executable._struct.trace is None  # type: ignore[attr-defined]
        with pytest.raises(BufferStateError, match="no trace"):
            buffer.write_trace()
    return [path.name for path in Path(folder).iterdir()]


def test_without_a_trace_there_is_no_file_and_no_log(ranks: Groups, tmp_path: Path) -> None:
    assert ranks(2).run(not_traced, str(tmp_path)) == [[], []]


def refused(rank: int, num_ranks: int, paths: list[str | None]) -> str:
    case = small_case(num_ranks)
    try:
        make_buffer(case, trace=paths[rank], timeout_s=seconds(20.0))
    except (ArgumentError, ConfigMismatchError) as error:
        message = f"{type(error).__name__}: {error}"
    with make_buffer(case) as buffer:  # nothing is left behind that keeps the ranks apart
        one_round(buffer, case, inputs_of(case, rank, 0), None)
    return message


def test_a_path_that_cannot_be_written_is_refused_on_every_rank(ranks: Groups, tmp_path: Path) -> None:
    bad, good = str(tmp_path / "absent" / "trace.json"), str(tmp_path / "trace.json")
    both = ranks(2).run(refused, [bad, bad])
    assert all(said.startswith(f"ArgumentError: trace is '{bad}', but no file") for said in both)
    assert all("Name a file in a folder that exists" in said for said in both)
    first, second = ranks(2).run(refused, [good, bad])
    assert first.startswith("ConfigMismatchError: rank 1 cannot be constructed: trace is")
    assert second.startswith("ArgumentError: trace is")
    differ = ranks(2).run(refused, [good, None])
    assert all(said.startswith("ConfigMismatchError") and "trace" in said for said in differ)
    assert list(tmp_path.iterdir()) == []


def time_out(rank: int, num_ranks: int, path: str) -> bool:
    case = small_case(num_ranks)
    with patient_buffer(case, trace=path, timeout_s=seconds(1.0)) as buffer:
        inputs = inputs_of(case, rank, 0)
        if rank == 1:
            dist.barrier()
            return True
        with pytest.raises(CommunicationTimeoutError):
            buffer.dispatch(inputs.x, inputs.topk_idx)
        dist.barrier()
    return True


def test_a_time_out_is_in_the_trace(ranks: Groups, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    ranks(2).run(time_out, str(path))
    events = read(path)
    (operator,) = spans_of(events, cat="operator")
    assert operator["args"]["failed"] == "wait"
    waits = spans_of(events, pid=0, cat="wait")
    longest = max(waits, key=lambda span: float(span["dur"]))
    assert longest["name"] == "wait for rank 1"
    assert longest["dur"] > operator["dur"] / 2


def through_operators(rank: int, num_ranks: int, path: str) -> bool:
    ops.configure(relaxed=True, timeout_s=seconds(20.0), trace=path)
    try:
        mine = make_round(rank, num_ranks)
        out = ops.npu_moe_distribute_dispatch_v2(mine.x, mine.ids, *mine.group)
        ops.npu_moe_distribute_combine_v2(
            experts_of(out[0]), mine.ids, out[2], out[4], mine.weights, *mine.group
        )
    finally:
        ops.release(ops.group_name())
        ops.configure()
    return True


def test_torch_npu_s_operators_are_traced_too(ranks: Groups, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    ranks(2).run(through_operators, str(path))
    operators = Counter((s["pid"], s["name"]) for s in spans_of(read(path), cat="operator"))
    assert operators == {(r, name): 1 for r in range(2) for name in ("dispatch #0", "combine #0")}


def test_configure_refuses_what_is_no_path() -> None:
    with pytest.raises(ArgumentError, match="trace is"):
        ops.configure(trace="")


def test_a_rank_that_dies_leaves_the_others_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with RankGroup(2) as group:
        answers = group.run(die, str(path), allow_failures=True)
    assert isinstance(answers[1], RankFailedError)
    assert {span["pid"] for span in spans_of(read(path))} == {0}


def die(rank: int, num_ranks: int, path: str) -> None:
    case = small_case(num_ranks)
    buffer = make_buffer(case, trace=path)
    one_round(buffer, case, inputs_of(case, rank, 0), None)
    if rank == 1:
        os._exit(1)
    buffer.close()
