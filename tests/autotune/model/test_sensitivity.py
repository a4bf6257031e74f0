"""What an answer depends on: of formulas whose derivatives are known, and of a plan's time."""

from __future__ import annotations

import math

import pytest

from autotune.model.constants import Constant, Machine, machine_named
from autotune.model.kernel_costs.remembered import NotedMachine, Remembered
from autotune.model.sensitivity import constants_read, judged
from tests.autotune.model.hand_made import (
    TWO_RANKS,
    compute,
    kernel_costs_of,
    plan_of,
    run_of,
    send,
    traffics_of,
    wait,
    walk,
)


def machine_with(**ranges: tuple[float, float, float]) -> Machine:
    """A3 with other values: low, value, high."""
    machine = machine_named("A3")
    changed = {
        name: Constant(value, "assumed", "a test", low, high) for name, (low, value, high) in ranges.items()
    }
    return Machine("A3", {**machine.constants, **changed})


def test_powers_have_their_exponent_as_elasticity() -> None:
    machine = machine_with(clock_ghz=(1, 2, 4), event_us=(3, 3, 3), cores=(10, 20, 30))
    found = judged(lambda m: m.clock_ghz**2 * m.event_us / m.cores, machine)
    elasticity = {each.name: each.elasticity for each in found.sensitivities}
    assert elasticity == pytest.approx({"clock_ghz": 2, "event_us": 1, "cores": -1})
    assert found.value == pytest.approx(4 * 3 / 20)
    assert found.read == {"clock_ghz", "event_us", "cores"}


def test_error_bars_are_roots_of_sums_of_squares_each_side_by_itself() -> None:
    machine = machine_with(event_us=(1, 2, 6), launch_graph_us=(4, 7, 8), flag_latency_us=(1, 1, 1))
    found = judged(lambda m: 10 + m.event_us - m.launch_graph_us + m.flag_latency_us, machine)
    assert found.value == 6
    assert found.below == pytest.approx(math.hypot(1, 1))  # one lower, the other one higher
    assert found.above == pytest.approx(math.hypot(4, 3))
    assert [(each.name, each.at_low, each.at_high) for each in found.sensitivities] == [
        ("event_us", 5, 10),
        ("launch_graph_us", 9, 5),
        ("flag_latency_us", 6, 6),
    ]


def test_a_constant_that_may_be_0_has_an_elasticity_by_differences() -> None:
    machine = machine_with(event_us=(0, 2, 4))
    (only,) = judged(lambda m: 3 * m.event_us, machine).sensitivities
    assert only.elasticity == pytest.approx(1)
    assert (only.at_low, only.at_high) == (0, 12)


def test_a_longest_of_two_depends_on_both_if_a_range_reaches_the_other() -> None:
    machine = machine_with(event_us=(1, 2, 6), launch_graph_us=(3, 3, 3))
    found = judged(lambda m: max(m.event_us, m.launch_graph_us), machine)
    assert found.value == 3
    assert (found.below, found.above) == (0, 3)


def test_what_is_read_by_name_or_from_the_table_is_noted() -> None:
    machine = machine_named("A3")
    assert constants_read(lambda m: m.cores + m.constants["event_us"].value, machine) == {"cores", "event_us"}
    assert NotedMachine(machine) != machine
    assert machine != NotedMachine(machine)


def test_a_remembered_kernel_cost_is_computed_again_only_where_what_it_reads_differs() -> None:
    plan, (traffic, _) = plan_of(send(), wait(), compute("sum")), traffics_of(TWO_RANKS)
    machine, run = machine_named("A3"), run_of({1: {0: 1.0}})
    computed = []

    def kernel_costs(kernel):  # type: ignore[no-untyped-def]
        def kernel_cost(work, m):  # type: ignore[no-untyped-def]
            computed.append(kernel.name)
            us = m.scalar_cycles if kernel.name == "sum" else m.constants["sync_all_us"].value
            return kernel_costs_of({kernel.name: us})(kernel)(work, m)

        return kernel_cost

    remembered = Remembered(kernel_costs)

    def total(m: Machine) -> float:
        return walk(plan, traffic, m, kernel_costs=remembered, run=run).total_us

    first = total(machine)
    assert sorted(computed) == ["dispatch_rows", "dispatch_send", "sum"]
    assert total(machine.replaced({"launch_graph_us": 5})) == first + 3
    assert len(computed) == 3
    assert total(machine.replaced({"scalar_cycles": 2})) == first + 1
    assert computed[3:] == ["sum"]
    # What the first one read is known although nothing was computed again.
    assert constants_read(total, machine) >= {"scalar_cycles", "sync_all_us", "launch_graph_us"}
    assert len(computed) == 4
    # Another rank's work is not taken for it.
    other = traffics_of(TWO_RANKS)[1]
    walk(plan, other, machine, kernel_costs=remembered, run=run_of({1: {0: 1.0}}))
    assert len(computed) == 7
    mistaken = judged(total, machine)
    plain = judged(lambda m: walk(plan, traffic, m, kernel_costs=kernel_costs, run=run).total_us, machine)
    assert mistaken == plain
