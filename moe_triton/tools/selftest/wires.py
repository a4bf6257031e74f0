"""The simplest transfers between ranks: rows, flags with a number, and a window for them.

Used to check and measure windows, flags and bandwidths before whole operators.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from moe_triton.backends.base import Backend, Executable
from moe_triton.core import ascendc
from moe_triton.core.abi import words_of
from moe_triton.core.errors import CommunicationTimeoutError
from moe_triton.core.kernel import AscendCKernel, TritonKernel
from moe_triton.core.plan import Launch, Placeholder, Plan, Stream, Value, launch
from moe_triton.core.reach import NUM_CHANGES_WORDS
from moe_triton.core.region import REGION_DIMS, Region, packed, region_of
from moe_triton.layout import NUM_ZONES, SLOT_ALIGN, STATUS_ENTRY_BYTES, align, entry_per_rank
from moe_triton.rendezvous.meeting import Meeting
from moe_triton.schemes.common.ascendc import EXCHANGE_SEND


class Wires:
    """A window with a status entry per rank and, for each of two zones, room for rows. Collective.

    Args:
        backend: with this rank's device selected.
        row_bytes: of a row, a multiple of 32.
        capacity: number of rows of a zone.
        wait_s: timeout of a wait, in seconds.
        blocks: blocks that send rows, None for the machine's default.
        group: the ranks, None for all.

    Attributes:
        last: what ran last, for its times.
    """

    last: Executable

    def __init__(
        self,
        backend: Backend,
        row_bytes: int,
        capacity: int,
        wait_s: float,
        blocks: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        meeting = Meeting(group, wait_s)
        self.rank, self.num_ranks = meeting.rank, meeting.num_ranks
        self._backend, self._wait_us = backend, int(wait_s * 1e6)
        self._blocks = blocks or backend.num_blocks(self.num_ranks)
        stride = align(row_bytes, SLOT_ALIGN)
        entries = align(self.num_ranks * STATUS_ENTRY_BYTES, SLOT_ALIGN)
        self._status = entry_per_rank("wires_status", 0, entries, self.num_ranks)
        dims = packed(stride, NUM_ZONES, capacity)
        self._slots = region_of("indexed_slots", NUM_ZONES * entries, stride, *dims)
        self._row_bytes, self._capacity = row_bytes, capacity
        self._window = backend.make_window(self._slots.end, meeting)
        device = backend.device
        self._received = torch.zeros(self.num_ranks, dtype=torch.int32, device=device)
        self._report = torch.zeros(self._blocks, ascendc.REPORT_WORDS, dtype=torch.int32, device=device)
        words = [*self._window.peers, *[0] * NUM_CHANGES_WORDS]
        self._fixed = {
            "window": self._window.tensor(),
            "peers": torch.tensor(words, dtype=torch.int64, device=device),
            "received": self._received,
            "report": self._report,
        }
        self._executables: dict[tuple[int, int], Executable] = {}  # by zone and peer, -1 for all
        self._rounds = 0

    def barrier(self, number: int = 0) -> list[int]:
        """Posts a flag with a number to every rank, and waits for those of all ranks.

        Returns:
            The ranks' numbers.

        Raises:
            CommunicationTimeoutError: a rank's flag did not come.
        """
        zone = self._rounds % NUM_ZONES
        own = torch.tensor([number], dtype=torch.int32).to(self._backend.device)
        self._run({"own": own}, zone, self._post, self._wait)
        received: list[int] = self._received.cpu().tolist()
        if min(received) < 0:  # set by a wait that has timed out, on every back end
            missing = [rank for rank, count in enumerate(received) if count < 0]
            detail = f"no flag within {self._wait_us / 1e6:g} s"
            raise CommunicationTimeoutError("barrier", self._rounds, zone, missing, detail)
        self._rounds += 1
        return received

    def post_and_wait(self) -> None:
        """A barrier without reading its result, for timing: only launches, flags and waits."""
        self._run({"own": self._received[:1]}, self._rounds % NUM_ZONES, self._post, self._wait)
        self._rounds += 1

    def send(self, peer: int, rows: torch.Tensor, zone: int = 0, number: torch.Tensor | None = None) -> None:
        """Sends rows to the first slots of a peer's zone, without a flag: a barrier follows.

        Args:
            peer: owner of the window.
            rows: (n, row_bytes) uint8 on the device, n at most the capacity.
            zone: which of the two.
            number: (1,) int32 on the device, the number of rows to send; None for all.
        """
        if number is None:
            number = torch.tensor([len(rows)], dtype=torch.int32).to(self._backend.device)
        self._run({"rows": rows, "num_rows": number}, zone, self._send, peer=peer)

    def slots(self, zone: int = 0) -> torch.Tensor:
        """(capacity, row_bytes) uint8 on the host: the contents of this rank's zone."""
        start, stride = self._slots.offset(zone=zone), self._slots.stride("index")
        flat = self._window.tensor()[start : start + self._capacity * stride].cpu()
        return flat.view(self._capacity, stride)[:, : self._row_bytes]

    def zone_of(self, zone: int) -> torch.Tensor:
        """(bytes,) uint8 on the device: this rank's window from a zone's first slot on."""
        return self._window.tensor()[self._slots.offset(zone=zone) :]

    def close(self) -> None:
        """Gives the window back, once every rank is done with it."""
        self._executables.clear()
        self._fixed.clear()
        self._window.close()

    def _run(
        self, bindings: dict[str, torch.Tensor], zone: int, *makers: Callable[..., Launch], peer: int = -1
    ) -> None:
        key = zone, peer
        if key not in self._executables:
            plan = Plan("selftest", zone, tuple(make(zone, peer) for make in makers))
            self._executables[key] = self._backend.compile(plan, self._report, self._fixed)
        self.last = self._executables[key]
        self.last.run(bindings)
        self._backend.synchronize()

    def _send(self, zone: int, peer: int) -> Launch:
        return launch_of_zeros(
            "send",
            EXCHANGE_SEND,
            "communication",
            self._blocks,
            **placeholders("rows", "num_rows", "peers", "report"),
            row_bytes=self._row_bytes,
            capacity=self._capacity,
            peer=peer,
            zone=zone,
            slots=self._slots.words(),
        )

    def _post(self, zone: int, peer: int) -> Launch:
        return post_entry(self._status, "own", num_ranks=self.num_ranks, rank=self.rank, zone=zone)

    def _wait(self, zone: int, peer: int) -> Launch:
        return wait_for_entries(self._status, self._wait_us, zone=zone)


