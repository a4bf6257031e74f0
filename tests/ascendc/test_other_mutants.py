"""Every second mutant: the others are in test_mutants.py. A file's tests run in one process."""

from __future__ import annotations

import pytest

from .mutants import Mutant
from .mutation import PARAMETERS, check_killed


@pytest.mark.long  # seconds to compile each
@pytest.mark.parametrize("mutant", PARAMETERS[1::2])
def test_is_killed(mutant: Mutant, chosen_mutants: tuple[Mutant, ...]) -> None:
    check_killed(mutant, chosen_mutants)
