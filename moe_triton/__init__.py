"""Mixture-of-Experts dispatch and combine over peer memory windows."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from moe_triton.core.deepep import missing
from moe_triton.core.errors import (
    ArgumentError,
    BufferStateError,
    CommunicationTimeoutError,
    ConfigMismatchError,
    CopyError,
    MoeTritonError,
    RankLostError,
    RankMaskedError,
    ThreadError,
    ToolchainError,
    WindowError,
)

if TYPE_CHECKING:
    from moe_triton.buffer import EPBuffer
    from moe_triton.core.config import Config
    from moe_triton.core.handle import DispatchHandle, DispatchOutput, Pending
    from moe_triton.core.health import RankHealth
    from moe_triton.core.network import Network
    from moe_triton.core.traffic import Traffic
    from moe_triton.core.tuning import Tuning

# The one place where it stands: packages read it from here.
__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "BufferStateError",
    "CommunicationTimeoutError",
    "Config",
    "ConfigMismatchError",
    "CopyError",
    "DispatchHandle",
    "DispatchOutput",
    "EPBuffer",
    "MoeTritonError",
    "Network",
    "Pending",
    "RankHealth",
    "RankLostError",
    "RankMaskedError",
    "ThreadError",
    "ToolchainError",
    "Traffic",
    "Tuning",
    "WindowError",
]

# What is imported when it is first asked for: a command that says how it is used takes no torch.
_MODULE_OF = {
    "EPBuffer": "buffer",
    "Config": "core.config",
    "Network": "core.network",
    "DispatchHandle": "core.handle",
    "DispatchOutput": "core.handle",
    "Pending": "core.handle",
    "RankHealth": "core.health",
    "Traffic": "core.traffic",
    "Tuning": "core.tuning",
}

if not TYPE_CHECKING:  # type checkers would take any name for one of the package's

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise missing(__name__, name, sys._getframe(1))
        module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
        made = globals()[name] = getattr(module, name)
        return made

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