def placeholders(*names: str) -> dict[str, Value]:
    """Arguments that placeholders of their own names fill."""
    return {name: Placeholder(name) for name in names}


def launch_of_zeros(
    step: str, kernel: TritonKernel | AscendCKernel, stream: Stream, blocks: int, **values: Value
) -> Launch:
    """A launch with 0 for each argument that is not given.

    Raises:
        ValueError: a value without an argument.
    """
    zeros: dict[str, Value] = {
        arg.name: (0,) * words_of(arg) if arg.type in REGION_DIMS else 0 for arg in kernel.args
    }
    return launch(step, kernel, stream, blocks, **{**zeros, **values})


def post_entry(status: Region, count: str, **values: Value) -> Launch:
    """Posts an entry {1.0f, count}; ``count`` names the placeholder with the number."""
    values |= placeholders("peers", "report") | {"count": Placeholder(count), "status": status.words()}
    return launch_of_zeros("post", ascendc.POST_STATUS, "communication", 1, **values)


def wait_for_entries(status: Region, timeout_us: int, **values: Value) -> Launch:
    """Waits for an entry from every rank; the counts go to the placeholder "received"."""
    values |= placeholders("window", "report") | {"recv_counts": Placeholder("received")}
    values |= {"num_local_experts": 1, "timeout_us": timeout_us, "status": status.words()}
    return launch_of_zeros("wait", ascendc.DISPATCH_WAIT, "communication", 1, **values)
