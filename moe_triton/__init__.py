"""Mixture-of-Experts dispatch and combine over peer memory windows."""

from __future__ import annotations

from moe_triton.buffer import EPBuffer
from moe_triton.config import Config
from moe_triton.errors import (
    ArgumentError,
    BufferStateError,
    CommunicationTimeoutError,
    ConfigMismatchError,
    MoeTritonError,
    ToolchainError,
    WindowError,
)
from moe_triton.handle import DispatchHandle, DispatchOutput
from moe_triton.tuning import Tuning

__all__ = [
    "ArgumentError",
    "BufferStateError",
    "CommunicationTimeoutError",
    "Config",
    "ConfigMismatchError",
    "DispatchHandle",
    "DispatchOutput",
    "EPBuffer",
    "MoeTritonError",
    "Tuning",
    "ToolchainError",
    "WindowError",
]
