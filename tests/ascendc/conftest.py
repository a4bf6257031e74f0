"""Both builds of the kernels, compiled once per source text."""

from __future__ import annotations

import pytest

from .library import Library, build


@pytest.fixture(scope="session")
def strict() -> Library:
    return Library(build(strict=True))


@pytest.fixture(scope="session")
def fast() -> Library:
    return Library(build(strict=False))


@pytest.fixture(params=["fast", "strict"])
def library(request: pytest.FixtureRequest) -> Library:
    """Either build."""
    built: Library = request.getfixturevalue(request.param)
    return built
