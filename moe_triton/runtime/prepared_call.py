"""Calls of operators whose arguments are checked: once per shape, however often the shape comes again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from moe_triton.core.config import Config
from moe_triton.core.errors import BufferStateError
from moe_triton.core.uncopied import Uncopied
from moe_triton.operators.buffer import TABLES
from moe_triton.operators.description import Symbols
from moe_triton.operators.variants import DispatchVariant, Variant
from moe_triton.runtime.arguments import taken_ids
from moe_triton.runtime.communicator import Communicator
from moe_triton.schemes import scheme_type
from moe_triton.schemes.scheme import KeptTables

Named = dict[str, Any]
Bindings = dict[str, Any]

# What Python and native code have of a plan, rounded up; tests/torch_npu_ops/test_kept_plans.py measures it.
PLAN_BYTES = 16 << 10


@dataclass(frozen=True)
class Deployment:
    """The ranks that take part in a call.

    Attributes:
        config: their settings.
        rank: this rank's number among them.
        members: their original ranks by new number, or None where nothing changed.
    """

    config: Config
    rank: int
    members: tuple[int, ...] | None = None


@dataclass(frozen=True)
class CallSite:
    """Where the calls of a plan run.

    Attributes:
        deployment: the ranks that take part.
        access: leads to their communicator, which it makes with them when a call first needs it.
    """

    deployment: Deployment
    access: Callable[[], Communicator]


@dataclass(frozen=True, eq=False)
class PreparedCall(Uncopied):
    """A checked call of one shape.

    Attributes:
        config: the group's settings as called.
        context: where it runs.
        variant: which kernels run.
        symbols: sizes and attributes of the call.
        inputs: placeholder and argument of each tensor that kernels read.
        copied: placeholders of those that have to be copied first: they are not contiguous, or of a dtype
            that no kernel reads.
    """

    _uncopied: ClassVar[str] = (
        "it leads to windows of this process. Call plan() of its function where the copy is used."
    )

    config: Config
    context: CallSite
    variant: Variant
    symbols: Symbols
    inputs: tuple[tuple[str, str], ...]
    copied: tuple[tuple[str, torch.dtype], ...]

    @property
    def deployment(self) -> Deployment:
        """The ranks that take part."""
        return self.context.deployment

    @cached_property
    def kept_bytes(self) -> int:
        """Memory that goes with this plan: its objects, and what kernels write that no caller sees."""
        specs = map(self.symbols.spec, self.symbols.operator.unreturned)
        return PLAN_BYTES + sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs)

    @property
    def communicator(self) -> Communicator:
        """Made, with all ranks of the group, when a call first needs it."""
        return self.context.access()

    @cached_property
    def tables(self) -> KeptTables | None:
        """Dispatch keeps these tables for combine; with torch_npu's functions they follow its counts."""
        return scheme_type(self.config).tables_of(self.deployment.config)

    @cached_property
    def called(self) -> dict[str, str]:
        """What a caller calls the contents of a placeholder; of those that share an argument, nothing."""
        operator = self.symbols.operator
        single = (each for each in operator.tensors if len(each.placeholders) == 1)
        names = {each.placeholders[0]: operator.called(each.name) for each in single}
        return {TABLES: names.get("recv_offsets", ""), **names}

    @cached_property
    def num_ids(self) -> int:
        """Legal ids: those of the routed experts that are left, and of the special ones."""
        return self.deployment.config.num_experts + self.deployment.config.num_special_experts

    def _bind(self, communicator: Communicator, named: Named) -> Bindings:
        """What the plan's placeholders hold, outputs aside."""
        bindings = self._constants.copy()
        for placeholder, argument in self.inputs:
            bindings[placeholder] = named[self._key(argument)]
        for placeholder, dtype in self.copied:
            given = bindings[placeholder]
            bindings[placeholder] = communicator.backend.empty(given.shape, dtype).copy_(given)
        self._prepare(communicator, bindings)
        return bindings

    def _key(self, argument: str) -> str:
        """What a call has an argument under."""
        return argument

    def _prepare(self, communicator: Communicator, bindings: Bindings) -> None:
        """Checks what depends on data, and adds what does."""
        self._bind_ids(communicator, bindings)

    def _bind_ids(self, communicator: Communicator, bindings: Bindings, keep: bool = False) -> None:
        """Ids as kernels read them; see `taken_ids`. Or where the first kernel makes its copy of them."""
        ids, mask, called = bindings["topk_idx"], bindings.get("mask"), self.symbols.operator.called
        if isinstance(self.variant, DispatchVariant) and self.variant.given_ids:
            bindings["given_ids"] = communicator.masks.marked(ids)
            bindings["topk_idx"] = communicator.backend.empty(ids.shape, torch.int32)
        else:
            bindings["topk_idx"] = taken_ids(communicator, ids, mask, self.num_ids, called, keep)

    @cached_property
    def _constants(self) -> Bindings:
        """What each call of this plan binds alike."""
        s, empty = self.symbols, self.communicator.backend.empty
        bindings: Bindings = {"num_tokens": s["BS"], "num_ids": s["BS"] * s["K"]}
        for output in s.operator.unreturned:
            bindings[output.placeholder] = empty(*s.spec(output))
        if self.variant.waits:
            members = self.deployment.members or tuple(range(self.config.num_ranks))
            bindings["rank_table"] = self._table(members, torch.int32)
            bindings["num_performance_entries"] = self.config.num_ranks
        return bindings

    def _table(self, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        """Constants of this plan, on its device.

        Raises:
            BufferStateError: inside a graph, which would hold a copy from memory that is gone by then.
        """
        backend = self.communicator.backend
        if backend.is_capturing():
            raise BufferStateError(
                "a call of this kind has not run before, and nothing can be prepared inside a graph. Run the "
                "same calls once before the capture."
            )
        return torch.tensor(values, dtype=dtype, device=backend.device)
