"""Plans of the halves: setup sends, teardown waits and arranges or sums.

What a setup returns besides is a ticket: teardown takes only that of the setup in flight. Everything else
that teardown needs is in the windows, so the buffers that torch_npu's setup packs its rows into have their
documented shapes here and no contents. Where the host does not read device memory, the ticket has none
either: which setup is in flight is known without it.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import torch

from moe_triton.core.checks import check_tensor
from moe_triton.core.errors import ArgumentError, BufferStateError
from moe_triton.layout import TRAILER_MARK, TRAILER_WORDS
from moe_triton.runtime.communicator import Communicator
from moe_triton.runtime.executables import Phase
from moe_triton.runtime.prepared_call import Bindings, Named
from moe_triton.torch_npu_ops.plans import CombinePlan, DispatchPlan, FunctionPlan

TICKET_WORDS = 2
# What both halves take alike: fields of a variant, by the arguments that decide them.
ALIKE = {"row_format": "quant_mode", "block_quantize": "comm_quant_mode", "dtype": "x"}


class SetupPlan(FunctionPlan):
    """A checked setup of one shape. Its last output is the ticket."""

    _phase: ClassVar[Phase] = "setup"

    def _make_outputs(self, communicator: Communicator) -> list[torch.Tensor]:
        made = super()._make_outputs(communicator)
        if not communicator.backend.is_asynchronous:
            made[-1].zero_()
            made[-1][0], made[-1][1] = _ticket(communicator, self._whole)
        return made


class TeardownPlan(FunctionPlan):
    """A checked teardown of one shape."""

    _phase: ClassVar[Phase] = "teardown"

    def execute(self, named: Named) -> Any:
        """Runs it where a setup with the same attributes is in flight.

        No communicator is made for it: its ranks would wait for those that call teardown as they set it up.

        Raises:
            BufferStateError: there is no setup.
            ArgumentError: it was made with others, or has returned something else.
            CommunicationTimeoutError: a rank's data did not come in time.
        """
        operator = self._whole
        setup = self.communicator.in_flight(operator) if self.context.access.is_made else None
        if setup is None:
            raise BufferStateError(
                f"no {operator} of this group and shape is set up. Call {operator}_setup first, with the "
                f"same attributes and shapes."
            )
        for field, name in ALIKE.items():
            had = getattr(setup, field, None)
            if had != getattr(self.variant, field, None):
                value = f"not what {operator}_setup had ({field} {had})"
                rule = "both halves take the same attributes"
                raise ArgumentError(name, value, rule, "Pass the same to both.")
        self._check_returned(self.communicator, named)
        return super().execute(named)

    def _check_returned(self, communicator: Communicator, named: Named) -> None:
        """Checks what setup has returned."""
        s, backend = self.symbols, communicator.backend
        for argument in s.operator.tensors:
            name = self._key(argument.name)
            if argument.of_setup and name in named:
                shape, dtypes = s.expected(argument), s.dtypes(argument)
                check_tensor(name, named[name], shape=shape, dtypes=dtypes, device=backend.device)
        if backend.is_asynchronous:
            return
        operator = self._whole
        expected, have = _ticket(communicator, operator), named["comm_cmd_info"][:TICKET_WORDS].tolist()
        if have != expected:
            is_ticket = have[:1] == expected[:1]
            value = f"that of {operator} {have[1]}" if is_ticket else f"one that begins with {have}"
            rule = f"{operator} {expected[1]} is in flight"
            raise ArgumentError("comm_cmd_info", value, rule, f"Pass what its {operator}_setup returned.")


def _ticket(communicator: Communicator, operator: str) -> list[int]:
    return [TRAILER_MARK, communicator.counts[operator] & 0x7FFFFFFF]


class DispatchSetupPlan(SetupPlan, DispatchPlan):
    """A checked dispatch_setup of one shape."""

    def _prepare(self, communicator: Communicator, bindings: Bindings) -> None:
        super()._prepare(communicator, bindings)
        if "smooth_scales" in bindings:
            # Those of shared experts that no rank holds have no row in our tables.
            unheld = self.symbols["S"] - self.config.num_shared_experts
            bindings["smooth_scales"] = bindings["smooth_scales"][unheld:]


class DispatchTeardownPlan(TeardownPlan, DispatchPlan):
    """A checked dispatch_teardown of one shape."""

    def _prepare(self, communicator: Communicator, bindings: Bindings) -> None:
        """The rows are here: nobody looks at ids again."""

    def _keep(self, communicator: Communicator, bindings: Bindings) -> None:
        """Setup's output is marked, which combine_teardown takes."""


class CombineSetupPlan(SetupPlan, CombinePlan):
    """A checked combine_setup of one shape."""

    @cached_property
    def _constants(self) -> Bindings:
        return {}  # it works on rows, not on tokens

    def _prepare(self, communicator: Communicator, bindings: Bindings) -> None:
        index, backend = bindings["origins"], communicator.backend
        first = 3 * communicator.capacity
        if not backend.is_asynchronous and backend.read_int32(index, first) != TRAILER_MARK:
            raise ArgumentError(
                "assist_info_for_combine",
                f"one of shape {tuple(index.shape)} without a number of rows",
                "it is dispatch_v2's or dispatch_teardown's output, unchanged",
                "Pass that tensor whole.",
            )
        bindings["recv_offsets"] = self._counts_ending(communicator, index, first + TRAILER_WORDS)
        self._count_rows(communicator, bindings)

    def _counts_ending(self, communicator: Communicator, index: torch.Tensor, end: int) -> torch.Tensor | int:
        """Running totals whose last one is that before ``end``: the plan reads that one, and no other."""
        if communicator.backend.is_asynchronous:
            # Their address, as if they stood there: a copy would be one more launch.
            return index.data_ptr() + (end - self.num_entries) * index.element_size()
        counts = torch.zeros(self.num_entries, dtype=torch.int32, device=index.device)
        counts[-1] = index[end - 1]
        return counts


class CombineTeardownPlan(TeardownPlan, CombinePlan):
    """A checked combine_teardown of one shape."""

    def _count_rows(self, communicator: Communicator, bindings: Bindings) -> None:
        """The results are here."""
