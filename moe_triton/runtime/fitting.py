"""Between tensors as callers have them and as kernels do, in a buffer whose sizes kernels do not take.

Kernels move rows in whole units of 32 elements (`Config.padded`). So a caller's rows are copied to longer
ones that end in zeros, and of what kernels write the caller sees the part that is its own. Zeros change
nothing of it: no largest element of a row, and no sum.

Shapes: H hidden, P the elements that a row has for kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moe_triton.backends.base import Backend, TensorSpec
from moe_triton.operators.description import Symbols

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fitting:
    """What a buffer's tensors become, and what becomes of those that kernels write.

    Args:
        hidden: H.
        padded_hidden: P.
        backend: that the buffer works on.
    """

    def __init__(self, hidden: int, padded_hidden: int, backend: Backend) -> None:
        self._hidden, self._padded, self._backend = hidden, padded_hidden, backend
        self._copies = backend.make_side_copies()

    def has_room(self, y: Any) -> bool:
        """Whether results lie as kernels read them: the first H elements of rows of P, all in memory.

        `EPBuffer.expert_output` gives such rows, and a dispatch's tokens are such.
        """
        if not isinstance(y, torch.Tensor) or y.dim() != 2 or y.stride() != (self._padded, 1):
            return False
        behind = y.storage_offset() + y.shape[0] * self._padded
        return behind * y.element_size() <= y.untyped_storage().nbytes()

    def stand_in(self, y: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor of the shape of results that have room, for checks: its contents are others."""
        return y.as_strided(y.shape, (y.shape[1], 1))

    def results(self, y: torch.Tensor, received: int | None, *, quantized: bool) -> torch.Tensor:
        """Results as kernels read them, (n, P).

        Args:
            y: (n, H), checked.
            received: rows that go back, of which there are no more; None if the host does not know.
            quantized: whether they travel in blocks, of which what is behind a row must not be the largest.
        """
        if self.has_room(y) and not quantized:
            return y.as_strided((y.shape[0], self._padded), (self._padded, 1))
        y = y[:received]
        return self._with_zeros(y, (len(y), self._padded))

    def given(self, s: Symbols, kernels: Symbols, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of a call as kernels read them; results aside.

        Args:
            s: sizes of the call.
            kernels: the same as kernels have them.
            tensors: what the caller passed, by argument.
        """
        fitted = dict(tensors)
        for argument in s.operator.tensors:
            if not s.is_given(argument.name) or not argument.shape or argument.name == "y":
                continue
            shapes = (_sizes(each.expected(argument), tensors[argument.name]) for each in (s, kernels))
            seen, needed = shapes
            if seen != needed:
                fitted[argument.name] = self._with_zeros(tensors[argument.name], needed)
        return fitted

    def all_seen(
        self, specs: Mapping[str, TensorSpec], made: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The parts of outputs that their caller sees, in the memory of these.

        Args:
            specs: their shapes and dtypes, by name.
            made: what kernels write, by name.
        """
        return {
            name: tensor[tuple(slice(0, size) for size in specs[name][0])] for name, tensor in made.items()
        }

    def copied(
        self, seen: torch.Tensor, out: torch.Tensor | None, received: int | None = None
    ) -> torch.Tensor:
        """What a caller sees of an output, in memory without gaps.

        Args:
            seen: that.
            out: where it is to go, or None.
            received: rows that are defined; None for all.
        """
        if out is None:
            out = self._backend.empty(seen.shape, seen.dtype)
        self._copy(out[:received], seen[:received])
        return out

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """In turn with kernels. As integers: not everything that copies knows every dtype."""
        whole = _INTEGERS[to.dtype.itemsize]
        self._copies.copy_in_turn(to.view(whole), source.view(whole))

    def _with_zeros(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """A copy in a larger shape."""
        made = self._backend.empty(shape, tensor.dtype)
        inside = tuple(slice(0, size) for size in tensor.shape)
        self._copy(made[inside], tensor)
        for dim, size in enumerate(tensor.shape):  # behind it in each dimension, once
            if size < shape[dim]:
                behind = *inside[:dim], slice(size, None)
                made[behind] = 0
        return made


def _sizes(expected: tuple[Any, ...], tensor: torch.Tensor) -> tuple[int, ...]:
    """A shape in which sizes that may be any are those of a tensor."""
    return tuple(
        have if isinstance(size, str) else size for size, have in zip(expected, tensor.shape, strict=True)
    )
