"""The outputs of a dispatch whose rows have places: how many rows they have, and their memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from moe_triton.backends.base import TensorSpec
from moe_triton.core.config import Config
from moe_triton.core.handle import DispatchOutput
from moe_triton.runtime.buffer_plans import BufferPlan, BufferPlans
from moe_triton.runtime.output_request import Request
from moe_triton.runtime.prepared_call import Named
from moe_triton.runtime.said import span_of

BY_ROW = "tokens", "scales", "weights"
"""Outputs that have a row for each that is received."""
LOCAL = "local_topk_idx", "local_topk_weights"
"""What has one besides where a token comes once for each rank: a handle keeps it."""


class Size(NamedTuple):
    """Rows of the outputs.

    Attributes:
        num_rows: gaps included.
        stride: rows from one expert's to the next one's; 0 where they follow one another.
    """

    num_rows: int
    stride: int = 0


def size_of(request: Request, config: Config, rank: int, rows: list[int] | None, rounds: int) -> Size:
    """The size of the outputs that a request asks for.

    Args:
        request: what is asked for.
        config: of the buffer.
        rank: this one.
        rows: that each of its experts receives; None where the host does not know.
        rounds: of the call.
    """
    received, local = request.received, config.experts_on(rank)
    if received is None:
        received = "exact" if request.max_tokens is None and rounds > 1 else "bound"
    bound = config.receive_capacity(rank)
    if request.is_per_rank:
        bound = min(bound, config.num_ranks * config.num_max_tokens_per_rank)
    bound *= rounds
    if request.is_padded:
        of_expert = (
            bound
            if config.is_shared_rank(rank)
            else config.num_max_tokens_per_rank * config.num_ranks * rounds
        )
        stride = of_expert
        if received == "exact":
            assert rows is not None
            stride = max(rows, default=0)
        elif isinstance(received, int):
            stride = received
        return Size(local * max(1, stride), max(1, stride))
    if received == "exact":
        assert rows is not None
        return Size(span_of(rows, request.alignment, 0))
    return Size(received if isinstance(received, int) else bound + local * (request.alignment - 1))


class Outputs:
    """Memory for the outputs of a call.

    Args:
        plans: of the buffer.
        plan: of the call.
        tensors: every one that it takes.
        request: what is asked for.
        out: of `EPBuffer.dispatch`.
        size: of the outputs.

    Attributes:
        size: of the outputs.
        written: as kernels write them, by name.

    Raises:
        ArgumentError: the caller's are too small, or of another kind.
        RuntimeError: torch's, where there is no memory.
    """

    def __init__(
        self, plans: BufferPlans, plan: BufferPlan, tensors: Named, request: Request, out: Any, size: Size
    ) -> None:
        self._plans, self._plan, self._request, self.size = plans, plan, request, size
        self._asked = {} if out is None else asked(plans, plan, tensors, request, out, size.num_rows)
        specs = {
            name: of_rows(spec, size.num_rows)
            for name, spec in plan.made_specs.items()
            if name in (*BY_ROW, *LOCAL)
        }
        given = {name: tensor for name, tensor in self._asked.items() if name in BY_ROW}
        self.written = given if plans.fitting is None else plans.fitting.as_written(specs, given)
        for name, spec in specs.items():
            if name not in self.written:
                self.written[name] = plans.communicator.backend.empty(*spec)

    def zero_all(self) -> None:
        """Zeroes everything, where gaps are to be zeros and only the device will know them."""
        if self._zeroes:
            for tensor in self.written.values():
                tensor.zero_()

    def zero_gaps(self, rows: list[int]) -> None:
        """Zeroes what is between experts' rows, where that is asked for.

        Args:
            rows: of each expert.
        """
        begin = 0
        for count in rows if self._zeroes else ():
            end = begin + span_of([count], self._request.alignment, self.size.stride)
            for tensor in self.written.values():
                tensor[begin + count : end].zero_()
            begin = end

    @property
    def _zeroes(self) -> bool:
        return self._request.zeroes and self._request.has_gaps

    def seen(self, per_expert: torch.Tensor) -> dict[str, torch.Tensor]:
        """All outputs as their caller sees them, by name.

        Args:
            per_expert: rows of each expert.
        """
        fitting, plan, size = self._plans.fitting, self._plan, self.size
        made = self.written | {"tokens_per_expert": per_expert}
        if fitting is not None:
            made = fitting.all_seen(_with_rows(plan.specs, size.num_rows), made)
        for name, tensor in self._asked.items():
            if made[name].data_ptr() != tensor.data_ptr():
                if fitting is None:
                    tensor.copy_(made[name])
                else:
                    fitting.copied(made[name], tensor)
            made[name] = tensor
        for name in BY_ROW if size.stride else ():
            if name in made:
                rows = made[name]
                made[name] = rows.unflatten(0, (len(rows) // size.stride, size.stride))  # type: ignore[no-untyped-call]
        return made


def asked(
    plans: BufferPlans, plan: BufferPlan, tensors: Named, request: Request, out: Any, num_rows: int
) -> dict[str, torch.Tensor]:
    """Outputs that the caller gives, by name, of so many rows.

    Args:
        plans: of the buffer.
        plan: of the call.
        tensors: every one that it takes.
        request: what is asked for.
        out: what is given.
        num_rows: that they must have at least.

    Raises:
        ArgumentError: one is missing, too small, of another kind, or in the memory of another one.
    """
    if request.is_padded and isinstance(out, DispatchOutput):
        out = out._replace(**{name: _rows_of(getattr(out, name), plan.specs.get(name)) for name in BY_ROW})
    elif request.is_padded:
        out = _rows_of(out, plan.specs["tokens"])
    return plans.asked(_with_rows(plan.specs, num_rows), tensors, out)


def of_rows(spec: TensorSpec, rows: int) -> TensorSpec:
    """The shape and dtype of an output with so many rows."""
    (_, *columns), dtype = spec
    return (rows, *columns), dtype


def _with_rows(specs: dict[str, TensorSpec], rows: int) -> dict[str, TensorSpec]:
    named = *BY_ROW, *LOCAL
    return {name: of_rows(spec, rows) if name in named else spec for name, spec in specs.items()}


def _rows_of(tensor: Any, spec: TensorSpec | None) -> Any:
    """Padded experts' rows as the rows that they are; rows as they are."""
    if spec is None or not isinstance(tensor, torch.Tensor) or tensor.dim() != len(spec[0]) + 1:
        return tensor
    is_block = tensor.is_contiguous() or tensor.stride(0) == tensor.shape[1] * tensor.stride(1)
    return tensor.flatten(0, 1) if is_block else tensor
