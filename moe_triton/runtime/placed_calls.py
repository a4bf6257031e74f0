"""The calls of a buffer, whether its rows have places or go one behind the other in one round.

Which ranks take part in a call in rounds is known in two ways. Either all of them ask for something that
needs it (`Request.is_announced`): then call words say so. Or some have more tokens than a round takes: they
ring a bell in every rank's window, and whoever has ended an ordinary dispatch joins them
(`PlacedCalls.join`).
"""

from __future__ import annotations

from dataclasses import replace
from types import NoneType
from typing import Any

import torch

from moe_triton.core.errors import ArgumentError
from moe_triton.core.handle import DispatchHandle, DispatchOutput, Pending, PlacedHandle
from moe_triton.core.plain_tensors import fault_of
from moe_triton.core.row_formats import RowFormat
from moe_triton.runtime import arguments, rows_per_rank
from moe_triton.runtime.buffer_plans import BufferPlans
from moe_triton.runtime.output_request import Request, make_request
from moe_triton.runtime.placed_combine import PlacedCombine
from moe_triton.runtime.placed_dispatch import PlacedDispatch, header_of, num_tokens_of
from moe_triton.runtime.placed_outputs import size_of
from moe_triton.runtime.placed_per_rank import PlacedPerRank
from moe_triton.runtime.prepared_call import Named
from moe_triton.runtime.programs.placed import Asked, Begun

MAX_ASKED = 64
_PLAIN_TYPES = (int, str, bool, NoneType)


