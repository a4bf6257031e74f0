"""What rows cost between memories: loops of cores, wires, hops. The kernels' costs of Ascend C kernels and of
published operators are made of these.

A row that is written to another device passes three things, each with a limit of its own:

- a **core**, which loads it, works on it and hands it over: its pipes run beside one another, the slowest one
  counts, and double buffering keeps two rows under way (`core_loop`);
- the **wire**: all bytes that leave a device, over its rate; between two cards of A2 there is a link of
  their own, so no less than the bytes for the busiest peer over that of a pair;
- the **hops**: a device has at most ``remote_writes_in_flight`` rows on their way, each for as long as its
  hop takes (Little's law: rows x hop / rows in flight). Two rows of each core can be on their way; the
  published times fit when wire and hops add up, and when what the cores do is hidden behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from autotune.model.constants import Machine
from autotune.model.topology import hop_us

_GB_PER_S = 1e3  # bytes in a microsecond
_Bytes = TypeVar("_Bytes", float, np.ndarray)

BUFFERS = 2
"""Rows that one core has under way: the queues of the kernels are double buffers."""


def us_of(machine: Machine, cycles: float) -> float:
    """Microseconds of some cycles of the vector cores' clock."""
    return cycles / machine.clock_ghz / 1e3


def bytes_per_cycle(machine: Machine, cores: int) -> float:
    """Between global memory and each of so many cores at once."""
    return min(machine.stream_bytes_per_cycle_alone, machine.stream_bytes_per_cycle * machine.cores / cores)


def load_cycles(machine: Machine, num_bytes: float, cores: int) -> float:
    """From issuing a copy to the unified buffer until its bytes are there."""
    return machine.load_latency_cycles + num_bytes / bytes_per_cycle(machine, cores)


def store_cycles(machine: Machine, num_bytes: float, cores: int) -> float:
    """From issuing a copy to this device's global memory until it has ended."""
    return machine.store_latency_cycles + num_bytes / bytes_per_cycle(machine, cores)


def vector_cycles(machine: Machine, num_bytes: float, instructions: int = 1) -> float:
    """Cycles of vector instructions that each go over so many bytes."""
    return instructions * (machine.vector_latency_cycles + num_bytes / machine.vector_bytes_per_cycle)


def core_loop(machine: Machine, items: float, pipes: Sequence[float]) -> float:
    """Microseconds of a double-buffered loop on one core.

    Args:
        machine: whose clock.
        items: turns of the loop.
        pipes: cycles that each pipe takes for one turn.

    The first turn goes through all pipes, every later one takes as long as the slowest of them; with two
    buffers, no less than half of a turn's way through all of them.
    """
    if items <= 0:
        return 0.0
    turn = max(max(pipes), sum(pipes) / BUFFERS)
    return us_of(machine, sum(pipes) + (items - 1) * turn)


def remote(rows: np.ndarray, tiers: Sequence[str]) -> np.ndarray:
    """(EP,) rows to each rank that leave the device: 0 where the rank is this one."""
    return np.where(np.array(tiers) == "self", 0, rows)


def hops(machine: Machine, writes: np.ndarray, tiers: Sequence[str], cores: int) -> float:
    """Microseconds of hops.

    Args:
        machine: whose hops.
        writes: (EP,) writes to each rank.
        tiers: (EP,) how far each is.
        cores: that write.
    """
    flight = np.array([hop_us(machine, tier) for tier in tiers])
    return float(writes @ flight) / min(BUFFERS * cores, machine.remote_writes_in_flight)


def wire(machine: Machine, num_bytes: float, busiest: float = 0.0, *, reads: bool = False) -> float:
    """Microseconds of bytes that leave a device, or reach it.

    Args:
        machine: whose link.
        num_bytes: to all its peers, or from them.
        busiest: of these, those of the peer with most.
        reads: whether they are read from peers; otherwise they are written.
    """
    us = num_bytes / (machine.remote_write_gb_per_s * _GB_PER_S)
    rate = "pair_read_gb_per_s" if reads else "pair_write_gb_per_s"
    if rate not in machine.constants:
        return us
    return max(us, busiest / (machine.constants[rate].value * _GB_PER_S))


def rdma_us(machine: Machine, num_bytes: _Bytes, messages: float = 1) -> _Bytes:
    """Microseconds in which a network port is busy with messages, each with bytes and without any.

    Args:
        machine: with a network.
        num_bytes: of all of them.
        messages: how many.
    """
    return num_bytes / (machine.rdma_gb_per_s * _GB_PER_S) + messages * machine.rdma_message_us


def written_remotely(
    machine: Machine, rows: np.ndarray, row_bytes: int, tiers: Sequence[str], cores: int, loop_us: float
) -> dict[str, float]:
    """Parts of the time in which rows go to other devices.

    Args:
        machine: that sends.
        rows: (EP,) rows to each rank.
        row_bytes: bytes of each.
        tiers: (EP,) how far each rank is.
        cores: that send.
        loop_us: what the slowest core does, by `core_loop`.

    Returns:
        "wire", "hops", and "cores": as much of the loop as the two do not hide.
    """
    leaving = remote(rows, tiers)
    wire_us = wire(machine, float(leaving.sum()) * row_bytes, float(leaving.max()) * row_bytes)
    hops_us = hops(machine, leaving, tiers, cores)
    return {"wire": wire_us, "hops": hops_us, "cores": max(0.0, loop_us - wire_us - hops_us)}


def merged(*parts: Mapping[str, float]) -> dict[str, float]:
    """Parts of what follows one another."""
    total: dict[str, float] = {}
    for each in parts:
        for name, us in each.items():
            total[name] = total.get(name, 0.0) + us
    return total
