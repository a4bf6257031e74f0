"""For the flight recorder: how long a run waited for ranks, by what it raised in ``performance_info``."""

from __future__ import annotations

import torch

from moe_triton.backends.base import Bindings
from moe_triton.backends.npu.runtime import Event, Runtime
from moe_triton.core.flight_file import RunStruct
from moe_triton.core.flight_memory import FlightMemory

WAITED, TABLE = "performance_info", "rank_table"


class RaisedWaits:
    """Copies a caller's ``performance_info`` to the host, on its stream, before a run and behind it.

    A run raises an entry to what it has waited for a rank if that is more than any run before: waits that
    are shorter are not seen, nor those of a run that starts while the copies of the last one are under way.

    Args:
        runtime: torch_npu.
        memory: of the recorder.
    """

    def __init__(self, runtime: Runtime, memory: FlightMemory) -> None:
        self._runtime, self._memory = runtime, memory
        self._copied: Event | None = None
        self._before = self._behind = self._table = torch.empty(0, dtype=torch.int64, device="cpu")
        self._waited: torch.Tensor | None = None  # of the run that is being started
        self._table_of: torch.Tensor | None = None
        self._run: tuple[RunStruct, int] | None = None  # whose copies are under way, or there

    def begin(self, bindings: Bindings) -> None:
        """Before a run is started."""
        waited, table = bindings.get(WAITED), bindings.get(TABLE)
        self._waited = None
        if not isinstance(waited, torch.Tensor) or not isinstance(table, torch.Tensor):
            return
        if self._run is not None and not self.note():
            return
        if self._before.shape != waited.shape:
            self._before, self._behind = (self._runtime.host_copy(waited) for _ in range(2))
        if self._table_of is not table:
            self._table, self._table_of = self._runtime.host_copy(table), table
            self._runtime.copy(self._table, table)
        self._runtime.copy(self._before, waited)
        self._waited = waited

    def end(self, run: RunStruct) -> None:
        """It is started.

        Args:
            run: where it is recorded.
        """
        if self._waited is None:
            return
        self._runtime.copy(self._behind, self._waited)
        self._copied = self._copied or self._runtime.make_event()
        self._copied.record(self._runtime.current_stream())
        self._waited, self._run = None, (run, run.number)

    def note(self) -> bool:
        """Records the waits of the last run that was copied, once its copies are there. Waits for nothing.

        Returns:
            Whether none is under way any more.
        """
        if self._run is None:
            return True
        if self._copied is None or not self._copied.query():
            return False
        (run, number), self._run = self._run, None
        before, behind = self._before.tolist(), self._behind.tolist()
        us = [
            behind[at] if 0 <= at < len(behind) and behind[at] > before[at] else 0
            for at in self._table.tolist()
        ]
        if run.number == number:  # else the ring has gone round
            self._memory.note_waits(run, us)
        return True
