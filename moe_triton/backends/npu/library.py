"""The native library for the NPU: the Ascend C kernels' launchers, through ctypes."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

from moe_triton.core import abi, native_files
from moe_triton.core.errors import ToolchainError
from moe_triton.core.kernel import AscendCKernel, FusedKernel

LIBRARY = "libmoe_kernels_npu.so"
_REBUILD = "Build it anew: moe-triton build --backend npu."


def find() -> Path | None:
    """Where the library is, if it was built."""
    return native_files.find(LIBRARY)


def load(path: Path) -> tuple[ctypes.CDLL, abi.Abi]:
    """A library of the kernels, and what it says of them.

    Raises:
        ToolchainError: it cannot be loaded, or was built from other sources than this package.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ToolchainError(
            f"{path} cannot be loaded: {error}. Source the set_env.sh of the CANN that it was built with, "
            "or build it anew: moe-triton build --backend npu."
        ) from error
    for function in (library.moe_schedule_mode, library.moe_posts):
        function.argtypes, function.restype = (), ctypes.c_uint32
    return library, abi.Abi(library, path, _REBUILD)


def library() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        ToolchainError: it was not built, cannot be loaded, or does not fit this package.
    """
    return _loaded()[0]


@functools.cache
def _loaded() -> tuple[ctypes.CDLL, abi.Abi]:
    path = find()
    if path is None:
        raise ToolchainError(
            f"{LIBRARY} is missing: the Ascend C kernels were not built for the NPU. "
            "Source CANN's set_env.sh and run: moe-triton build --backend npu"
        )
    return load(path)


def launcher(kernel: AscendCKernel | FusedKernel) -> Callable[[int, int, int], int]:
    """A kernel's launcher: called with blocks, a stream, and the address of the words of `abi.words`.

    It copies the words. It returns 0 when the kernel is on the stream, 1 for a number of blocks that no SoC
    has cores for, and otherwise an error of CANN's run time.

    Raises:
        ToolchainError: the library was built from other argument tables than this package's.
    """
    loaded, said = _loaded()
    said.check(kernel)
    function = getattr(loaded, kernel.symbol)
    function.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p)
    function.restype = ctypes.c_int
    return function  # type: ignore[no-any-return]


def symbol_address(name: str) -> int:
    """Address of one of the library's functions."""
    return ctypes.cast(getattr(library(), name), ctypes.c_void_p).value or 0


def blocks_start_together() -> bool:
    """Whether a launch waits until all its blocks have cores.

    If not (CANN before 9 has no such option), launches with SyncAll must not overlap with others: two of them
    would wait for each other's cores.
    """
    return bool(library().moe_schedule_mode())


def has_posts() -> bool:
    """Whether kernels can post to queues: whether the library was built with memfabric-hybrid."""
    return bool(library().moe_posts())
