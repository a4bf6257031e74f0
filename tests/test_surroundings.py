"""Nothing from outside decides: no test depends on the machine around it, or on its user."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.hosts import agent
from moe_triton.core import hccl
from tests.hosts import launched
from tests.patience import seconds
from tests.seen_from_inside import EXPECTED, is_forgotten, seen
from tests.surroundings import NOWHERE, ROOT, RUN, USERS

HOSTILE = {
    "HCCL_BUFFSIZE": "1",
    "HCCL_INTRA_PCIE_ENABLE": "1",
    "HCCL_INTRA_ROCE_ENABLE": "0",
    "MOE_TRITON_CACHE": f"{NOWHERE}/cache",
    "MOE_TRITON_TABLES": f"{NOWHERE}/tables",
    "ASCEND_HOME_PATH": "/usr/bin",
    "RANK": "3",
    "WORLD_SIZE": "5",
    "MASTER_ADDR": "nowhere.invalid",
    "OMP_NUM_THREADS": "1",
    "TRITON_INTERPRET": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "COLUMNS": "40",
    "TERM": "dumb",
    "TERMINAL_WIDTH": "30",
    "FORCE_COLOR": "1",
    "GITHUB_ACTIONS": "true",
    "LANG": "C",
    "LC_ALL": "C",
    "PYTHONIOENCODING": "latin-1",
    "PYTHONWARNINGS": "default",
    "HOME": f"{NOWHERE}/home",
    "XDG_CACHE_HOME": f"{NOWHERE}/cache",
    "XDG_CONFIG_HOME": f"{NOWHERE}/config",
}
# They print, look settings up and choose by them, and start a rank.
CHEAP = (
    "tests/seen_from_inside.py",
    "tests/test_limits_choice.py::test_a_buffer_inside_one_server_says_that_it_is_fullmesh",
    "tests/test_limits_choice.py::test_a_buffer_on_several_servers_goes_by_the_environment",
    "tests/test_limits_buffer_size.py",
    "tests/test_table_files.py",
    "tests/test_progress.py",
    "tests/selftest/test_report.py",
)


def sources(*folders: str) -> dict[Path, str]:
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in sorted(found)}


# What is taken away.


def test_hostile_surroundings_change_nothing(tmp_path: Path) -> None:
    """Variables, a home that is none, another current folder, and a umask by which nobody else may read."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", RUN))}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *(str(ROOT / name) for name in CHEAP),
        ],
        cwd=tmp_path,
        env=ours | HOSTILE,
        umask=0o077,
        capture_output=True,
        text=True,
        timeout=seconds(120),
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_this_run_is_away_from_home() -> None:
    assert seen()[1:] == EXPECTED[1:]  # variables may have come since: torch sets some


def variables_read(text: str) -> Iterator[str]:
    """Variables of the environment that a module reads by name."""
    tree = ast.parse(text)
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=of, attr="get" | "pop" | "setdefault"), args=[name, *_]):
                is_read = ast.unparse(of) == "os.environ"
            case ast.Call(func=ast.Attribute(attr="getenv"), args=[name, *_]):
                is_read = True
            case ast.Subscript(value=of, slice=name, ctx=ast.Load()):
                is_read = ast.unparse(of) == "os.environ"
            case ast.Compare(left=name, ops=[ast.In() | ast.NotIn()], comparators=[of]):
                is_read = ast.unparse(of) == "os.environ"
            case _:
                continue
        value = constants.get(name.id) if isinstance(name, ast.Name) else getattr(name, "value", None)
        if is_read and isinstance(value, str):
            yield value


def read_in(*folders: str) -> set[tuple[str, str]]:
    """Variables, and the files that read them."""
    texts = {path: text for path, text in sources(*folders).items() if re.search(r"\benviron\b|getenv", text)}
    return {(name, str(path)) for path, text in texts.items() for name in variables_read(text)}


