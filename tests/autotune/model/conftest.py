"""Fixtures of the model's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moe_triton.tables import kept


@pytest.fixture(scope="module", autouse=True)
def tables_are_read_once() -> Iterator[None]:
    """Nobody writes tables meanwhile, and a plan reads all of them: a quarter of the time."""
    with kept.keeping({}):
        yield
