"""memfabric-hybrid itself: its control connection and the names that the back end uses need no NPU."""

from __future__ import annotations

from collections.abc import Callable
from importlib import util
from pathlib import Path

import pytest

from moe_triton.processes import RankGroup
from tests.npu import memfabric_workers, standin

pytestmark = [
    pytest.mark.skipif(util.find_spec("memfabric_hybrid") is None, reason="no memfabric-hybrid"),
    pytest.mark.skipif(Path("/dev/davinci_manager").exists(), reason="a machine with NPUs: use the selftest"),
]


@pytest.mark.parametrize("posts", [False, True])
def test_it_comes_as_far_as_the_driver(ranks: Callable[[int], RankGroup], posts: bool) -> None:
    """Rank 0's store starts and is reached; then both ranks say what is missing, and neither hangs."""
    for said in ranks(2).run(memfabric_workers.allocate, posts):
        assert "rank 0: memfabric.shm.initialize failed with -1: init hybm failed" in said
        assert "rank 1: memfabric.shm.initialize failed with -" in said


@pytest.mark.parametrize("kind", ["MTE", "RDMA"])
def test_a_window_is_asked_for_as_it_expects(ranks: Callable[[int], RankGroup], kind: str) -> None:
    for said in ranks(2).run(memfabric_workers.create, kind):
        assert "not initialized yet" in said


def test_it_has_what_the_stand_in_has() -> None:
    import memfabric_hybrid

    fake = standin.fake_memfabric()
    real = memfabric_hybrid.shm
    assert not {name for name in vars(fake) if not name.startswith("__")} - set(dir(memfabric_hybrid))
    assert not {name for name in vars(fake.shm) if not name.startswith("__")} - set(dir(real))
    assert vars(fake.shm.ShmDataOpType).keys() <= set(dir(real.ShmDataOpType))
    assert {"gva", "topology_can_reach", "destroy"} <= set(dir(real.ShareMemory))
    assert {"init_timeout", "create_timeout", "operation_timeout", "start_store"} <= set(dir(real.ShmConfig))
