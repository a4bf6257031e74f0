"""What cores take for what they issue: `cores`, by the clock of ``kernels_ascendc/emulation/core_clock.h``.

Times are ticks: 2^-20 of a cycle, so that sums are exact.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autotune.model.constants import Machine
from autotune.model.kernel_costs.counted.library import PIPES, counting_library
from moe_triton.core.errors import ToolchainError

TICKS_PER_CYCLE = 1 << 20

ALL_PIPES = len(PIPES)
"""The number of a barrier's pipe that is one of all."""

OP = np.dtype(
    [
        *((name, "u1") for name in ("kind", "pipe", "other", "noted")),
        ("event", "<u4"),
        *((name, "<i8") for name in ("before", "ticks", "latency")),
    ]
)
"""``ClockedOp``, in the same file."""


class Kind(enum.IntEnum):
    """``Clocked``: what an operation is."""

    SCALAR, GLOBAL, COPY, VECTOR, SET, WAIT, BARRIER = range(7)


BEFORE, AFTER, SPAN = 1, 2, 4
"""Bits of an operation's ``noted``, and what an event is of: when all that was issued before is complete;
when S goes on; when it begins and ends on its pipe."""

PARTS = ("flags", "MTE3", "vector", "memory bandwidth", "MTE2", "scalar loads", "scalar")
"""What time on the critical path goes to, as ``TimePart`` has it behind the sum: flags between pipes; latency
of stores; vector instructions; bytes of copies; latency of loads; scalar accesses to global memory;
instructions of S and their issue."""
BYTES = PARTS[3]

_CAUSES = ("empty queue", "barrier", *(f"full queue of {p}" for p in PIPES), *(f"flag of {p}" for p in PIPES))
TAIL = "end of the program"
_EVENT = np.dtype([("op", "<u4"), ("what", "<u4"), ("begin", "<i8"), ("end", "<i8")])
_SETTINGS = np.dtype([("issue", "<i8"), ("scalar", "<i8"), ("queue_entries", "<u4"), ("with_spans", "<u4")])
_RESULT = np.dtype(
    [
        ("end", "<i8", 1 + len(PARTS)),
        ("busy", "<i8", len(PIPES)),
        ("free", "<i8", len(PIPES)),
        ("stalls", "<i8", (len(PIPES), len(_CAUSES))),
    ]
)


@dataclass(frozen=True, eq=False)
class Clocked:
    """One core's time.

    Attributes:
        end: ticks until everything is complete.
        events: what was to be noted, and all operations if they were asked for: ``op`` counts from the core's
            first one.
    """

    end: int
    events: np.ndarray
    _result: np.void

    @property
    def parts(self) -> dict[str, float]:
        """Cycles on the critical path, by what they went to."""
        return dict(zip(PARTS, cycles_of(self._result["end"][1:]).tolist(), strict=True))

    @property
    def busy(self) -> dict[str, float]:
        """Cycles in which each pipe was occupied."""
        return dict(zip(PIPES, cycles_of(self._result["busy"]).tolist(), strict=True))

    @property
    def stalls(self) -> dict[str, dict[str, float]]:
        """Cycles in which each pipe was not occupied, by cause; the time after its last one is such."""
        return {
            pipe: {**_named(stalls), TAIL: float(cycles_of(self.end - free))}
            for pipe, stalls, free in zip(PIPES, self._result["stalls"], self._result["free"], strict=True)
        }


def _named(stalls: np.ndarray) -> Mapping[str, float]:
    each = zip(_CAUSES, cycles_of(stalls).tolist(), strict=True)
    return {cause: cycles for cause, cycles in each if cycles}


def ticks_of(cycles: np.ndarray | float) -> np.ndarray:
    """The nearest number of ticks."""
    ticks: np.ndarray = np.rint(np.asarray(cycles) * TICKS_PER_CYCLE).astype(np.int64)
    return ticks


def cycles_of(ticks: np.ndarray | int) -> np.ndarray:
    """Ticks in cycles."""
    cycles: np.ndarray = np.asarray(ticks) / TICKS_PER_CYCLE
    return cycles


def cores(ops: np.ndarray, ends: np.ndarray, machine: Machine, with_spans: bool = False) -> list[Clocked]:
    """Clocks cores.

    Args:
        ops: (N,) `OP`, what they issue, core after core, in the order of their programs.
        ends: (cores,) where each core's end.
        machine: whose cores.
        with_spans: note when every operation begins and ends.

    Raises:
        ToolchainError: a core waits for a flag that is not set, sets one twice, or leaves one set.
    """
    library = counting_library()
    ops, ends = np.ascontiguousarray(ops, OP), np.ascontiguousarray(ends, np.uint64)
    # Only what counts is read: remembered prices depend on the constants that were.
    scalar = machine.scalar_cycles if np.isin(ops["kind"], (Kind.SET, Kind.WAIT, Kind.BARRIER)).any() else 0.0
    spans = ticks_of(machine.issue_cycles), ticks_of(scalar)
    settings = np.array((*spans, int(machine.queue_entries), with_spans), _SETTINGS)
    noted = (ops["noted"] & BEFORE > 0).sum() + (ops["noted"] & AFTER > 0).sum()
    events = np.empty(int(noted) + with_spans * len(ops), _EVENT)
    results = np.zeros(len(ends), _RESULT)
    pointers = [array.ctypes.data for array in (settings, results, events)]
    number = library.clock(ops.ctypes.data, ends.ctypes.data, len(ends), *pointers)
    if number != len(events):
        raise ToolchainError(library.last_error)
    first = np.r_[0, ends[:-1].astype(np.int64)]
    of_core = np.searchsorted(ends, events["op"], side="right")
    events["op"] -= first[of_core].astype(np.uint32)
    bounds = np.searchsorted(of_core, np.arange(len(ends) + 1))
    return [
        Clocked(int(result["end"][0]), events[bounds[core] : bounds[core + 1]], result)
        for core, result in enumerate(results)
    ]
