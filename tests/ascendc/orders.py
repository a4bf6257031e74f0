"""How many orders of arrival a case is run in."""

from __future__ import annotations

import pytest


def orders(few: int, many: int) -> pytest.MarkDecorator:
    """The seeds of a test: a few in `make test`, most of them in `make test-long`."""
    rest = pytest.param(range(few, many), marks=pytest.mark.long)
    return pytest.mark.parametrize("seeds", [range(few), rest], ids=["few", "many"])
