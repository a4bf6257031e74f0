"""Dispatches whose rows have places: in rounds, with gaps, by a known routing in rounds; and their combines.

A call has as many rounds as the rank with most tokens needs, the same on every rank, and each is a run of the
scheme's dispatch. Before the first one every rank says how many rows the whole call has for whom
(`Layout.calls`), so that each row goes to its place of the whole at once (docs/protocol.md, "Rounds of one
call"). Which ranks take part in that is known in two ways. Either all of them ask for something that needs
it (`Request.is_announced`): then call words say so. Or some have more tokens than a round takes: they ring a
bell in every rank's window, and whoever has ended an ordinary dispatch joins them (`PlacedCalls.join`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch

from moe_triton.backends.base import TensorSpec
from moe_triton.core.checks import check_tensor
from moe_triton.core.errors import ArgumentError, MoeTritonError
from moe_triton.core.handle import DispatchHandle, DispatchOutput, Pending, PlacedHandle, Round
from moe_triton.core.records import CALL_HEADER, MAX_CALL_TOKENS
from moe_triton.core.row_formats import RowFormat
from moe_triton.operators.buffer import COMBINE_OF_BUFFER, DISPATCH_OF_BUFFER, OF_HANDLE
from moe_triton.operators.variants import CombineVariant, DispatchVariant
from moe_triton.runtime import given_outputs
from moe_triton.runtime.arguments import other_ids_error
from moe_triton.runtime.buffer_plans import BufferPlans, CombineOfBuffer, DispatchOfBuffer
from moe_triton.runtime.communicator import bell_of
from moe_triton.runtime.executables import Phase
from moe_triton.runtime.output_request import Request
from moe_triton.runtime.prepared_call import Bindings, Named

# What a call binds for each of its tokens.
_BY_TOKEN = "x", "topk_idx", "topk_weights", "mask", "given_ids"
_BY_TOKEN_OF_COMBINE = "topk_idx", "topk_weights", "mask", "shared_x", "ori_x", "out"
# Outputs that have a row for each that is received.
_BY_ROW = "tokens", "scales", "weights"
_PADDED = -1  # in a header, where experts have as many rows each, however many that will be


class _Said(NamedTuple):
    """What all ranks have said of a call, on the host.

    Attributes:
        headers: (EP, words) of `CALL_HEADER`.
        rows: by rank, the rows that each of its experts receives.
    """

    headers: list[list[int]]
    rows: list[list[int]]

    def of(self, name: str) -> list[int]:
        """A field of each rank's header."""
        return [header[CALL_HEADER.word(name)] for header in self.headers]


class _Failure(NamedTuple):
    """Why nothing is delivered.

    Attributes:
        error: of the call.
        rounds: that are received all the same: peers have sent them, or will.
    """

    error: Exception
    rounds: int


class _Outputs(NamedTuple):
    """Where rows go.

    Attributes:
        num_rows: gaps included.
        stride: rows from one expert's to the next one's, or 0.
        written: as kernels write them, by name.
        asked: where their caller wants them, by name, checked.
    """

    num_rows: int
    stride: int
    written: dict[str, torch.Tensor]
    asked: dict[str, torch.Tensor]


