"""Between tensors as callers have them and as kernels do, in a buffer whose sizes kernels do not take.

Kernels move rows in whole units of 32 elements (`Config.padded`). So a caller's rows are copied to longer
ones that end in zeros, and of what kernels write the caller sees the part that is its own. Zeros change
nothing of it: no largest element of a row, and no sum.

To kernels each rank of routed experts has as many as the one with most. Those that there are not get nothing,
and no id names one of them.

Shapes: H hidden, P the elements that a row has for kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moe_triton.backends.base import TensorSpec
from moe_triton.core.config import Config
from moe_triton.operators.description import Symbols
from moe_triton.runtime.communicator import Communicator
from moe_triton.runtime.expert_mapping import ExpertMapping

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fitting:
    """What a buffer's tensors become, and what becomes of those that kernels write.

    Args:
        communicator: the buffer's.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._backend = communicator.backend
        config, of_kernels = communicator.config, communicator.context.config
        self._hidden, self._padded = config.hidden, of_kernels.hidden
        self._copies = self._backend.make_side_copies()
        self._ids: torch.Tensor | None = None
        if config.experts_per_rank is not None:
            numbers = _numbers_of(config, of_kernels)
            rows = [*range(config.num_shared_experts), *(config.num_shared_experts + n for n in numbers)]
            device = self._backend.device
            self._ids = torch.tensor([numbers], dtype=torch.int32, device=device)
            self._smooth_rows = torch.tensor(rows, device=device)
            self._mapping = ExpertMapping(communicator, of_kernels)

    def has_room(self, y: Any) -> bool:
        """Whether results lie as kernels read them: the first H elements of rows of P, all in memory.

        `EPBuffer.expert_output` gives such rows, and a dispatch's tokens are such.
        """
        if type(y) is not torch.Tensor or y.layout is not torch.strided:
            return False
        if y.dim() != 2 or y.stride() != (self._padded, 1):
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
            tensors: what the caller passed, by argument, but for ids, which are those of kernels.
        """
        fitted = dict(tensors)
        for argument in s.operator.tensors:
            if not s.is_given(argument.name) or not argument.shape or argument.name == "y":
                continue
            given = tensors[argument.name]
            seen, needed = (_sizes(each.expected(argument), given) for each in (s, kernels))
            if seen == needed:
                continue
            if argument.name == "smooth_scales" and self._ids is not None:
                spread = self._backend.empty((needed[0], seen[1]), given.dtype).zero_()
                given = spread.index_copy_(0, self._smooth_rows, given)
            fitted[argument.name] = self._with_zeros(given, needed)
        return fitted

    def ids_of_kernels(self, topk_idx: Any, active_mask: Any) -> Any:
        """(T, K) ids as kernels number experts; see `ExpertMapping.physical`.

        Raises:
            ArgumentError: a bad argument, of another shape or where the host reads ids a bad one.
        """
        if self._ids is None:
            return topk_idx
        return self._mapping.physical(topk_idx, active_mask, self._ids, "row")

    def give_back(self, s: Symbols, tensors: Mapping[str, Any], fitted: Mapping[str, Any]) -> None:
        """Copies what kernels have written to in place of a caller's tensors."""
        for argument in s.operator.tensors:
            given = tensors.get(argument.name)
            if argument.is_written and given is not None and fitted[argument.name] is not given:
                self._copy(given, _corner(fitted[argument.name], given.shape))

    def all_seen(
        self, specs: Mapping[str, TensorSpec], made: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The parts of outputs that their caller sees, in the memory of these.

        Args:
            specs: their shapes and dtypes, by name.
            made: what kernels write, by name.
        """
        return {name: _corner(tensor, specs[name][0]) for name, tensor in made.items()}

    def as_written(
        self, made_specs: Mapping[str, TensorSpec], asked: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Those of a caller's outputs that kernels can write, as they do; the others are copied to.

        Args:
            made_specs: shapes and dtypes as kernels write them, by name.
            asked: what the caller gives, checked, by name.
        """
        found = {}
        for name, tensor in asked.items():
            shape, _ = made_specs[name]
            if tensor.shape == shape and tensor.is_contiguous():
                found[name] = tensor
            elif tensor.shape[0] == shape[0] and shape[1:] == (self._padded,) and self.has_room(tensor):
                found[name] = tensor.as_strided(shape, (self._padded, 1))
        return found

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
        self._copies.copy_elements(to.view(whole), source.view(whole))

    def _with_zeros(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """A copy in a larger shape."""
        made = self._backend.empty(shape, tensor.dtype)
        inside = tuple(slice(0, size) for size in tensor.shape)
        self._copy(_corner(made, tensor.shape), tensor)
        for dim, size in enumerate(tensor.shape):  # behind it in each dimension, once
            if size < shape[dim]:
                behind = *inside[:dim], slice(size, None)
                made[behind].zero_()
        return made


def _numbers_of(config: Config, of_kernels: Config) -> list[int]:
    """By routed expert, its number to kernels."""
    routed = range(config.num_shared_ranks, config.num_ranks)
    firsts = {rank: of_kernels.first_expert_on(rank) for rank in routed}
    return [firsts[rank] + local for rank in routed for local in range(config.experts_on(rank))]


def _corner(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return tensor[tuple(slice(0, size) for size in shape)]


def _sizes(expected: tuple[Any, ...], tensor: torch.Tensor) -> tuple[int, ...]:
    """A shape in which sizes that may be any are those of a tensor."""
    return tuple(
        have if isinstance(size, str) else size for size, have in zip(expected, tensor.shape, strict=True)
    )
