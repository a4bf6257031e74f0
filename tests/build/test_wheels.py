"""Wheels for several machines: which there are, what is refused, and which libraries do not fit."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.patience import seconds
from wheels import __main__ as command
from wheels import build, check
from wheels.build import LEFT_OUT, PYTHONS, Wheel
from wheels.debian import Debian, MissingError, run

ROOT = Path(__file__).resolve().parents[2]


def test_each_python_has_wheels_or_is_left_out() -> None:
    classifiers = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert sorted([*PYTHONS, *LEFT_OUT]) == re.findall(r"Python :: (3\.\d+)", classifiers)


def test_a_wheel_is_named_for_what_it_is_for() -> None:
    wheel = Wheel("aarch64", "3.13")
    assert (wheel.interpreter, wheel.platform) == ("cp313", "manylinux_2_28_aarch64")


def test_a_python_without_headers_is_refused(tmp_path: Path) -> None:
    (other,) = {"x86_64", "aarch64"} - {build.platform.machine()}
    refused = rf"no headers of Python 3\.12 for {other} here: Debian has those of 3\.11 \(bookworm\)"
    with pytest.raises(MissingError, match=refused):
        build.build(Wheel(other, "3.12"), tmp_path, tmp_path)
    with pytest.raises(MissingError, match="machine is riscv64, but it must be x86_64 or aarch64"):
        build.build(Wheel("riscv64", "3.11"), tmp_path, tmp_path)


def test_the_command_says_what_there_is_and_what_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(wheel: Wheel, out: Path) -> Path:
        if wheel.machine == "aarch64":
            raise MissingError("no headers")
        path = out / f"{wheel.interpreter}.whl"
        path.touch()
        return path

    monkeypatch.setattr(command, "build", made)
    assert command.main(["--out", str(tmp_path), "--machine", "x86_64"]) == 0
    said = capsys.readouterr().out
    assert all(f"{tmp_path}/cp{python.replace('.', '')}.whl" in said for python in PYTHONS)
    assert "Python 3.10 and 3.12: no wheels" in said
    assert command.main(["--out", str(tmp_path), "--python", "3.11"]) == 1
    assert "no wheel for aarch64, Python 3.11: no headers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "is_allowed"),
    [
        ("manylinux_2_28_aarch64", True),
        ("manylinux_2_5_aarch64", True),
        ("manylinux_2_29_aarch64", False),
        ("manylinux_3_1_aarch64", False),
        ("manylinux_2_28_x86_64", False),
        ("musllinux_1_1_aarch64", False),
        ("linux_aarch64", False),
    ],
)
def test_what_runs_on_an_older_glibc_runs_on_a_newer_one(found: str, is_allowed: bool) -> None:
    assert check._allows(found, "manylinux_2_28_aarch64") == is_allowed


def test_a_program_that_fails_is_told_with_what_it_said() -> None:
    with pytest.raises(MissingError, match=r"sh -c 'echo no; exit 3' failed: no"):
        run(["sh", "-c", "echo no; exit 3"])


def test_packages_come_from_the_release_that_is_named(tmp_path: Path) -> None:
    config = Debian(tmp_path, "arm64", "trixie")._configure().read_text()
    assert 'APT::Architecture "arm64";' in config
    assert f'Dir::Etc::sourcelist "{tmp_path}/sources.list";' in config
    assert (tmp_path / "sources.list").read_text().split()[2:] == [
        "http://deb.debian.org/debian",
        "trixie",
        "main",
    ]
    assert "sourcelist" not in Debian(tmp_path, "arm64")._configure().read_text()


SOURCE = """
#include <cstring>
#include <string>
extern "C" void moe_copy(char* to, const char* from, unsigned long bytes) { std::memcpy(to, from, bytes); }
#ifdef SHOWS
std::string Name(int letters) { return std::string(letters, 'n'); }
#endif
#ifdef COPIES
extern "C" int moe_level() { return __builtin_cpu_supports("avx2"); }
#endif
"""


@pytest.mark.long
def test_a_library_that_does_not_fit_is_found(tmp_path: Path) -> None:
    pytest.importorskip("ziglang", reason="make .venv/.wheels")
    (tmp_path / "source.cpp").write_text(SOURCE)
    build._make_tools("x86_64", build.WORK)
    zig = build.WORK / "tools" / "x86_64-c++"

    def said(*options: str, compiler: str | Path = zig) -> str:
        output = tmp_path / "library.so"
        command = [compiler, "-shared", "-fPIC", "-O2", *options, "source.cpp", "-o", output]
        subprocess.run(list(map(str, command)), cwd=tmp_path, check=True, timeout=seconds(200))
        return "; ".join(check.library_problems(output.read_bytes()))

    assert said() == ""
    assert "shows C++ names, which another library's could replace: _Z" in said("-DSHOWS")
    assert "another memcpy" in said("-DCOPIES")
    assert "needs libstdc++.so.6" in said("-DSHOWS", compiler="g++")
