"""What tests leave running is ended, and said."""

from __future__ import annotations

import subprocess

import pytest

from tests.inner_run import said_of
from tests.leftovers import end, running
from tests.patience import seconds
from tests.processor_time import lives

CONFTEST = 'pytest_plugins = ["tests.leftovers", "tests.red_runs"]\n'
SLEEPER = """
import os, subprocess, sys

def start():
    code = "import sys, time\\nprint(flush=True)\\ntime.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    process.stdout.readline()
    return process

def lives(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

def note(name, pid):
    open(os.path.join(os.path.dirname(__file__), name), "w").write(str(pid))

def noted(name):
    return int(open(os.path.join(os.path.dirname(__file__), name)).read())
"""
FILES = {
    "test_a_red.py": """
from sleeper import *

def test_that_fails():
    note("failed", start().pid)
    assert False, "red"

def test_that_comes_next():
    assert not lives(noted("failed"))
""",
    "test_b_left.py": """
from sleeper import *

def test_that_leaves_one():
    note("left", start().pid)

def test_where_it_may_live_on():
    assert lives(noted("left"))
""",
    "test_c_after.py": """
from sleeper import *

def test_that_it_is_gone():
    assert not lives(noted("left"))

def test_that_takes_its_worker_along():
    note("orphan", start().pid)
    os._exit(3)
""",
    "test_d_other.py": """
from sleeper import *

def test_after_that():
    assert not lives(noted("orphan"))
""",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a run of these files by one worker prints, in whose place another comes."""
    own = {"conftest.py": CONFTEST, "sleeper.py": SLEEPER, "pytest.ini": "[pytest]\n"}
    return said_of(tmp_path_factory.mktemp("leftovers"), {**own, **FILES}, workers=1)


def test_what_a_failure_left_is_gone_before_the_next_test(said: str) -> None:
    assert "left running, and killed" in said
    assert "FAILED test_a_red.py::test_that_fails" in said
    assert "test_that_comes_next" not in said


def test_a_file_that_leaves_processes_behind_fails(said: str) -> None:
    assert "test_b_left.py has left processes behind, which were killed:" in said
    assert "ERROR test_b_left.py::test_where_it_may_live_on" in said
    assert "test_that_it_is_gone" not in said


def test_what_a_dead_worker_left_is_gone_too(said: str) -> None:
    assert "FAILED test_c_after.py::test_that_takes_its_worker_along" in said
    assert "test_after_that" not in said


def test_servers_of_multiprocessing_stay() -> None:
    assert not any("multiprocessing.forkserver" in command for command in running().values())


def test_what_is_ended_lives_no_more() -> None:
    process = subprocess.Popen(["sleep", "600"])
    assert lives(process.pid)
    end({process.pid: "sleep"})
    assert not lives(process.pid)  # nobody has waited for it
    process.wait(timeout=seconds(10))
    assert not lives(process.pid)
