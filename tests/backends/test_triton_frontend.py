"""Triton's front end is in one thread at a time, whoever asks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from autotune.npu_compiler.compile import npu_ir
from moe_triton.backends.cpu.triton.loader import load
from moe_triton.core.errors import ToolchainError
from moe_triton.core.kernel import TritonKernel
from moe_triton.kernels.route import route_kernel
from tests.patience import seconds

ASKED: dict[str, Callable[[TritonKernel], object]] = {"load": load, "npu_ir": npu_ir}
MOMENT = 0.2  # s in which another thread would come in


class _Source:
    """In the place of a Triton function: parsing it is what this test does then."""

    def __init__(self, parse: Callable[[], object]) -> None:
        self._parse = parse

    @property
    def cache_key(self) -> str:
        self._parse()
        raise ToolchainError("enough")


def _ask(what: str, parse: Callable[[], object]) -> None:
    with contextlib.suppress(ToolchainError):  # what the source ends with
        ASKED[what](replace(route_kernel(), fn=_Source(parse)))


@pytest.mark.parametrize("first", ["load", "npu_ir"])
@pytest.mark.parametrize("second", ["load", "npu_ir"])
def test_a_second_thread_waits(first: str, second: str) -> None:
    """With two in it, ast.parse of Python before 3.11.8 raises a SystemError in one of them."""
    events: list[str] = []
    other = threading.Thread(target=_ask, args=(second, lambda: events.append("second")))

    def parse() -> None:
        other.start()
        other.join(MOMENT)
        events.append("first")

    _ask(first, parse)
    other.join(seconds(60))
    assert events == ["first", "second"]
