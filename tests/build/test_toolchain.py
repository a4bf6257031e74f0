"""What is found of CANN, its driver and its processor, and what is said of what does not fit."""

from __future__ import annotations

import platform
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_triton.backends.npu import toolchain
from moe_triton.core.errors import ToolchainError
from moe_triton.core.installing import install
from moe_triton.tools.cli import doctor
from tests.build.fake_cann import FakeCann


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has of an NPU is out of sight."""
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    monkeypatch.setattr(toolchain, "HOMES", (tmp_path / "default",))
    monkeypatch.setattr(toolchain, "DRIVER_INFO", tmp_path / "driver" / "version.info")
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    monkeypatch.setattr(toolchain.util, "find_spec", lambda name: None)


@pytest.fixture
def driver(tmp_path: Path) -> Callable[[str], None]:
    def install(version: str) -> None:
        (tmp_path / "driver").mkdir(exist_ok=True)
        (tmp_path / "driver" / "version.info").write_text(f"Version={version}\nascendhal_version=7.35.19\n")

    return install


# The columns are npu-smi's, narrower.
MAP = """
        NPU ID           Chip ID          Chip Logic ID    Chip Name
        4                0                0                Ascend {chip}
        4                1                -                Mcu
"""
BOARDS = {
    "Ascend310P3": ("NPU ID     : 4", "Chip ID    : 0", "Chip Name  : 310P3"),
    "Ascend910B4": ("NPU ID     : 4", "Chip ID    : 0", "Chip Type  : Ascend", "Chip Name  : 910B4"),
    "Ascend910_9392": ("NPU ID     : 4", "NPU Name   : 9392", "Chip ID    : 0", "Chip Name  : Ascend910"),
}


@pytest.fixture
def npu_smi(tmp_path: Path) -> Callable[[str], None]:
    def install(soc: str) -> None:
        board = "\n".join(f"        {line}" for line in BOARDS.get(soc, ()))
        script = (
            "#!/bin/sh\n"
            'case "$*" in\n'
            f'"info -m") /bin/cat <<END\n{MAP.format(chip=soc)}END\n;;\n'
            f'"info -t board -i 4 -c 0") /bin/cat <<END\n{board}\nEND\n;;\n'
            "*) exit 1;;\n"
            "esac\n"
        )
        (tmp_path / "programs").mkdir(exist_ok=True)
        (tmp_path / "programs" / "npu-smi").write_text(script)
        (tmp_path / "programs" / "npu-smi").chmod(0o755)

    return install


# CANN.


@pytest.mark.parametrize("old_file", [False, True])
@pytest.mark.parametrize("in_bin", [False, True])
def test_cann_is_found_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old_file: bool, in_bin: bool
) -> None:
    fake = FakeCann(tmp_path / "cann", "8.3.RC1", old_file=old_file, in_bin=in_bin)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(fake.home))
    found = toolchain.check_cann()
    assert (found.home, found.bisheng) == (fake.home, fake.bisheng)
    assert found.version == ((8, 3), "8.3.RC1")


def test_cann_is_found_where_it_is_installed_by_default(tmp_path: Path) -> None:
    FakeCann(tmp_path / "default", "9.0.0")
    assert toolchain.check_cann().home == tmp_path / "default"


def test_a_folder_that_is_named_comes_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, other = FakeCann(tmp_path / "named"), FakeCann(tmp_path / "other")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(other.home))
    assert toolchain.check_cann(named.home).home == named.home
    # One that is named and not there is no reason to take another.
    with pytest.raises(ToolchainError, match=rf"CANN is missing \({tmp_path}/gone\)"):
        toolchain.check_cann(tmp_path / "gone")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "gone"))
    with pytest.raises(ToolchainError, match=rf"CANN is missing \({tmp_path}/gone\)"):
        toolchain.check_cann()


def test_without_cann_the_error_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=f"not in {tmp_path}/default.*source its set_env.sh"):
        toolchain.check_cann()


def test_a_cann_without_its_compiler_is_refused(tmp_path: Path) -> None:
    fake = FakeCann(tmp_path / "cann", with_bisheng=False)
    with pytest.raises(ToolchainError, match=f"bisheng is missing: neither {fake.home}"):
        toolchain.check_cann(fake.home)


ARCHITECTURES = [("x86_64", "aarch64"), ("aarch64", "x86_64")]


@pytest.mark.parametrize(("here", "other"), ARCHITECTURES)
def test_what_a_cann_has_for_other_machines_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str, other: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: here)
    fake = FakeCann(tmp_path / "cann", "9.1.0", machine=here)
    of_other = fake.home / f"{other}-linux" / "ascend_toolkit_install.info"
    of_other.parent.mkdir()
    of_other.write_text("version=8.0.0\n")
    found = toolchain.check_cann(fake.home)
    assert found.version == ((9, 1), "9.1.0")
    assert set(found.machines) == {here, other}


@pytest.mark.parametrize(("here", "other"), ARCHITECTURES)
@pytest.mark.parametrize("old_file", [False, True])
def test_a_cann_for_another_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str, other: str, old_file: bool
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: here)
    fake = FakeCann(tmp_path / "default", "9.1.0", machine=other, old_file=old_file)
    why = f"it is for {other}, and this machine is {here}"
    refused = f"CANN in {fake.home} does not run here: {why}. Install the {here} package of CANN's toolkit"
    with pytest.raises(ToolchainError, match=refused):
        toolchain.check_cann()
    rows = npu_rows(monkeypatch)
    assert not rows["CANN"][0]
    assert rows["CANN"][2].startswith(f"{why}: install")
    assert not rows["bisheng"][0]


def test_a_cann_that_does_not_say_what_it_is_for_is_taken(tmp_path: Path) -> None:
    fake = FakeCann(tmp_path / "cann", "9.1.0", old_file=True)
    (of_machine,) = fake.home.glob("*-linux")
    of_machine.rmdir()
    assert toolchain.check_cann(fake.home).machines == ()


@pytest.mark.parametrize("version", ["7.0.1", "8.0.0", "8.2.RC1"])
def test_an_old_cann_is_refused_with_the_reason(tmp_path: Path, version: str) -> None:
    fake = FakeCann(tmp_path / "cann", version)
    refused = rf"CANN is {version} \(in {fake.home}\), but it must be 8.3 or later \(.*SyncAll: they "
    with pytest.raises(ToolchainError, match=refused):
        toolchain.check_cann(fake.home)


@pytest.mark.parametrize(
    ("text", "version"),
    [("8.0.RC1.alpha002", (8, 0)), ("25.0.rc1", (25, 0)), ("10.1", (10, 1)), ("none", None), ("", None)],
)
def test_versions_are_read(text: str, version: tuple[int, int] | None) -> None:
    parsed = toolchain.parse_version(text)
    assert (parsed.numbers if parsed else None) == version


# Driver and processor.


@pytest.mark.parametrize(
    ("cann", "installed", "oldest"),
    [
        ("8.0.0", "24.1.rc1", None),
        ("8.0.0", "23.0.6", "24.1"),
        ("8.5.0", "25.0.1", None),
        ("8.5.0", "24.1.0", "25.0"),
        ("9.0.0", "25.0.1", None),
        ("9.1.0", "25.0.1", "25.2"),
        ("9.1.0", "26.0.rc1", None),
    ],
)
def test_the_driver_has_to_serve_the_cann(
    driver: Callable[[str], None], cann: str, installed: str, oldest: str | None
) -> None:
    driver(installed)
    version = toolchain.parse_version(cann)
    assert version is not None
    if oldest is None:
        assert toolchain.check_driver(version).text == installed
    else:
        message = f"driver is {installed}, but CANN {cann} needs {oldest} or later"
        with pytest.raises(ToolchainError, match=message):
            toolchain.check_driver(version)


def test_without_a_driver_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=r"driver is missing.*mount /usr/local/Ascend/driver"):
        toolchain.check_driver(toolchain.Version((9, 0), "9.0.0"))


@pytest.mark.parametrize("soc", ["Ascend910B4", "Ascend910_9392"])
def test_npu_smi_tells_the_processor(npu_smi: Callable[[str], None], soc: str) -> None:
    npu_smi(soc)
    assert toolchain.check_soc().name == soc


def test_torch_npu_tells_the_processor_first(
    npu_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    npu_smi("Ascend910B4")
    monkeypatch.setattr(toolchain.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    import torch

    device = types.SimpleNamespace(get_device_name=lambda: "Ascend910_9391")
    monkeypatch.setattr(torch, "npu", device, raising=False)
    assert toolchain.check_soc().name == "Ascend910_9391"

    def fails() -> str:
        raise RuntimeError("no device")

    monkeypatch.setattr(device, "get_device_name", fails)
    assert toolchain.check_soc().name == "Ascend910B4"


def test_without_a_processor_the_error_says_who_was_asked() -> None:
    with pytest.raises(ToolchainError, match="neither torch_npu nor npu-smi tells it"):
        toolchain.check_soc()


def test_all_versions_are_checked_together(
    tmp_path: Path, driver: Callable[[str], None], npu_smi: Callable[[str], None]
) -> None:
    fake = FakeCann(tmp_path / "cann", "9.0.0")
    driver("25.5.0")
    npu_smi("Ascend910B4")
    found = toolchain.check_versions(fake.home)
    assert found.cann.home == fake.home
    assert found.driver.text == "25.5.0"
    assert found.soc.vector_cores == 40
    unknown = FakeCann(tmp_path / "unknown", None)
    with pytest.raises(ToolchainError, match=r"version is unknown: no ascend_toolkit_install\.info"):
        toolchain.check_versions(unknown.home)


# Doctor.


def npu_rows(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[bool, str, str]]:
    monkeypatch.setattr(doctor.util, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor.library, "find", lambda: None)
    rows = [row for row in doctor.components() if row[0].startswith(doctor.NPU)]
    return {name.removeprefix(doctor.NPU): rest for name, *rest in rows}  # type: ignore[misc]


def test_doctor_tells_what_an_npu_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = npu_rows(monkeypatch)
    assert list(rows) == [
        *("CANN", "bisheng", "driver", "SoC", "Ascend C kernels", "torch_npu", "memfabric-hybrid"),
    ]
    assert not any(present for present, *_ in rows.values())
    assert rows["Ascend C kernels"][2] == "moe-triton build --backend npu"
    assert rows["torch_npu"][2] == install("npu")


def test_doctor_tells_what_an_npu_has(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    driver: Callable[[str], None],
    npu_smi: Callable[[str], None],
) -> None:
    fake = FakeCann(tmp_path / "default", "9.1.0")
    driver("25.5.0")
    npu_smi("Ascend910_9392")
    rows = npu_rows(monkeypatch)
    assert rows["CANN"][:2] == [True, f"9.1.0 in {fake.home}"]
    assert rows["bisheng"][:2] == [True, str(fake.bisheng)]
    assert rows["driver"][:2] == [True, "25.5.0"]
    assert rows["SoC"][:2] == [True, "Ascend910_9392, A3, 48 vector cores"]


def test_doctor_tells_what_does_not_fit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    driver: Callable[[str], None],
    npu_smi: Callable[[str], None],
) -> None:
    FakeCann(tmp_path / "default", "7.0.0", with_bisheng=False)
    driver("1.0")
    npu_smi("Ascend310P3")
    rows = npu_rows(monkeypatch)
    # What that CANN asks of a driver is not known.
    assert [name for name, (present, *_) in rows.items() if present] == ["driver"]
    assert f"it must be 8.3 or later ({toolchain.WHY_OLDEST_CANN})" in rows["CANN"][2]
    assert "SoC is 'Ascend310P3', but it must be one of A2's or A3's" in rows["SoC"][2]
    monkeypatch.setattr(toolchain, "HOMES", (tmp_path / "newer",))
    FakeCann(tmp_path / "newer", "9.1.0")
    rows = npu_rows(monkeypatch)
    assert rows["driver"][1:] == [
        "1.0",
        "The NPU's driver is 1.0, but CANN 9.1.0 needs 25.2 or later. "
        "Install a newer driver (Ascend HDK), or an older CANN.",
    ]
