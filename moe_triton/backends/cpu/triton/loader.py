"""Kernels as callable addresses: looked up in memory, then on disk, then compiled."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_triton.backends.cpu.triton import cache
from moe_triton.backends.cpu.triton.codegen import compile_object, link
from moe_triton.backends.cpu.triton.frontend import source_key, tensor_ir
from moe_triton.backends.cpu.triton.lowering import lower
from moe_triton.backends.cpu.triton.rewrite_llvm import ENTRY_SYMBOL
from moe_triton.backends.cpu.triton.targets import target_named, this_target
from moe_triton.backends.cpu.triton.toolchain import find_toolchain, versions
from moe_triton.core.errors import ToolchainError
from moe_triton.core.kernel import TritonKernel
from moe_triton.core.logs import log_of

_log = log_of("kernels")

COMPILING = "compiling the kernel %s"


@dataclass(frozen=True)
class CompiledKernel:
    """Machine code of one kernel.

    Attributes:
        kernel: what was compiled.
        noalias: the code assumes that no written argument overlaps another one.
        path: the shared library.
        function: ``void entry(const uint64_t* words, int32_t programs, int32_t program)`` for ctypes.
        entry: its address. ``words[i]`` is the i-th run-time argument: an address, or an integer in the
            low bits.
    """

    kernel: TritonKernel
    noalias: bool
    path: Path
    function: Callable[[Any, int, int], None] = field(repr=False)
    entry: int


_loaded: dict[tuple[TritonKernel, str, bool, str, bool], CompiledKernel] = {}
# Hashing a kernel takes longer than running a small one. The kernel in the value keeps its id taken.
_by_id: dict[tuple[int, bool, str | None, bool], tuple[TritonKernel, CompiledKernel]] = {}
_loading = threading.Lock()


def load(
    kernel: TritonKernel, noalias: bool = True, cpu: str | None = None, *, streams: bool = False
) -> CompiledKernel:
    """Machine code of a kernel, compiled at most once per machine.

    Args:
        noalias: build for calls in which no written argument overlaps another one (see `overlaps`).
        cpu: name of a level (`moe_triton.backends.cpu.triton.targets`); this machine's by default.
        streams: whether rows that it copies bypass the caches, on a level where that gains. Who tells others
            that they are there has a fence before (``OrderStreamed``).
    """
    if known := _by_id.get((id(kernel), noalias, cpu, streams)):
        return known[1]
    level = cpu or this_target().name
    constants = repr(sorted(kernel.constants.items()))
    identity = (kernel, constants, noalias, level, streams)
    with _loading:
        if identity not in _loaded:
            _loaded[identity] = _load(*identity)
        _by_id[id(kernel), noalias, cpu, streams] = (kernel, _loaded[identity])
        return _loaded[identity]


def _function_of(entry: cache.Entry) -> Any:
    return ctypes.CDLL(str(entry.opened))[ENTRY_SYMBOL]


def _private_function_of(entry: cache.Entry) -> Any:
    try:
        return _function_of(entry)
    except (OSError, AttributeError) as error:
        raise ToolchainError(
            f"the compiled kernel {entry.path} cannot be loaded: {error}. Set TMPDIR or MOE_TRITON_CACHE to "
            "a folder that programs can be run from (not mounted with noexec)."
        ) from error


def _load(kernel: TritonKernel, constants: str, noalias: bool, cpu: str, streams: bool) -> CompiledKernel:
    signature = [(arg.name, arg.type) for arg in kernel.args]
    key = cache.entry_key((source_key(kernel), signature, constants, noalias, cpu, streams, versions()))

    def build() -> bytes:
        _log.info(COMPILING, kernel.name)
        find_toolchain()  # all that is missing in one message, before the first step fails
        target = target_named(cpu)
        how = {"noalias": noalias, "streams": streams and target.streams}
        text = lower(tensor_ir(kernel, named_ops=False), kernel, target=target, **how)
        return link(compile_object(text, target))

    with cache.fetch(cache.cache_folder(), key, build, of=f"the kernel {kernel.name}") as entry:
        path = entry.path
        try:
            function = _function_of(entry)
        except (OSError, AttributeError):
            # No library for all its digest says, or a folder to run nothing from. Its folder stays open: the
            # loader takes a descriptor's name that it knows for the library that it has read there.
            with cache.fetch_privately(key, build) as private:
                path, function = private.path, _private_function_of(private)
    function.argtypes = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
    function.restype = None
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return CompiledKernel(kernel, noalias, path, function, address)
