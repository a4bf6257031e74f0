"""The flight recorder as native code writes it (``kernels_ascendc/emulation/flight.h``)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from moe_triton.backends.base import Recording
from moe_triton.backends.cpu.native import I32, I64, POINTER, U32, U64, alike, fields
from moe_triton.backends.phases import PhaseTimes
from moe_triton.core.flight_file import BOUNDS_US, NUM_RUNS, Header

TOKENS, ROWS = "num_tokens", "recv_offsets"


class FlightStruct(ctypes.Structure):
    """``moe::Flight``."""

    _fields_ = (
        *fields(runs=POINTER, max_runs=U64),
        *alike(POINTER, "num_runs", "totals", "peers", "now_us"),
        *fields(num_ranks=U64, bounds_us=POINTER, counts=POINTER, numbers=POINTER),
    )


class SpanStruct(ctypes.Structure):
    """``moe::FlightSpan``."""

    _fields_ = alike(I64, "begin", "end", "of")


class FlownPlanStruct(ctypes.Structure):
    """``moe::FlownPlan``."""

    _fields_ = (
        *fields(flight=POINTER),
        *alike(U32, "number", "operator", "num_steps", "ends_run", "counts"),
        *fields(tokens_placeholder=I32, rows_placeholder=I32, num_entries=U64, row_bytes=U64),
        *alike(POINTER, "durations_us", "cycles", "spans"),
        *fields(ranks_of_experts=POINTER, num_experts=U64, kinds=POINTER),
    )


class FlownPlan:
    """A plan as native code records its runs.

    Args:
        recording: of the plan.
        placeholders: names of those that calls fill, in order.
        durations: microseconds of launches.
        times: of phases of a launch.

    Attributes:
        address: of the ``moe::FlownPlan``.
    """

    def __init__(
        self,
        recording: Recording,
        placeholders: Sequence[str],
        durations: ctypes.Array[ctypes.c_double],
        times: PhaseTimes,
    ) -> None:
        memory, flown, rounds, num_entries = recording
        places, at, experts = memory.places, memory.address_of, memory.ranks_of_experts
        bounds = (ctypes.c_uint32 * len(BOUNDS_US))(*BOUNDS_US)
        flight = FlightStruct(
            at(places.runs),
            NUM_RUNS,
            at(Header.num_runs.offset),
            at(Header.runs.offset),
            at(places.peers),
            at(places.now),
            memory.num_ranks,
            ctypes.addressof(bounds),
            ctypes.addressof(rounds) + type(rounds).counts.offset,
            ctypes.addressof(memory.numbers),
        )
        ranks = (ctypes.c_int32 * max(1, len(experts)))(*experts)
        spans = (SpanStruct * max(1, len(flown.steps)))(*(SpanStruct(*span) for span in times.spans()))
        kinds = (ctypes.c_uint8 * max(1, len(flown.kinds)))(*flown.kinds)
        tokens, rows = (placeholders.index(name) if name in placeholders else -1 for name in (TOKENS, ROWS))
        self._struct = FlownPlanStruct(
            ctypes.addressof(flight),
            flown.number,
            flown.operator,
            len(flown.steps),
            flown.ends_run,
            flown.counts,
            tokens,
            rows if flown.row_bytes else -1,
            num_entries,
            flown.row_bytes,
            ctypes.addressof(durations),
            times.cycles.data_ptr(),
            ctypes.addressof(spans),
            ctypes.addressof(ranks),
            len(experts),
            ctypes.addressof(kinds),
        )
        # Native code has their addresses.
        self._kept = flight, bounds, ranks, kinds, spans, durations, times, recording
        self.address = ctypes.addressof(self._struct)
