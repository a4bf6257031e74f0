"""The native library: plan runner and Ascend C kernels, through ctypes."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

from moe_triton.backends.cpu import profiler
from moe_triton.core import abi, native_files
from moe_triton.core.errors import ToolchainError
from moe_triton.core.installing import reinstall
from moe_triton.core.kernel import AscendCKernel, FusedKernel

LIBRARY = "libmoe_kernels.so"
REBUILD = "Build it anew: moe-triton build --backend cpu, or install moe_triton again."


class LaunchStruct(ctypes.Structure):
    """``MoeLaunch``."""

    _fields_ = (
        ("entry", ctypes.c_uint64),
        ("kind", ctypes.c_uint32),
        ("blocks", ctypes.c_uint32),
        ("words", ctypes.c_void_p),
        ("alongside", ctypes.c_uint32),
        ("first", ctypes.c_uint32),
    )


class PatchStruct(ctypes.Structure):
    """``MoePatch``."""

    _fields_ = (
        ("word", ctypes.c_void_p),
        ("hole", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("part", ctypes.c_uint32),
        ("parts", ctypes.c_uint32),
        ("is_count", ctypes.c_uint64),
    )


class WindowGroupStruct(ctypes.Structure):
    """``moe::WindowGroup``."""

    _fields_ = (
        ("addresses", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("window_bytes", ctypes.c_uint64),
        ("own", ctypes.c_uint64),
    )


class SettingsStruct(ctypes.Structure):
    """``moe::LaunchSettings``."""

    _fields_ = (
        ("cached_bytes", ctypes.c_uint64),
        ("spins", ctypes.c_uint32),
        ("yields", ctypes.c_uint32),
        ("num_groups", ctypes.c_uint64),
        ("groups", ctypes.POINTER(WindowGroupStruct)),
        ("control", ctypes.c_void_p),
        ("link", ctypes.c_void_p),
        ("nic", ctypes.c_void_p),
    )


class PlanStruct(ctypes.Structure):
    """``MoePlan``."""

    _fields_ = (
        ("launches", ctypes.c_void_p),
        ("num_launches", ctypes.c_uint64),
        ("patches", ctypes.c_void_p),
        ("num_patches", ctypes.c_uint64),
        ("report", ctypes.c_void_p),
        ("report_words", ctypes.c_uint64),
        ("phase_words", ctypes.c_uint64),
        ("durations_us", ctypes.c_void_p),
        ("settings", ctypes.c_void_p),
        ("overlap", ctypes.c_uint64),
        ("trace", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("steps", ctypes.c_void_p),
    )


class TraceLogStruct(ctypes.Structure):
    """``TraceLog``."""

    _fields_ = (
        ("events", ctypes.c_void_p),
        ("max_events", ctypes.c_uint64),
        ("num_events", ctypes.c_uint64),
        ("calls", ctypes.c_void_p),
        ("max_calls", ctypes.c_uint64),
        ("num_calls", ctypes.c_uint64),
    )


class LinkLogStruct(ctypes.Structure):
    """``LinkLog``."""

    _fields_ = (
        ("spans", ctypes.c_void_p),
        ("max_spans", ctypes.c_uint64),
        ("num_spans", ctypes.c_uint64),
        ("call", ctypes.c_void_p),
    )


class TracedPlanStruct(ctypes.Structure):
    """``TracedPlan``."""

    _fields_ = (
        ("log", ctypes.c_void_p),
        ("number", ctypes.c_uint32),
        ("tokens_hole", ctypes.c_int32),
        ("rows_hole", ctypes.c_int32),
        ("last_entry", ctypes.c_uint32),
        ("traffic", ctypes.c_void_p),
        ("traffic_blocks", ctypes.c_uint64),
    )


class TracedLaunchStruct(ctypes.Structure):
    """``TracedLaunch``."""

    _fields_ = (
        ("log", ctypes.c_void_p),
        ("number", ctypes.c_uint32),
        ("first_core", ctypes.c_uint32),
        ("steps", ctypes.c_void_p),
    )


def find() -> Path | None:
    """Where the library is: beside the package, or where an editable install put it."""
    return native_files.find(LIBRARY)


def library() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        ToolchainError: it was not built, or from other sources than this package.
    """
    return _loaded()[0]


@functools.cache
def _loaded() -> tuple[ctypes.CDLL, abi.Abi]:
    path = find()
    if path is None:
        raise ToolchainError(
            f"{LIBRARY} is missing: the Ascend C kernels were not built. Install a C++17 compiler "
            f"(apt-get install g++) and run: {reinstall()}"
        )
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise ToolchainError(f"{path} cannot be loaded: {error}. {REBUILD}") from error
    said = abi.Abi(lib, path, REBUILD)
    lib.moe_run_plan.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    lib.moe_run_plan.restype = ctypes.c_int64
    lib.moe_use_settings.argtypes = (ctypes.c_void_p,)
    lib.moe_use_settings.restype = None
    lib.moe_nic_open.argtypes = (ctypes.c_void_p,)
    lib.moe_nic_open.restype = ctypes.c_void_p
    lib.moe_nic_close.argtypes = (ctypes.c_void_p,)
    lib.moe_nic_close.restype = None
    lib.moe_first_bad_id.argtypes = (
        ctypes.c_void_p,
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_int64,
        ctypes.POINTER(ctypes.c_int32),
    )
    lib.moe_first_bad_id.restype = ctypes.c_int64
    lib.moe_take_ids.argtypes = (
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_int64,
        ctypes.POINTER(ctypes.c_int32),
    )
    lib.moe_take_ids.restype = ctypes.c_int64
    lib.moe_digest_ids.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64)
    lib.moe_digest_ids.restype = ctypes.c_int64
    lib.moe_last_error.restype = ctypes.c_char_p
    lib.moe_use_profiler.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    lib.moe_use_profiler.restype = None
    lib.moe_use_profiler(*profiler.functions())
    lib.moe_forget_threads.restype = None
    os.register_at_fork(after_in_child=lib.moe_forget_threads)
    return lib, said


def check(*kernels: AscendCKernel | FusedKernel) -> None:
    """Checks that the library has kernels as this package calls them.

    Raises:
        ToolchainError: it was built from other argument tables.
    """
    _loaded()[1].check(*kernels)


def launcher(kernel: AscendCKernel | FusedKernel) -> Any:
    """A kernel's launcher.

    Raises:
        ToolchainError: the library was built from other argument tables.
    """
    loaded, said = _loaded()
    said.check(kernel)
    return getattr(loaded, kernel.symbol)


def address_of(function: Any) -> int:
    """Address of one of the library's functions."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def symbol_address(name: str) -> int:
    """Address of the library's function of this name."""
    return address_of(getattr(library(), name))


def last_error() -> str:
    """Why the last Ascend C launch failed."""
    message: bytes | None = library().moe_last_error()
    return (message or b"no message").decode()
