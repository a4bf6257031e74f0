"""The published example with the bytes of our plans: what it counts, and what it leaves out."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.model.kernel_costs.movement import rdma_us
from benchmarks.servers.example import STAGES, example, example_flow, fullmesh, hierarchy, machine

ROW = 2 * 7168


@pytest.mark.parametrize(("posts", "messages"), [("aiv", 2 * 7), ("aicpu", 2 * 7)])
def test_wires_of_the_hierarchy(posts: str, messages: int) -> None:
    wires = hierarchy(posts)
    between, inside = wires.us(machine())
    assert between == pytest.approx(38.3, rel=0.01)
    assert inside == pytest.approx(8.0, rel=0.01)
    # 128 bytes go with a token of 8 experts, 32 with a row inside, 32 are an end flag.
    assert wires.between == 56 * (ROW + 128) + 7 * 32
    assert wires.inside == 112 * (ROW + 32)
    assert wires.posts == messages


def test_wire_of_the_fullmesh() -> None:
    wires, flow = fullmesh(), example_flow()
    rows = flow.sent.sum() - flow.sent[0]
    assert rdma_us(machine(), rows * ROW) == pytest.approx(86.1, rel=0.001)
    # A stamp goes with each row, a header and a flag with each of 63 blocks: 2% more.
    assert wires.between == rows * (ROW + 32) + 63 * (512 + 32)
    assert wires.us(machine())[0] == pytest.approx(86.1, rel=0.025)
    assert wires.posts == 63


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    found = {(r["case"]["route"], r["metric"]): r["value"] for r in example()}
    assert {route for route, _ in found} == {"fullmesh", *(f"hierarchy, {posts}" for posts in STAGES)}
    assert found["hierarchy, aiv", "between"] / found["fullmesh", "between"] == pytest.approx(0.44, abs=0.01)
    assert "The published example" in capsys.readouterr().out
    assert np.isfinite(list(found.values())).all()
