"""The constants of a CPU that ranks share: every one is measured, on as many ranks as there are cores."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from autotune.model.constants import machine_named
from autotune.model.timelines import cpu
from moe_triton.processes import RankGroup
from moe_triton.tools.selftest.check import Place, Settings
from moe_triton.tools.selftest.checks import constants
from moe_triton.tools.selftest.cpu_probe import CONSTANTS, CpuProbe
from tests.patience import seconds

MOST_PASSES = 20
SETTINGS = Settings(quick=True, timeout_s=seconds(60.0))


def measured(rank: int, num_ranks: int, cores: int) -> tuple[dict[str, float], int]:
    """A pass on a machine of so many cores, and the blocks of a kernel."""
    backend = Place(rank, num_ranks, SETTINGS).backend
    with mock.patch.object(type(backend), "num_blocks", lambda self, ranks: max(1, cores // ranks)):
        probe = CpuProbe(backend, rank, num_ranks, SETTINGS.wait_s)
        try:
            return undisturbed(probe), backend.num_blocks(1)
        finally:
            probe.close()


def undisturbed(probe: CpuProbe) -> dict[str, float]:
    """What a pass measures; another one for all where others had the core of some rank all the time."""
    for _ in range(MOST_PASSES):
        try:
            figures, disturbed = probe.measure(), torch.zeros(1)
        except ValueError:
            figures, disturbed = {}, torch.ones(1)
        dist.all_reduce(disturbed)
        if not disturbed:
            return figures
    raise AssertionError(f"{MOST_PASSES} passes were disturbed")


def found_by_check(rank: int, num_ranks: int) -> dict[str, float]:
    return dict(constants.measure_cpu(Place(rank, num_ranks, SETTINGS)).figures)


@pytest.mark.parametrize(("ranks", "cores"), [(2, 2), (3, 2), (2, 4)])
def test_every_rank_with_a_core_measures_every_constant(ranks: int, cores: int) -> None:
    with RankGroup(ranks) as group:
        found = group.run(measured, cores, timeout_s=seconds(90))
    for rank, (figures, _) in enumerate(found):
        assert set(figures) == (set(CONSTANTS) if rank < cores else set()), rank
        assert all(value > 0 for name, value in figures.items() if "_per_s" in name)
        assert all(value >= 0 for value in figures.values())
    assert found[0][0]["cpu_start_us"] > 0
    machine_named("cpu").measured(found[0][0], "a test")


def test_the_check_gives_each_constant_with_its_range() -> None:
    with RankGroup(2) as group:
        figures = group.run(found_by_check, timeout_s=seconds(90))[0]
    for name in CONSTANTS:
        assert figures[f"{name} low"] <= figures[name] <= figures[f"{name} high"]


def test_what_the_model_reads_of_a_cpu_is_what_is_measured() -> None:
    own = {name for name in machine_named("cpu").constants if name.startswith("cpu_")}
    assert own <= set(CONSTANTS)
    assert {*cpu.TIMES, *cpu.RATES, "flag_latency_us"} == set(CONSTANTS)
