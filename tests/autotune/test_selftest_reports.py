"""The machine of a selftest's report: what was measured, and the product's constants in the gaps."""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from pathlib import Path

import pytest

from autotune.cli.model.options import machine_of
from autotune.model.constants import Machine, machine_named
from autotune.selftest_reports.constants import constants_of, machine_of_report, product_of, read_machine
from moe_triton.core.errors import ArgumentError
from moe_triton.tools.selftest.check import Result, Settings
from moe_triton.tools.selftest.report import Report
from tests.autotune.measured_constants import measured_constants

MOMENT = datetime(2026, 3, 4, 5, 6, 7, tzinfo=timezone.utc)
RESULTS = (
    Result("devices", "environment", "passed", figures={"ranks": 8}, facts={"SoC": "Ascend910_9391"}),
    Result("memcpy", "constants", "passed", figures={"memcpy_gb_per_s": 700.0, "bad": float("nan")}),
)


def test_constants_are_those_of_the_product_with_what_was_measured(tmp_path: Path) -> None:
    Report(Settings(backend="npu"), RESULTS, MOMENT, True).write(tmp_path)
    machine = read_machine(tmp_path)
    assert machine == read_machine(tmp_path / "report.json") == machine_of(str(tmp_path))
    assert machine.name == "A3"
    assert machine.memcpy_gb_per_s == 700
    assert measured_constants(machine) == {"memcpy_gb_per_s"}


def test_streaming_rates_become_bytes_per_cycle_and_core() -> None:
    figures = {
        "blocks": 40.0,
        "stream_gb_per_s": 1480.0,
        "stream_gb_per_s low": 1400.0,
        "stream_gb_per_s high": 1500.0,
        "stream_alone_gb_per_s": 37.0,
        "call_overhead_us": 9.0,
        "call_overhead_us low": 8.0,
        "call_overhead_us high": 12.0,
    }
    results = [
        Result("streaming", "constants", "passed", figures=figures),
        Result("failed", "constants", "failed", figures={"flag_latency_us": 3.0}),
        Result("other", "timing", "passed", figures={"sync_all_us": 3.0}),
    ]
    devices = Result("devices", "environment", "passed", facts={"SoC": "Ascend910B3"})
    machine = machine_of_report(Report(Settings(backend="npu"), (devices, *results), MOMENT, True).document())
    stream = machine.constants["stream_bytes_per_cycle"]
    assert (stream.value, stream.low, stream.high) == pytest.approx(
        tuple(rate / 40 / 1.85 for rate in (1480, 1400, 1500))
    )
    assert (stream.kind, stream.source) == ("measured", "on Ascend910B3 2026-03-04")
    assert machine.stream_bytes_per_cycle_alone == pytest.approx(37 / 1.85)
    called = machine.constants["call_overhead_us"]
    assert (called.value, called.low, called.high) == (9, 8, 12)
    assert {"flag_latency_us", "sync_all_us"}.isdisjoint(measured_constants(machine))
    assert machine.sync_all_us == machine_named("A2").sync_all_us


@pytest.mark.parametrize(
    ("backend", "soc", "nearest"),
    [
        ("npu", "Ascend910B3", "hop_node_us"),
        ("npu", "Ascend910_9391", "hop_sibling_us"),
        ("cpu", "x", "hop_sibling_us"),
    ],
)
def test_the_neighbour_that_was_written_to_is_the_nearest_of_the_product(
    backend: str, soc: str, nearest: str
) -> None:
    figures = {"hop_us": 0.4, "hop_us low": 0.3, "hop_us high": 0.6}
    machine = constants_of(figures, backend, soc, "x")
    hop = machine.constants[nearest]
    assert (hop.value, hop.low, hop.high) == (0.4, 0.3, 0.6)
    assert measured_constants(machine) == {nearest}


@pytest.mark.parametrize(
    ("soc", "product"),
    [("Ascend910B3", "A2"), ("Ascend910_9391", "A3"), ("Ascend910C", "A3"), ("unknown", "A3")],
)
def test_products_are_known_by_their_devices(soc: str, product: str) -> None:
    assert product_of("npu", soc) == product
    assert product_of("cpu", soc) == "cpu"


def test_reports_and_files_of_before_are_read(tmp_path: Path) -> None:
    """A report of version 2 held a whole machine, and beside it lay a file of it."""
    before = machine_named("A3").measured({"memcpy_gb_per_s": 650.0}, "Ascend910_9391 2026-01-02")
    document = Report(Settings(backend="npu"), RESULTS, MOMENT, True).document()
    document |= {"version": 2, "constants": json.loads(before.to_json())}
    (tmp_path / "report.json").write_text(json.dumps(document))
    (tmp_path / "constants.json").write_text(before.to_json())
    assert read_machine(tmp_path) == read_machine(tmp_path / "constants.json") == before
    assert Machine.from_json(before.to_json()) == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 1}, "report is of version 1, but this moe_triton reads versions 2 and 3"),
        ({"version": 2}, r"report is not whole, but it must be complete \(KeyError: 'constants'\)"),
        ({"checks": [{}]}, r"report is not whole, but it must be complete \(KeyError: 'stage'\)"),
        ({"machine": None}, "report is not whole"),
        ({"format": "another"}, '"format" must be "moe_triton.machine_constants"'),
    ],
)
def test_a_report_that_is_not_one_is_refused(changes: dict[str, object], said: str, tmp_path: Path) -> None:
    document = Report(Settings(backend="npu"), RESULTS, MOMENT, True).document() | changes
    (tmp_path / "report.json").write_text(json.dumps(document))
    with pytest.raises(ArgumentError, match=said):
        machine_of(str(tmp_path))


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"it must be one of .*, or a file \(No such file or directory\)"):
        machine_of(str(tmp_path / "nothing"))


def test_the_page_names_constants_that_there_are() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "selftest.md").read_text()
    constants = page.split("| Constant |")[1].split("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", constants))
    assert "call_overhead_us" in named
    assert named <= machine_named("cpu").constants.keys()
