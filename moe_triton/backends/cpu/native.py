"""The native library: plan runner and Ascend C kernels, through ctypes."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

import torch

from moe_triton.core import abi, native_files
from moe_triton.core.errors import ToolchainError
from moe_triton.core.installing import reinstall
from moe_triton.core.kernel import AscendCKernel, FusedKernel

LIBRARY = "libmoe_kernels.so"
REBUILD = "Build it anew: moe-triton build --backend cpu, or install moe_triton again."

# Types of fields and arguments.
U64, U32, I64, I32 = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int64, ctypes.c_int32
POINTER, TEXT = ctypes.c_void_p, ctypes.c_char_p


def fields(**types: Any) -> tuple[tuple[str, Any], ...]:
    """The fields of a C struct: their types by name, in order."""
    return tuple(types.items())


def alike(kind: Any, *names: str) -> tuple[tuple[str, Any], ...]:
    """Fields of one type."""
    return tuple((name, kind) for name in names)


class LaunchStruct(ctypes.Structure):
    """``MoeLaunch``."""

    _fields_ = fields(entry=U64, kind=U32, blocks=U32, words=POINTER, alongside=U32, first=U32)


class PatchStruct(ctypes.Structure):
    """``MoePatch``."""

    _fields_ = fields(word=POINTER, placeholder=U64, offset=U64, part=U32, parts=U32, is_count=U64)


class WindowGroupStruct(ctypes.Structure):
    """``moe::WindowGroup``."""

    _fields_ = fields(addresses=POINTER, count=U64, window_bytes=U64, own=U64)


class SettingsStruct(ctypes.Structure):
    """``moe::LaunchSettings``."""

    _fields_ = (
        *fields(copy_row=POINTER, cached_bytes=U64, spins=U32, yields=U32),
        *fields(num_groups=U64, groups=ctypes.POINTER(WindowGroupStruct)),
        *alike(POINTER, "control", "link", "nic", "changes"),
        *fields(masked_by=ctypes.POINTER(U64), num_masked_by=U64, mask_bit=U64),
    )


class PlanStruct(ctypes.Structure):
    """``MoePlan``."""

    _fields_ = (
        *fields(launches=POINTER, num_launches=U64, patches=POINTER, num_patches=U64),
        *fields(report=POINTER, report_words=U64, phase_words=U64),
        *fields(durations_us=POINTER, settings=POINTER, overlap=U64),
        *fields(trace=POINTER, name=TEXT, steps=POINTER, reads_peers=U64, flight=POINTER),
    )


class TurnStruct(ctypes.Structure):
    """``MoeTurn``."""

    _fields_ = fields(plan=POINTER, placeholders=POINTER, operator=U32, begins=U32, ends=U32)


class TraceLogStruct(ctypes.Structure):
    """``TraceLog``."""

    _fields_ = fields(
        events=POINTER, max_events=U64, num_events=U64, calls=POINTER, max_calls=U64, num_calls=U64
    )


class LinkLogStruct(ctypes.Structure):
    """``LinkLog``."""

    _fields_ = fields(spans=POINTER, max_spans=U64, num_spans=U64, call=POINTER)


class TracedPlanStruct(ctypes.Structure):
    """``TracedPlan``."""

    _fields_ = (
        *fields(log=POINTER, number=U32, tokens_placeholder=I32, rows_placeholder=I32, last_entry=U32),
        *fields(traffic=POINTER, traffic_blocks=U64),
    )


class TracedLaunchStruct(ctypes.Structure):
    """``TracedLaunch``."""

    _fields_ = fields(log=POINTER, number=U32, first_core=U32, steps=POINTER)


# Symbols of torch's libraries, in the order of `TorchProfiler` in kernels_ascendc/emulation/trace.h.
PROFILER_SYMBOLS = (
    "_ZN2at12hasCallbacksEv",  # at::hasCallbacks(): the only one that sees a profiler of all threads, too
    "aoti_record_function_start",
    "aoti_record_function_end",
)


@functools.cache
def profiler_functions() -> tuple[int | None, ...]:
    """Addresses of what native code calls of torch's profiler: a call that waits has left Python.

    None for all where torch lacks one: there are no ranges then.
    """
    library = ctypes.CDLL(torch._C.__file__)
    try:
        return tuple(address_of(getattr(library, symbol)) for symbol in PROFILER_SYMBOLS)
    except AttributeError:
        return (None,) * len(PROFILER_SYMBOLS)


# What each of the library's functions returns and takes.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "moe_run_plan": (I64, POINTER, POINTER),
    "moe_resume_plan": (I64, POINTER, POINTER, U64),
    "moe_run_turns": (I64, POINTER, U64, POINTER, POINTER),
    "moe_watch_signal": (ctypes.c_int, ctypes.c_int, ctypes.c_int),
    "moe_flight_begin": (None, POINTER, POINTER),
    "moe_flight_end": (None, POINTER, POINTER, I64),
    "moe_use_settings": (None, POINTER),
    "moe_nic_open": (POINTER, POINTER),
    "moe_nic_close": (None, POINTER),
    "moe_nic_post": (ctypes.c_int, POINTER, POINTER),
    "moe_nic_delivered": (U64, POINTER, U32),
    "moe_nic_posted": (U64, POINTER, U32),
    "moe_nic_drop": (None, POINTER, U32),
    "moe_nic_is_dropped": (ctypes.c_int, POINTER, U32),
    "moe_fabric_error": (TEXT,),
    "moe_fabric_open": (POINTER, TEXT, POINTER, U64, U64),
    "moe_fabric_listen": (ctypes.c_int, POINTER, U32, POINTER, POINTER),
    "moe_fabric_has": (ctypes.c_int, TEXT, POINTER),
    "moe_fabric_share": (None, POINTER, U32, U32),
    "moe_fabric_address": (ctypes.c_int, POINTER, U32, POINTER),
    "moe_fabric_connect": (ctypes.c_int, POINTER, U32, POINTER),
    "moe_fabric_queues": (POINTER, POINTER),
    "moe_fabric_written": (U64, POINTER),
    "moe_fabric_close": (None, POINTER),
    "moe_first_bad_id": (I64, POINTER, U64, U64, I64, ctypes.POINTER(I32)),
    "moe_take_ids": (I64, POINTER, U32, POINTER, U64, U64, I64, POINTER, U32, ctypes.POINTER(I32)),
    "moe_digest_ids": (I64, POINTER, U64, POINTER, U64),
    "moe_last_error": (TEXT,),
    "moe_row_copy_name": (TEXT, U64),
    "moe_row_copy": (POINTER, U64),
    "moe_stream": (None, POINTER, POINTER, U64),
    "moe_fence": (None,),
    "moe_exchange_word": (U64, POINTER, U64, U64),
    "moe_time_row_copies": (ctypes.c_int, U64, U32, U64, POINTER),
    "moe_use_profiler": (None, POINTER, POINTER, POINTER),
    "moe_forget_threads": (None,),
}


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
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    lib.moe_use_profiler(*profiler_functions())
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