class PlacedCalls:
    """The calls of one buffer whose rows have places.

    Args:
        plans: the buffer's.
    """

    def __init__(self, plans: BufferPlans) -> None:
        self._plans, self._communicator = plans, plans.communicator
        self._asked: dict[tuple[tuple[Any, ...], tuple[type, ...]], Asked | None] = {}

    def any_dispatch(
        self,
        tensors: Named,
        row_format: RowFormat,
        request: Request,
        out: Any,
        known: DispatchHandle | None,
        wait: bool,
    ) -> DispatchOutput | Pending[DispatchOutput]:
        """A dispatch, whether its rows have places or not.

        Args:
            tensors: every one that it takes.
            row_format: how rows travel.
            request: what is asked for.
            out: of `EPBuffer.dispatch`.
            known: a checked handle whose routing it has, or None.
            wait: whether for the rows too, or only until they are sent.

        Raises:
            ArgumentError: a bad argument. Nothing was sent.
        """
        if known is not None:
            tensors, request = self._with_routing(tensors, request, known), _request_of(known, request)
        per_rank = request.is_per_rank
        if per_rank:
            asked = {"smooth_scales": tensors["smooth_scales"], **dict(request.given)}
            rows_per_rank.check(self._communicator, self._plans.special, asked)
        if known is not None:
            if isinstance(known, PlacedHandle):
                self._check_placed("handle", "of a dispatch in rounds, or with places", wait)
                return self._placed(tensors, row_format, request, out, known).run()
            return self._plans.dispatch(tensors, row_format, out, wait, _as_it_is, known, per_rank=per_rank)
        x, most = tensors["x"], self._communicator.config.num_max_tokens_per_rank
        tokens = num_tokens_of(x)
        if request.is_announced or tokens > most:
            name, value = ("x", f"of {tokens} tokens") if tokens > most else request.reason
            self._check_placed(name, value, wait)
            return self._placed(tensors, row_format, request, out).run()

        def joined(first: DispatchOutput) -> DispatchOutput:
            return self.join(first, tensors, row_format, request, out)

        return self._plans.dispatch(tensors, row_format, out, wait, joined, per_rank=per_rank)

    def _placed(
        self, tensors: Named, row_format: RowFormat, request: Request, *args: Any, **options: Any
    ) -> PlacedDispatch:
        """A dispatch whose rows have places, of the rows that are asked for."""
        kind = PlacedPerRank if request.is_per_rank else PlacedDispatch
        return kind(self._plans, tensors, row_format, request, *args, **options)

    def any_combine(
        self,
        tensors: Named,
        handle: DispatchHandle,
        comm_quantize: str | None,
        out: Any,
        wait: bool,
    ) -> torch.Tensor | Pending[torch.Tensor]:
        """A combine, whether its dispatch's rows had places or not; see `BufferPlans.combine`."""
        if handle.results_idx is not None:
            rows_per_rank.check_combine(handle, tensors["topk_weights"])
        if not isinstance(handle, PlacedHandle):
            return self._plans.combine(tensors, handle, comm_quantize, out, wait)
        if not wait:
            rule = "rounds of a call wait for each other"
            raise ArgumentError("wait", False, rule, "Leave it out for handles of dispatches in rounds.")
        return PlacedCombine(self._plans, tensors, handle, comm_quantize, out).run()

    def _check_placed(self, name: str, value: object, wait: bool) -> None:
        """Checks that there are such calls."""
        communicator = self._communicator
        communicator.scheme.check_offers("rounds", name, value)
        if communicator.context.exchange_rank is not None:
            rule = "tensor-parallel ranks exchange the rows of one round"
            raise ArgumentError(name, value, rule, "Leave it out, split the batch, or leave out tp_group.")
        if not wait:
            rule = "rounds of a call wait for each other, and places are known when all are heard"
            instead = "pass fewer tokens" if name == "x" else f"leave out {name}"
            raise ArgumentError("wait", False, rule, f"Leave it out, or {instead}.")

    def _with_routing(self, tensors: Named, request: Request, known: DispatchHandle) -> Named:
        """What a dispatch takes, with the routing of an earlier one."""
        if request.is_per_rank and known.results_idx is None:
            rule = "it has the routing of rows for single experts"
            remedy = "Leave do_expand out, or pass the handle of a dispatch with do_expand=False."
            raise ArgumentError("handle", "of a dispatch with do_expand=True", rule, remedy)
        for name in ("topk_idx", "active_mask"):
            if tensors[name] is not None:
                raise ArgumentError(name, "given", "handle has the routing", "Leave one of the two out.")
        for name, value in request.given:
            if name != "do_zero_padding":
                raise ArgumentError(
                    name, value, "outputs are as those of handle", "Leave one of the two out."
                )
        arguments.check_routing(known, self._communicator)
        x = tensors["x"]
        is_plain = isinstance(x, torch.Tensor) and fault_of(x) is None
        if is_plain and x.dim() and len(x) != known.num_tokens:
            rule = f"the routing of handle is of {known.num_tokens}"
            remedy = "Pass as many, in their order."
            raise ArgumentError("x", f"of {len(x)} tokens", rule, remedy)
        return tensors | {"topk_idx": known.topk_idx, "active_mask": known.active_mask}

    def asked(self, *options: Any) -> Asked | None:
        """What native code needs of a call with places, where it may run such a call.

        Args:
            options: num_max_tokens_per_rank, num_recv_tokens, expert_alignment, layout and do_zero_padding of
                `EPBuffer.dispatch`, which nobody has looked at.
        """
        if not all(type(each) in _PLAIN_TYPES for each in options):
            return None
        # A number and a truth value may be equal, and are not the same to `make_request`.
        key = options, tuple(map(type, options))
        if key not in self._asked:
            if len(self._asked) >= MAX_ASKED:
                self._asked.clear()
            self._asked[key] = self._make_asked(options)
        return self._asked[key]

    def _make_asked(self, options: tuple[Any, ...]) -> Asked | None:
        communicator = self._communicator
        config, size = communicator.config, communicator.config.num_max_tokens_per_rank
        try:
            most_tokens, received, alignment, layout, zeroes = options
            request = make_request(most_tokens, received, alignment, layout, zeroes, True)
            if request.is_announced:
                self._check_placed(*request.reason, wait=True)
        except ArgumentError:  # Python says it
            return None
        most = size if request.max_tokens is None else request.max_tokens
        if not request.is_announced or most > size:
            return None
        header = self._plans.call_header(*header_of(request, rounds=1))
        rows, stride = 0, 0
        if request.received != "exact":
            known = size_of(request, config, communicator.rank, None, 1)
            rows, stride = (0, known.stride) if request.is_padded else (known.num_rows, 0)
        numbers = request.alignment, rows, stride, int(request.is_padded)
        return Asked(header, most, *numbers, int(request.zeroes and request.has_gaps))

    def go_on(self, begun: Begun, tensors: Named, row_format: RowFormat, request: Request) -> DispatchOutput:
        """Ends a call that native code has begun.

        Args:
            begun: what there is of it.
            tensors: every one that it takes.
            row_format: how its rows travel.
            request: what was asked for.
        """
        try:
            call = self._placed(tensors, row_format, request, None, begun=begun)
        except BaseException as error:  # peers go on already
            self._communicator.abandon("dispatch", error)
            raise
        return call.run()

    def leave_masked(
        self, made: DispatchOutput, tensors: Named, row_format: RowFormat, request: Request
    ) -> DispatchOutput:
        """What native code has made of a call, without ranks that were masked in it.

        Args:
            made: what it has made.
            tensors: every one that it took.
            row_format: how its rows travelled.
            request: what was asked for.
        """
        each = made.handle.rounds[0]  # type: ignore[attr-defined]
        kept = each.topk_idx, each.expand_idx, each.send_counts, each.recv_offsets, each.assist_info
        none = each.send_counts[:0]  # counters have been counted
        begun = Begun(*kept, none, none)
        return self._placed(tensors, row_format, request, None, begun=begun).leave_masked(made)

    def join(
        self, first: DispatchOutput, tensors: Named, row_format: RowFormat, request: Request, out: Any
    ) -> DispatchOutput:
        """Goes on with a dispatch that has ended, and was the first round of more.

        Args:
            first: what it gave.
            tensors: every one that it took.
            row_format: how its rows travelled.
            request: what was asked for.
            out: of `EPBuffer.dispatch`, where its rows are.
        """
        names = "x", "topk_idx", "topk_weights", "active_mask"
        nothing = {name: tensors[name][:0] for name in names if tensors.get(name) is not None}
        try:
            sizes = tensors | nothing, row_format, request, out
            call = self._placed(*sizes, joined=first, inputs=tensors)
        except BaseException as error:  # peers go on already
            self._communicator.abandon("dispatch", error)
            raise
        return call.run()


def _request_of(known: DispatchHandle, request: Request) -> Request:
    """What a dispatch by a known routing is asked for: outputs as those of its handle."""
    per_rank = known.results_idx is not None
    if not isinstance(known, PlacedHandle):
        return replace(request, is_per_rank=per_rank)
    return Request(None, None, known.alignment, known.stride > 0, request.zeroes, per_rank)


def _as_it_is(made: DispatchOutput) -> DispatchOutput:
    return made
