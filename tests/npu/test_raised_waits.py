"""What the flight recorder takes from `performance_info`: of which rank, and what a run has raised itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moe_triton.backends.npu.raised_waits import RaisedWaits
from moe_triton.core.flight_memory import FlightMemory, PeersAre
from moe_triton.core.plan import Plan

RANKS = 3


class Device:
    """Copies that are there once it is told to do its work."""

    def __init__(self) -> None:
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def host_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.copies.append((to, source.clone()))

    def make_event(self) -> Any:
        return self

    def current_stream(self) -> None:
        return None

    def record(self, stream: None) -> None:
        pass

    def query(self) -> bool:
        return not self.copies

    def work(self) -> None:
        for to, source in self.copies:
            to.copy_(source)
        self.copies.clear()


@pytest.fixture
def memory() -> Iterator[FlightMemory]:
    memory = FlightMemory(0, RANKS, {}, [])
    yield memory
    memory.close()


class Calls:
    """Runs that raise entries of a caller's tensor, which has them in an order of its own."""

    def __init__(self, memory: FlightMemory, table: list[int], num_entries: int) -> None:
        self.device, self.memory = Device(), memory
        self.raised = RaisedWaits(self.device, memory)  # type: ignore[arg-type]
        self.table = torch.tensor(table, dtype=torch.int32)
        self.info = torch.zeros(num_entries, dtype=torch.int64)
        flown = memory.flown(Plan("dispatch", 0, ()), [PeersAre.RANKS], 0)
        assert flown is not None
        self.flown = flown

    def run(self, number: int, values: list[int]) -> None:
        run = self.memory.begin_run(self.flown, number, 1)
        self.raised.begin({"performance_info": self.info, "rank_table": self.table})
        self.info.copy_(torch.maximum(self.info, torch.tensor(values)))
        self.raised.end(run)
        self.memory.end_run(run, self.flown, 0, ())

    def awaited(self) -> list[tuple[int, int] | None]:
        return [run.awaited for run in self.memory.read().runs]


def test_entries_are_those_of_the_callers_numbering(memory: FlightMemory) -> None:
    calls = Calls(memory, [4, 0, -1], 5)
    calls.run(0, [70, 0, 0, 0, 20])
    calls.device.work()
    assert calls.raised.note()
    assert calls.awaited() == [(1, 70)]
    assert [peer.sum_us for peer in memory.read().peers] == [20, 70, 0]
    assert [sum(peer.classes) for peer in memory.read().peers] == [1, 1, 0]


def test_a_run_has_what_it_has_raised_itself(memory: FlightMemory) -> None:
    calls = Calls(memory, [0, 1, 2], 3)
    for number, values in enumerate(([10, 500, 10], [30, 400, 10], [5, 5, 5])):
        calls.run(number, values)
        calls.device.work()
        calls.raised.note()
    assert calls.awaited() == [(1, 500), (0, 30), None]


def test_nobody_waits_for_copies_that_are_under_way(memory: FlightMemory) -> None:
    calls = Calls(memory, [0, 1, 2], 3)
    calls.run(0, [0, 9, 0])
    assert not calls.raised.note()
    calls.run(1, [0, 90, 0])  # is not seen: nothing is written over while the device writes it
    calls.device.work()
    assert calls.raised.note()
    assert calls.awaited() == [(1, 9), None]
    calls.run(2, [0, 900, 0])
    calls.device.work()
    calls.run(3, [0, 9000, 0])  # records the one before
    assert calls.awaited() == [(1, 9), None, (1, 900), None]


def test_calls_without_are_not_looked_at(memory: FlightMemory) -> None:
    calls = Calls(memory, [0, 1, 2], 3)
    calls.raised.begin({"performance_info": 0})
    calls.raised.end(memory.begin_run(calls.flown, 0, 1))
    assert calls.raised.note()
    assert not calls.device.copies
    assert calls.awaited() == [None]
