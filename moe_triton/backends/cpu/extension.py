"""`moe_calls`, the extension module for work that costs too much in Python (kernels_ascendc/calls).

It exchanges tensors with torch through DLPack's table of C functions (``__dlpack_c_exchange_api__``), and
calls some functions of torch's libraries for what the table lacks (`SYMBOLS`). So it is built without torch,
and works with every torch that has both.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import importlib.util
from types import ModuleType
from typing import Any

import torch

from moe_triton.backends.cpu.native import REBUILD, address_of
from moe_triton.core import native_files
from moe_triton.core.errors import ToolchainError

MODULE = "moe_calls"
FILE = f"{MODULE}.so"
TABLE = "__dlpack_c_exchange_api__"

# Symbols of torch's libraries, by their names in kernels_ascendc/calls/tensors.h.
SYMBOLS = {
    "aoti_torch_get_storage_size": "aoti_torch_get_storage_size",
    "aoti_torch_get_storage_offset": "aoti_torch_get_storage_offset",
    "aoti_torch_grad_mode_is_enabled": "aoti_torch_grad_mode_is_enabled",
    "is_neg": "_ZN2at6native6is_negERKNS_6TensorE",  # at::native::is_neg(const at::Tensor&)
    "requires_grad": "_ZNK3c1010TensorImpl13requires_gradEv",  # c10::TensorImpl::requires_grad() const
}

# DLPack's code and bits of each dtype, as in `Dtype` in kernels_ascendc/calls/tensors.h.
DTYPE_CODES = {
    torch.int8: 0 << 8 | 8,
    torch.int32: 0 << 8 | 32,
    torch.int64: 0 << 8 | 64,
    torch.float16: 2 << 8 | 16,
    torch.float32: 2 << 8 | 32,
    torch.bfloat16: 4 << 8 | 16,
    torch.bool: 6 << 8 | 8,
}


@functools.cache
def extension() -> ModuleType | None:
    """The module, or None if `why_not` gives a reason."""
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


def new_pool(module: ModuleType, limit: int = 0) -> Any:
    """The module's `OutputPool`.

    Args:
        module: `extension`.
        limit: bytes that it may keep.
    """
    return module.OutputPool(
        tensor_type=torch.Tensor, functions=torch_functions(), codes=DTYPE_CODES, limit=limit
    )


def why_not() -> str:
    """Why the module cannot be used; empty if it can."""
    if not hasattr(torch.Tensor, TABLE):
        return f"torch {torch.__version__} has no torch.Tensor.{TABLE}; torch 2.13 has"
    try:
        torch_functions()
    except AttributeError as error:
        return f"torch {torch.__version__} lacks a function that torch 2.13 has: {error}"
    if not _tensors_are_as_expected():
        return f"torch {torch.__version__} lays its tensors out in another way than torch 2.13"
    if native_files.find(FILE) is None:
        return f"{FILE} was not built: install python3-dev, then moe_triton again"
    return ""


@functools.cache
def torch_functions() -> dict[str, int]:
    """Addresses of torch's functions that the module calls.

    Raises:
        AttributeError: this torch lacks one.
    """
    library = ctypes.CDLL(torch._C.__file__)
    return {name: address_of(getattr(library, symbol)) for name, symbol in SYMBOLS.items()}


def _tensors_are_as_expected() -> bool:
    """Whether a tensor's C++ object lies right behind the head of its Python object."""
    tensor = torch.empty(0, device="cpu")
    return ctypes.c_void_p.from_address(id(tensor) + object.__basicsize__).value == tensor._cdata
