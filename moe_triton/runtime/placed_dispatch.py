"""Dispatches whose rows have places: in rounds, with gaps, or in as much memory as they need.

A call has as many rounds as the rank with most tokens needs, the same on every rank, and each is a run of the
scheme's dispatch. Before the first one every rank says how many rows the whole call has for whom
(`moe_triton.layout.CallRegions`), so that each row goes to its place of the whole at once (docs/protocol.md,
"Rounds of one call").
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch

from moe_triton.core.errors import ArgumentError, BufferStateError
from moe_triton.core.handle import DispatchOutput, PlacedHandle, Round, memory_of
from moe_triton.core.plain_tensors import fault_of
from moe_triton.core.plan import NEXT, OF_ROUND
from moe_triton.core.records import MAX_CALL_TOKENS
from moe_triton.core.row_formats import RowFormat
from moe_triton.layout.call_word import BY_HANDLE
from moe_triton.operators.buffer import DISPATCH_OF_BUFFER
from moe_triton.operators.variants import DispatchVariant
from moe_triton.runtime.buffer_plans import BufferPlans, DispatchOfBuffer
from moe_triton.runtime.communicator import bell_of
from moe_triton.runtime.executables import Phase
from moe_triton.runtime.lost_rows import LostRows, Tables
from moe_triton.runtime.masked_run import local_counts_of
from moe_triton.runtime.output_request import Request
from moe_triton.runtime.placed_outputs import BY_ROW, LOCAL, Outputs, Size, asked, of_rows, size_of
from moe_triton.runtime.prepared_call import Bindings, Named
from moe_triton.runtime.programs.placed import Begun
from moe_triton.runtime.said import PADDED, Said
from moe_triton.runtime.settled_calls import Verdict
from moe_triton.runtime.turns import PhaseRun

# What a call binds for each of its tokens.
_BY_TOKEN = "x", "topk_idx", "topk_weights", "mask", "given_ids", "results_idx"
# Outputs of each round; what a handle keeps of one.
_OF_ROUND = "assist_info", "recv_offsets", "tables"
_LINE_WORDS = 16  # int32 of a cache line, at which each piece of memory begins
_KEPT = "topk_idx", "expand_idx", "recv_offsets", "assist_info", "places", "send_counts"


def _or_none(number: int | None) -> int:
    """A number in a header: 0 stands for none."""
    return 0 if number is None else number + 1


def header_of(request: Request, rounds: int) -> tuple[int, ...]:
    """What a rank says of a call besides counts: the first words of a `CALL_HEADER`.

    Args:
        request: what it is asked for.
        rounds: that its tokens take.
    """
    stride = PADDED if request.is_padded else 0
    return rounds, _or_none(request.max_tokens), request.capacity, request.alignment, stride


def num_tokens_of(x: object) -> int:
    """Tokens of a dispatch whose arguments nobody has looked at; 0 of what is no tensor of any."""
    is_plain = isinstance(x, torch.Tensor) and fault_of(x) is None
    return len(x) if is_plain and x.dim() else 0  # type: ignore[arg-type, attr-defined]


class Heard(NamedTuple):
    """What is known of a call once all ranks have said what they have.

    Attributes:
        places: where each entry's rows begin and end, as plans bind it: "starts", which move on with each
            round, "first_starts" and "limits".
        offsets: inclusive prefix sums of all rows.
        per_expert: rows of each expert.
        rows: the same on the host, of this rank's own experts; None where it does not know.
    """

    places: Bindings
    offsets: torch.Tensor
    per_expert: torch.Tensor
    rows: list[int] | None


class PlacedDispatch:
    """One of them.

    Args:
        plans: of the buffer.
        tensors: every one that it takes.
        row_format: how rows travel.
        request: what is asked for.
        out: of `EPBuffer.dispatch`.
        known: the handle whose routing it has.
        joined: what its first round gave, where that is over.
        inputs: what the caller passed, where the tensors are others.
        begun: what there is of it already, where it is under way.

    Raises:
        ArgumentError: a bad argument. Nothing was sent.
    """

    def __init__(
        self,
        plans: BufferPlans,
        tensors: Named,
        row_format: RowFormat,
        request: Request,
        out: Any,
        known: PlacedHandle | None = None,
        joined: DispatchOutput | None = None,
        inputs: Named | None = None,
        begun: Begun | None = None,
    ) -> None:
        self._plans, self._request, self._out = plans, request, out
        self._known, self._joined, self._begun = known, joined, begun
        self._communicator, self._host = plans.communicator, plans.host
        self._backend = self._communicator.backend
        self._config, self._of_kernels = self._communicator.config, self._communicator.context.config
        self._size, self._rank = self._config.num_max_tokens_per_rank, self._communicator.rank
        if known is None:
            tensors = plans.with_ids_of_kernels(tensors)
        self._tensors, self._inputs = tensors, tensors if inputs is None else inputs
        self._check_request(tensors)
        modes = plans.modes_of(tensors, row_format, plans.bypasses(tensors), known is not None)
        is_announced = BY_HANDLE if known is not None else int(request.is_announced)
        modes |= {"is_routed": True, "is_placed": True, "is_announced": is_announced}
        modes["per_rank"] = request.is_per_rank
        self._plan = plans.find(DISPATCH_OF_BUFFER, DispatchOfBuffer, tensors, modes)
        if out is not None and joined is None:  # all but how many rows it needs, which nobody may know yet
            asked(plans, self._plan, self._inputs, request, out, 0)
        self._fitted = plans.fitted(self._plan, tensors)
        self._given: Bindings = self._plan.bind(self._fitted)
        self._routing_variant = cast(DispatchVariant, self._plan.variant)
        self._variant = self._routing_variant
        if self._variant.given_ids is not None:  # a new one takes time to be looked up
            self._variant = replace(self._variant, given_ids=None)
        self._num_tokens = int(self._given["num_tokens"])
        if (results_idx := self._results_idx(self._num_tokens)) is not None:
            self._given["results_idx"] = results_idx
        self._mine = max(1, -(-self._num_tokens // self._size))  # rounds that this rank has tokens for
        of_call = {"expand_idx": self._num_tokens * self._of_kernels.num_topk}
        of_call |= {
            "call_counts": self._of_kernels.num_experts,
            "call_shared_counts": self._of_kernels.num_shared_ranks,
        }
        of_call |= dict.fromkeys(
            ("starts", "limits", "first_starts", "call_offsets"), self._communicator.context.num_entries
        )
        (self._of_call,) = self._ints(of_call, 1)
        self._expand_idx = self._of_call["expand_idx"]
        self._counts_of_round = self._backend.empty(*self._plan.made_specs["tokens_per_expert"])
        self._rounds: list[Bindings] = []
        self._counters: dict[str, torch.Tensor] = {}
        # Of a round that is over peers go on already.
        self._is_under_way = joined is not None or begun is not None
        if joined is None:
            self._make_rounds(self._mine)
        if begun is not None:
            self._take_over(begun)

    def _check_request(self, tensors: Named) -> None:
        x, most = tensors["x"], self._request.max_tokens
        tokens = num_tokens_of(x)
        if tokens > MAX_CALL_TOKENS:
            rule = f"a call has at most {MAX_CALL_TOKENS} of a rank"
            raise ArgumentError("x", f"of {tokens} tokens", rule, "Split the batch.")
        if most is not None and tokens > most:
            rule = f"num_max_tokens_per_rank={most} says that no rank has more"
            raise ArgumentError("x", f"of {tokens} tokens", rule, "Pass the most that any rank has.")
        if not self._host.is_asynchronous or self._known is not None:
            return
        if not self._request.is_announced:
            rule = f"the host does not look whether a rank has more than {self._size} tokens"
            remedy = "Pass num_max_tokens_per_rank of dispatch, the same on every rank."
            raise ArgumentError("x", f"of {tokens} tokens", rule, remedy)
        if self._reads and self._host.is_capturing():
            name = "num_max_tokens_per_rank" if most is None else "num_recv_tokens"
            value = None if most is None else self._request.received
            rule = "a graph cannot wait for the host to read what comes"
            remedy = "Pass num_max_tokens_per_rank, and num_recv_tokens='bound' or nothing."
            raise ArgumentError(name, value, rule, remedy)

    @property
    def _reads(self) -> bool:
        """Whether the host has to read what ranks have said."""
        return self._request.max_tokens is None or self._request.received not in (None, "bound")

    def run(self) -> DispatchOutput:
        """Runs it. If it ends between two phases, as by Ctrl-C, no peer is left in the dark.

        Raises:
            ArgumentError: a rank has too little room, or another number of tokens at most; or this rank's own
                memory is too small. What was sent has been received, and the buffer stays usable.
            CommunicationTimeoutError: a rank's data did not come in time. The buffer is then broken.
        """
        ways = {(False, False): self._whole, (True, False): self._again, (False, True): self._behind}
        try:
            return ways[self._known is not None, self._joined is not None]()
        except BaseException as error:
            if self._is_under_way and self._communicator.is_usable:
                self._communicator.abandon("dispatch", error)
            raise

    # Its ways.

    def _take_over(self, begun: Begun) -> None:
        """Binds what native code has left of the call's first round, and of counters before it."""
        names = "topk_idx", "expand_idx", "send_counts", "recv_offsets", "assist_info"
        self._rounds[0] |= {name: getattr(begun, name) for name in names} | {"origins": begun.assist_info}
        self._given["topk_idx"], self._expand_idx = begun.topk_idx, begun.expand_idx
        counters = {"recv_stats": begun.recv_stats, "performance_info": begun.performance_info}
        self._counters = {
            name: counts for name, counts in counters.items() if self._given.get(name) is not None
        }

    def _whole(self) -> DispatchOutput:
        """All of it: routes, says what there is, and runs all rounds."""
        if self._begun is not None:
            return self._deliver(self._communicator.zone("dispatch"), 0)
        totals = {name: self._of_call[name] for name in ("call_counts", "call_shared_counts")}
        zone = self._communicator.zone("dispatch")
        if self._mine == 1:
            self._keep_counts()
            self._is_under_way = True
            self._run("ask", self._rounds[0] | totals | self._header())
            return self._deliver(zone, 0)
        phases = self._counted(totals)
        self._is_under_way = True
        self._keep_counts()
        phases.append(self._phase("ring", self._rounds[0] | totals | self._header()))
        self._communicator.run_phases(phases)
        return self._deliver(zone, 0)

    def _counted(self, totals: Bindings) -> list[PhaseRun]:
        """What counts the rows of all rounds that this rank has tokens for."""
        made = self._rounds[0]
        if made.get("mask") is None and not self._of_kernels.num_shared_ranks and not self._sends_ahead:
            # Numbers within rounds follow in each of them. Where tokens are left out, or shared experts'
            # ranks are chosen, kernels have memory for one round only.
            names = [name for name in ("topk_idx", "given_ids", "results_idx") if name in self._given]
            whole: Bindings = {name: self._given[name] for name in names}
            whole |= {"expand_idx": self._expand_idx, "num_tokens": self._num_tokens}
            whole["num_ids"] = self._num_tokens * self._of_kernels.num_topk
            return [self._phase("routing", made | whole | totals)]
        return [self._phase("routing", bindings | totals) for bindings in self._rounds]

    @property
    def _sends_ahead(self) -> bool:
        """Whether rows of a round go out beside the arranging of the one before it."""
        return self._communicator.scheme.sends_ahead

    def _behind(self) -> DispatchOutput:
        """All but the first round, which is over: nobody here knew that there are more."""
        self._is_under_way = True
        zone = self._communicator.zone("dispatch", -1)
        self._rounds.append(self._round_that_is_over())
        totals = {"call_counts": self._rounds[0]["send_counts"]}
        if self._of_kernels.num_shared_ranks:
            totals["call_shared_counts"] = self._communicator.memory.bindings["shared_counts"].clone()
        self._run("announce", totals | self._header(), zone)
        return self._deliver(zone, 1)

    def _again(self) -> DispatchOutput:
        """All of it by a known routing: nobody has to say anything."""
        known = self._known
        assert known is not None
        self._make_rounds(len(known.rounds))
        rows = None
        if not (self._host.is_asynchronous or self._request.is_per_rank):  # which has no gaps
            rows = known.tokens_per_expert_list
        places = {
            "starts": self._of_call["starts"],
            "limits": known.limits,
            "first_starts": known.first_starts,
        }
        heard = Heard(places, known.recv_offsets, known.tokens_per_expert, rows)
        outputs = self._outputs(Size(known.num_rows, known.stride))
        self._is_under_way = True
        return self._received(0, outputs, heard, [self._phase("restart", places)], is_counted=False)

    def _keep_counts(self) -> None:
        """Keeps what counters of the caller's hold, for a call that delivers nothing."""
        names = "recv_stats", "performance_info"
        self._counters = {
            name: self._given[name].clone() for name in names if self._given.get(name) is not None
        }

    def _take_back_counts(self) -> None:
        for name, counts in self._counters.items():
            self._given[name].copy_(counts)

    def _deliver(self, zone: int, begun: int) -> DispatchOutput:
        """Behind what ranks have said, with the first round sent; where ``begun`` is 1 it is over."""
        said, rounds = None, -(-(self._request.max_tokens or 0) // self._size)
        refusal: Exception | None = None
        if self._host.is_asynchronous:
            self._communicator.quiet_call_words(zone)
        if self._reads or not self._host.is_asynchronous:
            rounds, refusal = self._settled(zone, begun, rounds)
            said = self._said(zone)
        rounds = 1 if refusal is not None else max(1, rounds)
        rows = None if said is None else said.rows_on(self._rank)
        size = size_of(self._request, self._config, self._rank, rows, rounds)
        heard, starts = self._starts(size, rows)
        self._make_rounds(rounds)
        try:
            if refusal is not None:
                raise refusal
            outputs = self._outputs(size)
        except (ArgumentError, MemoryError, RuntimeError):
            # Peers have sent rows, or will: they are received, and go nowhere.
            nowhere = {name: torch.zeros_like(places) for name, places in heard.places.items()}
            self._communicator.run_phases(
                self._filled(begun, rounds, self._written(None) | nowhere, is_counted=not begun)
            )
            self._take_back_counts()
            self._is_under_way = False
            raise
        if len(self._rounds) > 1 or begun:
            first = [self._phase("starts", starts, zone)]
            return self._received(begun, outputs, heard, first, is_counted=not begun)
        return self._received(begun, outputs, heard, [], starts)

    def _settled(self, zone: int, begun: int, least: int) -> tuple[int, ArgumentError | None]:
        """Rounds of the call, and why no rank gets anything: the same on every rank that goes on.

        Args:
            zone: of the first round.
            begun: 1 where that is over.
            least: rounds that follow from what was asked for.
        """

        def find() -> Verdict:
            self._communicator.quiet_call_words(zone)
            said = self._said(zone)
            most = -(-MAX_CALL_TOKENS // self._size)  # whatever a peer says
            error = said.refusal(self._request)
            refusal = None if error is None else (error.argument, error.rule, error.remedy)
            return Verdict(max(least, min(said.num_rounds, most)), refusal)

        if self._host.is_asynchronous or (least and not isinstance(self._request.received, int)):
            verdict = find()  # whoever was heard
        else:
            number = self._communicator.counts["dispatch"] - begun
            verdict = self._communicator.participants.settle(number, find)
            self._communicator.quiet_call_words(zone)
        if verdict.refusal is not None:
            name, rule, remedy = verdict.refusal
            value = self._request.received if name == "num_recv_tokens" else self._request.max_tokens
            return verdict.rounds, ArgumentError(name, value, rule, remedy)
        if verdict.rounds < self._mine:
            raise BufferStateError(
                f"all others go on without this rank, in {verdict.rounds} round(s) of a call in which it has "
                f"{self._mine}. Construct a new buffer on every rank to take part again."
            )
        return verdict.rounds, None

    def _received(
        self,
        begun: int,
        outputs: Outputs,
        heard: Heard,
        phases: list[PhaseRun],
        starts: Bindings | None = None,
        *,
        is_counted: bool = True,
    ) -> DispatchOutput:
        """Behind all that is to be known: receives what has not been received yet, each row at its place.

        Args:
            begun: the first round that is not arranged.
            outputs: for the rows.
            heard: what is known.
            phases: what goes before.
            starts: what finds the places of the only round's rows first; None where they are found.
            is_counted: whether the first of these rounds is sent.
        """
        if heard.rows is None:
            outputs.zero_all()
        places = heard.places | self._written(outputs)
        if self._joined is not None:
            late = self._late_rows(self._joined)
            phases.append(self._phase("late_fill", self._rounds[0] | late | places))
        if starts is not None:
            phases.append(self._phase("place", self._rounds[0] | places | starts))
        else:
            phases += self._filled(begun, len(self._rounds), places, is_counted=is_counted)
            phases += self._counting_experts(heard, places)
        self._communicator.run_phases(phases)
        return self._finished(outputs, heard)

    def leave_masked(self, made: DispatchOutput) -> DispatchOutput:
        """What native code has made of the call, without ranks that were masked while rows came."""
        handle = made.handle
        assert isinstance(handle, PlacedHandle)
        of_native = handle.rounds[0]
        self._rounds[0] |= {"places": of_native.places, "tables": of_native.tables}
        places = {"first_starts": handle.first_starts, "limits": handle.limits}
        rows = handle.tokens_per_expert_list
        heard = Heard(places, handle.recv_offsets, made.tokens_per_expert, rows)
        outputs = self._outputs(Size(handle.num_rows, handle.stride))
        for name in BY_ROW:
            tensor = getattr(made, name)
            if tensor is not None:
                outputs.written[name] = tensor.flatten(0, 1) if handle.stride else tensor
        return self._finished(outputs, heard)

    def _finished(self, outputs: Outputs, heard: Heard) -> DispatchOutput:
        """What the call returns, all rows being there."""
        masked = self._communicator.masks.known.masked
        # On a device ranks are masked between calls only, and have no rows but by an earlier routing.
        if masked and not (self._host.is_asynchronous and self._known is None):
            outputs, heard = self._without(masked, outputs, heard)
        if heard.rows is not None:
            outputs.zero_gaps(heard.rows)
        self._is_under_way = False
        seen = outputs.seen(heard.per_expert)
        if self._plans.fitting is not None:
            self._plans.fitting.give_back(self._plan.symbols, self._tensors, self._fitted)
        get = seen.get
        handle = PlacedHandle(**self._kept(outputs, heard))
        if masked:
            self._communicator.masks.mark_handle(handle)
        if self._communicator.memory.posts and not self._host.is_asynchronous:
            handle.note_traffic(self._communicator.memory.traffic("dispatch"))
        return DispatchOutput(
            seen["tokens"], get("scales"), seen["tokens_per_expert"], get("weights"), handle
        )

    def _without(self, masked: Collection[int], outputs: Outputs, heard: Heard) -> tuple[Outputs, Heard]:
        """The outputs, and what is known, without rows of masked ranks, of which some may have come."""
        places = heard.places
        tables = Tables(heard.offsets, places["first_starts"], places["limits"])
        lost = LostRows(tables, self._config.num_ranks, masked)
        moved, rows, per_expert = None, heard.rows, heard.per_expert
        of_experts = torch.zeros_like(per_expert)
        if lost.has_places:
            left, size = lost.rows_left, outputs.size
            if self._known is None:
                size = size_of(self._request, self._config, self._rank, left, len(self._rounds))
            tables = lost.tables(self._request.alignment, size.stride)
            old, new = lost.moves(tables)
            if self._request.is_per_rank:
                local, gone = outputs.written["local_topk_idx"], lost.places()
                of_experts = local_counts_of(local[gone[gone < len(local)]], len(per_expert))
            moved = heard.offsets.new_full((outputs.size.num_rows,), -1)
            moved[old] = new.int()
            kept = {name: tensor[old] for name, tensor in outputs.written.items()}
            outputs = self._outputs(size)
            for name, tensor in kept.items():
                outputs.written[name][new] = tensor
            rows = None if rows is None else left
        for each in self._rounds:
            of_round = each["recv_offsets"], each["assist_info"], each["places"]
            gone = lost.leave_round(*of_round, moved)
            if not self._request.is_per_rank:
                of_experts += gone
        stats = self._given.get("recv_stats")
        if stats is not None:
            stats[: len(of_experts)] -= of_experts.int()
        if lost.has_places and self._request.is_per_rank:
            local = outputs.written["local_topk_idx"][: sum(lost.rows_left)]  # such rows have no gaps
            per_expert = local_counts_of(local, len(per_expert))
        elif lost.has_places:
            per_expert = per_expert.new_tensor(lost.rows_left)
        places = places | {"first_starts": tables.first_starts, "limits": tables.limits}
        return outputs, Heard(places, tables.offsets, per_expert, rows)

    # What ranks say.

    def _header(self) -> Bindings:
        """What an announcement says besides counts."""
        request = self._request
        words = header_of(request, 1 if self._joined is not None else self._mine)
        # Who asks for what needs it, or was rung itself, rings nobody.
        is_expected = request.is_announced or self._host.is_asynchronous or self._joined is not None
        bell = 0 if is_expected else bell_of(self._communicator.counts["dispatch"] + 1)
        return {"call_header": self._plans.call_header(*words), "bell": bell}

    def _said(self, zone: int) -> Said:
        words = self._host.on_host(self._communicator.call_words(zone))
        return Said.of_words(words, self._config, self._of_kernels)

    def _starts(self, size: Size, rows: list[int] | None) -> tuple[Heard, Bindings]:
        """What will be known once begins of entries are found, and what finds them binds."""
        context = self._communicator.context
        places = {name: self._of_call[name] for name in ("starts", "limits", "first_starts")}
        offsets = self._of_call["call_offsets"]
        per_expert = self._backend.empty((context.num_local_experts,), torch.int64)
        written = {"call_offsets": offsets, "call_tokens_per_expert": per_expert}
        layout = {"alignment": self._request.alignment, "expert_stride": size.stride}
        return Heard(places, offsets, per_expert, rows), places | written | layout

    # Rounds.

    def _make_rounds(self, number: int) -> None:
        """Makes what further rounds bind, until there are so many."""
        made = len(self._rounds)
        sizes = {
            name: math.prod(self._plan.made_specs[name][0])
            for name in _OF_ROUND
            if name in self._plan.made_specs
        }
        sizes["places"] = self._communicator.context.capacity
        if self._known is None:
            sizes["send_counts"] = self._of_kernels.num_experts
        if number > made:
            pieces = self._ints(sizes, number - made)
            self._rounds += self._new_rounds(made, pieces)

    def _new_rounds(self, begin: int, made: Sequence[dict[str, torch.Tensor]]) -> list[Bindings]:
        """What rounds bind; they have no tokens where this rank has fewer rounds.

        Args:
            begin: number of the first one.
            made: memory of each one's own.
        """
        topk, last = self._of_kernels.num_topk, self._num_tokens
        of_all = self._given | {"tokens_per_expert": self._counts_of_round}
        by_round = {
            name: self._by_round(self._given[name], 1)
            for name in _BY_TOKEN
            if self._given.get(name) is not None
        }
        if self._known is None:
            by_round["expand_idx"] = self._by_round(self._expand_idx, topk)
        rounds = []
        for number, memory in enumerate(made, start=begin):
            first = min(number * self._size, last)
            tokens = min(self._size, last - first)
            bindings = of_all | self._plan.bound(memory) | memory
            bindings |= {name: parts[min(number, self._mine)] for name, parts in by_round.items()}
            bindings |= {
                "first_token": first,
                "num_tokens": tokens,
                "num_ids": tokens * topk,
                "is_later_round": int(number > 0),
            }
            if self._known is not None:
                routed = self._known.rounds[number]
                bindings |= {"expand_idx": routed.expand_idx, "send_counts": routed.send_counts}
            elif number >= self._mine:
                bindings["send_counts"] = self._plans.no_counts
            if self._plans.tables and not self._host.is_asynchronous:
                self._plans.tables.keep(bindings)
            rounds.append(bindings)
        return rounds

    def _by_round(self, tensor: torch.Tensor, of_token: int) -> list[torch.Tensor]:
        """What each round of this rank takes of a tensor, and behind that what one without tokens takes.

        Args:
            tensor: of all tokens.
            of_token: its elements, or rows, of each.
        """
        return [*torch.split(tensor, self._size * of_token), tensor[self._num_tokens * of_token :]]

    def _round_that_is_over(self) -> Bindings:
        """What the first round has bound, where it is over."""
        assert self._joined is not None
        handle = self._joined.handle
        kept = {name: getattr(handle, name) for name in ("topk_idx", "expand_idx", "recv_offsets")}
        self._num_tokens, self._expand_idx = handle.num_tokens, handle.expand_idx
        return {
            **self._given,
            **kept,
            "assist_info": handle.assist_info,
            "mask": handle.active_mask,
            "tables": handle.tables,
            # Of the plan that ran last.
            "send_counts": self._communicator.memory.bindings["counts"].clone(),
            "places": self._ints({"places": self._communicator.context.capacity}, 1)[0]["places"],
            "first_token": 0,
            "num_tokens": handle.num_tokens,
        }

    def _late_rows(self, first: DispatchOutput) -> Bindings:
        """Where the rows of the round that is over are."""
        found: Bindings = {}
        for name in BY_ROW:
            rows = getattr(first, name)
            if rows is not None and self._out is not None:  # which may be where they go
                spec = of_rows(self._plan.made_specs[name], len(rows))
                copy = self._backend.empty(*spec)
                copy[tuple(slice(0, size) for size in rows.shape)] = rows
                rows = copy
            found[f"round_{name}"] = rows
        return found

    def _filled(self, begun: int, end: int, places: Bindings, *, is_counted: bool) -> list[PhaseRun]:
        """What receives rounds from ``begun`` on; each is sent before the one ahead of it is arranged, where
        that may be.

        Args:
            begun: the first round that is not arranged.
            end: behind the last one that is to be.
            places: where rows go, and what of it is each entry's.
            is_counted: whether the first one is sent.
        """
        rounds, ahead = self._rounds, self._sends_ahead
        phases: list[PhaseRun] = []
        for number in range(begun, end):
            bindings, is_sent = rounds[number] | places, number == begun and is_counted
            if not (ahead or is_sent or self._known):
                phases.append(self._phase("round", bindings))
                continue
            if not is_sent:
                phases.append(self._phase("entries" if ahead and number > begun else "count", bindings))
            if ahead and number + 1 < end:
                behind = rounds[number + 1]
                bindings |= {f"{NEXT}{name}": behind[name] for name in OF_ROUND & behind.keys()}
                phases.append(self._phase("fill_ahead", bindings))
            else:
                phases.append(self._phase("fill", bindings))
        return phases

    def _outputs(self, size: Size) -> Outputs:
        return Outputs(self._plans, self._plan, self._inputs, self._request, self._out, size)

    def _written(self, outputs: Outputs | None) -> Bindings:
        """Where rows go, as plans bind it; None for nowhere."""
        if outputs is not None:
            return self._plan.bound(outputs.written) | {"num_places": outputs.size.num_rows}
        specs = self._plan.made_specs
        names = [name for name in (*BY_ROW, *LOCAL) if name in specs]
        unread = {name: self._backend.empty(*of_rows(specs[name], 1)) for name in names}
        return self._plan.bound(unread) | {"num_places": 0}

    def _ints(self, sizes: Mapping[str, int], count: int) -> list[dict[str, torch.Tensor]]:
        """So many times int32 tensors of these sizes.

        All are of one piece of memory: a loop of calls takes no more pieces than are kept for later ones.
        """
        gaps = [-size % _LINE_WORDS for size in sizes.values()]
        pieces = [each for pair in zip(sizes.values(), gaps, strict=True) for each in pair]
        memory = self._backend.empty((count * sum(pieces),), torch.int32)
        made = torch.split(memory, pieces * count)[::2]
        firsts = range(0, len(made), len(sizes))
        return [dict(zip(sizes, made[first : first + len(sizes)], strict=True)) for first in firsts]

    def _phase(self, phase: Phase, bindings: Bindings, zone: int | None = None) -> PhaseRun:
        variant = self._routing_variant if phase in ("ask", "routing") else self._variant
        return PhaseRun(variant, bindings, phase, zone)

    def _run(self, phase: Phase, bindings: Bindings, zone: int | None = None) -> None:
        self._communicator.run_phase(self._phase(phase, bindings, zone))

    # What goes with rows that come once for each rank (`moe_triton.runtime.placed_per_rank`).

    def _results_idx(self, num_tokens: int) -> torch.Tensor | None:
        """Where kernels have the first expert of each rank of these tokens; None where they have not."""
        return None

    def _counting_experts(self, heard: Heard, places: Bindings) -> list[PhaseRun]:
        """What counts each expert's rows once all are at their places; nothing where each round has."""
        return []

    def _kept_round(self, bindings: Bindings) -> Round:
        """What a handle keeps of a round, of what the round has bound."""
        kept = {name: bindings[name] for name in _KEPT}
        mask, tables = bindings.get("mask"), bindings.get("tables")
        return Round(bindings["first_token"], **kept, active_mask=mask, tables=tables)

    def _kept(self, outputs: Outputs, heard: Heard) -> dict[str, Any]:
        """What a handle keeps."""
        ids, mask, first = self._given["topk_idx"], self._given.get("mask"), self._joined
        size = outputs.size
        if first is not None:
            ids, mask = first.handle.topk_idx, first.handle.active_mask
        rounds = tuple(map(self._kept_round, self._rounds))
        return {
            "memory_of_rounds": memory_of(rounds),
            "buffer_id": self._plans.buffer_id,
            "number": self._communicator.counts["dispatch"] - 1,
            "dtype": self._tensors["x"].dtype,
            "topk_idx": ids,
            "expand_idx": self._known.expand_idx if self._known is not None else self._expand_idx,
            "recv_offsets": heard.offsets,
            "digest": self._communicator.digest_ids(ids, mask),
            "num_ranks": self._config.num_ranks,
            "num_local_experts": self._config.experts_on(self._rank),
            "num_shared_experts": self._config.num_shared_experts,
            "exchange_counts": None,
            "active_mask": mask,
            "tables": None,
            "traffic": None,
            "rounds": rounds,
            "tokens_of_round": self._size,
            "num_rows": size.num_rows,
            "alignment": self._request.alignment,
            "stride": size.stride,
            "tokens_per_expert": heard.per_expert,
            "first_starts": heard.places["first_starts"],
            "limits": heard.places["limits"],
        }
