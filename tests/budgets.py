"""What tests may cost, in seconds of processor time, which load hardly changes; a pytest plug-in.

Each test is charged with what its process and all that it started took, its ranks and compilers too. One
beyond `MOST_S` fails. At the end of a run the files that took most are printed, and the budgets of folders.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import pytest

from tests.patience import PATIENCE, seconds
from tests.processor_time import of_tests

MOST_S, MOST_LONG_S = 40.0, 240.0
"""Of one test, and of one that is marked long: twice what any takes. Who is first pays for fixtures that
others use and for kernels that nobody has compiled, and processors have slow phases."""

BUDGETS_S: Mapping[str, tuple[float, float]] = {
    # folder: (make test, make test-long), on two cores, with kernels compiled before, and a quarter more
    "tests": (143, 165),
    "tests/aarch64": (30, 5),
    "tests/ascendc": (325, 870),
    "tests/autotune": (92, 45),
    "tests/autotune/gate": (15, 35),
    "tests/autotune/model": (140, 140),
    "tests/backends": (25, 30),
    "tests/bad_calls": (15, 85),
    "tests/balance": (40, 150),
    "tests/benchmarks": (50, 30),
    "tests/build": (95, 240),
    "tests/chaos": (20, 30),
    "tests/cli": (55, 30),
    "tests/distributed": (345, 830),
    "tests/flight": (15, 5),
    "tests/hosts": (45, 240),
    "tests/kernels": (75, 110),
    "tests/memory_order": (20, 155),
    "tests/npu": (90, 30),
    "tests/selftest": (34, 50),
    "tests/torch_npu_ops": (75, 30),
    "tests/trace": (30, 30),
}
DEAREST = (
    "ascendc/test_mutants.py",
    "distributed/test_operators.py",
    "ascendc/test_kernels.py",
    "distributed/test_hierarchy.py",
    "build/test_packages.py",
    "distributed/test_direct.py",
    "ascendc/test_other_mutants.py",
    "build/test_triton_package.py",
    "distributed/test_killed_servers.py",
    "ascendc/test_direct.py",
    "autotune/test_step_times.py",
    "benchmarks/test_records.py",
    "benchmarks/test_servers.py",
    "distributed/test_posted.py",
    "bad_calls/test_bad_calls.py",
    "distributed/test_close.py",
    "autotune/model/test_parts.py",
    "autotune/model/test_page.py",
    "ascendc/test_receiving.py",
    "ascendc/test_blocks.py",
    "npu/test_graphs.py",
    "cli/test_errors.py",
    "build/test_library.py",
    "build/test_cmake.py",
    "test_examples.py",
    "torch_npu_ops/test_compile.py",
)
"""Files that several workers begin with, for one of them alone would end with such a file."""
SHOWN = 10
PROPERTY, IS_LONG = "processor_s", "is_long"

_begun = pytest.StashKey[float]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker: files that take longest first, then those of many tests."""
    if not hasattr(config, "workerinput"):
        return
    place = {config.rootpath / "tests" / name: number for number, name in enumerate(DEAREST)}
    count = Counter(item.path for item in items)
    items.sort(key=lambda item: (place.get(item.path, len(place)), -count[item.path], item.path))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the fixtures, which the first test that asks for them is charged with."""
    item.stash[_begun] = of_tests()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Charges a test, once its fixtures have ended, and fails it if it takes too much."""
    report = yield
    if report.when != "teardown" or _begun not in item.stash:
        return report
    took = of_tests() - item.stash[_begun]
    is_long = item.get_closest_marker("long") is not None
    report.user_properties += [(PROPERTY, took), (IS_LONG, is_long)]
    most = seconds(MOST_LONG_S if is_long else MOST_S)
    if took > most and report.passed:
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} took {took:.1f} s of processor time, with its ranks and compilers, but a "
            f"{'long ' if is_long else ''}test may take {most:g} (MOE_TEST_PATIENCE is {PATIENCE:g}). "
            "Make it do less, or mark it long (CONTRIBUTING.md)."
        )
    return report


@dataclass
class Charge:
    """Of a file, or of a folder.

    Attributes:
        took: processor time, in seconds.
        tests: how many.
    """

    took: float = 0.0
    tests: int = 0

    def add(self, took: float) -> None:
        """One more test."""
        self.took += took
        self.tests += 1


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The files that took most, and what folders take of their budgets."""
    files: dict[str, Charge] = defaultdict(Charge)
    folders: dict[tuple[str, bool], Charge] = defaultdict(Charge)
    for reports in terminalreporter.stats.values():
        for report in reports:
            found = dict(getattr(report, "user_properties", ()))
            if getattr(report, "when", None) != "teardown" or PROPERTY not in found:
                continue
            path = PurePosixPath(report.nodeid.partition("::")[0])
            files[str(path)].add(found[PROPERTY])
            folders[str(path.parent), found[IS_LONG]].add(found[PROPERTY])
    if sum(charge.tests for charge in files.values()) < 2:
        return
    terminalreporter.section("processor time, in seconds")
    for name, charge in sorted(files.items(), key=lambda item: -item[1].took)[:SHOWN]:
        terminalreporter.write_line(f"{charge.took:8.1f}  {name}, {charge.tests} tests")
    for (name, is_long), charge in sorted(folders.items()):
        budget = BUDGETS_S.get(name, (0.0, 0.0))[is_long]
        beyond = "  beyond its budget" if charge.took > seconds(budget) else ""
        tier = "long" if is_long else ""
        terminalreporter.write_line(f"{charge.took:8.1f} of {budget:4g}  {name} {tier}{beyond}".rstrip())
