"""Packages hold the sources that `moe-triton build` needs, and the command builds the CPU's library too."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import moe_triton
from moe_triton.backends.cpu import extension, native
from moe_triton.core import abi
from moe_triton.core.native_files import COUNTING_LIBRARY
from moe_triton.schemes.ascendc import LAUNCHED, tables
from moe_triton.tools import codegen
from moe_triton.tools.cli.app import app
from tests import surroundings
from tests.build.fake_cann import SOURCES
from tests.headers import HAS_HEADERS
from tests.patience import seconds
from wheels.build import Wheel, build

pytestmark = pytest.mark.long  # each compiles the kernels with all optimisations, or packs a checkout

ROOT = SOURCES.parent
FILES = {str(path.relative_to(ROOT)) for path in SOURCES.rglob("[!.]*") if path.is_file()}


def run_hook(code: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "ASCEND_HOME_PATH"}
    command = [sys.executable, "-c", f"import scikit_build_core.build as build; {code}"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=seconds(280))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of `make wheels`, for this machine and this Python."""
    pytest.importorskip("ziglang", reason="make .venv/.wheels")
    python = ".".join(map(str, sys.version_info[:2]))
    return build(Wheel(platform.machine(), python), tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_the_sources(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    native_folder = "moe_triton/_native"
    headers = {f"kernels_ascendc/include/{name}" for name in codegen.headers(tables())}
    assert {f"{native_folder}/{name}" for name in FILES | headers} <= names
    assert {f"{native_folder}/{name}" for name in (native.LIBRARY, COUNTING_LIBRARY)} <= names
    assert f"{native_folder}/{extension.FILE}" in names
    assert "moe_triton/py.typed" in names
    assert "autotune/cli/kernels.py" in names


@pytest.fixture
def outside() -> Iterator[Path]:
    """A folder that is gone afterwards: two gigabytes are installed there, and pytest would keep them."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.timeout(900)
def test_the_wheel_runs_the_demo_in_an_environment_of_its_own(wheel: Path, outside: Path) -> None:
    assert wheel.name.startswith(f"moe_triton-{moe_triton.__version__}-")
    python = outside / "environment" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= surroundings.of_user  # who may have named an index, and keeps what pip has fetched

    def run(*command: object, most_s: float) -> str:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=outside,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds(most_s),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "venv", python.parents[1], most_s=120)
    versions = ("--constraint", ROOT / "constraints.txt")
    run(python, "-m", "pip", "install", *versions, f"{wheel}[cpu]", most_s=600)
    where = run(python, "-c", "import moe_triton; print(moe_triton.__file__)", most_s=60)
    assert Path(where.strip()).is_relative_to(python.parents[1])
    small = ("--ranks", 2, "--tokens", 4, "--hidden", 512, "--topk", 2, "--experts", 4, "--rounds", 2)
    said = run(python.with_name("moe-triton"), "demo", *small, most_s=120)
    assert "equals the dense reference bit for bit" in " ".join(said.split())


def test_the_source_package_holds_the_sources(tmp_path: Path) -> None:
    run_hook(f"build.build_sdist({str(tmp_path)!r})")
    (package,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(package) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert names >= FILES
    assert "tests/build/fake_cann.py" in names


def test_the_command_builds_the_library_for_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    command = ["build", "--backend", "cpu", "--output", str(tmp_path), "--jobs", "2"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    path = tmp_path / native.LIBRARY
    abi.Abi(ctypes.CDLL(str(path)), path, "").check(*LAUNCHED)
    assert (tmp_path / COUNTING_LIBRARY).is_file()
    assert (tmp_path / extension.FILE).is_file() or not HAS_HEADERS
