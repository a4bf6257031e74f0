"""What is found out about a machine before anything runs on it."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from moe_triton.backends.npu import toolchain
from moe_triton.tools.selftest.check import Place, Settings
from moe_triton.tools.selftest.checks import environment
from moe_triton.tools.selftest.checks.environment import count_devices, find_toolchain, use_device


def place(backend: str, ranks: int | None = None) -> Place:
    return Place(0, 1, Settings(backend=backend, ranks=ranks))


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What torch_npu says of a machine with four cards."""
    npu = SimpleNamespace(device_count=lambda: 4, get_device_name=lambda number: "Ascend910_9391")
    module = ModuleType("torch_npu")
    module.npu = npu  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    return npu


def test_a_group_has_a_rank_for_each_card(cards: SimpleNamespace) -> None:
    finding = count_devices(place("npu"))
    assert finding.wrong == ()
    assert finding.figures == {"devices": 4, "ranks": 4}
    assert finding.facts == {"SoC": "Ascend910_9391"}
    assert count_devices(place("npu", 3)).figures["ranks"] == 3


def test_too_few_cards_are_told(cards: SimpleNamespace) -> None:
    assert count_devices(place("npu", 5)).wrong == ("5 ranks were asked for, but there are 4 devices",)
    for number in (0, 1):
        cards.device_count = lambda n=number: n
        (said,) = count_devices(place("npu")).wrong
        assert "at least 2 ranks" in said
        assert said.endswith(f"here it gets {number}")


def test_on_a_cpu_there_are_two_ranks_or_as_many_as_asked_for() -> None:
    assert count_devices(place("cpu")).figures["ranks"] == 2
    assert count_devices(place("cpu", 5)).figures["ranks"] == 5


def test_each_back_end_asks_for_its_own_components(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_triton.tools.cli import doctor

    rows = [
        ("native kernels", True, "libmoe", ""),
        ("triton-ascend", True, "3.2.0", ""),
        ("shared memory", False, "", "mount it"),
        ("npu: CANN", False, "", "install CANN"),
        ("npu: bisheng", True, "", ""),
    ]
    monkeypatch.setattr(doctor, "components", lambda: rows)
    on_cpu, on_npu = find_toolchain(place("cpu")), find_toolchain(place("npu"))
    assert on_cpu.wrong == ("shared memory is missing: mount it",)
    assert on_cpu.facts == {"native kernels": "libmoe", "triton-ascend": "3.2.0"}
    assert on_npu.wrong == ("CANN is missing: install CANN",)
    assert on_npu.facts == {"triton-ascend": "3.2.0", "npu: bisheng": "present"}


def test_a_device_that_loses_numbers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    here = place("cpu")
    assert use_device(here).wrong == ()

    def memory(shape: torch.Size, dtype: torch.dtype) -> SimpleNamespace:
        """Memory that ignores writes."""
        zeros = torch.zeros(shape, dtype=dtype)
        return SimpleNamespace(copy_=lambda source: None, cpu=lambda: zeros)

    forgetful = SimpleNamespace(
        device=here.backend.device,
        empty=memory,
        synchronize=lambda: None,
        identity=dict,
        num_blocks=lambda ranks: 1,
    )
    monkeypatch.setattr(Place, "backend", forgetful)
    assert use_device(here).wrong == ("numbers came back from the device changed",)


@pytest.mark.parametrize(
    ("name", "text", "version"),
    [
        ("version.cfg", "# version: 1.0\ntoolkit_running_version=[7.3.0.1:8.0.RC1]\n", "8.0.RC1"),
        (
            f"{platform.machine()}-linux/ascend_toolkit_install.info",
            "package_name=x\nversion=8.2.RC1\ninnerversion=V1\n",
            "8.2.RC1",
        ),
        ("sparc-linux/ascend_toolkit_install.info", "version=8.2.RC1\n", "version unknown"),
        ("other", "version=1", "version unknown"),
    ],
)
def test_the_toolkit_is_asked_for_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, version: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert environment.versions()["CANN"] == version


def test_the_driver_is_asked_for_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "info").write_text("Version=24.1.rc3\nascendhal_version=7.35\n")
    monkeypatch.setattr(toolchain, "DRIVER_INFO", tmp_path / "info")
    assert environment.versions()["driver"] == "24.1.rc3"


def test_what_is_not_there_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.setattr(toolchain, "DRIVER_INFO", Path("/dev/null/version.info"))
    monkeypatch.setattr(toolchain, "HOMES", ())
    monkeypatch.setattr(environment, "_read", lambda path: "")
    facts = environment.versions()
    assert facts["CANN"] == facts["driver"] == "not installed"
    assert facts["moe_triton"] != "not installed"
    assert facts["CPU cores"] == f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    assert environment.cpu_ghz() is None
