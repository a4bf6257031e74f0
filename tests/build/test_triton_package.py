"""Upstream's triton and triton-ascend in one environment: what is said, and what mends it. No network."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pip
import pytest

from moe_triton.core import triton_package
from moe_triton.core.triton_package import OWNER, PACKAGE, Ownership, digest, write_placeholder
from tests.patience import seconds

SCRIPT = Path(triton_package.__file__)

UPSTREAM = {
    "triton/__init__.py": "__version__ = '3.7.1'\n",
    "triton/backends/__init__.py": "# finds back ends by entry points\n",
    "triton/backends/compiler.py": "class Language: ...\n",
    "triton/backends/nvidia/compiler.py": "from triton.backends.compiler import Language\n",
    "triton/knobs.py": "# upstream's only\n",
}
ASCEND = {
    "triton/__init__.py": "__version__ = '3.2.0'\n",
    "triton/backends/__init__.py": (
        "import importlib, os\n"
        "for name in os.listdir(os.path.dirname(__file__)):\n"
        "    if os.path.isdir(os.path.join(os.path.dirname(__file__), name)) and name[0] != '_':\n"
        "        importlib.import_module(f'triton.backends.{name}.compiler')\n"
    ),
    "triton/backends/compiler.py": "class BaseBackend: ...\n",
    "triton/backends/ascend/__init__.py": "",
    "triton/backends/ascend/compiler.py": "from triton.backends.compiler import BaseBackend\n",
}


def write_wheel(
    folder: Path, name: str, version: str, files: dict[str, str], requires: tuple[str, ...] = ()
) -> Path:
    """A wheel of Python files."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {each}" for each in requires)]
    texts = {
        **files,
        f"{info}/METADATA": "\n".join(["Metadata-Version: 2.1", *lines]) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},sha256={digest(text.encode())},{len(text)}\n" for path, text in texts.items())
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for inside, text in {**texts, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            wheel.writestr(inside, text)
    return path


class Place:
    """An environment of its own, with pip and a folder of wheels for all that pip may reach."""

    def __init__(self, folder: Path) -> None:
        self.python = folder / "environment" / "bin" / "python"
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", self.python.parents[1]],
            check=True,
            timeout=seconds(120),
        )
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.site = self.python.parents[1] / "lib" / version / "site-packages"
        for module in (pip, __import__("packaging")):
            source = Path(module.__file__).parent
            (self.site / source.name).symlink_to(source)
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        self.environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels)}
        self.environment |= {"PIP_CONFIG_FILE": os.devnull}

    def run(self, *arguments: object, code: int = 0) -> str:
        command = [str(self.python), *map(str, arguments)]
        done = subprocess.run(
            command,
            env=self.environment,
            cwd=self.wheels,
            capture_output=True,
            text=True,
            timeout=seconds(120),
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def pip(self, *arguments: object, code: int = 0) -> str:
        return self.run("-m", "pip", "--disable-pip-version-check", *arguments, code=code)

    def problem(self) -> str:
        """What the product says of this environment."""
        code = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import triton_package as t"
        return self.run("-c", f"{code}; print(t.ownership().problem)").strip()

    def installed(self) -> set[str]:
        return {path.name for path in self.site.glob("*.dist-info")}

    def clear(self) -> None:
        for path in self.site.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    made = Place(tmp_path_factory.mktemp("triton_package"))
    write_wheel(
        made.wheels, "torch", "2.13.0", {"torch.py": ""}, ('triton==3.7.1; platform_system == "Linux"',)
    )
    write_wheel(made.wheels, PACKAGE, "3.7.1", UPSTREAM)
    write_wheel(made.wheels, OWNER, "3.2.0", ASCEND)
    return made


@pytest.fixture
def empty(place: Place) -> Iterator[Place]:
    yield place
    place.clear()


def assert_holds(place: Place) -> None:
    """triton-ascend works, pip is content, and installing everything again changes nothing."""
    assert place.problem() == ""
    code = "import triton, triton.backends; print(triton.__version__)"
    assert place.run("-c", code).strip() == "3.2.0"
    assert "No broken requirements" in place.pip("check")
    before = place.installed()
    assert "Successfully installed" not in place.pip("install", "torch", OWNER)
    assert place.installed() == before
    assert place.run("-I", SCRIPT, "mend") == ""


ORDERS = list(itertools.permutations(("torch", PACKAGE, OWNER)))


@pytest.mark.parametrize("order", [ORDERS[0], ORDERS[4]], ids="-".join)
def test_any_order_is_told_and_mended(order: tuple[str, ...], empty: Place) -> None:
    for name in order:
        empty.pip("install", "--no-deps", "--quiet", name)
    said = empty.problem()
    assert said.startswith("upstream triton 3.7.1 lies where triton-ascend 3.2.0 belongs: files ")
    assert "1 added (triton/backends/nvidia)" in said
    assert ("3 replaced (triton/__init__.py, ...)" in said) is (order.index(PACKAGE) > order.index(OWNER))
    told = empty.run("-I", SCRIPT, "mend")
    assert said in told
    assert "the name triton 3.7.1 is held by a package without files" in told
    assert not (empty.site / "triton/knobs.py").exists()
    assert_holds(empty)


@pytest.mark.long
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_every_order_and_an_uninstalled_upstream(order: tuple[str, ...], empty: Place) -> None:
    for name in order:
        empty.pip("install", "--no-deps", "--quiet", name)
    empty.pip("uninstall", "--yes", "--quiet", PACKAGE)
    said = empty.problem()
    assert said.startswith("triton-ascend 3.2.0 is not whole: files 3 missing (triton/__init__.py, ...)")
    empty.run("-I", SCRIPT, "mend")
    assert_holds(empty)
    # The next command that asks for upstream's by name gets it, and the same cure holds again.
    empty.pip("install", "--no-deps", "--quiet", "--force-reinstall", "--ignore-installed", PACKAGE)
    assert "upstream triton 3.7.1 lies where" in empty.problem()
    empty.run("-I", SCRIPT, "mend")
    assert_holds(empty)


def test_a_name_that_is_held_beforehand_keeps_upstream_away(empty: Place) -> None:
    empty.pip("install", "--no-deps", "--quiet", "torch")
    assert empty.run("-I", SCRIPT, "hold").strip() == "3.7.1"
    empty.pip("install", "--quiet", "torch", OWNER)
    assert not (empty.site / "triton/knobs.py").exists()
    assert_holds(empty)


def test_nothing_is_changed_where_the_wheel_cannot_be_had(empty: Place) -> None:
    for name in (OWNER, PACKAGE):
        empty.pip("install", "--no-deps", "--quiet", name)
    away = empty.wheels.rename(empty.wheels.with_name("away"))
    empty.wheels.mkdir()
    before = sorted(path for path in (empty.site / PACKAGE).rglob("*.py"))
    try:
        said = empty.run("-I", SCRIPT, "mend", code=1)
    finally:
        empty.wheels.rmdir()
        away.rename(empty.wheels)
    assert "pip download --no-deps failed" in said
    assert "Nothing was changed." in said
    assert sorted(path for path in (empty.site / PACKAGE).rglob("*.py")) == before


def test_a_version_that_lies_over_upstream_on_purpose_is_whole(empty: Place, tmp_path: Path) -> None:
    # triton-ascend's FAQ: since 3.2.1 it requires upstream's and is laid over it.
    later = write_wheel(tmp_path, OWNER, "3.2.2", ASCEND, ("triton==3.7.1",))
    empty.pip("install", "--quiet", PACKAGE)
    empty.pip("install", "--quiet", later)
    assert empty.problem() == ""
    empty.pip("install", "--quiet", "--no-deps", "--force-reinstall", "--ignore-installed", PACKAGE)
    assert empty.problem().startswith("upstream triton 3.7.1 lies where triton-ascend 3.2.2 belongs")


def test_what_hides_another_environment_s_is_told_and_uninstalled(empty: Place) -> None:
    below = empty.wheels.with_name("below")
    empty.pip("install", "--no-deps", "--quiet", "--target", below, OWNER)
    (empty.site / "below.pth").write_text(f"{below}\n")
    try:
        assert empty.problem() == ""
        empty.pip("install", "--no-deps", "--quiet", "--ignore-installed", PACKAGE)
        said = f"triton 3.7.1 in {empty.site / PACKAGE} hides triton-ascend 3.2.0"
        assert empty.problem() == said
        assert said in empty.run("-I", SCRIPT, "mend")
        assert empty.problem() == ""
        assert empty.run("-c", "import triton; print(triton.__version__)").strip() == "3.2.0"
    finally:
        (empty.site / "below.pth").unlink()


def test_no_pip_and_no_right_to_write_are_said_in_a_sentence(
    empty: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (OWNER, PACKAGE):
        empty.pip("install", "--no-deps", "--quiet", name)
    (empty.site / "pip").rename(empty.site / "away")
    try:
        said = empty.run("-I", SCRIPT, "mend", code=1)
    finally:
        (empty.site / "away").rename(empty.site / "pip")
    assert "there is no pip in this environment: python -m ensurepip" in said
    assert "Nothing was changed." in said
    monkeypatch.setattr(triton_package.os, "access", lambda path, mode: False)
    with pytest.raises(triton_package.MendError, match=r"cannot be written: .*Nothing was changed\."):
        triton_package._check_writable(empty.site)


def test_a_name_that_is_no_longer_held_is_told(empty: Place) -> None:
    code = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import triton_package as t"
    empty.pip("install", "--no-deps", "--quiet", "torch", OWNER)
    assert empty.run("-c", f"{code}; print(t.would_hold())").strip() == "True"
    empty.run("-I", SCRIPT, "mend")
    assert empty.run("-c", f"{code}; print(t.would_hold())").strip() == "False"


def test_a_patched_file_is_nobody_elses(empty: Place) -> None:
    empty.pip("install", "--no-deps", "--quiet", OWNER)
    (empty.site / "triton/backends/compiler.py").write_text("class BaseBackend: ...  # patched\n")
    assert empty.problem() == ""
    (empty.site / "triton/backends/compiler.py").unlink()
    assert "is not whole: files 1 missing (triton/backends/compiler.py)" in empty.problem()


def test_nothing_is_said_where_triton_ascend_is_not(empty: Place) -> None:
    empty.pip("install", "--no-deps", "--quiet", PACKAGE)
    assert empty.problem() == ""
    assert empty.run("-I", SCRIPT, "mend") == ""
    assert (empty.site / "triton/knobs.py").exists()


def test_this_environment_is_whole() -> None:
    found = triton_package.ownership()
    assert found == Ownership(found.version)


def test_a_placeholder_has_no_files(tmp_path: Path) -> None:
    wheel = write_placeholder(tmp_path, "3.7.1")
    assert wheel.name == "triton-3.7.1-py3-none-any.whl"
    info = "triton-3.7.1.dist-info"
    assert zipfile.ZipFile(wheel).namelist() == [f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD")]
