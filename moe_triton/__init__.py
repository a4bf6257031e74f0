"""Mixture-of-Experts dispatch and combine over peer memory windows."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

from moe_triton.buffer import EPBuffer
from moe_triton.core.config import Config
from moe_triton.core.deepep import missing
from moe_triton.core.errors import (
    ArgumentError,
    BufferStateError,
    CommunicationTimeoutError,
    ConfigMismatchError,
    CopyError,
    MoeTritonError,
    ThreadError,
    ToolchainError,
    WindowError,
)
from moe_triton.core.handle import DispatchHandle, DispatchOutput, Pending
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
    "Pending",
    "ThreadError",
    "ToolchainError",
    "Traffic",
    "Tuning",
    "WindowError",
]

if not TYPE_CHECKING:  # type checkers would take any name for one of the package's

    def __getattr__(name: str) -> NoReturn:
        raise missing(__name__, name, sys._getframe(1))
