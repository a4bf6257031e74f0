"""Times made from known constants bring these constants back; what times cannot tell stays as it was."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from autotune.model.constants import Constant, Machine, machine_named
from autotune.model.fits.calibrate import Calibration, calibrate, errors
from moe_triton.core.errors import ArgumentError

SEEDS = range(5)
NOISE = 0.02
TOLERANCE = 0.1  # of a constant, from times with 2 % of noise
KNOWN = (
    "load_latency_cycles",
    "stream_bytes_per_cycle",
    "scalar_global_cycles",
    "vector_latency_cycles",
    "remote_writes_in_flight",
)


class Step(NamedTuple):
    """A launch of a toy kernel: rows that are loaded, computed on, and sent."""

    rows: int
    row_bytes: int
    elements: int
    instructions: int
    sent: int


STEPS = [
    Step(rows, row_bytes, elements, instructions, sent)
    for rows in (1, 16, 128)
    for row_bytes in (64, 14336)
    for elements, instructions, sent in ((0, 0, 0), (50, 0, 0), (0, 300, 0), (0, 0, 500), (5, 40, 20))
]


def predict(machine: Machine, step: Step) -> float:
    load = step.rows * (machine.load_latency_cycles + step.row_bytes / machine.stream_bytes_per_cycle)
    scalar = step.elements * machine.scalar_global_cycles
    vector = step.instructions * (machine.vector_latency_cycles + 64)
    hops = 0.7 * step.sent / machine.remote_writes_in_flight
    return (load + scalar + vector) / (1000 * machine.clock_ghz) + hops


def other(seed: int, names: tuple[str, ...] = KNOWN) -> Machine:
    """A machine with other constants, in their ranges."""
    random = np.random.default_rng(seed)
    assumed = machine_named("A3")
    entries = {name: assumed.constants[name] for name in names}
    return assumed.replaced({n: float(random.uniform(e.low, e.high)) for n, e in entries.items()})


def fit(true: Machine, noise: float = 0.0, seed: int = 0, steps: list[Step] = STEPS) -> Calibration[Step]:
    random = np.random.default_rng(seed)
    times = [predict(true, step) * float(np.exp(random.normal(0, noise))) for step in steps]
    return calibrate(machine_named("A3"), steps, times, predict, "a machine, today")


@pytest.mark.parametrize("seed", SEEDS)
def test_exact_times_bring_back_their_constants(seed: int) -> None:
    true = other(seed)
    found = fit(true)
    assert set(found.fitted) == set(KNOWN)
    for name in KNOWN:
        assert getattr(found.machine, name) == pytest.approx(getattr(true, name), rel=1e-3), name
    assert np.abs(errors(found.after, found.measured)).max() < 1e-3
    assert np.abs(errors(found.before, found.measured)).max() > 0.05


@pytest.mark.parametrize("seed", SEEDS)
def test_times_with_noise_bring_them_back_within_their_interval(seed: int) -> None:
    true = other(seed)
    found = fit(true, NOISE, seed)
    assert set(found.fitted) == set(KNOWN)
    for name in KNOWN:
        value = getattr(true, name)
        assert getattr(found.machine, name) == pytest.approx(value, rel=TOLERANCE), name
        entry, (low, high) = found.machine.constants[name], found.outcomes[name].interval
        assert entry.low <= entry.value <= entry.high
        assert low / 1.05 <= value <= high * 1.05, name
    assert np.abs(errors(found.after, found.measured)).mean() < 2 * NOISE


def test_a_fit_says_what_it_was_made_of() -> None:
    found = fit(other(0), NOISE)
    entry = found.machine.constants["load_latency_cycles"]
    assert (entry.kind, entry.source) == ("fitted", f"to {len(STEPS)} step times on a machine, today")
    assert Machine.from_json(found.machine.to_json()) == found.machine
    assert 1 <= found.condition < 1000


def test_what_no_time_depends_on_stays_as_it_was() -> None:
    found = fit(other(0))
    before = machine_named("A3")
    for name in ("flag_cycles", "launch_graph_us", "queue_entries"):
        assert found.outcomes[name].verdict == "unused"
        assert found.machine.constants[name] == before.constants[name]
    assert found.outcomes["cores"].verdict == "fixed"


def test_times_of_one_kind_leave_the_rest() -> None:
    """Without rows that are sent, and with one row only, nothing is said of links and bandwidth."""
    steps = [Step(1, 64, elements, 0, 0) for elements in (0, 10, 100)]
    found = fit(other(1), steps=steps)
    assert found.fitted == ["load_latency_cycles", "scalar_global_cycles"]
    assert found.outcomes["remote_writes_in_flight"].verdict == "unused"
    bandwidth = found.outcomes["stream_bytes_per_cycle"]
    assert bandwidth.verdict == "weak"
    assert bandwidth.after == machine_named("A3").constants["stream_bytes_per_cycle"]


def product(machine: Machine, step: Step) -> float:
    """A time in which two constants of like ranges only act together."""
    return step.sent * machine.flag_latency_us * machine.scalar_local_cycles


PAIR = ("flag_latency_us", "scalar_local_cycles")
SENT = [Step(1, 64, 0, 0, sent) for sent in (1, 10, 100)]


def test_two_that_only_act_together_are_both_left_and_named() -> None:
    true = other(2, PAIR)
    found = calibrate(machine_named("A3"), SENT, [product(true, step) for step in SENT], product, "x")
    assert found.fitted == []
    for name, alike in (PAIR, PAIR[::-1]):
        assert (found.outcomes[name].verdict, found.outcomes[name].alike) == ("alike", alike)
    assert found.machine == machine_named("A3")
    assert found.condition == 1


def test_of_two_that_act_together_one_is_found_once_the_other_is_measured() -> None:
    true = other(2, PAIR)
    known = machine_named("A3").measured({PAIR[0]: true.flag_latency_us}, "x")
    found = calibrate(known, SENT, [product(true, step) for step in SENT], product, "x")
    assert found.fitted == [PAIR[1]]
    assert found.machine.scalar_local_cycles == pytest.approx(true.scalar_local_cycles, rel=1e-3)
    assert found.outcomes[PAIR[0]].verdict == "measured"
    assert found.machine.constants[PAIR[0]] == known.constants[PAIR[0]]


def test_a_value_outside_its_range_ends_at_the_bound_and_says_so() -> None:
    highest = machine_named("A3").constants["scalar_global_cycles"].high
    found = fit(machine_named("A3").replaced({"scalar_global_cycles": 1.3 * highest}))
    outcome = found.outcomes["scalar_global_cycles"]
    assert outcome.is_at_bound
    assert found.machine.scalar_global_cycles == pytest.approx(highest)
    assert not found.outcomes["load_latency_cycles"].is_at_bound


def test_times_that_no_constants_explain_make_intervals_wide() -> None:
    random = np.random.default_rng(0)
    times = [predict(machine_named("A3"), step) * float(random.lognormal(0, 1)) for step in STEPS]
    wild = calibrate(machine_named("A3"), STEPS, times, predict, "x")
    calm = fit(machine_named("A3"), NOISE)
    assert len(wild.fitted) < len(calm.fitted)
    for name in wild.fitted:
        widths = [np.log(c.outcomes[name].interval[1] / c.outcomes[name].interval[0]) for c in (wild, calm)]
        assert widths[0] > 5 * widths[1]


@pytest.mark.parametrize("times", [[], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")]])
def test_what_is_no_time_is_refused(times: list[float]) -> None:
    with pytest.raises(ArgumentError, match=r"^us is"):
        calibrate(machine_named("A3"), STEPS[: len(times)], times, predict, "x")


def test_nothing_is_fitted_where_everything_was_measured() -> None:
    entry = Constant(450, "measured", "x", 450, 450)
    machine = Machine("A3", dict.fromkeys(machine_named("A3").constants, entry))
    found = calibrate(machine, STEPS, [1.0] * len(STEPS), predict, "x")
    assert found.fitted == []
    assert found.machine == machine
    assert (found.before == found.after).all()
