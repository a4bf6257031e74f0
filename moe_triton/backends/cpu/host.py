"""The host of the CPU back end: tensors are in its own memory, and calls end before they return."""

from __future__ import annotations

import torch

from moe_triton.checks import CPU


class CpuHost:
    """See `moe_triton.backends.base.Host`."""

    device = CPU

    def is_capturing(self) -> bool:
        """Never: there are no graphs."""
        return False

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor
