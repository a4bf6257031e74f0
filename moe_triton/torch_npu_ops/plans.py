"""Plans of torch_npu's functions: checked once per shape, then executed as often as the shape comes again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, ClassVar

import torch

from moe_triton.backends import CAPABILITIES
from moe_triton.backends.base import TensorSpec
from moe_triton.core.errors import ArgumentError
from moe_triton.core.marks import mark, mark_of
from moe_triton.operators.buffer import TABLES
from moe_triton.runtime.arguments import other_ids_error
from moe_triton.runtime.communicator import Communicator
from moe_triton.runtime.executables import Phase
from moe_triton.runtime.plan_calls import NativeCalls, PlanCall
from moe_triton.runtime.prepared_call import Bindings, CallSite, Named, PreparedCall
from moe_triton.schemes import make_scheme
from moe_triton.schemes.rank_context import RankContext
from moe_triton.schemes.scheme import Scheme
from moe_triton.torch_npu_ops.registry import Access, Native

# Outputs of dispatch that say where combine's results go.
INDEXES = "expand_idx", "origins"


@dataclass(frozen=True)
class GroupSite(CallSite):
    """Where the calls of a plan run: on the windows of a group.

    Attributes:
        exchange_rank: this rank's number among two tensor-parallel ranks, or None.
    """

    access: Access
    exchange_rank: int | None


class FunctionPlan(PreparedCall):
    """A checked call of a function. `execute` runs it."""

    context: GroupSite

    @property
    def window_bytes(self) -> int:
        """Bytes of the data windows that this plan works in.

        HCCL_BUFFSIZE has to cover that of the group, and that between two tensor-parallel ranks by itself.
        """
        return sum(window.data_bytes for window in self._scheme.windows)

    @property
    def workspace_bytes(self) -> int:
        """Private bytes that this plan's kernels need between them."""
        return self._scheme.workspace_bytes(self.variant)

    @cached_property
    def _scheme(self) -> Scheme:
        """To ask for sizes, before anything is made."""
        place = self.deployment
        return make_scheme(
            RankContext(place.config, place.rank, 1, 0, CAPABILITIES["cpu"], self.context.exchange_rank)
        )

    @cached_property
    def num_entries(self) -> int:
        """Pairs of an expert of this rank and a rank that it received rows from."""
        config = self.deployment.config
        return config.experts_on(self.deployment.rank) * config.num_ranks

    def execute(self, named: Named) -> Any:
        """Runs it, and returns its outputs.

        Args:
            named: the call's arguments. Tensors need not be contiguous.

        Raises:
            ArgumentError: their contents break a rule, where the host reads them. Nothing was sent.
            BufferStateError: the communicator cannot be used.
            CommunicationTimeoutError: a rank's data did not come in time.

        Examples:
            >>> plan = torch_npu.npu_moe_distribute_dispatch_v2.plan(x, expert_ids, *group)
            >>> outputs = plan.execute({"x": x, "expert_ids": expert_ids})
        """
        access = self.context.access
        communicator = access()
        native = access.native
        # A new one would get the plans that are suspended while ranks are masked.
        if native is None and not communicator.masks.masked:
            native = access.native = self._make_native(communicator)
        if native and communicator.is_idle:
            made = native(*self._get_inputs(named))
            if made is not None:
                communicator.note_use()
                return made
        communicator.check_usable()
        bindings = self._bind(communicator, named)
        outputs = self._make_outputs(communicator)
        for placeholder, output in zip(self._output_placeholders, outputs, strict=True):
            bindings[placeholder] = output
        self._keep(communicator, bindings)
        communicator.run(self.variant, bindings, self._phase)
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def _key(self, argument: str) -> str:
        return self.symbols.operator.called(argument)

    _phase: ClassVar[Phase] = "whole"

    @property
    def _whole(self) -> str:
        """The operator that this is, or is a half of."""
        return self.symbols.operator.name.partition("_")[0]

    @cached_property
    def _get_inputs(self) -> Callable[[Named], tuple[Any, ...]]:
        return itemgetter(*dict.fromkeys(self._key(argument) for _, argument in self.inputs))

    def _make_native(self, communicator: Communicator) -> Native:
        """A native call for calls of this plan; False where there is none."""
        calls = communicator.calls
        # Masked ids are made, tails of outputs set, and weights compared in Python.
        unusual = self._phase != "whole" or self.copied or self.variant.mask != "none" or self._unwritten
        if unusual or self.tables or not isinstance(calls, NativeCalls):
            return False
        s, operator = self.symbols, self._whole
        dims = {name: len(s.given[name]) for name in dict.fromkeys(name for _, name in self.inputs)}
        outputs = [(o.name, o.placeholder, *s.spec(o)) for o in s.operator.outputs]
        bounds = None
        constants = self._constants
        if operator == "combine":
            bounds = min(s["rows"], communicator.capacity), self.num_entries - 1
            constants = constants | {"num_rows": self._num_rows(s["rows"])}
        sizes = s["BS"], s["K"]
        program = PlanCall(
            operator, self.inputs, dims, outputs, constants, self.num_ids, sizes, self.index, bounds
        )
        self.context.access.program = program
        return calls.call(program, self.variant, communicator.context.parts(operator, s["BS"]))

    def _num_rows(self, known: int) -> int:
        """How many results combine looks at, of so many: A3's second version has an origin for each."""
        if self.finds_by_ids or self.variant.exchange:
            return known
        return min(known, math.prod(self.symbols.given[self.index]) // 3)

    @property
    def finds_by_ids(self) -> bool:
        """Whether combine finds results by the ids: in the first version, and on A2."""
        return self.symbols.operator.version == 1 or self.config.product == "A2"

    @cached_property
    def index(self) -> str:
        """The tensor that says where combine's results go: dispatch returns it, and combine takes it."""
        returned = [output.name for output in self.symbols.operator.outputs]
        return next(name for name in INDEXES if name in returned or self.symbols.is_given(name))

    def _keep(self, communicator: Communicator, bindings: Bindings) -> None:
        """What combine reads again, once there are outputs."""

    def _bind_tables(self, bindings: Bindings) -> None:
        """Adds the tables, which stand behind the counts of dispatch."""
        bindings[TABLES] = bindings["recv_offsets"][self.num_entries :]

    @cached_property
    def _output_placeholders(self) -> tuple[str, ...]:
        return tuple(output.placeholder for output in self.symbols.operator.outputs)

    @cached_property
    def _output_specs(self) -> tuple[list[TensorSpec], list[tuple[int, torch.Tensor]]]:
        """The outputs to make; and by position those without elements, which all calls share."""
        specs, nothing = [], []
        for position, (shape, dtype) in enumerate(self.symbols.specs()):
            if math.prod(shape):
                specs.append((shape, dtype))
            else:
                device = self.communicator.backend.device
                nothing.append((position, torch.empty(shape, dtype=dtype, device=device)))
        return specs, nothing

    @cached_property
    def _unwritten(self) -> list[tuple[int, int]]:
        """Position of each output of counts that no kernel fills to its end, and what is written of it."""
        written = {
            "tokens_per_expert": self.deployment.config.experts_on(self.deployment.rank),
            "recv_offsets": self.num_entries * self.symbols["tp"],
            "exchange_counts": 2 * self.variant.exchange,
        }
        sizes = [
            (placeholder, shape[0])
            for placeholder, (shape, _) in zip(self._output_placeholders, self.symbols.specs(), strict=True)
        ]
        return [
            (i, written[placeholder])
            for i, (placeholder, size) in enumerate(sizes)
            if size > written.get(placeholder, size)
        ]

    def _make_outputs(self, communicator: Communicator) -> list[torch.Tensor]:
        """The outputs, with what no kernel writes set."""
        specs, nothing = self._output_specs
        made: list[torch.Tensor] = communicator.backend.empty_all(specs)
        for position, output in nothing:
            made.insert(position, output)
        for position, written in self._unwritten:
            made[position][written:] = 0
        return made


class DispatchPlan(FunctionPlan):
    """A checked dispatch of one shape."""

    @cached_property
    def _marked(self) -> str:
        """The placeholder of what comes back with combine."""
        return next(o.placeholder for o in self.symbols.operator.outputs if o.name == self.index)

    def _keep(self, communicator: Communicator, bindings: Bindings) -> None:
        digest = communicator.digest_ids(bindings["topk_idx"], bindings.get("mask"))
        if digest is not None:
            mark(bindings[self._marked], digest)
        if self.tables:
            self._bind_tables(bindings)
            if not communicator.backend.is_asynchronous:
                self.tables.keep(bindings)


class CombinePlan(FunctionPlan):
    """A checked combine of one shape."""

    def _prepare(self, communicator: Communicator, bindings: Bindings) -> None:
        super()._prepare(communicator, bindings)
        self._check_ids(communicator, bindings)
        self._count_rows(communicator, bindings)
        if self.tables:
            self._bind_tables(bindings)
            if not communicator.backend.is_asynchronous:
                self.tables.check(bindings, self.called)

    def _check_ids(self, communicator: Communicator, bindings: Bindings) -> None:
        """Checks that ids and mask are those of the dispatch whose index this is, where it is known.

        Raises:
            ArgumentError: they are not.
        """
        had = mark_of(bindings["expand_idx"])
        if had is not None and had != communicator.digest_ids(bindings["topk_idx"], bindings.get("mask")):
            dispatch = f"the dispatch that returned this {self._key(self.index)}"
            raise other_ids_error(
                "expert_ids", dispatch, "Pass the expert_ids and x_active_mask of that dispatch."
            )

    def _count_rows(self, communicator: Communicator, bindings: Bindings) -> None:
        """Adds how many results there may be.

        Raises:
            ArgumentError: there are more results than rows.
        """
        rows = known = self.symbols["rows"]
        if communicator.backend.is_asynchronous:
            # Kernels may take so many whatever the counts say; they report a total that is beyond. With a
            # peer there are as many rows as can have been received (`check_whole`).
            known = rows if self.variant.exchange else min(rows, communicator.capacity)
        else:
            total = communicator.backend.read_int32(bindings["recv_offsets"], self.num_entries - 1)
            if not 0 <= total <= rows or total > communicator.capacity:
                rule = f"expand_x has {rows} rows and at most {communicator.capacity} can have been received"
                remedy = "Pass ep_recv_counts of the matching dispatch."
                raise ArgumentError("ep_send_counts", f"one with a total of {total} rows", rule, remedy)
        bindings["num_rows"] = self._num_rows(known)

    @cached_property
    def _constants(self) -> Bindings:
        bindings = super()._constants
        if "norm_eps" in self.symbols:
            # A graph may hold it for as long as this plan lives.
            bindings["eps"] = self._table([self.symbols["norm_eps"]], torch.float32)
        return bindings
