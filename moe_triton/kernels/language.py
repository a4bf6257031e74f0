"""Triton where it is installed; otherwise enough of it for kernel files to import.

The torch fallback needs no more than that.
"""

from __future__ import annotations

import inspect
from typing import Any

try:
    import triton
    import triton.language as tl

    HAVE_TRITON = True
except ImportError:
    HAVE_TRITON = False

    class _UncompiledFunction:
        """What ``triton.jit`` gives without Triton: a name and a source, nothing to call."""

        def __init__(self, fn: Any) -> None:
            self.fn = fn
            self.__name__ = fn.__name__
            self.src = inspect.getsource(fn)

    class _Triton:
        @staticmethod
        def jit(fn: Any) -> Any:
            return _UncompiledFunction(fn)

    class _Language:
        constexpr = object

    triton = _Triton()  # type: ignore[assignment]
    tl = _Language()  # type: ignore[assignment]

__all__ = ["HAVE_TRITON", "tl", "triton"]
