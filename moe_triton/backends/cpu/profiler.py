"""torch's profiler as native code reaches it: without Python, which a call that waits has left."""

from __future__ import annotations

import ctypes
import functools

import torch

# Symbols of torch's libraries, in the order of `TorchProfiler` in kernels_ascendc/emulation/profiler.h.
SYMBOLS = (
    "_ZN2at12hasCallbacksEv",  # at::hasCallbacks(): the only one that sees a profiler of all threads, too
    "aoti_record_function_start",
    "aoti_record_function_end",
)


@functools.cache
def functions() -> tuple[int | None, ...]:
    """Addresses of what native code calls. None for all where torch lacks one: there are no ranges then."""
    library = ctypes.CDLL(torch._C.__file__)
    try:
        return tuple(ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value for symbol in SYMBOLS)
    except AttributeError:
        return (None,) * len(SYMBOLS)
