"""Other builds of the kernels, as the model prices them: wrong kernels, and one of another scheme."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from autotune.model.clusters.group import Group
from autotune.model.clusters.prices import Call
from autotune.model.constants import machine_named
from autotune.model.cost import Cost, Place, work_of
from autotune.model.kernel_costs.counted import library as libraries
from autotune.model.kernel_costs.counted import run as runs
from autotune.model.kernel_costs.counted.library import CountingLibrary, Did
from autotune.model.kernel_costs.counted.price import counted
from autotune.model.kernel_costs.counted.run import PlanRun, standing_for
from moe_triton.core import native_files
from moe_triton.schemes import SCHEMES
from tests.ascendc.library import Patch, build_counting
from tests.autotune.model.calls import config, plan, traffic
from tests.autotune.model.simple_kernel_costs import simple_kernel_costs
from tests.distributed.keeping import scheme as keeping
from tests.distributed.test_keeping import FOLDER, build

pytestmark = pytest.mark.long  # a build each

A3 = machine_named("A3")
LAUNCHERS = [f"moe_dispatch_{name}" for name in ("send", "wait", "offsets", "receive")]
ROW = "        rows_.Copy(visit.row, visit.slots, visit.num_slots);\n"
TWICE = Patch("include/send_rows.h", ROW, ROW + ROW)
NO_FLAG = Patch(
    "include/waits.h",
    """        Order<AscendC::HardEvent::V_S>();
        return static_cast<int64_t>(sum_.GetValue(0));""",
    "        return static_cast<int64_t>(sum_.GetValue(0));",
)
MASK = "        const uint64_t mask[2] = {FIRST_WORDS << word, 0};\n"
BARRIER = Patch("include/waits.h", MASK, f"        AscendC::PipeBarrier<PIPE_ALL>();\n{MASK}")
Priced = Callable[..., tuple[Cost, np.ndarray]]


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> Priced:
    """A launch of a dispatch of eight ranks, by a build with patches: its price, and what its cores do."""
    settings = config(8, 64)
    whole, known = plan(settings, "dispatch"), traffic(settings)

    def price(step: str, *patches: Patch) -> tuple[Cost, np.ndarray]:
        library = CountingLibrary(build_counting(patches, LAUNCHERS))
        for module in (libraries, runs):
            monkeypatch.setattr(module, "counting_library", lambda: library)
        run: PlanRun = standing_for(whole, [known])
        index = [launch.step for launch in whole.launches].index(step)
        work = work_of(whole.launches[index], known, Place(run, index, 0))
        return counted(work, A3), run.ran(index)[0].steps.records

    return price


def test_a_row_that_is_moved_twice_passes_the_wire_twice(
    priced: Callable[..., tuple[Cost, np.ndarray]],
) -> None:
    (before, _), (after, _) = priced("send"), priced("send", TWICE)
    rows = traffic(config(8, 64)).sent[1:].sum()
    assert after.sent - before.sent == rows * (7168 + 32)
    wire_us = rows * (7168 + 32) / A3.remote_write_gb_per_s / 1e3
    assert after.parts["wire"] - before.parts["wire"] == pytest.approx(wire_us)
    # Each is a trip of its own; of the two, one has the stamp.
    assert after.parts["hops"] - before.parts["hops"] > 0.8 * rows / 48 * A3.hop_sibling_us
    assert after.us > before.us + wire_us


def test_a_flag_less_is_seen_in_the_time(priced: Priced) -> None:
    """What the vector unit sums is read before it is there."""
    (before, was), (after, now) = priced("wait"), priced("wait", NO_FLAG)
    assert (was["did"] == Did.WAIT).sum() - (now["did"] == Did.WAIT).sum() >= 1
    least = (A3.flag_cycles + A3.vector_latency_cycles) / A3.clock_ghz / 1e3
    assert after.us <= before.us - least


def test_a_barrier_more_is_seen_in_the_time(priced: Priced) -> None:
    """What is under way has to end before the sum begins."""
    (before, was), (after, now) = priced("wait"), priced("wait", BARRIER)
    assert (now["did"] == Did.BARRIER).sum() > (was["did"] == Did.BARRIER).sum()
    assert (
        before.us
        < after.us
        < before.us + (A3.load_latency_cycles + A3.store_latency_cycles) / A3.clock_ghz / 1e3
    )


def test_a_movement_kernel_of_another_scheme_needs_no_line_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = build("--output", str(tmp_path), "--scheme", str(FOLDER))
    assert "built" in said, said
    monkeypatch.setitem(SCHEMES["A3"], "keeping", f"{keeping.__name__}:Keeping")
    monkeypatch.setattr(native_files, "folders", lambda: (tmp_path,))
    libraries.counting_library.cache_clear()
    try:
        call = Call.typical(Group(8, 16, comm_alg="keeping", mode="stream"), simple_kernel_costs)
        monkeypatch.setattr(keeping.Keeping, "place", lambda *_: None)  # its results are not left in place
        (found,) = call.priced("combine", A3)
    finally:
        libraries.counting_library.cache_clear()
    (kept,) = [span for span in found.timeline.spans if span.launch.kernel.name == "keep_rows"]
    rows = call.traffics[0].num_rows
    assert kept.cost.us > 0
    assert (kept.cost.sent, kept.cost.written) == (0, rows * 2 * 7168)
