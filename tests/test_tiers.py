"""Tiers hold what they say: the quick one nothing slow, and together they leave nothing out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import seconds
from tests.tiers import QUICK

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {name: Path(ROOT, name).read_text(encoding="utf-8") for name in QUICK if Path(ROOT, name).is_file()}
MAKEFILE = Path(ROOT, "Makefile").read_text(encoding="utf-8")


def quick_files_with(pattern: str) -> list[str]:
    """Those whose text has it, this file aside."""
    texts = {name: text for name, text in SOURCES.items() if name != "tests/test_tiers.py"}
    return [name for name, text in texts.items() if re.search(pattern, text)]


def commands_of(target: str) -> list[str]:
    """What a target of the Makefile runs."""
    (commands,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, flags=re.M)
    return [line.strip() for line in commands.splitlines()]


def test_quick_files_exist_and_have_tests() -> None:
    assert sorted(SOURCES) == sorted(QUICK)
    assert quick_files_with(r"(?m)^def test_") == [name for name in QUICK if name != "tests/test_tiers.py"]


def test_nothing_quick_is_long() -> None:
    assert quick_files_with(r"mark\.long") == []


def test_nothing_quick_builds_the_kernels() -> None:
    assert quick_files_with(r"mutants|\bbuild\(|\bLibrary\(|\bcmake\b") == []


def test_two_of_the_quick_files_run_ranks_as_processes() -> None:
    assert len(quick_files_with("RankGroup")) == 2


def test_the_list_is_printed_for_the_command_line() -> None:
    command = [sys.executable, "-m", "tests.tiers"]
    printed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=seconds(60)
    )
    assert printed.stdout.split() == list(QUICK)
    assert any("tests.tiers" in command for command in commands_of("test-quick"))


def test_what_quick_leaves_out_the_others_run() -> None:
    """`make test` takes all that is not long, `make test-long` the rest, and every change passes both."""
    usual, rest = commands_of("test")[0], commands_of("test-long")[0]
    assert re.fullmatch(r"\$\(BIN\)/python -m pytest( -n 3)?( \$\(SPREAD\))?( --durations=\d+)?", usual)
    # A worker that has died stays dead: see there.
    spread = r"^SPREAD := --dist loadfile --no-loadscope-reorder --max-worker-restart 0$"
    assert re.search(spread, MAKEFILE, flags=re.M)
    assert re.search(r" -m long tests$", rest)
    configuration = Path(ROOT, "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r"^addopts = .*-m 'not long'", configuration, flags=re.M)
    assert re.search(r'^testpaths = \["tests"\]$', configuration, flags=re.M)
    ci = Path(ROOT, ".ci", "run").read_text(encoding="utf-8").splitlines()
    assert {"make test", "make test-long"} <= set(ci)


@pytest.mark.parametrize("name", ["test_mutants.py", "test_other_mutants.py"])
def test_mutants_are_compiled_by_test_long_alone(name: str) -> None:
    text = Path(ROOT, "tests", "ascendc", name).read_text(encoding="utf-8")
    _, _, function = text.rpartition("def test_is_killed")[0].rpartition("\n\n")
    assert function.startswith("@pytest.mark.long")
    assert text.count("check_killed(") == 1
    assert "patches=" not in text
