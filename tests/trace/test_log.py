"""What is kept in memory, and what becomes of it in the file."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_triton.backends import CAPABILITIES
from moe_triton.backends.base import TracedCall, TraceEvent
from moe_triton.backends.cpu.trace_log import EVENTS_PER_CALL, NativeTraceLog
from moe_triton.core import ascendc
from moe_triton.core.config import Config
from moe_triton.core.kernel import Arg, AscendCKernel
from moe_triton.core.plan import Launch, Placeholder, Plan
from moe_triton.core.records import TRAFFIC
from moe_triton.core.row_formats import INT8
from moe_triton.core.traffic import PLACEHOLDER, ByReach, Traffic
from moe_triton.operators.variants import CombineVariant, DispatchVariant
from moe_triton.runtime.traces import TracedRank, metadata, spans
from moe_triton.schemes.fullmesh.scheme import Fullmesh
from moe_triton.schemes.rank_context import RankContext

CONFIG = Config(3, 4, 64, 2, 4, 1, 1, relaxed=True)
SITE = RankContext(CONFIG, 2, 2, 1000, CAPABILITIES["cpu"])
RANKS = (5, 6, 7)
PLACE = TracedRank(CONFIG, 2, 2, RANKS)
DISPATCH = DispatchVariant(torch.bfloat16, INT8, False, False)
COMBINE = CombineVariant(torch.bfloat16, True)


def plan_of(operator: str, phase: str = "whole") -> Plan:
    build = getattr(Fullmesh(SITE), phase)
    plan: Plan = build(DISPATCH if operator == "dispatch" else COMBINE, 0)
    return plan


def step_of(plan: Plan, step: str) -> int:
    return [launch.step for launch in plan.launches].index(step)


def fill(log: NativeTraceLog, calls: int, events: int) -> None:
    plan = log.add_plan(plan_of("dispatch"), (), {})
    for _ in range(calls):
        log.begin_call()
        for launch in range(events):
            log.add_launch(launch, 0)
        log.end_call(plan, 0, {"num_tokens": 3}, 0)


def test_what_was_added_is_taken_once() -> None:
    log = NativeTraceLog(100, 0)
    fill(log, 3, 4)
    calls, events, dropped = log.take()
    assert [call.number for call in calls] == [1, 2, 3]
    assert [(e.call, e.launch) for e in events] == [(c, n) for c in (1, 2, 3) for n in range(4)]
    assert {call.tokens for call in calls} == {3}
    assert dropped == 0
    assert log.take() == ([], [], 0)
    fill(log, 1, 1)
    assert [call.number for call in log.take()[0]] == [4]


@pytest.mark.parametrize("max_events", [1, 9, 10, 11, 64])
def test_the_oldest_calls_are_dropped_whole_and_counted(max_events: int) -> None:
    log = NativeTraceLog(max_events, 0)
    for round_number in range(1, 4):
        fill(log, 20, 5)
        calls, events, dropped = log.take()
        numbers = [call.number for call in calls]
        last = 20 * round_number
        assert numbers == list(range(last - len(numbers) + 1, last + 1))
        assert [e.call for e in events] == [n for n in numbers for _ in range(5)]
        assert len(events) <= max_events
        assert dropped == round_number * (20 - len(numbers))
        # As many as there is room for, but for one that may be there in part.
        assert len(numbers) >= min(max_events // 5 - 1, -(-max_events // EVENTS_PER_CALL))


def carry(log: NativeTraceLog, call: int, messages: int) -> None:
    """As a NIC does."""
    for _ in range(messages):
        number = log._link.num_spans
        log._carried[number % len(log._carried)] = 10 * number, 10 * number + 5, call, 1
        log._link.num_spans += 1


def test_what_the_link_carried_is_taken_once_with_its_call() -> None:
    log = NativeTraceLog(100, 0)
    for call in (1, 2):
        fill(log, 1, 2)
        carry(log, call, 3)
    calls, events, dropped = log.take()
    carried = [event for event in events if event.kind == ascendc.TRACE_LINK]
    assert ([call.number for call in calls], len(events), dropped) == ([1, 2], 4 + 6, 0)
    assert [(e.call, e.begin_ns, e.peer) for e in carried] == [(1 + n // 3, 10 * n, 1) for n in range(6)]
    carry(log, 2, 1)  # late: its call has been taken
    fill(log, 1, 0)
    carry(log, 3, 1)
    calls, events, dropped = log.take()
    assert ([call.number for call in calls], [e.call for e in events], dropped) == ([3], [3], 0)
    assert log.take() == ([], [], 0)


def test_numbers_and_spans_of_the_link_are_read_with_fences_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first span is there behind the first fence; others are written over it before the second one."""
    log = NativeTraceLog(4, 0)
    fill(log, 1, 1)
    log._link.num_spans = 2

    def arrive() -> None:
        log._carried[:2] = [(10, 15, 1, 1), (20, 25, 1, 1)]

    def be_written_over() -> None:
        log._carried[:2] = [(50, 55, 9, 1), (60, 65, 9, 1)]
        log._link.num_spans = 4

    fences = iter([arrive, be_written_over])
    monkeypatch.setattr(
        "moe_triton.backends.cpu.native.library", lambda: SimpleNamespace(moe_fence=lambda: next(fences)())
    )
    events, _ = log._take_carried()
    # The number of the second look says that the place of the first span may be in use.
    assert [event.begin_ns for event in events] == [20]
    assert next(fences, None) is None


