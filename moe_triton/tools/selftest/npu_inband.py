"""Whether the last 32 of a copy's 512 aligned bytes arrive last, as in-band flags need."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_triton.backends.npu.executable import NpuExecutable
from moe_triton.backends.npu.runtime import Runtime
from moe_triton.core.plan import Hole, Launch, Plan, Stream
from moe_triton.core.records import ORIGIN
from moe_triton.core.region import Region, region_of
from moe_triton.layout import BLOCK_BYTES, BLOCK_DATA_BYTES, STATUS_ENTRY_BYTES, SlotLayout
from moe_triton.schemes.fullmesh.ascendc import INBAND_RECEIVE, INBAND_SEND
from moe_triton.tools.selftest.trials import launch_of_zeros

ROUNDS = 32
ROWS = 8
SLOT = SlotLayout(hidden=7168, itemsize=2)
SLOT_BYTES = -(-SLOT.packed_bytes // BLOCK_DATA_BYTES) * BLOCK_BYTES
# Enough for kernels on two streams to overlap. If they do not, a second receive takes the rows.
WAIT_US = 5_000


class InbandExchange:
    """One device that sends rows with flags in band to itself and receives them at the same time.

    Row i goes to expert i, and a block of the receiving kernel waits for each, so that a row is read as soon
    as its flags are seen.
    """

    def __init__(self) -> None:
        self.runtime = Runtime()
        self.communication = self.runtime.make_stream()
        self.window = self._words(ROWS * SLOT_BYTES // 4 + BLOCK_BYTES // 4)
        self.slots: Region = region_of(
            "dispatch_slots",
            -self.window.data_ptr() % BLOCK_BYTES,
            SLOT_BYTES,
            (1, ROWS * SLOT_BYTES),
            (1, ROWS * SLOT_BYTES),
            (ROWS, SLOT_BYTES),
            (1, SLOT_BYTES),
        )
        one = (1, STATUS_ENTRY_BYTES)
        self.status = region_of("dispatch_status", 0, STATUS_ENTRY_BYTES, one, one, one)
        self.rows = self._words(ROWS, SLOT.row_bytes // 4)
        self.received = self._words(ROWS, SLOT.row_bytes // 4)
        experts = torch.arange(ROWS, dtype=torch.int32, device=self.runtime.device)
        self._fixed = {
            "window": self.window,
            "peers": torch.tensor([self.window.data_ptr()], dtype=torch.int64, device=self.runtime.device),
            "rows": self.rows,
            "experts": experts,
            "places": self._words(ROWS),
            "offsets": experts + 1,
            "received": self.received,
            "origins": self._words(ROWS, ORIGIN.num_words),
        }

    def run(self, number: int) -> bool:
        """A round with numbers of its own: whether all rows came as they were sent."""
        words = torch.arange(self.rows.numel(), dtype=torch.int32, device=self.runtime.device)
        self.rows.copy_(words.view_as(self.rows) + number * words.numel())
        beside = replace(self._receive("communication", WAIT_US), alongside=True)
        launches = (self._send(), beside, self._receive("compute", 0))
        # A new executable for each round: a receive that has timed out once does not wait again.
        plan = Plan("assumption", 0, launches, overlap=True)
        NpuExecutable(plan, self._fixed, self.runtime, self.communication, two_streams=True).run({})
        self.runtime.synchronize()
        return bool((self.received == self.rows).all())

    def _words(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.runtime.device)

    def _send(self) -> Launch:
        return launch_of_zeros(
            "send",
            INBAND_SEND,
            "compute",
            1,
            rows=Hole("rows"),
            row_stride=SLOT.row_bytes,
            row_bytes=SLOT.row_bytes,
            stamp_offset=SLOT.stamp_offset,
            rows_per_token=1,
            topk_idx=Hole("experts"),
            expand_idx=Hole("places"),
            peers=Hole("peers"),
            num_tokens=ROWS,
            topk=1,
            num_experts=ROWS,
            kept_rank=-1,
            slots=self.slots.words(),
            status=self.status.words(),
            report=Hole("report"),
        )

    def _receive(self, stream: Stream, us: int) -> Launch:
        return launch_of_zeros(
            "receive",
            INBAND_RECEIVE,
            stream,
            ROWS,
            window=Hole("window"),
            recv_offsets=Hole("offsets"),
            num_entries=ROWS,
            num_ranks=1,
            capacity=ROWS,
            row_bytes=SLOT.row_bytes,
            scale_offset=SLOT.scale_offset,
            scale_bytes=SLOT.scale_bytes,
            stamp_offset=SLOT.stamp_offset,
            out_rows=Hole("received"),
            out_origins=Hole("origins"),
            timeout_us=us,
            slots=self.slots.words(),
            report=Hole("report"),
        )


def blocks_arrive_in_order() -> str | None:
    """None if every row was complete when its flags were set, else what was found."""
    exchange = InbandExchange()
    wrong = [number for number in range(ROUNDS) if not exchange.run(number)]
    return f"flags were there before their data in {len(wrong)} of {ROUNDS} rounds" if wrong else None
