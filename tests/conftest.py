"""Fixtures that every test may use."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import surroundings  # before torch, which reads some of what it takes away

# isort: split
from moe_triton.backends.cpu.triton.cache import why_unsafe
from moe_triton.processes import RankGroup
from tests.patience import seconds
from tests.processor_time import lives

ANSWER_S = seconds(120)
KEPT_KERNELS = Path(__file__).resolve().parents[1] / "build" / "test-kernels"  # `make clean` removes it
KEPT_S = 14 * 24 * 3600.0

pytest_plugins = ["tests.budgets", "tests.leftovers", "tests.red_runs"]

# Examples are real work on two shared cores: no deadline per example, pytest-timeout bounds the test.
settings.register_profile(
    "moe_triton",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("moe_triton")

# A run imports the library in hundreds of processes, and tests in each worker: compiled once is enough.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell starts commands in the background with Ctrl-C ignored, and processes inherit that; but tests
# interrupt theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """The time that a test has at most is a deadline too."""
    if config.getoption("timeout", None) is None:
        config.option.timeout = seconds(float(config.getini("timeout")))


def pytest_sessionstart() -> None:
    """When pytest has looked at the terminal, and before a module of tests makes something of it."""
    surroundings.forget(surroundings.TERMINAL)


def _shared_by_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.getbasetemp()
    return root.parent if "PYTEST_XDIST_WORKER" in os.environ else root


@pytest.fixture(scope="session", autouse=True)
def away_from_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test sees the user's own files, nor leaves any there."""
    with surroundings.away_from_home(_shared_by_workers(tmp_path_factory) / surroundings.HOME_NAME):
        yield


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Compiled kernels go to a folder of this checkout, shared by workers, their ranks and later runs.

    An entry's name is a digest of all that it is made of, so that what was changed is compiled anew.
    """
    root = _shared_by_workers(tmp_path_factory)
    folder = _kept_folder() or root / "kernel-cache"
    folder.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_TRITON_CACHE", str(folder))
        (root / "tables").mkdir(exist_ok=True)  # workers share it, too
        patch.setenv("MOE_TRITON_TABLES", str(root / "tables"))  # none of the user's own
        yield folder


def _kept_folder() -> Path | None:
    """None where the checkout is somebody else's, or nothing can be written there, or others can, too."""
    try:
        KEPT_KERNELS.mkdir(mode=0o700, parents=True, exist_ok=True)
        oldest = time.time() - KEPT_S
        for entry in KEPT_KERNELS.iterdir():
            if entry.stat().st_mtime < oldest:
                entry.unlink(missing_ok=True)
    except OSError:
        return None
    is_ours = KEPT_KERNELS.stat().st_uid == os.geteuid() and os.access(KEPT_KERNELS, os.W_OK)
    is_ours = is_ours and not why_unsafe(KEPT_KERNELS)
    return KEPT_KERNELS if is_ours else None


class PatientGroup(RankGroup):
    """Its deadlines are those of tests."""

    def run(self, *arguments: Any, timeout_s: float = ANSWER_S, **options: Any) -> list[Any]:
        """See `RankGroup.run`."""
        return super().run(*arguments, timeout_s=timeout_s, **options)


@pytest.fixture(scope="module")
def ranks(kernel_cache: Path) -> Iterator[Callable[[int], RankGroup]]:
    """Groups of processes by size, started when first asked for and kept for the module's tests."""
    groups: dict[int, RankGroup] = {}

    def group(num_ranks: int) -> RankGroup:
        started = groups.get(num_ranks)
        if started is None or not all(process.pid and lives(process.pid) for process in started.processes):
            if started is not None:  # a test that failed has taken it along
                started.close()
            groups[num_ranks] = started = PatientGroup(num_ranks, timeout_s=ANSWER_S)
        return started

    yield group
    for started in groups.values():
        started.close()
