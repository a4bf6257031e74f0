"""What tests are charged with, and what a red run says."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import cast

import pytest

from tests.budgets import BUDGETS_S, DEAREST, pytest_collection_modifyitems
from tests.inner_run import ROOT, said_of
from tests.patience import seconds
from tests.processor_time import of_nobody, of_tests, of_tree

BURN = "import sys, time\nwhile time.process_time() < 0.5: pass\n"
READ = "sys.stdin.read()"
CONFTEST = 'pytest_plugins = ["tests.budgets", "tests.red_runs"]\n'
FILE = """
import subprocess, sys, time
import pytest

def test_that_is_quick():
    pass

@pytest.mark.parametrize("how", ["itself", "a process"])
def test_that_burns(how):
    code = "import time\\nwhile time.process_time() < 1.2: pass"
    if how == "itself":
        begun = time.process_time()
        while time.process_time() - begun < 1.2:
            pass
    else:
        subprocess.run([sys.executable, "-c", code], check=True)

@pytest.mark.long
def test_that_may_burn():
    test_that_burns("a process")

def test_that_sleeps():
    time.sleep(1.2)

def test_that_is_wrong():
    print("what it said")
    raise RuntimeError("rank 1 waited for rank 3")
"""


def test_a_process_is_charged_with_what_it_started() -> None:
    before = of_tree()
    running = subprocess.Popen([sys.executable, "-c", BURN + READ], stdin=subprocess.PIPE)
    running.communicate(timeout=seconds(60))
    assert of_tree() - before > 0.4
    running = subprocess.Popen(
        [sys.executable, "-c", BURN + "print(flush=True)\n" + READ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert running.stdout is not None
    running.stdout.readline()  # it still lives
    assert of_tree() - before > 0.8
    running.communicate(timeout=seconds(60))


def test_what_a_session_does_once_is_no_tests() -> None:
    before, all_before = of_tests(), of_tree()
    with of_nobody():
        subprocess.run([sys.executable, "-c", BURN], check=True, timeout=seconds(60))
    assert of_tree() - all_before - (of_tests() - before) > 0.4


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a run prints, in which a test may take a second, and a long one five."""
    conftest = f"{CONFTEST}from tests import budgets\nbudgets.MOST_S, budgets.MOST_LONG_S = 1.0, 5.0\n"
    own = {"conftest.py": conftest, "pytest.ini": "[pytest]\nmarkers = long\n", "test_file.py": FILE}
    return said_of(tmp_path_factory.mktemp("budgets"), own, workers=2)


def test_who_takes_too_much_fails_and_others_do_not(said: str) -> None:
    found = re.findall(r"^(?:ERROR|FAILED) test_file\.py::(\S+)", said, flags=re.M)
    assert set(found) == {"test_that_burns[itself]", "test_that_burns[a", "test_that_is_wrong"}
    assert re.search(r"1 failed, 5 passed, .*2 errors", said)
    assert "with its ranks and compilers, but a test may take 1 (MOE_TEST_PATIENCE is 1)" in said


def test_files_are_printed_by_what_they_took(said: str) -> None:
    took, tests = re.findall(r"^ *([\d.]+)  test_file\.py, (\d+) tests$", said, flags=re.M)[0]
    assert 3.5 < float(took) < 10
    assert tests == "6"


def test_the_last_lines_say_why(said: str) -> None:
    last = said.splitlines()[-60:]
    begins = next(i for i, line in enumerate(last) if line.startswith("3 failed; the first of them"))
    why = "\n".join(last[begins:])
    assert "FAILED test_file.py::test_that_is_wrong (call)" in why
    assert "rank 1 waited for rank 3" in why
    assert re.search(r"  load [\d. ]+ on \d+ cores, [\d.]+ GB of memory and [\d.]+ GB of /dev/shm free", why)


def test_dear_files_come_first_and_then_those_of_many_tests() -> None:
    assert all((ROOT / "tests" / name).is_file() for name in DEAREST)
    assert len(set(DEAREST)) == len(DEAREST)
    files = ["test_a.py", DEAREST[1], "test_b.py", "test_b.py", DEAREST[0], "test_c.py"]
    items = [SimpleNamespace(path=ROOT / "tests" / name, number=n) for n, name in enumerate(files)]
    for config, order in (
        (SimpleNamespace(rootpath=ROOT, workerinput={}), [4, 1, 2, 3, 0, 5]),
        (SimpleNamespace(rootpath=ROOT), [0, 1, 2, 3, 4, 5]),
    ):
        found = items[:]
        pytest_collection_modifyitems(cast("pytest.Config", config), cast("list[pytest.Item]", found))
        assert [item.number for item in found] == order


def test_every_folder_has_a_budget() -> None:
    found = {path.parent.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}
    assert {str(folder) for folder in found} == set(BUDGETS_S)
