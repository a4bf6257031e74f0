"""The benchmark of several hosts: its arithmetic, and that it runs. Never about how fast."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compare.cases import ROOT, Sample
from benchmarks.compare.launch import Mpi
from benchmarks.hosts import namespaces
from benchmarks.hosts.figures import BY_MPI, VS_GLOO, VS_MPI, VS_NATIVE, Measured
from benchmarks.hosts.rounds import FORMATS, GLOO, OURS, key
from tests.patience import seconds


def sample(route: str, phase: str, iteration: int, us: float, quantize: str = "") -> Sample:
    return Sample(route, phase, 3, 4, quantize, iteration, 0, us)  # type: ignore[arg-type]


def measured(*samples: Sample, **posted: list[list[int]]) -> Measured:
    """On a host of two ranks and one of one, over 2 Gbit/s; what each rank posts, by route and rows."""
    of_ranks = [{key(*name.split("__")): each[rank] for name, each in posted.items()} for rank in range(3)]
    return Measured((2, 1), 4, 2.0, [samples], of_ranks)


def test_a_link_is_its_hosts() -> None:
    found = measured(
        *(
            sample("ours", phase, i, us)
            for i, us in enumerate((2.0, 4.0))
            for phase in ("dispatch", "combine")
        ),
        ours__=[[100, 10], [200, 20], [250, 80]],
    )
    assert found.most_bytes("ours", "") == (300, 80)
    assert found.link_us(500) == pytest.approx(2.0)
    assert found.both_us("ours", "") == [4.0, 8.0]
    link_us = 380 * 8 / 2e3
    assert found.vs_link("ours", "")["time_vs_link"] == pytest.approx(6.0 / link_us)


def test_gains_are_of_times_and_of_bytes() -> None:
    route, other = "A3 hierarchy", "A3 fullmesh_v1"
    phases = [(route, "", 2.0), (route, "int8", 1.0), (other, "", 6.0)]
    found = measured(
        *(sample(name, each, 0, us, rows) for name, rows, us in phases for each in ("dispatch", "combine")),
        **{
            f"{route}__": [[30, 10]] * 3,
            f"{route}__int8": [[20, 10]] * 3,
            f"{other}__": [[100, 60]] * 3,
        },
    )
    int8, hierarchy = found.gain_of_int8(route), found.gain_of_hierarchy(route, "")
    assert (int8["int8_gain"], int8["int8_bytes_ratio"]) == (2.0, 1.5)
    assert (hierarchy["hierarchy_gain"], hierarchy["hierarchy_bytes_ratio"]) == (3.0, 4.0)


def test_ratios_are_against_the_fastest_scheme_there_is() -> None:
    times = {
        GLOO: (6.0, 8.0),
        "A2 fullmesh": (2.0, 4.0),
        "A3 fullmesh_v1": (5.0, 5.0),
        "mpi_native": (5.0, 10.0),
    }
    found = measured(*(sample(name, "both", i, us[i]) for name, us in times.items() for i in range(2)))
    ratios = found.ratios("")
    assert ratios[VS_GLOO.name] == pytest.approx((3.0 + 2.0) / 2)
    assert ratios[f"{VS_GLOO.name}_fastest"] == pytest.approx(3.0)
    assert ratios[VS_NATIVE.name] == pytest.approx(1.5)
    assert VS_MPI.name not in ratios


def test_of_several_runs_the_best_ratio_counts() -> None:
    runs = [
        [sample(GLOO, "both", 0, gloo), sample(name, "both", 0, us)]
        for name, gloo, us in (("A2 fullmesh", 6.0, 3.0), ("A3 hierarchy", 9.0, 3.5))
    ]
    found = Measured((2, 1), 4, None, runs, [])
    assert found.ratios("")[VS_GLOO.name] == pytest.approx(9.0 / 3.5)
    assert found.routes("") == [GLOO, "A2 fullmesh", "A3 hierarchy"]
    assert found.times(GLOO, "") == [6.0]


@pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or "there are hosts")
def test_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    sizes = ["--hosts", "2", "--ranks-per-host", "1", "--tokens", "1", "--gbits", "10"]
    often = ["--iterations", "2", "--link-iterations", "2"]
    command = [sys.executable, "-m", "benchmarks.hosts", *sizes, *often, "--json", str(path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=seconds(200))
    records = json.loads(path.read_text())
    routes = {GLOO, *OURS, *(BY_MPI if Mpi.find().mpirun else ())}
    found = {(r["case"]["route"], r["case"]["rows"]) for r in records if r["metric"] == "median_us"}
    assert found == {(route, rows or "bf16") for route in routes for rows in FORMATS}
    linked = [r for r in records if r["metric"] == "time_vs_link"]
    assert {(r["case"]["route"], r["case"]["gbits"]) for r in linked} == {(route, 10.0) for route in OURS}
    assert all(r["value"] > 0 for r in linked)
    assert {"int8_gain", "hierarchy_gain", "idle_nic_share", VS_GLOO.name} <= {r["metric"] for r in records}
