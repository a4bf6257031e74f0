"""Loops, wires and hops, with answers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.model.constants import machine_named
from autotune.model.kernel_costs import movement

A3 = machine_named("A3").replaced({"clock_ghz": 1.0, "remote_writes_in_flight": 10})


def test_a_loop_takes_its_slowest_pipe_after_the_first_turn() -> None:
    assert movement.core_loop(A3, 5, (100, 700, 200)) == pytest.approx((1000 + 4 * 700) / 1000)


def test_two_buffers_hide_half_of_a_turn_at_most() -> None:
    assert movement.core_loop(A3, 5, (300, 300, 300)) == pytest.approx((900 + 4 * 450) / 1000)


def test_nothing_takes_no_time() -> None:
    assert movement.core_loop(A3, 0, (100,)) == 0


def test_hops_are_shared_by_the_rows_on_their_way() -> None:
    reach = ("self", "sibling", "node", "far")
    writes = np.array([0, 10, 10, 10])
    total = 10 * (0.2 + 0.7 + 2.1)
    assert movement.hops(A3, writes, reach, cores=48) == pytest.approx(total / 10)
    assert movement.hops(A3, writes, reach, cores=3) == pytest.approx(total / 6)  # two for each core


def test_what_cores_do_is_hidden_behind_wire_and_hops() -> None:
    reach = ("self", "far")
    rows = np.array([5.0, 5.0])
    parts = movement.written_remotely(A3, rows, 196_000, reach, 48, loop_us=4.0)
    assert parts == pytest.approx({"wire": 5.0, "hops": 1.05, "cores": 0.0})
    parts = movement.written_remotely(A3, rows, 196_000, reach, 48, loop_us=10.0)
    assert sum(parts.values()) == pytest.approx(10.0)


def test_cores_share_the_memory_and_one_alone_has_its_own_limit() -> None:
    assert movement.bytes_per_cycle(A3, 48) == A3.stream_bytes_per_cycle
    assert movement.bytes_per_cycle(A3, 24) == 2 * A3.stream_bytes_per_cycle
    assert movement.bytes_per_cycle(A3, 1) == A3.stream_bytes_per_cycle_alone