@pytest.mark.parametrize("messages", [1, 2, 5, 24, 25, 26, 60])
def test_calls_whose_messages_were_overwritten_are_dropped_whole(messages: int) -> None:
    log = NativeTraceLog(25, 0)
    for call in range(1, 11):
        fill(log, 1, 1)
        carry(log, call, messages)
    calls, events, dropped = log.take()
    whole = {number: [event for event in events if event.call == number] for number in range(1, 11)}
    assert len(calls) + dropped == 10
    assert len(calls) >= min(-(-25 // EVENTS_PER_CALL), 24 // messages) - 1
    for number in range(dropped + 1, 11):
        assert len(whole[number]) == 1 + messages
    assert not any(whole[number] for number in range(1, dropped + 1))


def test_what_was_posted_is_summed_over_blocks() -> None:
    log, kernel = NativeTraceLog(100, 0), AscendCKernel("posts", (Arg("traffic", "*i64", "out"),))
    counters = torch.zeros(3, TRAFFIC.num_words, dtype=torch.int64)
    for operator, first in (("dispatch", 0), ("combine", 1)):
        placeholder = Placeholder(PLACEHOLDER, first * TRAFFIC.num_bytes)
        plan = Plan(operator, 0, (Launch("flag", kernel, (placeholder,), 2, "communication"),))
        traced = log.add_plan(plan, (), {PLACEHOLDER: counters})
        log.begin_call()
        counters[:, : len(TRAFFIC.fields)] = torch.arange(6) + torch.tensor([[1], [10], [100]])
        log.end_call(traced, 0, {}, 0)
        counters.zero_()
    fill(log, 1, 0)
    first, second, none = log.take()[0]
    assert first.traffic == Traffic(ByReach(11, 17), ByReach(13, 19), ByReach(15, 21))
    assert second.traffic == Traffic(ByReach(110, 116), ByReach(112, 118), ByReach(114, 120))
    assert none.traffic is None
    (span,) = spans_of([first], [], dispatch=1)
    assert span["args"] == {
        "zone": 0,
        "posts between": 11,
        "posts inside": 17,
        "payload_bytes between": 13,
        "payload_bytes inside": 19,
        "framing_bytes between": 15,
        "framing_bytes inside": 21,
    }


def spans_of(calls: list[TracedCall], events: list[TraceEvent], **counts: int) -> list[dict[str, Any]]:
    return spans(PLACE, calls, events, {"dispatch": 0, "combine": 0, "barrier": 0, **counts})


def test_calls_are_numbered_from_the_end() -> None:
    kinds = [
        ("dispatch", "whole", "dispatch #6"),
        ("combine", "setup", "combine #3 setup"),
        ("dispatch", "setup", "dispatch #7 setup"),
        ("combine", "teardown", "combine #3 teardown"),
        ("dispatch", "teardown", "dispatch #7 teardown"),
        ("combine", "whole", "combine #4"),
        ("dispatch", "setup", "dispatch #8 setup"),
    ]
    calls = [
        TracedCall(plan_of(operator, phase), 10 + n, 10 * n, 10 * n + 5, -1, -1, None)
        for n, (operator, phase, _) in enumerate(kinds)
    ]
    made = spans_of(calls, [], dispatch=8, combine=5)
    assert [span["name"] for span in made] == [name for *_, name in kinds]


def test_spans_say_what_where_and_how_long() -> None:
    plan = plan_of("dispatch")
    pack, send = step_of(plan, "route + pack"), step_of(plan, "send")
    failed = plan.launches[step_of(plan, "wait")]
    calls = [TracedCall(plan, 1, 1_000, 9_500, 4, -1, failed)]
    events = [
        TraceEvent(3_000, 4_000, 1, send, 1, ascendc.TRACE_WRITE, -1),
        TraceEvent(4_000, 5_000, 1, send, 1, ascendc.TRACE_FLAG, -1),
        TraceEvent(3_000, 5_000, 1, send, 1, ascendc.TRACE_BLOCK, -1),
        TraceEvent(2_000, 2_500, 1, pack, 0, ascendc.TRACE_BLOCK, -1),
    ]
    operator, packed, sent, written, flagged = spans_of(calls, events, dispatch=1)
    assert operator == {
        "name": "dispatch #0",
        "cat": "operator",
        "ph": "X",
        "ts": 1.0,
        "dur": 8.5,
        "pid": 7,
        "tid": 0,
        "args": {"zone": 0, "tokens": 4, "failed": "wait"},
    }
    ids, rows = 8 * 8 + 4 * 4, 4 * (3 * 64 + 4)
    assert packed["args"] == {"of": "dispatch #0", "kernel": "route_pack", "launch_bytes": ids + rows}
    assert [span["name"] for span in (sent, written, flagged)] == ["send", "write", "flag"]
    assert {span["tid"] for span in (sent, written, flagged)} == {1}
    assert sent["ts"] == written["ts"]  # what is inside comes after
    assert sent["cat"] == "communication"


def test_waits_of_dispatch_name_the_source_in_the_world() -> None:
    plan = plan_of("dispatch")
    wait = step_of(plan, "wait")
    calls = [TracedCall(plan, 1, 0, 99, 4, 9, None)]
    events = [TraceEvent(0, 10 * (p + 1), 1, wait, 0, ascendc.TRACE_WAIT, p) for p in (0, 2)]
    waits = [span for span in spans_of(calls, events, dispatch=1) if span["cat"] == "wait"]
    assert [(span["name"], span["args"]["rank"]) for span in waits] == [
        ("wait for rank 7", 7),
        ("wait for rank 5", 5),
    ]


def test_waits_of_combine_are_by_expert_and_the_longest_counts() -> None:
    plan = plan_of("combine")
    wait = step_of(plan, "wait")
    calls = [TracedCall(plan, 1, 0, 99, 4, 9, None)]
    # Experts 0 and 1 are rank 1's, 2 and 3 rank 2's; the shared one, after them, rank 0's.
    ends = {0: 10, 1: 30, 2: 20, 3: 15, 4: 40}
    events = [TraceEvent(0, end, 1, wait, 0, ascendc.TRACE_WAIT, peer) for peer, end in ends.items()]
    waits = [span for span in spans_of(calls, events, combine=1) if span["cat"] == "wait"]
    assert [(span["args"]["rank"], span["dur"]) for span in waits] == [(5, 0.04), (6, 0.03), (7, 0.02)]


def test_the_link_is_behind_the_cores_and_says_to_whom() -> None:
    calls = [TracedCall(plan_of("dispatch"), 1, 0, 99, 4, 9, None)]
    (span,) = [
        span
        for span in spans_of(calls, [TraceEvent(10, 30, 1, -1, -1, ascendc.TRACE_LINK, 1)], dispatch=1)
        if span["cat"] == "link"
    ]
    assert (span["name"], span["tid"], span["dur"]) == ("to rank 6", 2, 0.02)
    assert span["args"] == {"of": "dispatch #0", "rank": 6}
    names = [e["args"].get("name") for e in metadata(PLACE, 0, has_link=True) if e["tid"] == 2]
    assert names == ["link"]


def test_metadata_names_rank_and_cores_and_says_what_was_dropped() -> None:
    plain = list(metadata(PLACE, 0))
    assert {e["args"].get("name") for e in plain} == {"rank 7", "core 0", "core 1", None}
    (dropped,) = [e for e in metadata(PLACE, 4) if e["name"] == "process_labels"]
    assert dropped["args"] == {"labels": "4 oldest calls dropped", "dropped_calls": 4}
