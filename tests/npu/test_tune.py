"""Kernels' settings measured on an NPU: on the stand-in, bits are real and the clock is made up."""

from __future__ import annotations

from pathlib import Path

import pytest

import moe_triton
from moe_triton.core.tables import Table
from moe_triton.processes import run_ranks
from tests.npu import tune_workers
from tests.npu.device import POLICIES

NAME = f"kernels-{tune_workers.CHIP}"


@pytest.mark.parametrize("policy", POLICIES)
def test_the_fastest_by_the_devices_clock_is_chosen(policy: str, tmp_path: Path) -> None:
    """A launch takes a microsecond for each of its programs: 48 of them, or 8."""
    (found,) = run_ranks(tune_workers.search, 1, (policy, tmp_path / "study.db"))
    settings, facts, most_programs = found
    assert settings == {"PROGRAMS": 8}
    assert most_programs == 48
    assert facts["default_ns"] == pytest.approx(48_000)
    assert facts["ns"] == pytest.approx(8_000)
    assert facts["high"] == pytest.approx(8 / 48)
    assert facts["rounds"] == 15


def test_other_bits_stop_the_run(tmp_path: Path) -> None:
    (said,) = run_ranks(tune_workers.other_bits, 1, (tmp_path / "study.db",))
    assert "HAS_WEIGHTS=0" in said
    assert "bytes of out are not the default's" in said


def test_a_table_of_another_product_is_not_measured() -> None:
    (said,) = run_ranks(tune_workers.of_another_product, 1, ())
    assert "this machine has an Ascend910B3, an A2. Pass --soc A2" in said


def test_the_command_writes_where_figures_come_from(tmp_path: Path) -> None:
    (said,) = run_ranks(tune_workers.command, 1, (tmp_path,))
    assert "returns plain any, ranks 16, tokens 16: " in said
    table = Table.from_json((tmp_path / f"{NAME}.json").read_text(), NAME)
    begin, _, end = table.source.partition(", triton-ascend ")
    assert begin == f"measured on Ascend910_9391, moe_triton {moe_triton.__version__}"
    assert end.endswith(", CANN 9.0.0")
    assert "--soc Ascend910_9391 --measure" in table.command
