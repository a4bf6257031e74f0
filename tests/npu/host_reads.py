"""What a host does not do while its device works on: read tensors, and make some of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from moe_triton.backends.npu.executable import NpuExecutable

READS = ("tolist", "item", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")
MAKES = ("empty", "zeros", "ones", "full", "arange")


class HostReadError(AssertionError):
    """The host read a tensor, or made one where the device is not."""


@contextmanager
def refused(*, prepares: bool = False) -> Iterator[None]:
    """Raises where a tensor is read, made from the host's numbers, or made without naming a device.

    What kernels reported is an exception: it is in the host's memory when an executable looks at it.

    Args:
        prepares: tensors may be made from the host's numbers, on the device.
    """
    looking = 0
    outcome = NpuExecutable.outcome

    def look(self: NpuExecutable, wait: bool) -> int | None:
        nonlocal looking
        looking += 1
        try:
            return outcome(self, wait)
        finally:
            looking -= 1

    def read(name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if looking:
                return usual(*args, **kwargs)
            raise HostReadError(f"Tensor.{name}")

        return call

    def make(name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if "device" in kwargs:
                return usual(*args, **kwargs)
            raise HostReadError(f"torch.{name} without a device")

        return call

    with ExitStack() as patches:
        for name in READS:
            patches.enter_context(
                mock.patch.object(torch.Tensor, name, read(name, getattr(torch.Tensor, name)))
            )
        for name in MAKES:
            patches.enter_context(mock.patch.object(torch, name, make(name, getattr(torch, name))))
        guard = make if prepares else read
        patches.enter_context(mock.patch.object(torch, "tensor", guard("tensor", torch.tensor)))
        patches.enter_context(mock.patch.object(NpuExecutable, "outcome", look))
        yield
