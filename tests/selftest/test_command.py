"""``moe-triton selftest`` as a user meets it, and what it says of a machine that is not as it should be."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import json
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from moe_triton.tools.cli.app import app
from moe_triton.tools.selftest import private, run
from moe_triton.tools.selftest.check import STAGES, Check, Settings, run_on_rank
from moe_triton.tools.selftest.checks import environment
from moe_triton.tools.selftest.checks.kernels import kernel_checks
from moe_triton.tools.selftest.cpu_probe import CONSTANTS as CPU_CONSTANTS
from tests.selftest import probes

ROOT = Path(__file__).resolve().parents[2]
HAS_CORES = len(os.sched_getaffinity(0)) > 1


def selftest(folder: Path, *options: str) -> tuple[int, str, dict[str, Any]]:
    command = ["selftest", "--output", str(folder), *options]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, command, catch_exceptions=False)
    path = folder / "report.json"
    return result.exit_code, result.output, json.loads(path.read_text()) if path.exists() else {}


def statuses(document: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["status"] for check in document["checks"]}


@pytest.mark.parametrize(
    "check", kernel_checks(Settings(quick=True)), ids=lambda check: check.name.replace(" ", "_")
)
def test_kernels_give_what_they_give_in_torch(check: Check) -> None:
    """One by one, and before the command runs them all: compiling takes most of its time."""
    found = run_on_rank(0, 1, check.function, check.arguments, Settings(quick=True), check.on_device)
    assert found.wrong == ()
    assert found.figures["launches"] > 0


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("selftest") / "report"
    return *selftest(folder, "--backend", "cpu", "--quick"), folder


def test_a_machine_that_is_as_it_should_be_passes(quick: tuple[int, str, dict[str, Any], Path]) -> None:
    code, output, document, _ = quick
    assert [c for c in document["checks"] if c["status"] == "failed"] == []
    assert code == 0, output
    assert document["verdict"] == "passed"
    assert document["complete"]
    assert "Nothing has failed" in output


def test_the_report_is_of_every_stage_and_every_check(quick: tuple[int, str, dict[str, Any], Path]) -> None:
    _, _, document, _ = quick
    assert list(dict.fromkeys(check["stage"] for check in document["checks"])) == list(STAGES)
    planned = [
        c.name for c in (*environment.environment_checks(Settings()), *run.checks_of(Settings(quick=True), 2))
    ]
    assert [check["name"] for check in document["checks"]] == planned[1:]  # versions are the machine's
    skipped = [check for check in document["checks"] if check["status"] == "skipped"]
    assert [check["details"] for check in skipped] == [
        ["the cpu back end captures no graphs"],
        *([] if HAS_CORES else [["one block has no others to wait for"]]),
    ]
    timing = next(check for check in document["checks"] if check["stage"] == "timing")
    assert timing["figures"]["dispatch_call_p50_us"] > timing["figures"]["dispatch step route_us"] > 0


def test_the_constants_that_a_cpu_has_are_measured(quick: tuple[int, str, dict[str, Any], Path]) -> None:
    found: dict[str, float] = {}
    for check in quick[2]["checks"]:
        found |= check["figures"] if check["stage"] == "constants" else {}
    written = {"remote_write_gb_per_s", "flag_latency_us", "hop_us"}
    written |= {"sync_all_us"} if HAS_CORES else set()
    launched = {"launch_stream_us", "call_overhead_us", "cores"}
    read = {"memcpy_gb_per_s", "stream_gb_per_s", "stream_alone_gb_per_s"}
    assert written | launched | read | set(CPU_CONSTANTS) <= found.keys()
    for name in ("memcpy_gb_per_s", "stream_gb_per_s", "call_overhead_us"):
        assert 0 < found[f"{name} low"] < found[f"{name} high"], f"{name} was the same in every pass"


def test_the_report_tells_nothing_about_who_and_where(quick: tuple[int, str, dict[str, Any], Path]) -> None:
    _, _, document, folder = quick
    names = {socket.gethostname(), socket.gethostname().split(".")[0], Path.home().name}
    with contextlib.suppress(KeyError, OSError):  # a user without a name
        names.add(getpass.getuser())
    secrets = [name for name in names if len(name) >= private.SHORTEST and name.lower() not in private.WORDS]
    for path in folder.iterdir():
        text = path.read_text()
        assert [s for s in secrets if re.search(rf"(?<!\w){re.escape(s)}(?!\w)", text, flags=re.I)] == []
        for place in {str(Path.home()), str(ROOT), str(folder), sys.prefix, "/home/", "/tmp/"}:
            assert place not in text, f"{path.name}: {place}"
    assert document["machine"]["Python"] == ".".join(map(str, sys.version_info[:3]))


Replace = Callable[[str, Callable[..., Any]], None]


@pytest.fixture
def in_kernel_checks(monkeypatch: pytest.MonkeyPatch) -> Replace:
    """Puts another function in place of that of all kernels' checks."""

    def replace(name: str, function: Callable[..., Any]) -> None:
        real = run.kernel_checks

        def checks(settings: Settings) -> list[Check]:
            return [
                dataclasses.replace(check, function=function) if name in check.name else check
                for check in real(settings)
            ]

        monkeypatch.setattr(run, "kernel_checks", checks)

    return replace


