"""Back ends by name."""

from __future__ import annotations

from moe_triton.backends.base import Backend
from moe_triton.errors import ArgumentError

BACKENDS = ("cpu",)


def make_backend(name: str, kernels: str) -> Backend:
    """The back end of this name.

    Raises:
        ArgumentError: there is none.
        ToolchainError: something that it needs is missing.
    """
    if name == "cpu":
        from moe_triton.backends.cpu.backend import CpuBackend

        return CpuBackend(kernels)
    raise ArgumentError("backend", repr(name), f"it must be one of {list(BACKENDS)}", "Use backend='cpu'.")
