"""`moe_calls`, the extension module for what costs too much in Python (kernels_ascendc/calls).

It exchanges tensors with torch by way of DLPack's table of C functions (``__dlpack_c_exchange_api__``): it
needs nothing of torch's to be built, and works with every torch that has the table.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
from types import ModuleType

import torch

from moe_triton import native_files
from moe_triton.backends.cpu.native import REBUILD
from moe_triton.errors import ToolchainError

MODULE = "moe_calls"
FILE = f"{MODULE}.so"
TABLE = "__dlpack_c_exchange_api__"

# DLPack's code and bits of each dtype, as in `Dtype` in kernels_ascendc/calls/tensors.h.
DTYPE_CODES = {
    torch.int8: 0 << 8 | 8,
    torch.int32: 0 << 8 | 32,
    torch.int64: 0 << 8 | 64,
    torch.float16: 2 << 8 | 16,
    torch.float32: 2 << 8 | 32,
    torch.bfloat16: 4 << 8 | 16,
}


@functools.cache
def extension() -> ModuleType | None:
    """The module, or None where `why_not` says why."""
    if why_not():
        return None
    path = str(native_files.find(FILE))
    loader = importlib.machinery.ExtensionFileLoader(MODULE, path)
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise ToolchainError(f"{path} cannot be loaded: {error}. {REBUILD}") from error
    return module


def why_not() -> str:
    """What is missing for it; empty where nothing is."""
    if not hasattr(torch.Tensor, TABLE):
        return f"torch {torch.__version__} has no torch.Tensor.{TABLE}; torch 2.13 has"
    if native_files.find(FILE) is None:
        return f"{FILE} was not built: install python3-dev, then moe_triton again"
    return ""
