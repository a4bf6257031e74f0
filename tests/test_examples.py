"""The examples run, as a user starts them, and say so when something differs."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import pytest
from torch import Tensor

from moe_triton.balance import Placement
from moe_triton.processes import RankFailedError, RankGroup
from tests.patience import seconds

ROOT = Path(__file__).resolve().parent.parent
MOE_LAYER, SURVIVORS = (ROOT / "examples" / name for name in ("moe_layer.py", "survivors.py"))


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


def test_survivors_go_on_with_all_requests() -> None:
    ended = subprocess.run(
        [sys.executable, SURVIVORS, "--victim", "2", "--step", "4"],
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds(120),
    )
    assert ended.returncode == 0, ended.stderr
    *of_ranks, last = ended.stdout.splitlines()
    said = re.compile(r"(rank \d: 4 of 4 requests as on one rank; without \[2\]), (\d) step")
    found = [said.match(line) for line in sorted(of_ranks)]
    told = [each and each[1] for each in found]
    assert told == [f"rank {rank}: 4 of 4 requests as on one rank; without [2]" for rank in (0, 1, 3)]
    assert any(each and each[2] == "1" for each in found)  # they waited for results of the one that died
    assert last == "rank 2 was killed in step 4: the others went on"


def decode(rank: int, num_ranks: int, is_wrong: bool) -> int:
    names = runpy.run_path(str(SURVIVORS))
    with pytest.MonkeyPatch.context() as patch:
        if is_wrong:  # ids go on to the replicas that are lost
            right = Placement.table
            patch.setattr(Placement, "table", lambda self, layer, mask=None: right(self, layer))
        serve = names["serve"]
        assert isinstance(serve, FunctionType)
        code: int = serve(0, 1)
    return code


@pytest.mark.parametrize("is_wrong", [False, True])
def test_survivors_say_whether_requests_are_right(ranks: Callable[[int], RankGroup], is_wrong: bool) -> None:
    killed, *others = ranks(4).run(decode, is_wrong, allow_failures=True)
    assert isinstance(killed, RankFailedError)
    assert others == [int(is_wrong)] * 3
