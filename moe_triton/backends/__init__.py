"""Back ends by name."""

from __future__ import annotations

from moe_triton.backends.base import Backend, Host
from moe_triton.backends.cpu.capabilities import CAPABILITIES as CPU
from moe_triton.backends.npu.capabilities import CAPABILITIES as NPU
from moe_triton.core.capabilities import Capabilities
from moe_triton.core.checks import check_text
from moe_triton.core.errors import ArgumentError
from moe_triton.core.tuning import Tuning

CAPABILITIES: dict[str, Capabilities] = {each.target: each for each in (CPU, NPU)}
"""What each can do, by its name."""
BACKENDS = tuple(CAPABILITIES)


def check_name(name: object) -> str:
    """Checks that there is a back end of this name.

    Raises:
        ArgumentError: there is none.
    """
    if (text := check_text("backend", name)) not in BACKENDS:
        raise _unknown(text)
    return text


def has_windows_in_memory(name: object) -> bool:
    """Whether windows of this back end are memory of a host, which ranks of other hosts do not reach."""
    return isinstance(name, str) and str.__eq__(name, "cpu")


def make_backend(name: str, kernels: str, tuning: Tuning | None = None) -> Backend:
    """The back end of this name, with its own share of the tuning.

    Raises:
        ArgumentError: there is none.
        ToolchainError: something that it needs is missing.
    """
    check_name(name)
    check_text("kernels", kernels)
    if name == "cpu":
        from moe_triton.backends.cpu.backend import CpuBackend

        return CpuBackend(kernels, tuning)
    from moe_triton.backends.npu.backend import NpuBackend

    return NpuBackend(kernels, tuning)


def select_device(name: str, local_rank: int) -> None:
    """Selects this process's device, before anything else uses one.

    Args:
        name: of the back end. The CPU's ranks have no devices to choose from.
        local_rank: number of this rank among those of the machine, from 0.

    Raises:
        ArgumentError: there is no back end of this name.
        ToolchainError: something that it needs is missing.
    """
    if name not in BACKENDS:
        raise _unknown(name)
    if name == "npu":
        from moe_triton.backends.npu.runtime import imported

        imported().npu.set_device(local_rank)


def make_host(name: str) -> Host:
    """What calls need of the back end of this name before it is made.

    Raises:
        ArgumentError: there is none.
        ToolchainError: something that it needs is missing.
    """
    if name == "cpu":
        from moe_triton.backends.cpu.host import CpuHost

        return CpuHost()
    if name == "npu":
        from moe_triton.backends.npu.runtime import Runtime

        return Runtime()
    raise _unknown(name)


def _unknown(name: str) -> ArgumentError:
    return ArgumentError("backend", repr(name), f"it must be one of {list(BACKENDS)}", "Use backend='cpu'.")
