"""What tests and ranks see of their surroundings; tests/test_surroundings.py runs it in hostile ones."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from pathlib import Path

from moe_triton.processes import run_ranks
from tests.surroundings import FORGOTTEN, HOME_NAME, ROOT, TERMINAL, UMASK, USERS

SET_HERE = ("MOE_TRITON_CACHE", "MOE_TRITON_TABLES", "LC_ALL")
EXPECTED = ([], HOME_NAME, str(ROOT), UMASK)


def is_forgotten(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in (*FORGOTTEN, *TERMINAL))


def seen(rank: int = 0, num_ranks: int = 1) -> tuple[list[str], str, str, int]:
    """Variables, home, current folder and umask."""
    umask = os.umask(0)
    os.umask(umask)
    names = [name for name in os.environ if is_forgotten(name) and name not in SET_HERE]
    names += [name for name in USERS[1:] if name in os.environ]
    return names, Path.home().name, str(Path.cwd()), umask


def test_a_test_is_away_from_it_all() -> None:
    assert seen() == EXPECTED


def test_a_rank_is_away_from_it_all() -> None:
    assert run_ranks(seen, 1) == [EXPECTED]
