"""The ring that native code writes its events to."""

from __future__ import annotations

import ctypes

import numpy as np

from moe_triton.backends.base import TraceEvent
from moe_triton.backends.cpu import native

_EVENT = np.dtype(
    [
        ("begin_ns", np.uint64),
        ("end_ns", np.uint64),
        ("call", np.uint64),
        ("launch", np.uint32),
        ("block", np.uint32),
        ("kind", np.uint32),
        ("peer", np.int32),
    ]
)


class NativeTraceLog:
    """See `moe_triton.backends.base.TraceLog`.

    Args:
        capacity: events that are kept.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._events = np.empty(capacity, _EVENT)  # memory that is touched when it is needed
        self._struct = native.TraceLogStruct(self._events.ctypes.data, capacity, 0, 0)
        self.address = ctypes.addressof(self._struct)

    def begin_call(self, number: int) -> None:
        """See `moe_triton.backends.base.TraceLog`."""
        self._struct.call = number

    @property
    def call(self) -> int:
        """Number of the call that runs."""
        number: int = self._struct.call
        return number

    def add(self, event: TraceEvent) -> None:
        """Adds what happened in Python."""
        self._events[self._struct.written % self.capacity] = tuple(event)
        self._struct.written += 1

    def take(self) -> list[TraceEvent]:
        """See `moe_triton.backends.base.TraceLog`."""
        written, capacity = self._struct.written, self.capacity
        self._struct.written = 0
        if written <= capacity:
            kept = self._events[:written]
        else:
            kept = np.roll(self._events, -(written % capacity))
            # Of the oldest call that is there some events may be gone.
            kept = kept[kept["call"] > kept["call"].min()]
        return [TraceEvent(*event) for event in kept.tolist()]
