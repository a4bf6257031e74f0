"""Both builds of the kernels, compiled once per source text."""

from __future__ import annotations

import pytest

from .library import Library, build
from .mutants import Mutant


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


@pytest.fixture(scope="module")
def chosen_mutants(request: pytest.FixtureRequest) -> tuple[Mutant, ...]:
    """Those of a file that were asked for, in their order."""
    chosen = [
        item.callspec.params.get("mutant")
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    return tuple(mutant for mutant in chosen if mutant is not None)