def test_a_kernel_that_is_off_by_a_bit_fails_alone(tmp_path: Path, in_kernel_checks: Replace) -> None:
    in_kernel_checks("kernel", probes.check_kernel_with_wrong_pack)
    code, output, document = selftest(tmp_path, "--quick", "--only", "kernels")
    failed = [check for check in document["checks"] if check["status"] == "failed"]
    assert code == 1, output
    assert [check["name"] for check in failed] == ["kernel pack, H 512"]
    assert "pack/bf16-h512: rows differs in 1 of" in failed[0]["details"][0]
    assert document["summary"]["passed"] == len(document["checks"])  # versions are one more
    assert "failed kernels: kernel pack" in output
    assert "### kernels: kernel pack, H 512" in (tmp_path / "report.md").read_text()


def test_a_traceback_in_the_report_has_no_places(tmp_path: Path, in_kernel_checks: Replace) -> None:
    in_kernel_checks("kernel select", probes.check_that_stumbles)
    code, output, document = selftest(tmp_path, "--quick", "--only", "kernels")
    assert code == 1
    (check,) = [check for check in document["checks"] if check["status"] == "failed"]
    assert "IndexError" in check["details"][0]
    assert 'File "moe_triton/tools/selftest/check.py"' in check["details"][0]
    assert str(ROOT) not in check["details"][0] + output


@pytest.fixture
def no_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks look for one in vain, also where there is one."""
    real = run.environment_checks
    others = {
        environment.find_toolchain: probes.find_toolchain_without_an_npu,
        environment.find_versions: probes.find_versions_without_an_npu,
    }

    def checks(settings: Settings) -> list[Check]:
        return [
            dataclasses.replace(check, function=others.get(check.function, check.function))
            for check in real(settings)
        ]

    monkeypatch.setattr(run, "environment_checks", checks)


@pytest.mark.usefixtures("no_npu")
def test_without_an_npu_the_report_says_what_is_missing(tmp_path: Path) -> None:
    code, output, document = selftest(tmp_path, "--backend", "npu")
    assert code == 1
    assert "Traceback" not in output + json.dumps(document)
    found = statuses(document)
    assert found["toolchain"] == "failed"
    assert set(found.values()) <= {"failed", "skipped"}
    toolchain = next(check for check in document["checks"] if check["name"] == "toolchain")
    for missing in ("CANN is missing", "torch_npu is missing"):
        assert any(missing in detail for detail in toolchain["details"])
        assert missing in output
    skipped = [check for check in document["checks"] if check["status"] == "skipped"]
    assert len(skipped) > 50
    assert all("because of 'toolchain'" in check["details"][0] for check in skipped)
    assert document["machine"]["torch_npu"] == "not installed"
    assert not any(check["figures"] for check in document["checks"] if check["stage"] == "constants")


def test_assumptions_are_checked_before_anything_uses_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The declared ones; what holds is passed, what does not names its page."""
    declared = ModuleType("declared")
    declared.ASSUMPTIONS = probes.ASSUMPTIONS  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, environment.ASSUMPTIONS_MODULE, declared)
    checks = environment.environment_checks(Settings(backend="npu"))
    devices: list[int] = []
    torch_npu = ModuleType("torch_npu")
    torch_npu.npu = SimpleNamespace(set_device=devices.append)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu)
    names = [check.name for check in checks]
    assert names[:4] == ["versions", "toolchain", "assumption: water is wet", "assumption: stones float"]
    assert names.index("back end") > 4
    assert not any(check.on_device for check in checks[:5])
    assert [check.page for check in checks[2:4]] == ["Page of water", "Page of stones"]
    place = environment.Place(0, 1, Settings(backend="npu"))
    assert environment.check_assumption(place, "water is wet").wrong == ()
    assert environment.check_assumption(place, "stones float").wrong == ("one sank",)
    fallen = environment.check_assumption(place, "pigs fly")
    assert (fallen.wrong, fallen.left) == (("AttributeError: pigs have no wings",), True)
    assert devices == [0, 0, 0]


def test_a_stage_that_does_not_exist_is_named(tmp_path: Path) -> None:
    code, output, document = selftest(tmp_path / "none", "--only", "coffee")
    assert (code, document) == (1, {})
    assert "--only is 'coffee', but it must be one of" in output
    assert "kernels" in output


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, output, _ = selftest(tmp_path / "file" / "folder")
    assert code == 1
    assert f"{tmp_path / 'file' / 'folder'}: Not a directory" in output


def test_the_page_names_every_stage_and_every_option() -> None:
    page = (ROOT / "docs" / "selftest.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", page.split("| Stage |")[1].split("\n\n")[0], flags=re.M)
    assert tuple(listed) == STAGES
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["selftest", "--help"]).output
    options = set(re.findall(r"--[a-z-]+", shown)) - {"--help"}
    assert options == set(re.findall(r"^\| `(--[a-z-]+)` \|", page, flags=re.M))
