"""The examples run, by torchrun as a user starts them, and say so when something differs."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import pytest
from torch import Tensor

from moe_triton.processes import RankGroup
from tests.patience import seconds

ROOT = Path(__file__).resolve().parent.parent
MOE_LAYER = ROOT / "examples" / "moe_layer.py"


def test_the_layer_by_torchrun() -> None:
    # --standalone: a port of its own beside other tests.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*command, MOE_LAYER], capture_output=True, text=True, check=False, timeout=seconds(240)
    )
    assert ended.returncode == 0, ended.stderr
    lines = sorted(ended.stdout.splitlines())
    assert [line.split(", ")[0] for line in lines[:2]] == [
        f"rank {rank}: {64 - 8 * rank} tokens" for rank in range(2)
    ]
    assert lines[2:] == ["same as the dense layer, within 1%"]


def test_the_layer_by_itself() -> None:
    ended = subprocess.run(
        [sys.executable, MOE_LAYER], capture_output=True, text=True, check=False, timeout=seconds(120)
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0].startswith("rank 0: 64 tokens, ")
    assert lines[1:] == ["same as the dense layer, within 1%"]


def run_layer(rank: int, num_ranks: int, is_wrong: bool) -> int:
    names = runpy.run_path(str(MOE_LAYER))
    if is_wrong and rank == 0:  # the other ranks' layers agree, and have to hear of it
        right = names["DenseLayer"].forward

        def wrong(self: object, x: Tensor) -> Tensor:
            result: Tensor = right(self, x)
            result[-1] *= 1.1
            return result

        names["DenseLayer"].forward = wrong
    main = names["main"]
    assert isinstance(main, FunctionType)
    code: int = main()
    return code


@pytest.mark.parametrize("is_wrong", [False, True])
def test_the_layer_says_whether_it_agrees(ranks: Callable[[int], RankGroup], is_wrong: bool) -> None:
    assert ranks(2).run(run_layer, is_wrong) == [int(is_wrong)] * 2