def test_settings_of_the_product_are_no_tests() -> None:
    found = read_in("moe_triton", "autotune", "benchmarks", "examples")
    names = {name for name, _ in found}
    assert {"MOE_TRITON_CACHE", "MOE_TRITON_TABLES", "ASCEND_HOME_PATH", "WORLD_SIZE", "COLUMNS"} <= names
    known = {*USERS, "PYTHONPATH", agent.KEEPERS}
    assert {(name, path) for name, path in found if not is_forgotten(name) and name not in known} == set()
    for name in (hccl.BUFFSIZE, hccl.INTRA_PCIE, hccl.INTRA_ROCE):
        assert is_forgotten(name)


def test_tests_read_no_variable_that_they_do_not_set() -> None:
    known = {"CI", "CXX", "MOE_TEST_PATIENCE", "PATH", "PYTEST_XDIST_WORKER", "PYTHONDONTWRITEBYTECODE", RUN}
    known.add(launched.ENDED)  # set where others are started
    assert {(name, path) for name, path in read_in("tests") if name not in known} == set()


# What is written down.

# A path from the root of the file system: a text, or in one behind a space, a bracket, a comma, = or file://.
PLACE = re.compile(r"(?:^|(?<=[\s=(,'\"])|(?<=file://))/[A-Za-z][\w.-]*(?:/[\w.@-]+)*")
EVERYWHERE = (NOWHERE, "/dev/shm", "/dev/zero", "/proc", "/usr/bin", "/bin/cat")
# Texts that are printed, compared and taken apart: nobody looks there.
ONLY_TEXTS = {
    "tests/backends/test_shared_memory.py": ("/dev/vda", "/hidden", "/huge", "/x"),
    "tests/build/test_toolchain.py": ("/usr/local/Ascend/driver",),
    "tests/cli/test_errors.py": ("/none",),
    "tests/distributed/test_windows.py": ("/a/group",),
    "tests/npu/standin.py": ("/cann",),
    "tests/test_hosts.py": ("/some/where.so",),
    "tests/selftest/test_command.py": ("/home", "/tmp"),
    "tests/selftest/test_report.py": ("/home", "/data/x", "/opt/py", "/usr/local/Ascend", "/root"),
    "tests/test_docs.py": ("/path/to/moe_triton",),
    "tests/test_kept_memory.py": ("/moe_triton-",),
    "tests/torch_npu_ops/test_kept_plans.py": ("/moe_triton-",),
    "tests/test_installing.py": ("/path/to/moe_triton",),
}
# Whether it is there decides what can be tested at all.
LOOKED_FOR = {
    "tests/npu/test_memfabric.py": ("/dev/davinci_manager",),
    "tests/memory_order/test_relacy.py": ("/usr/include/relacy",),
}


def texts_of(tree: ast.Module) -> Iterator[str]:
    """A module's strings, and how those with values in them begin; not what documents it."""
    passed_by = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            passed_by |= {id(part) for part in node.values[1:]}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in passed_by:
            yield node.value


def test_what_is_to_be_nowhere_is_below_a_device() -> None:
    found = []
    for path, text in sources("tests").items():
        if path != Path("tests", Path(__file__).name) and PLACE.search(text):
            allowed = (*EVERYWHERE, *ONLY_TEXTS.get(str(path), ()), *LOOKED_FOR.get(str(path), ()))
            places = [place for text in texts_of(ast.parse(text)) for place in PLACE.findall(text)]
            found += [f"{path}: {place}" for place in places if not place.startswith(allowed)]
    assert found == []


def test_programs_are_the_users_choice() -> None:
    """git may be absent, or refuse a checkout that is somebody else's; compilers have other names."""
    command = re.compile(r'\[\s*"(git|g\+\+|gcc|c\+\+|cc|clang(?:\+\+)?)"')
    found = {str(path): command.findall(text) for path, text in sources("tests").items()}
    assert {path: programs for path, programs in found.items() if programs} == {}
