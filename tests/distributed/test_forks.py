"""A child that was forked from a rank: its buffers are the parent's."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_triton.processes import RankGroup
from tests.distributed import closed
from tests.distributed.interrupted import Way
from tests.patience import seconds

Groups = Callable[[int], RankGroup]
REFUSED = (
    "BufferStateError",
    "this process was forked from the one that made the buffer. Construct one here.",
    True,
)


@pytest.mark.parametrize("way", [Way(num_blocks=2), Way("torch", "direct")], ids=str)
def test_a_forked_child_is_refused_and_leaves_the_parents_alone(
    ranks: Groups, way: Way, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    said = ranks(2).run(closed.fork, way, str(trace))[0]
    call, write, close = ast.literal_eval(said)
    assert call == write == REFUSED
    assert close == ("", "", True)
    events = json.loads(trace.read_text())["traceEvents"]
    calls = [event for event in events if event["ph"] == "X" and event["name"] == "dispatch #0"]
    assert sorted(event["pid"] for event in calls) == [0, 1]


def test_a_fork_while_a_thread_is_in_a_call(ranks: Groups) -> None:
    call, close = ast.literal_eval(ranks(2).run(closed.fork_meanwhile)[0])
    assert call == REFUSED
    assert close == ("", "", True)


# Blocks run on threads, which a forked child does not have.
BLOCKS_IN_A_CHILD = """
import os, sys
from moe_triton.backends.cpu.backend import CpuBackend
from moe_triton.kernels import Sizes, kernel_cases
from moe_triton.tools.selftest.kernel_cases import check_case

backend = CpuBackend()
case = next(c for c in kernel_cases(Sizes(8), 256, "cpu") if c.kernel.name == "pack")
wrong = check_case(case, backend, 2)
child = os.fork()
wrong += check_case(case, backend, 2)
if child:
    wrong += [str(status)] if (status := os.waitpid(child, 0)[1]) else []
sys.exit(str(wrong) if wrong else 0)
"""


def test_blocks_run_in_a_forked_child() -> None:
    subprocess.run([sys.executable, "-c", BLOCKS_IN_A_CHILD], check=True, timeout=seconds(100))
