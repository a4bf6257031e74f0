"""The rings that native code writes traces to."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import numpy as np
import torch

from moe_triton.backends.base import Bindings, TracedCall, TraceEvent
from moe_triton.backends.cpu import native
from moe_triton.core.ascendc import TRACE_BLOCK, TRACE_LINK
from moe_triton.core.plan import Placeholder, Plan
from moe_triton.core.records import TRAFFIC
from moe_triton.core.traffic import NUM_COUNTERS, PLACEHOLDER, Traffic

EVENTS_PER_CALL = 8  # at least, or nearly so
_EVENT = np.dtype("u8, u8, u8, u4, u4, u4, i4")
# What the link carried.
_CARRIED = np.dtype([("begin_ns", "u8"), ("end_ns", "u8"), ("call", "u8"), ("peer", "u8")])
_CALL = np.dtype(f"u8, u8, u8, u4, i4, i4, i4, {NUM_COUNTERS}i8")
_NOTHING_POSTED = (-1,) * NUM_COUNTERS
_CALL_OF_EVENT, _NUMBER_OF_CALL = "f2", "f2"


class NativeTraceLog:
    """Keeps the newest of what the plans of one communicator did, in rings that native code writes to.

    Args:
        max_events: number of events that are kept, and of messages on the link.
        last_entry: index of the total number of rows in ``recv_offsets``.

    Attributes:
        address: of the ``moe::TraceLog``.
        link_address: of the ``moe::LinkLog``, for a NIC.
    """

    def __init__(self, max_events: int, last_entry: int) -> None:
        max_calls = -(-max_events // EVENTS_PER_CALL)
        # Pages are only touched when they are needed.
        self._events, self._calls = np.empty(max_events, _EVENT), np.empty(max_calls, _CALL)
        self._struct = native.TraceLogStruct(
            self._events.ctypes.data, max_events, 0, self._calls.ctypes.data, max_calls, 0
        )
        self.address = ctypes.addressof(self._struct)
        self._carried = np.empty(max(2, max_events), _CARRIED)
        call = self.address + native.TraceLogStruct.num_calls.offset
        self._link = native.LinkLogStruct(self._carried.ctypes.data, len(self._carried), 0, call)
        self.link_address = ctypes.addressof(self._link)
        self._num_carried = 0  # that were taken
        self._last_entry = last_entry
        self._plans: list[Plan] = []
        self._num_taken = 0
        self._num_dropped = 0

    def add_plan(self, plan: Plan, placeholders: Sequence[str], fixed: Bindings) -> native.TracedPlanStruct:
        """Registers a plan, and describes it for native code.

        Args:
            plan: to be traced.
            placeholders: names of those that calls fill, in order.
            fixed: what the others hold.
        """
        self._plans.append(plan)
        tokens, rows = (
            placeholders.index(name) if name in placeholders else -1
            for name in ("num_tokens", "recv_offsets")
        )
        number = len(self._plans) - 1
        posting = _traffic(plan, fixed)
        return native.TracedPlanStruct(self.address, number, tokens, rows, self._last_entry, *posting)

    def begin_call(self) -> None:
        """A call begins that runs from Python."""
        self._struct.num_calls += 1

    def end_call(self, plan: native.TracedPlanStruct, begin_ns: int, bindings: Bindings, result: int) -> None:
        """A call that ran from Python ends, with a result like that of ``moe_run_plan``."""
        number, rows = self._struct.num_calls, bindings.get("recv_offsets")
        num_rows = int(rows[self._last_entry]) if isinstance(rows, torch.Tensor) and not result else -1
        entry = (
            begin_ns,
            time.monotonic_ns(),
            number,
            plan.number,
            bindings.get("num_tokens", -1),
            num_rows,
            result,
            _counters(plan.traffic, plan.traffic_blocks) if plan.traffic else _NOTHING_POSTED,
        )
        self._calls[number % len(self._calls)] = entry

    def add_launch(self, launch: int, begin_ns: int) -> None:
        """A launch that ran from Python, as one block, ends."""
        entry = begin_ns, time.monotonic_ns(), self._struct.num_calls, launch, 0, TRACE_BLOCK, -1
        self._events[self._struct.num_events % len(self._events)] = entry
        self._struct.num_events += 1

    def take(self) -> tuple[list[TracedCall], list[TraceEvent], int]:
        """Returns and forgets the calls with all of their events, and the number of dropped calls."""
        num_calls, num_events = self._struct.num_calls, self._struct.num_events
        first = max(self._num_taken + 1, num_calls - len(self._calls) + 1)
        events = self._events[:num_events]
        if num_events > len(self._events):
            events = np.roll(self._events, -(num_events % len(self._events)))
            # Some events of the oldest call may be overwritten.
            first = max(first, int(events[_CALL_OF_EVENT].min()) + 1)
        carried, first_whole = self._take_carried()
        first = max(first, first_whole)
        calls = [self._call(number) for number in range(first, num_calls + 1)]
        kept = events[events[_CALL_OF_EVENT] >= first].tolist()
        self._num_dropped += first - self._num_taken - 1
        self._num_taken, self._struct.num_events = num_calls, 0
        kept_events = [TraceEvent(*event) for event in kept]
        kept_events += [event for event in carried if event.call >= first]
        return calls, kept_events, self._num_dropped

    def _take_carried(self) -> tuple[list[TraceEvent], int]:
        """What the link has carried since the last time, and the first call of which that is all.

        The NIC may add more meanwhile: it writes behind the newest, where the oldest is.
        """
        fence = native.library().moe_fence
        number, most = self._link.num_spans, len(self._carried)
        fence()
        numbers = np.arange(max(self._num_carried, number - most), number)
        spans = self._carried[numbers % most]
        fence()
        spans = spans[numbers > self._link.num_spans - most]
        is_whole = len(spans) == number - self._num_carried
        self._num_carried = number
        events = [
            TraceEvent(begin, end, call, -1, -1, TRACE_LINK, peer)
            for begin, end, call, peer in spans.tolist()
        ]
        return events, 0 if is_whole or not events else events[0].call + 1

    def _call(self, number: int) -> TracedCall:
        call = self._calls[number % len(self._calls)].item()
        begin, end, _, plan_number, tokens, rows, result, counters = call
        plan = self._plans[plan_number]
        failed = plan.launches[abs(result) - 1] if result else None
        traffic = Traffic.of(counters.tolist()) if counters[0] >= 0 else None
        return TracedCall(plan, number, begin, end, tokens, rows, failed, traffic)


def _traffic(plan: Plan, fixed: Bindings) -> tuple[int, int]:
    """Where the blocks of a plan count what they post, and how many they are; 0 where they post nothing."""
    for launch in plan.launches:
        for value in launch.values:
            if isinstance(value, Placeholder) and value.name == PLACEHOLDER:
                memory = fixed[PLACEHOLDER]
                assert isinstance(memory, torch.Tensor)
                return memory.data_ptr() + value.offset, launch.blocks
    return 0, 0


def _counters(address: int, blocks: int) -> tuple[int, ...]:
    """The sums of all blocks' counters."""
    words = (ctypes.c_int64 * (blocks * TRAFFIC.num_words)).from_address(address)
    return tuple(sum(words[i :: TRAFFIC.num_words]) for i in range(NUM_COUNTERS))
