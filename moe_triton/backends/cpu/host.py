"""The host of the CPU back end: tensors are in its own memory, and calls end before they return."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from moe_triton.backends.cpu.capabilities import CAPABILITIES
from moe_triton.backends.cpu.extension import extension, new_pool
from moe_triton.core import plain_tensors
from moe_triton.core.checks import CPU


class CpuHost:
    """Tells calls what they need before there is a back end: tensors are in the host's own memory."""

    device = CPU
    is_asynchronous = CAPABILITIES.is_asynchronous
    posts_from_one = False

    def __init__(self) -> None:
        module = extension()
        # In native code, as every call asks.
        self.describe: Callable[..., Hashable | None] = (
            new_pool(module).describe if module else plain_tensors.describe
        )
        """Returns a key of the dtypes, sizes, contiguity and devices of a call's tensors, or None."""

    def is_capturing(self) -> bool:
        """Never: there are no graphs."""
        return False

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor
