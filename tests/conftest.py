"""Fixtures that every test may use."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from moe_triton.processes import RankGroup

# Examples are real work on two shared cores: no deadline per example, pytest-timeout bounds the test.
settings.register_profile(
    "moe_triton",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("moe_triton")

# A shell starts commands in the background with Ctrl-C ignored, and processes inherit that; but tests
# interrupt theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Compiled kernels go to a folder of this test run, shared by its workers and their ranks."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder = root / "kernel-cache"
    folder.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_TRITON_CACHE", str(folder))
        (root / "tables").mkdir(exist_ok=True)  # workers share it, too
        patch.setenv("MOE_TRITON_TABLES", str(root / "tables"))  # none of the user's own
        yield folder


@pytest.fixture(scope="module")
def ranks(kernel_cache: Path) -> Iterator[Callable[[int], RankGroup]]:
    """Groups of processes by size, started when first asked for and kept for the module's tests."""
    groups: dict[int, RankGroup] = {}

    def group(num_ranks: int) -> RankGroup:
        if num_ranks not in groups:
            groups[num_ranks] = RankGroup(num_ranks)
        return groups[num_ranks]

    yield group
    for started in groups.values():
        started.close()
