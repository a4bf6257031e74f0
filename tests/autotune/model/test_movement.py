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


def test_between_two_cards_of_a2_there_is_one_link() -> None:
    a2 = machine_named("A2").replaced(
        {"remote_write_gb_per_s": 70.0, "pair_write_gb_per_s": 20.0, "pair_read_gb_per_s": 25.0}
    )
    assert movement.wire(a2, 70_000, 20_000) == pytest.approx(1.0)
    assert movement.wire(a2, 70_000, 50_000) == pytest.approx(2.5)
    assert movement.wire(a2, 70_000, 50_000, reads=True) == pytest.approx(2.0)
    assert movement.wire(A3, 70_000, 70_000) == pytest.approx(70 / 196)
    reach = ("self", "node", "node")
    parts = movement.written_remotely(a2, np.array([9.0, 1.0, 4.0]), 20_000, reach, 48, 0.0)
    assert parts["wire"] == pytest.approx(4.0)


def test_a_message_has_a_time_of_its_own_beside_its_bytes() -> None:
    a2 = machine_named("A2").replaced({"rdma_gb_per_s": 20.0, "rdma_message_us": 0.25})
    assert movement.rdma_us(a2, 60_000.0, 2) == pytest.approx(3.5)
    assert movement.rdma_us(a2, np.array([0.0, 20_000.0])).tolist() == pytest.approx([0.25, 1.25])


def test_cores_share_the_memory_and_one_alone_has_its_own_limit() -> None:
    assert movement.bytes_per_cycle(A3, 48) == A3.stream_bytes_per_cycle
    assert movement.bytes_per_cycle(A3, 24) == 2 * A3.stream_bytes_per_cycle
    assert movement.bytes_per_cycle(A3, 1) == A3.stream_bytes_per_cycle_alone
