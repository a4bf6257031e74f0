"""Checks' functions that go wrong in every way, and kernels that do. Processes import them from here."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from moe_triton.backends.base import Backend, Bindings, Executable, Recording, TraceLog
from moe_triton.backends.npu import toolchain
from moe_triton.core.errors import ToolchainError
from moe_triton.core.plan import Plan
from moe_triton.kernels import Case, kernel_cases
from moe_triton.tools.selftest.check import Assumption, Finding, Place
from moe_triton.tools.selftest.checks import environment, kernels

PID = "pid"
OF_AN_NPU = ("torch_npu",)


def work(place: Place) -> Finding:
    return Finding(figures={"ranks": place.num_ranks, PID: os.getpid()}, facts={"said": "all is well"})


def hang(place: Place, hanging: int) -> Finding:
    while place.rank == hanging:
        time.sleep(0.05)
    return Finding()


def crash(place: Place) -> Finding:
    os._exit(3)


def stumble(place: Place) -> Finding:
    return Finding(wrong=(str([][1]),))


def lack(place: Place) -> Finding:
    raise ToolchainError("the gold compiler is missing")


def disagree(place: Place) -> Finding:
    return Finding(wrong=(f"{place.rank} is odd",) if place.rank % 2 else ())


def decline(place: Place) -> Finding:
    return Finding(skipped="there is nothing to do")


def fall() -> str:
    raise AttributeError("pigs have no wings")


ASSUMPTIONS = (
    Assumption("water is wet", "Page of water", lambda: None),
    Assumption("stones float", "Page of stones", lambda: "one sank"),
    Assumption("pigs fly", "Page of pigs", fall),
)


class FlippingExecutable:
    """Runs what it should, and then changes one bit of an element in what one argument is bound to."""

    failed_launch = None

    def __init__(self, inner: Executable, name: str, place: tuple[int, int]) -> None:
        self._inner, self._name, self._place = inner, name, place

    def run(self, bindings: Bindings) -> int:
        code = self._inner.run(bindings)
        tensor = bindings[self._name]
        assert isinstance(tensor, torch.Tensor)
        flat = tensor.view(-1).view(torch.uint8)
        byte, bit = self._place
        flat[tensor.numel() // 2 * tensor.element_size() + byte] ^= bit
        return code

    def durations_us(self) -> dict[str, float]:
        return self._inner.durations_us()


class FlippingBackend:
    """A back end whose kernels get one bit of one argument wrong."""

    def __init__(self, inner: Backend, name: str, place: tuple[int, int] = (0, 1)) -> None:
        self._inner, self._flipped, self._place = inner, name, place

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def compile(
        self,
        plan: Plan,
        report: torch.Tensor,
        fixed: Bindings,
        log: TraceLog | None = None,
        recording: Recording | None = None,
    ) -> FlippingExecutable:
        inner = self._inner.compile(plan, report, fixed, log, recording)
        return FlippingExecutable(inner, self._flipped, self._place)


def wrong_by_one_bit(case: Case) -> Case:
    """A case whose fallback sets the lowest bit of a quantised row otherwise than its kernel."""

    def fallback(programs: int, **arguments: Any) -> None:
        case.kernel.fallback(programs, **arguments)
        arguments["rows"][arguments["row_stride"] + 3] ^= 1

    kernel = dataclasses.replace(case.kernel, fallback=fallback)
    return dataclasses.replace(case, family=dataclasses.replace(case.family, build=lambda shape: kernel))


def check_kernel_with_wrong_pack(place: Place, name: str, hidden: int) -> Finding:
    """The kernels' check where `pack` does not do what its fallback says."""

    def cases(*sizes: Any) -> list[Case]:
        return [wrong_by_one_bit(c) if c.kernel.name == "pack" else c for c in kernel_cases(*sizes)]

    kernels._cases.cache_clear()
    with mock.patch.object(kernels, "kernel_cases", cases):
        try:
            return kernels.check_kernel(place, name, hidden)
        finally:
            kernels._cases.cache_clear()


def check_that_stumbles(place: Place, name: str, hidden: int) -> Finding:
    return stumble(place)


@contextlib.contextmanager
def without_an_npu() -> Iterator[None]:
    """On a machine that has one, too."""
    find, version = importlib.util.find_spec, environment.distribution_version
    with (
        mock.patch.object(toolchain, "HOMES", ()),
        mock.patch.object(toolchain, "DRIVER_INFO", Path("/dev/null/version.info")),
        mock.patch.object(
            importlib.util, "find_spec", lambda name, *rest: None if name in OF_AN_NPU else find(name, *rest)
        ),
        mock.patch.object(
            environment, "distribution_version", lambda name: "" if name in OF_AN_NPU else version(name)
        ),
    ):
        yield


def find_toolchain_without_an_npu(place: Place) -> Finding:
    with without_an_npu():
        return environment.find_toolchain(place)


def find_versions_without_an_npu(place: Place) -> Finding:
    with without_an_npu():
        return environment.find_versions(place)
