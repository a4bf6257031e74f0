"""Where no triton-ascend is to be had, what needs it is skipped, and the torch fallbacks are tested."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from moe_triton.backends.cpu.triton.toolchain import distribution_version, has_wheels
from moe_triton.core.errors import ToolchainError

IS_TO_BE_HAD = bool(distribution_version("triton-ascend")) or has_wheels()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    try:
        return (yield)
    except ToolchainError as error:
        if IS_TO_BE_HAD:
            raise
        pytest.skip(f"there is no triton-ascend for this Python: {error}")