def span_of(rows: Sequence[int], alignment: int, stride: int) -> int:
    """Rows of outputs with so many for each expert, gaps included."""
    return len(rows) * stride if stride else sum(-(-count // alignment) * alignment for count in rows)


class PlacedCalls:
    """The calls of one buffer whose rows have places.

    Args:
        plans: the buffer's.
    """

    def __init__(self, plans: BufferPlans) -> None:
        self.plans, self.communicator, self.host = plans, plans.communicator, plans.host
        self._headers: dict[tuple[int, ...], torch.Tensor] = {}

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
            tensors = self._with_routing(tensors, request, known)
            if isinstance(known, PlacedHandle):
                self._check_placed("handle", "of a dispatch in rounds, or with places", wait)
                request = Request(None, None, known.alignment, known.stride > 0, request.zeroes)
                return self.dispatch(tensors, row_format, request, out, known)
            return self.plans.dispatch(tensors, row_format, out, wait, _as_it_is, known)
        x, most = tensors["x"], self.communicator.config.num_max_tokens_per_rank
        tokens = len(x) if isinstance(x, torch.Tensor) and x.dim() else 0
        if request.is_announced or tokens > most:
            name, value = ("x", f"of {tokens} tokens") if tokens > most else request.reason
            self._check_placed(name, value, wait)
            return self.dispatch(tensors, row_format, request, out)

        def joined(first: DispatchOutput) -> DispatchOutput:
            return self.join(first, tensors, row_format, request, out)

        return self.plans.dispatch(tensors, row_format, out, wait, joined)

    def any_combine(
        self,
        tensors: Named,
        handle: DispatchHandle,
        comm_quantize: str | None,
        out: Any,
        wait: bool,
    ) -> torch.Tensor | Pending[torch.Tensor]:
        """A combine, whether its dispatch's rows had places or not; see `BufferPlans.combine`."""
        if not isinstance(handle, PlacedHandle):
            return self.plans.combine(tensors, handle, comm_quantize, out, wait)
        if not wait:
            rule = "rounds of a call wait for each other"
            raise ArgumentError("wait", False, rule, "Leave it out for handles of dispatches in rounds.")
        return self.combine(tensors, handle, comm_quantize, out)

    def _check_placed(self, name: str, value: object, wait: bool) -> None:
        """Checks that there are such calls."""
        communicator = self.communicator
        communicator.scheme.check_offers("rounds", name, value)
        if communicator.context.exchange_rank is not None:
            rule = "tensor-parallel ranks exchange the rows of one round"
            raise ArgumentError(name, value, rule, "Leave it out, split the batch, or leave out tp_group.")
        if not wait:
            rule = "rounds of a call wait for each other, and places are known when all are heard"
            raise ArgumentError("wait", False, rule, f"Leave it out, or {name}.")

    def _with_routing(self, tensors: Named, request: Request, known: DispatchHandle) -> Named:
        """What a dispatch takes, with the routing of an earlier one."""
        for name in ("topk_idx", "active_mask"):
            if tensors[name] is not None:
                raise ArgumentError(name, "given", "handle has the routing", "Leave one of the two out.")
        for name, value in request.given:
            if name != "do_zero_padding":
                raise ArgumentError(name, value, "outputs are as those of handle", "Leave one of the two out.")
        x = tensors["x"]
        if isinstance(x, torch.Tensor) and x.dim() and len(x) != known.num_tokens:
            rule = f"the routing of handle is of {known.num_tokens}"
            remedy = "Pass as many, in their order."
            raise ArgumentError("x", f"of {len(x)} tokens", rule, remedy)
        return tensors | {"topk_idx": known.topk_idx, "active_mask": known.active_mask}

    def dispatch(
        self,
        tensors: Named,
        row_format: RowFormat,
        request: Request,
        out: Any,
        known: PlacedHandle | None = None,
    ) -> DispatchOutput:
        """A dispatch that says itself that its rows have places.

        Args:
            tensors: every one that it takes.
            row_format: how rows travel.
            request: what is asked for.
            out: of `EPBuffer.dispatch`.
            known: the handle whose routing it has, or None.

        Raises:
            ArgumentError: a bad argument, where nothing was sent; or a rank has too little room, or another
                number of tokens at most. The buffer stays usable.
        """
        call = _Dispatch(self, tensors, row_format, request, out, known)
        return call.alone(call.whole if known is None else call.again)

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
        call = _Dispatch(self, tensors | nothing, row_format, request, out, joined=first)
        return call.alone(lambda: call.behind(first))

    def combine(
        self, tensors: Named, handle: PlacedHandle, comm_quantize: str | None, out: Any
    ) -> torch.Tensor:
        """A combine of a dispatch whose rows had places.

        Args:
            tensors: every one that it takes besides those of the handle.
            handle: a checked one.
            comm_quantize: of `EPBuffer.combine`.
            out: where sums are to go, or None.

        Raises:
            ArgumentError: a bad argument. Nothing was sent.
        """
        call = _Combine(self, tensors, handle, comm_quantize, out)
        try:
            return call.whole()
        except MoeTritonError:
            raise
        except BaseException as error:
            self.give_up("combine", error)
            raise

    def give_up(self, operator: str, error: BaseException) -> None:
        """A call has ended between two of its phases, by Ctrl-C for example."""
        if self.communicator.is_usable:
            self.communicator.abandon(operator, error)

    @cached_property
    def no_counts(self) -> torch.Tensor:
        """The counts of a round to which this rank brings no token."""
        backend, c = self.communicator.backend, self.communicator.context.config
        return torch.zeros(c.num_experts, dtype=torch.int32, device=backend.device)

    def header(self, *values: int) -> torch.Tensor:
        """A `CALL_HEADER` on the device; most calls have that of an earlier one."""
        header = self._headers.get(values)
        if header is None:
            if len(self._headers) >= 64:
                self._headers.clear()
            words = [*values, *(0,) * (CALL_HEADER.num_words - len(values))]
            header = torch.tensor(words, dtype=torch.int32).to(self.communicator.backend.device)
            self._headers[values] = header
        return header


class _Dispatch:
    """One of them.

    Args:
        calls: of the buffer.
        tensors: every one that it takes.
        row_format: how rows travel.
        request: what is asked for.
        out: of `EPBuffer.dispatch`.
        known: the handle whose routing it has.
        joined: what its first round gave, where that is over.

    Raises:
        ArgumentError: a bad argument. Nothing was sent.
    """

    def __init__(
        self,
        calls: PlacedCalls,
        tensors: Named,
        row_format: RowFormat,
        request: Request,
        out: Any,
        known: PlacedHandle | None = None,
        joined: DispatchOutput | None = None,
    ) -> None:
        self.calls, self.request, self.out, self.known = calls, request, out, known
        self.communicator, self.host, self.backend = calls.communicator, calls.host, calls.communicator.backend
        self.plans, self.fitting = calls.plans, calls.plans.fitting
        self.config, self.of_kernels = self.communicator.config, self.communicator.context.config
        self.size, self.rank = self.config.num_max_tokens_per_rank, self.communicator.rank
        if known is None:
            tensors = self.plans.with_ids_of_kernels(tensors)
        self.tensors = tensors
        is_announced = known is not None or request.is_announced
        self._check_request(tensors, is_announced)
        ahead = self.communicator.scheme.sends_ahead
        # What is quantised for the round that is sent ahead takes the place of rows that stay here.
        own = self.plans.bypasses(tensors) and not (ahead and row_format.is_quantized)
        modes = self.plans.modes_of(tensors, row_format, own)
        modes |= {"is_routed": True, "is_placed": True, "is_announced": is_announced}
        self.plan = self.plans.find(DISPATCH_OF_BUFFER, DispatchOfBuffer, tensors, modes)
        self._check_out()
        self.fitted = self.plans.fitted(self.plan, tensors)
        self.given: Bindings = self.plan.bind(self.fitted)
        self.routing_variant = cast(DispatchVariant, self.plan.variant)
        self.variant = replace(self.routing_variant, given_ids=None)
        self.num_tokens = int(self.given["num_tokens"])
        self.mine = max(1, -(-self.num_tokens // self.size))  # rounds that this rank has tokens for
        self.expand_idx = self._ints(self.num_tokens * self.of_kernels.num_topk)
        self.joined = None if joined is None else joined.handle
        self.rounds: list[Bindings] = []
        if joined is None:
            self._make_rounds(self.mine)

    def _check_request(self, tensors: Named, is_announced: bool) -> None:
        x, most = tensors["x"], self.request.max_tokens
        tokens = len(x) if isinstance(x, torch.Tensor) and x.dim() else 0
        if tokens > MAX_CALL_TOKENS:
            rule = f"a call has at most {MAX_CALL_TOKENS} of a rank"
            raise ArgumentError("x", f"of {tokens} tokens", rule, "Split the batch.")
        if most is not None and tokens > most:
            rule = f"num_max_tokens_per_rank={most} says that no rank has more"
            raise ArgumentError("x", f"of {tokens} tokens", rule, "Pass the most that any rank has.")
        if not self.host.is_asynchronous or self.known is not None:
            return
        if not is_announced:
            rule = f"the host does not look whether a rank has more than {self.size} tokens"
            remedy = "Pass num_max_tokens_per_rank of dispatch, the same on every rank."
            raise ArgumentError("x", f"of {tokens} tokens", rule, remedy)
        if self._reads and self.host.is_capturing():
            value = self.request.received if most is not None else None
            name = "num_max_tokens_per_rank" if most is None else "num_recv_tokens"
            rule = "a graph cannot wait for the host to read what comes"
            remedy = "Pass num_max_tokens_per_rank, and num_recv_tokens='bound' or nothing."
            raise ArgumentError(name, value, rule, remedy)

    @property
    def _reads(self) -> bool:
        """Whether the host has to read what ranks have said."""
        request = self.request
        return request.max_tokens is None or request.received not in (None, "bound")

    def _check_out(self) -> None:
        """Checks what can be of given outputs before anything is sent: all but how many rows they have."""
        if self.out is not None:
            self._asked(0)

    def alone(self, body: Any) -> DispatchOutput:
        """Runs the call; one that ends between two phases leaves no peer in the dark."""
        try:
            made: DispatchOutput = body()
        except MoeTritonError:
            raise
        except BaseException as error:
            self.calls.give_up("dispatch", error)
            raise
        return made

    # Its ways.

    def whole(self) -> DispatchOutput:
        """All of it: routes, says what there is, and runs all rounds."""
        totals = self._totals()
        for bindings in self.rounds:
            self._run("routing", bindings | totals)
        zone = self.communicator.zone("dispatch")
        self._announce(totals, zone, self.mine)
        self._run("count", self.rounds[0])
        return self._hear_and_fill(zone, 0)

    def behind(self, first: DispatchOutput) -> DispatchOutput:
        """All but the first round, which is over: nobody here knew that there are more."""
        zone = self.communicator.zone("dispatch", -1)
        self.rounds.append(self._round_of(first))
        memory = self.communicator.memory.bindings
        totals = {"call_counts": self.rounds[0]["send_counts"]}
        if self.of_kernels.num_shared_ranks:
            totals["call_shared_counts"] = memory["shared_counts"].clone()
        self._announce(totals, zone, 1)
        return self._hear_and_fill(zone, 1, first)

    def again(self) -> DispatchOutput:
        """All of it by a known routing: nobody has to say anything."""
        known = self.known
        assert known is not None
        rounds = len(known.rounds)
        self._make_rounds(rounds)
        outputs, unfit = self._outputs(known.num_rows, known.stride)
        if unfit is not None:  # before anything was sent: its size was known
            raise unfit
        rows = None if self.host.is_asynchronous else known.tokens_per_expert_list
        self._zero_gaps(outputs, None if rows is None else [])
        self._fill(0, rounds, outputs, {}, is_counted=False)
        self._zero_gaps(outputs, rows)
        return self._made(outputs, known.recv_offsets, known.tokens_per_expert)

    def _hear_and_fill(self, zone: int, begun: int, first: DispatchOutput | None = None) -> DispatchOutput:
        """Behind the announcement; where ``begun`` is 1 the first round is over."""
        request, context = self.request, self.communicator.context
        self._run("hear", {}, zone)
        said, failure = None, None
        rounds = max(1, -(-(request.max_tokens or 0) // self.size))
        if self._reads or not self.host.is_asynchronous:
            said = self._said(zone)
            rounds = max(rounds, *said.of("rounds"))
            failure = self._verdict(said, rounds)
        num_rows, stride = self._needed(said, rounds)
        heard: Bindings = {name: self._ints(context.num_entries) for name in ("starts", "limits", "call_offsets")}
        heard["call_tokens_per_expert"] = self.backend.empty((context.num_local_experts,), torch.int64)
        heard |= {"alignment": request.alignment, "expert_stride": stride}
        self._run("starts", heard, zone)
        self._make_rounds(rounds)
        outputs, unfit = self._outputs(num_rows, stride) if failure is None else (_NOWHERE, None)
        if failure is not None or unfit is not None:
            self._drain(begun, rounds, heard, failure or _Failure(unfit, rounds))
        rows = None if said is None else said.rows[self.rank]
        self._zero_gaps(outputs, None if rows is None else [])
        if first is not None:
            self._run("late_fill", self._late(first, outputs, heard))
        self._fill(begun, rounds, outputs, heard, is_counted=not begun)
        self._zero_gaps(outputs, rows)
        return self._made(outputs, heard["call_offsets"], heard["call_tokens_per_expert"])

    # What ranks say.

    def _announce(self, totals: Bindings, zone: int, rounds: int) -> None:
        request = self.request
        stride = _PADDED if request.is_padded else 0
        words = rounds, request.max_tokens or 0, request.capacity, request.alignment, stride
        # Who asks for what needs it, or was rung itself, rings nobody.
        is_expected = request.is_announced or self.host.is_asynchronous or self.joined is not None
        bell = 0 if is_expected else bell_of(self.communicator.counts["dispatch"] + 1)
        self._run("announce", totals | {"call_header": self.calls.header(*words), "bell": bell}, zone)

    def _said(self, zone: int) -> _Said:
        words = self.host.on_host(self.communicator.call_words(zone)).long()
        headers, counts = words[:, : CALL_HEADER.num_words], words[:, CALL_HEADER.num_words :]
        counts = counts.clamp(0, MAX_CALL_TOKENS).sum(0)
        c, kernels, rows = self.config, self.of_kernels, []
        for rank in range(c.num_ranks):
            first = rank if c.is_shared_rank(rank) else c.num_shared_ranks + kernels.first_expert_on(rank)
            rows.append(counts[first : first + c.experts_on(rank)].tolist())
        return _Said(headers.tolist(), rows)

    def _verdict(self, said: _Said, rounds: int) -> _Failure | None:
        """Why nobody gets anything, the same on every rank."""
        most = said.of("max_tokens")
        if len(set(most)) > 1:
            shown = ", ".join(f"{number or 'none'} on rank {rank}" for rank, number in enumerate(most))
            error = ArgumentError(
                "num_max_tokens_per_rank",
                self.request.max_tokens,
                f"it must be the same on every rank, and is {shown}",
                "Pass the same number on every rank.",
            )
            return _Failure(error, 1)
        capacities = zip(said.of("capacity"), said.of("alignment"), said.of("stride"), said.rows, strict=True)
        for rank, (room, alignment, stride, rows) in enumerate(capacities):
            needed = max(rows, default=0) if stride == _PADDED else span_of(rows, max(1, alignment), 0)
            if 0 < room < needed:
                what = "of an expert" if stride == _PADDED else "with the gaps" if alignment > 1 else "in all"
                error = ArgumentError(
                    "num_recv_tokens",
                    self.request.received,
                    f"rank {rank} has room for {room} rows and receives {needed} {what}",
                    "Pass a larger number there, or 'exact'. No rank has got anything of this dispatch.",
                )
                return _Failure(error, 1)
        return None

    # Where rows go.

    def _needed(self, said: _Said | None, rounds: int) -> tuple[int, int]:
        """Rows of the outputs, and how far apart padded experts' are, or 0."""
        request, config = self.request, self.config
        received = request.received
        if received is None:
            received = "exact" if request.max_tokens is None and rounds > 1 else "bound"
        local, rows = config.experts_on(self.rank), [] if said is None else said.rows[self.rank]
        if request.is_padded:
            most = config.shared_capacity if config.is_shared_rank(self.rank) else self.size * config.num_ranks
            stride = most * rounds
            if received == "exact":
                stride = max(rows, default=0)
            elif isinstance(received, int):
                stride = received
            stride = max(1, stride)
            return local * stride, stride
        if received == "exact":
            return span_of(rows, request.alignment, 0), 0
        if isinstance(received, int):
            return received, 0
        return config.receive_capacity(self.rank) * rounds + local * (request.alignment - 1), 0

    def _outputs(self, num_rows: int, stride: int) -> tuple[_Outputs, Exception | None]:
        """Memory for so many rows, or why there is none."""
        try:
            specs = self.plan.made_specs
            asked = {} if self.out is None else self._asked(num_rows)
            names = [name for name in _BY_ROW if name in specs]
            if self.fitting is None:
                written = {name: asked[name] for name in names if name in asked}
            else:
                shapes = {name: _of_rows(specs[name], num_rows) for name in names}
                shown = {name: tensor for name, tensor in asked.items() if name in names}
                written = self.fitting.as_written(shapes, shown)
            for name in names:
                if name not in written:
                    written[name] = self.backend.empty(*_of_rows(specs[name], num_rows))
        except (ArgumentError, MemoryError, RuntimeError) as error:
            return _NOWHERE, error
        return _Outputs(num_rows, stride, written, asked), None

    def _asked(self, num_rows: int) -> dict[str, torch.Tensor]:
        """Outputs that the caller gives, by name, of so many rows."""
        specs = {
            name: _of_rows(spec, num_rows) if name in _BY_ROW else spec
            for name, spec in self.plan.specs.items()
        }
        out = self.out
        if self.request.is_padded:
            out = _without_experts(out)
        return self.plans.asked(specs, self.tensors, out)

    def _zero_gaps(self, outputs: _Outputs, rows: list[int] | None) -> None:
        """Zeroes what is between experts' rows: all beforehand where the host does not know, of None."""
        if not (self.request.zeroes and self.request.has_gaps):
            return
        written = outputs.written.values()
        if rows is None:
            for tensor in written:
                tensor.zero_()
            return
        begin = 0
        for count in rows:
            end = begin + (outputs.stride or -(-count // self.request.alignment) * self.request.alignment)
            for tensor in written:
                tensor[begin + count : end].zero_()
            begin = end

    # Rounds.

    def _make_rounds(self, number: int) -> None:
        while len(self.rounds) < number:
            self.rounds.append(self._new_round(len(self.rounds)))

    def _new_round(self, number: int) -> Bindings:
        """What a round binds; it has no tokens where this rank has fewer rounds."""
        first, last = (min(n * self.size, self.num_tokens) for n in (number, number + 1))
        topk, plan, specs = self.of_kernels.num_topk, self.plan, self.plan.made_specs
        made = {name: self.backend.empty(*specs[name]) for name in _OF_ROUND if name in specs}
        bindings = self.given | plan.bound(made) | made
        for name in _BY_TOKEN:
            if bindings.get(name) is not None:
                bindings[name] = bindings[name][first:last]
        bindings |= {
            "first_token": first,
            "num_tokens": last - first,
            "num_ids": (last - first) * topk,
            "is_later_round": int(number > 0),
        }
        if self.known is not None:
            routed = self.known.rounds[number]
            bindings |= {name: getattr(routed, name) for name in ("expand_idx", "send_counts", "places")}
        else:
            bindings["expand_idx"] = self.expand_idx[first * topk : last * topk]
            is_empty = number >= self.mine
            bindings["send_counts"] = self.calls.no_counts if is_empty else self._ints(self.of_kernels.num_experts)
            bindings["places"] = self._ints(self.communicator.context.capacity)
        if self.plans.tables and not self.host.is_asynchronous:
            self.plans.tables.keep(bindings)
        return bindings

    def _round_of(self, first: DispatchOutput) -> Bindings:
        """What the round that is over has bound."""
        handle = first.handle
        bindings = self.given | {name: getattr(handle, name) for name in ("topk_idx", "expand_idx", "recv_offsets")}
        bindings |= {
            "assist_info": handle.assist_info,
            "mask": handle.active_mask,
            "tables": handle.tables,
            "send_counts": self.communicator.memory.bindings["counts"].clone(),
            "places": self._ints(self.communicator.context.capacity),
            "first_token": 0,
            "num_tokens": handle.num_tokens,
        }
        self.num_tokens, self.expand_idx = handle.num_tokens, handle.expand_idx
        return bindings

    def _late(self, first: DispatchOutput, outputs: _Outputs, heard: Bindings) -> Bindings:
        """What brings the rows of the round that is over to their places."""
        bindings = self.rounds[0] | self._placed(outputs, heard)
        for name in _BY_ROW:
            rows = getattr(first, name)
            if rows is None:
                continue
            if self.out is not None:  # which may be where they go
                rows = self._copy_of(name, rows)
            bindings[f"round_{name}"] = rows
        return bindings

    def _copy_of(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows of an output as kernels write them, in memory of their own."""
        made = self.backend.empty(*_of_rows(self.plan.made_specs[name], len(rows)))
        made[tuple(slice(0, size) for size in rows.shape)] = rows
        return made

    def _placed(self, outputs: _Outputs, heard: Bindings) -> Bindings:
        return heard | self.plan.bound(outputs.written) | {"num_places": outputs.num_rows}

    def _fill(
        self, begun: int, rounds: int, outputs: _Outputs, heard: Bindings, *, is_counted: bool
    ) -> None:
        """Receives rounds from ``begun`` on; each is sent before the one ahead of it is arranged, where that
        may be.

        Args:
            begun: the first round that is not arranged.
            rounds: how many there are.
            outputs: where rows go.
            heard: where their places begin, and end.
            is_counted: whether the first one is sent.
        """
        communicator, placed = self.communicator, self._placed(outputs, heard)
        ahead = communicator.scheme.sends_ahead
        fill: Phase = "fill" if self.known is None else "refill"
        for number in range(begun, rounds):
            bindings = self.rounds[number] | placed
            if number > begun or not is_counted:
                self._run("entries" if ahead and number > begun else "count", bindings)
            if ahead and number + 1 < rounds:
                self._run("rows", self.rounds[number + 1] | placed, communicator.zone("dispatch", 1))
            self._run(fill, bindings)

    def _drain(self, begun: int, rounds: int, heard: Bindings, failure: _Failure) -> None:
        """Receives what peers send, which goes nowhere, and says why.

        Raises:
            Exception: why.
        """
        entries = self.communicator.context.num_entries
        nothing = {name: self._ints(entries).zero_() for name in ("starts", "limits")}
        self._fill(begun, failure.rounds, self._nowhere(), heard | nothing, is_counted=not begun)
        raise failure.error

    def _nowhere(self) -> _Outputs:
        specs = self.plan.made_specs
        written = {name: self.backend.empty(*_of_rows(specs[name], 1)) for name in _BY_ROW if name in specs}
        return _Outputs(0, 0, written, {})

    def _totals(self) -> Bindings:
        """Memory for counts of the whole call."""
        totals = {"call_counts": self._ints(self.of_kernels.num_experts)}
        if self.of_kernels.num_shared_ranks:
            totals["call_shared_counts"] = self._ints(self.of_kernels.num_shared_ranks)
        return totals

    def _ints(self, number: int) -> torch.Tensor:
        return self.backend.empty((number,), torch.int32)

    def _run(self, phase: Phase, bindings: Bindings, zone: int | None = None) -> None:
        variant = self.routing_variant if phase == "routing" else self.variant
        self.communicator.run_phase(variant, bindings, phase, zone)

    # What it gives.

    def _made(self, outputs: _Outputs, offsets: torch.Tensor, per_expert: torch.Tensor) -> DispatchOutput:
        fitting, plan = self.fitting, self.plan
        written = outputs.written | {"tokens_per_expert": per_expert}
        seen = dict(written)
        if fitting is not None:
            specs = {name: _of_rows(spec, outputs.num_rows) if name in _BY_ROW else spec for name, spec in plan.specs.items()}
            seen = fitting.all_seen(specs, written)
            fitting.give_back(plan.symbols, self.tensors, self.fitted)
        for name, tensor in outputs.asked.items():
            if seen[name].data_ptr() != tensor.data_ptr():
                tensor.copy_(seen[name]) if fitting is None else fitting.copied(seen[name], tensor)
            seen[name] = tensor
        if outputs.stride:
            seen |= {name: _by_expert(seen[name], outputs.stride) for name in _BY_ROW if name in seen}
        get = seen.get
        return DispatchOutput(
            seen["tokens"], get("scales"), seen["tokens_per_expert"], get("weights"), self._handle(outputs, offsets, per_expert)
        )

    def _handle(self, outputs: _Outputs, offsets: torch.Tensor, per_expert: torch.Tensor) -> PlacedHandle:
        ids, mask = self._routing()
        rounds = tuple(
            Round(
                each["first_token"],
                **{name: each[name] for name in _KEPT},
                active_mask=each.get("mask"),
                tables=each.get("tables"),
            )
            for each in self.rounds
        )
        return PlacedHandle(
            buffer_id=self.plans.buffer_id,
            number=self.communicator.counts["dispatch"] - 1,
            dtype=self.tensors["x"].dtype,
            topk_idx=ids,
            expand_idx=self.known.expand_idx if self.known is not None else self.expand_idx,
            recv_offsets=offsets,
            digest=self.backend.digest_ids(ids, mask),
            num_ranks=self.config.num_ranks,
            num_local_experts=self.config.experts_on(self.rank),
            exchange_counts=None,
            active_mask=mask,
            tables=None,
            traffic=None,
            rounds=rounds,
            tokens_of_round=self.size,
            num_rows=outputs.num_rows,
            alignment=self.request.alignment,
            stride=outputs.stride,
            tokens_per_expert=per_expert,
        )

    def _routing(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The ids and the mask of all tokens of this rank."""
        if self.joined is not None:
            return self.joined.topk_idx, self.joined.active_mask
        return self.given["topk_idx"], self.given.get("mask")


class _Combine:
    """A combine of one.

    Args:
        calls: of the buffer.
        tensors: every one that it takes besides those of the handle.
        handle: a checked one.
        comm_quantize: of `EPBuffer.combine`.
        out: where sums are to go, or None.

    Raises:
        ArgumentError: a bad argument. Nothing was sent.
    """

    def __init__(
        self, calls: PlacedCalls, tensors: Named, handle: PlacedHandle, comm_quantize: str | None, out: Any
    ) -> None:
        self.communicator, self.plans, self.handle = calls.communicator, calls.plans, handle
        self.backend, self.host, self.fitting = self.communicator.backend, calls.host, self.plans.fitting
        self.out, results = out, _flat(tensors["y"], handle)
        first = handle.rounds[0]
        y = results
        if self.fitting is not None and self.fitting.has_room(y):
            y = self.fitting.stand_in(y)
        kept = {name: getattr(first, name, None) for name in OF_HANDLE}
        kept |= {name: getattr(handle, name) for name in ("topk_idx", "expand_idx", "active_mask")}
        tensors = tensors | kept | {"y": y}
        is_quantized = comm_quantize is not None
        self.takes_places = self.communicator.scheme.sums_placed and not is_quantized
        modes = {
            "comm_quant_mode": 2 * is_quantized,
            "local_bypass": not is_quantized and self.plans.bypasses(tensors),
            "in_place": False,
            "is_placed": self.takes_places,
            "is_long": True,
        }
        if not modes["local_bypass"]:
            tensors["expand_idx"] = None
        shape = "n", self.communicator.config.hidden
        check_tensor("y", y, shape=shape, dtypes=(handle.dtype,), device=self.host.device)
        self.plan = self.plans.find(COMBINE_OF_BUFFER, CombineOfBuffer, tensors, modes)
        if len(y) < handle.num_rows:
            rule = f"dispatch's outputs have {handle.num_rows}"
            raise ArgumentError("y", f"of {len(y)} rows", rule, "Pass a row for each, gaps included.")
        fitted = self.plans.fitted(self.plan, tensors)
        if self.fitting is not None:
            fitted["y"] = self.fitting.results(results, handle.num_rows, quantized=is_quantized)
        self._check_tables(fitted)
        self.given: Bindings = self.plan.bind(fitted)
        if handle.digest != self.backend.digest_ids(handle.topk_idx, handle.active_mask):
            name, remedy = "handle.topk_idx", "Pass output.handle as dispatch made it."
            raise other_ids_error(name, f"dispatch {handle.number}", remedy)
        if out is not None:
            self.out = given_outputs.sized("out", out, self.plan.specs["out"], self.host.device)
            read = {self.plan.symbols.operator.called(name): tensor for name, tensor in tensors.items()}
            given_outputs.check_apart({"out": self.out}, read | {"y": results})
        is_given = self.out is not None and self.fitting is None
        self.made = self.plan.make({"out": self.out} if is_given else {})

    def _check_tables(self, fitted: Named) -> None:
        """Where a dispatch keeps tables, each round is held to its own."""
        tables = self.plans.tables
        if tables is None or self.host.is_asynchronous:
            return
        weights = fitted["topk_weights"]
        for each in self.handle.rounds:
            last = each.first_token + len(each.topk_idx)
            of_round = None if weights is None else weights[each.first_token : last].float().contiguous()
            bindings = {**each._asdict(), "origins": each.assist_info, "topk_weights": of_round}
            bindings |= {"num_tokens": len(each.topk_idx), "mask": each.active_mask}
            tables.check(bindings, self.plan.called)

    def whole(self) -> torch.Tensor:
        """All rounds."""
        bindings, y = self.given | self.plan.bound(self.made), self.given["y"]
        variant = cast(CombineVariant, self.plan.variant)
        for each in self.handle.rounds:
            of_round = dict(bindings)
            first, last = each.first_token, each.first_token + len(each.topk_idx)
            for name in _BY_TOKEN_OF_COMBINE:
                if isinstance(of_round.get(name), torch.Tensor):
                    of_round[name] = of_round[name].view(-1, *_row(of_round[name]))[first:last] if name == "shared_x" else of_round[name][first:last]
            of_round |= {"num_tokens": last - first, "num_ids": each.topk_idx.numel()}
            of_round |= {name: getattr(each, name) for name in ("expand_idx", "recv_offsets", "places", "tables")}
            of_round |= {"topk_idx": each.topk_idx, "mask": each.active_mask, "origins": each.assist_info}
            if not self.takes_places:
                of_round |= self._gathered(variant, of_round, each, y)
            self.communicator.run(variant, of_round)
        out = self.made["out"]
        if self.fitting is None:
            return out
        return self.fitting.copied(self.fitting.all_seen(self.plan.specs, self.made)["out"], self.out)

    def _gathered(self, variant: CombineVariant, bindings: Bindings, each: Round, y: torch.Tensor) -> Bindings:
        """A round's results, one after the other."""
        rows = self.communicator.context.capacity
        if not self.host.is_asynchronous:
            rows = min(rows, int(each.recv_offsets[-1]))
        gathered = self.backend.empty((rows, y.shape[1]), y.dtype)
        self.communicator.run_phase(variant, bindings | {"gathered": gathered, "room_of_gathered": rows}, "gather")
        return {"y": gathered, "num_rows": rows}


def _as_it_is(made: DispatchOutput) -> DispatchOutput:
    return made


_OF_ROUND = "assist_info", "recv_offsets", "tokens_per_expert", "tables"
_KEPT = "topk_idx", "expand_idx", "recv_offsets", "assist_info", "places", "send_counts"
_NOWHERE = _Outputs(0, 0, {}, {})


def _of_rows(spec: TensorSpec, rows: int) -> TensorSpec:
    (_, *columns), dtype = spec
    return (rows, *columns), dtype


def _row(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape[-1:])


def _by_expert(tensor: torch.Tensor, stride: int) -> torch.Tensor:
    """Rows of padded experts, (E, stride, ...)."""
    return tensor.unflatten(0, (-1, stride)) if len(tensor) else tensor.reshape(0, stride, *tensor.shape[1:])


def _without_experts(out: Any) -> Any:
    """Outputs of padded experts as the rows that they are."""
    if not isinstance(out, DispatchOutput):
        return _rows_of(out)
    return out._replace(**{name: _rows_of(getattr(out, name)) for name in _BY_ROW})


def _rows_of(tensor: Any) -> Any:
    is_padded = isinstance(tensor, torch.Tensor) and tensor.dim() > 1 and tensor.is_contiguous()
    return tensor.flatten(0, 1) if is_padded else tensor


def _flat(y: Any, handle: PlacedHandle) -> Any:
    """Results as rows, also where there is a block of them for each expert."""
    if not (handle.stride and isinstance(y, torch.Tensor) and y.dim() == 3):
        return y
    shape = (handle.num_rows // handle.stride, handle.stride)
    if y.shape[:2] != shape:
        rule = f"dispatch's tokens are of {shape[0]} experts with {shape[1]} rows each"
        raise ArgumentError("y", f"of shape {tuple(y.shape)}", rule, "Pass as many rows of each expert.")
    return y.flatten(0, 1) if y.is_contiguous() else y
