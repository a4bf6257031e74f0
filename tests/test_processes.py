from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_triton.core.errors import ToolchainError
from moe_triton.processes import RankFailedError, RankGroup, run_ranks, tell
from tests.patience import seconds


def rank_and_size(rank: int, num_ranks: int, extra: str) -> tuple[int, int, str]:
    return rank, num_ranks, extra


def fail_on_one(rank: int, num_ranks: int) -> int:
    if rank == 1:
        raise ValueError("rank one is unhappy")
    return rank


def exit_on_one(rank: int, num_ranks: int) -> int:
    if rank == 1:
        os._exit(3)
    return rank


def never_end(rank: int, num_ranks: int) -> None:
    while rank == 0:
        time.sleep(0.1)


def test_results_come_by_rank() -> None:
    with RankGroup(3) as group:
        assert group.run(rank_and_size, "a") == [(0, 3, "a"), (1, 3, "a"), (2, 3, "a")]
        assert group.run(rank_and_size, "b")[2] == (2, 3, "b")


def test_a_failure_names_the_rank_and_its_reason() -> None:
    with pytest.raises(RankFailedError, match=r"rank 1: (.|\n)*rank one is unhappy"):
        run_ranks(fail_on_one, 2)


def test_a_dead_rank_is_a_failure_of_that_rank_only() -> None:
    results = run_ranks(exit_on_one, 3, allow_failures=True)
    assert results[0] == 0
    assert results[2] == 2
    assert isinstance(results[1], RankFailedError)


def test_the_deadline_ends_all_processes() -> None:
    with RankGroup(2) as group:
        with pytest.raises(RankFailedError, match=r"no result within 0\.5 s"):
            group.run(never_end, timeout_s=0.5)
        assert not any(process.is_alive() for process in group.processes)


UNGUARDED = """
import operator
from moe_triton.processes import RankGroup
with RankGroup(2, imports_main=False) as group:
    print(group.run(operator.add))
"""


@pytest.mark.parametrize("is_file", [True, False])
def test_a_script_without_a_guard_starts_ranks_that_do_not_import_it(tmp_path: Path, is_file: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    given = {"input": ""} if is_file else {"input": UNGUARDED}
    command = [sys.executable, str(script) if is_file else "-"]
    done = subprocess.run(command, **given, capture_output=True, text=True, timeout=seconds(120), check=False)
    assert (done.stdout, done.returncode) == ("[2, 3]\n", 0), done.stderr


def test_who_dies_because_of_a_missing_guard_is_told() -> None:
    with pytest.raises(RankFailedError, match="if __name__"):
        run_ranks(exit_on_one, 2)


def refuse(rank: int, num_ranks: int) -> None:
    if rank:
        raise ToolchainError("there is no compiler")
    raise KeyError("a bug")


def test_what_we_say_ourselves_is_told_apart_from_bugs() -> None:
    with pytest.raises(RankFailedError) as failed:
        run_ranks(refuse, 2)
    assert failed.value.messages == {1: "there is no compiler"}
    assert all("Traceback" in text for text in failed.value.failures.values())


def tell_twice(rank: int, num_ranks: int) -> int:
    tell(f"half of {rank}")
    tell(f"all of {rank}")
    return rank


def test_ranks_tell_how_far_they_are() -> None:
    heard: list[tuple[int, str]] = []
    found = run_ranks(tell_twice, 2, hear=lambda rank, said: heard.append((rank, said)))
    assert found == [0, 1]
    for rank in (0, 1):
        assert [said for of, said in heard if of == rank] == [f"half of {rank}", f"all of {rank}"]
    tell("nobody hears this")


IN_A_RANK = """
from moe_triton.processes import run_ranks
if __name__ == "__main__":
    print(run_ranks(divmod, 1))
"""


def test_a_triton_that_is_broken_keeps_no_rank_from_starting(tmp_path: Path) -> None:
    """What is wrong with it is said by the rank that needs it; without it none could say anything."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise AttributeError('of two versions')\n")
    script = tmp_path / "script.py"
    script.write_text(IN_A_RANK)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=seconds(120),
        check=False,
    )
    assert done.stdout == "[(0, 0)]\n", done.stderr
