"""Where no triton-ascend is to be had, what needs it is skipped, and the torch fallbacks are tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moe_triton.backends.cpu.triton import loader
from moe_triton.backends.cpu.triton.toolchain import distribution_version, has_wheels


def _skip() -> None:
    pytest.skip("there is no triton-ascend for this Python")


@pytest.fixture(scope="session", autouse=True)
def toolchain() -> Iterator[None]:
    """The one that kernels are compiled by."""
    with pytest.MonkeyPatch.context() as patch:
        if not distribution_version("triton-ascend") and not has_wheels():
            patch.setattr(loader, "find_toolchain", _skip)
        yield
