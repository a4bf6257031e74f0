"""The commands that errors name for what is missing can be run as they stand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

import moe_triton
from moe_triton import EPBuffer, ToolchainError
from moe_triton.backends.cpu.triton import toolchain
from moe_triton.backends.cpu.triton.frontend import tensor_ir
from moe_triton.core import installing, triton_package
from moe_triton.core.triton_package import FIX, MendError
from moe_triton.kernels.route import route_kernel
from moe_triton.tools.cli import doctor
from moe_triton.tools.cli.app import app
from tests.patience import seconds

ROOT = Path(moe_triton.__file__).parents[1]


@pytest.fixture
def note(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """What pip has noted of where this package came from."""
    found: dict[str, object] = {}

    class Distribution:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return json.dumps(found) if found else None

    monkeypatch.setattr(metadata, "distribution", lambda name: Distribution())
    installing._source.cache_clear()
    yield found
    installing._source.cache_clear()


def test_a_checkout_and_a_wheel_file_are_named(note: dict[str, object], tmp_path: Path) -> None:
    folder = tmp_path / "my moe"
    folder.mkdir()
    note.update(url=folder.as_uri(), dir_info={"editable": True})
    assert installing.install("cpu") == f"pip install -e '{folder}[cpu]'"
    installing._source.cache_clear()
    wheel = tmp_path / "moe_triton-0.1.0-cp311-cp311-linux_x86_64.whl"
    wheel.touch()
    note.clear()
    note.update(url=wheel.as_uri(), archive_info={})
    assert installing.install("npu") == f"pip install '{wheel}[npu]'"
    assert installing.reinstall() == f"pip install --force-reinstall --no-deps '{wheel}'"


@pytest.mark.parametrize("url", ["file:///dev/null/away", "https://index.example/moe_triton.whl", ""])
def test_what_is_not_there_any_more_is_described(url: str, note: dict[str, object]) -> None:
    note.update(url=url)
    assert installing.install("tune") == "pip install '/path/to/moe_triton[tune]'"


FOLDERS = (
    *("moe_triton", "autotune", "kernels_ascendc", "benchmarks", "examples", "docs", "tests"),
    *(".ci", ".github"),
)
SUFFIXES = {".py", ".md", ".toml", ".h", ".cpp", ".cmake", ".yml"}


def texts_of(root: Path) -> Iterator[Path]:
    """The files that are read or run, in a checkout or in a source package."""
    for path in (*root.iterdir(), *(path for folder in FOLDERS for path in (root / folder).rglob("*"))):
        if path.is_file() and (path.suffix in SUFFIXES or path.name == "Makefile"):
            yield path


def test_no_page_and_no_message_takes_a_name_that_is_in_no_index() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in texts_of(ROOT) if path != Path(__file__)}
    assert len(texts) > 500
    by_name = re.compile(r"pip3? install[^\n]*(?<![\w/.])moe_triton(?![\w/.-])")
    lines = [f"{path}: {line}" for path, text in texts.items() for line in text.splitlines()]
    assert [line for line in lines if by_name.search(line)] == []


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"moe_triton {moe_triton.__version__}\n")


SPOILT = triton_package.Ownership("3.2.0", "3.7.1", (), ("triton/__init__.py", "triton/jit.py"))
TOLD = (
    "upstream triton 3.7.1 lies where triton-ascend 3.2.0 belongs: files 2 replaced "
    f"(triton/__init__.py, ...). Run: {FIX}"
)


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """triton-ascend as it is after upstream's triton was installed over it."""
    monkeypatch.setattr(triton_package, "ownership", lambda: SPOILT)
    toolchain.find_toolchain.cache_clear()
    yield
    toolchain.find_toolchain.cache_clear()


@pytest.mark.usefixtures("spoilt")
def test_construction_compile_and_doctor_say_whose_files_lie_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ToolchainError) as at_construction:
        EPBuffer(num_max_tokens_per_rank=4, hidden=1024, num_topk=2, num_experts=8)
    assert TOLD in str(at_construction.value)
    with pytest.raises(ToolchainError) as at_compile:
        tensor_ir(route_kernel(), named_ops=True)
    assert str(at_compile.value) == TOLD
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "400"})
    assert result.exit_code == 1
    assert TOLD in " ".join(result.output.split())


def test_doctor_says_what_it_has_fixed_and_what_stands_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.triton_package, "mend", lambda: "")
    assert "There is nothing to fix." in CliRunner().invoke(app, ["doctor", "--fix"]).output
    monkeypatch.setattr(doctor.triton_package, "mend", lambda: "triton-ascend is whole again")
    assert "triton-ascend is whole again" in CliRunner().invoke(app, ["doctor", "--fix"]).output

    def refuse() -> str:
        raise MendError("pip download --no-deps failed:\nNothing was changed.")

    monkeypatch.setattr(doctor.triton_package, "mend", refuse)
    result = CliRunner().invoke(app, ["doctor", "--fix"])
    assert result.exit_code == 1
    assert "Nothing was changed." in result.output


def test_a_triton_that_cannot_be_imported_leaves_the_command_that_fixes_it() -> None:
    program = """
import sys
sys.modules["triton"] = None
from moe_triton.tools.cli.app import app
app(["doctor", "--help"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=seconds(120)
    )
    assert done.returncode == 0, done.stderr
    assert "--fix" in done.stdout


def test_doctor_says_what_runs_where_no_triton_is_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "LAST_PYTHON", (3, 9))
    monkeypatch.setattr(toolchain, "package_folder", lambda package: None)
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "400"})
    assert result.exit_code == 1
    assert "no index has it for Python 3." in result.output
    assert 'runs without Triton kernels only: kernels="torch"' in result.output
    monkeypatch.setattr(doctor.native, "find", lambda: None)
    assert "The CPU back end cannot run as it is." in CliRunner().invoke(app, ["doctor"]).output


def test_a_folder_that_an_uninstalled_triton_leaves_is_none(tmp_path: Path) -> None:
    (tmp_path / "triton" / "language").mkdir(parents=True)  # can be imported, as a namespace
    program = f"""
import importlib.machinery, importlib.util
spec = importlib.machinery.PathFinder.find_spec("triton", [{str(tmp_path)!r}])
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: spec if name == "triton" else real(name, *rest)
from moe_triton.kernels.language import HAVE_TRITON
from moe_triton.kernels.route import route_kernel
print(HAVE_TRITON, route_kernel().name)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=seconds(120), check=False
    )
    assert done.stdout.split() == ["False", "route"], done.stderr
