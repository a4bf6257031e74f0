"""`EPBuffer`'s calls that native code leaves to Python: checked once per shape, whole or in halves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from moe_triton.backends.base import Host, TensorSpec
from moe_triton.core import plain_tensors
from moe_triton.core.checks import check_tensor, not_plain_error
from moe_triton.core.errors import ArgumentError
from moe_triton.core.handle import OF_RANKS, DispatchHandle, DispatchOutput, Pending
from moe_triton.core.records import CALL_HEADER
from moe_triton.core.row_formats import RowFormat
from moe_triton.layout.call_word import BY_HANDLE
from moe_triton.operators.buffer import (
    COMBINE_OF_BUFFER,
    DISPATCH_OF_BUFFER,
    DISPATCHED,
    OF_HANDLE,
    attributes_of,
)
from moe_triton.operators.description import Operator, Symbols
from moe_triton.runtime import arguments, given_outputs
from moe_triton.runtime.arguments import call_of, check_argument, inputs_of, other_ids_error
from moe_triton.runtime.communicator import Communicator
from moe_triton.runtime.fitting import Fitting
from moe_triton.runtime.in_flight import SentCalls
from moe_triton.runtime.plan_cache import PlanCache
from moe_triton.runtime.prepared_call import Bindings, CallSite, Deployment, Named, PreparedCall
from moe_triton.runtime.turns import PhaseRun
from moe_triton.schemes.rules import check_call, check_given

# Large tensors are not copied in silence.
LARGE = ("x", "y")
# What arguments that belong to a mode are needed with.
NEEDED_WITH = {"exchange": "tp_world_size", "table_words": "table_words"}
MAX_HEADERS = 64
# Without these a rank's rows for itself need not go through its window.
UNUSUAL = ("active_mask", "performance_info", "shared_expert_x")


@dataclass(frozen=True, eq=False)
class BufferPlan(PreparedCall):
    """A checked call of a buffer.

    Attributes:
        kernels: sizes of the call as kernels have them, where these are others than the caller's.
    """

    kernels: Symbols | None = None

    def bind(self, named: Named) -> Bindings:
        """What the placeholders hold, outputs aside."""
        return self._bind(self.communicator, named)

    def make(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The outputs as kernels write them, by their names, those among them that are there already."""
        names = [name for name in self.made_specs if name not in given]
        made = self.communicator.backend.empty_all([self.made_specs[name] for name in names])
        return {**given, **dict(zip(names, made, strict=True))}

    def bound(self, outputs: Mapping[str, torch.Tensor]) -> Bindings:
        """Outputs by their placeholders."""
        operator = self.symbols.operator
        return {
            output.placeholder: outputs[output.name] for output in operator.outputs if output.name in outputs
        }

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """Shapes and dtypes of the outputs as the caller sees them, by name."""
        return self._specs_by(self.symbols)

    @cached_property
    def made_specs(self) -> dict[str, TensorSpec]:
        """The same as kernels write them."""
        return self._specs_by(self.kernels) if self.kernels else self.specs

    def _specs_by(self, s: Symbols) -> dict[str, TensorSpec]:
        return {output.name: s.spec(output) for output in s.operator.returned(self.variant)}


class DispatchOfBuffer(BufferPlan):
    """A checked dispatch of a buffer."""

    def _prepare(self, communicator: Communicator, bindings: Bindings) -> None:
        """Private copies of what combine reads again, after users may have written over theirs."""
        if self.symbols.get("is_known"):  # of a handle, which has them
            return
        self._bind_ids(communicator, bindings, keep=True)
        mask = bindings.get("mask")
        if mask is not None:
            bindings["mask"] = communicator.backend.empty(mask.shape, mask.dtype).copy_(mask)


class CombineOfBuffer(BufferPlan):
    """A checked combine of a buffer."""

    def _prepare(self, communicator: Communicator, bindings: Bindings) -> None:
        """Its ids are the buffer's own."""
        y = bindings["y"]
        bindings["num_rows"] = y.shape[0]
        is_long = self.symbols.get("is_long")  # and looked at round by round
        if self.tables and not is_long and not communicator.backend.is_asynchronous:
            self.tables.check(bindings, self.called)
        if self.variant.local_bypass:
            bindings["own_results"] = (y.data_ptr() - communicator.window_base) // y.element_size()


class BufferPlans:
    """The plans of one buffer, and calls by them.

    Args:
        communicator: the buffer's.
        host: of its back end.
        buffer_id: which buffer it is.
        special: numbers of zero, copy and constant experts.

    Attributes:
        sent: calls that were sent and not yet waited for.
    """

    def __init__(
        self, communicator: Communicator, host: Host, buffer_id: int, special: tuple[int, int, int]
    ) -> None:
        self.communicator, self.host, self.buffer_id = communicator, host, buffer_id
        self.special = special
        context, c = communicator.context, communicator.config
        self._context = CallSite(Deployment(context.config, context.rank), lambda: communicator)
        self.tables = communicator.scheme.tables_of(context.config)
        copies = 2 if communicator.participants.may_stand_in else 1
        words = copies * self.tables.num_words if self.tables else 0
        others = context.rank, context.exchange_rank, special, words
        self._of_kernels = attributes_of(context.config, *others)
        self._attributes = {
            DISPATCH_OF_BUFFER: attributes_of(c, *others),
            # What a handle keeps is as kernels have left it.
            COMBINE_OF_BUFFER: {**self._of_kernels, "H": c.hidden},
        }
        self.fitting = Fitting(communicator) if context.config is not c else None
        self._plans: PlanCache[BufferPlan] = PlanCache()
        self._headers: dict[tuple[int, ...], torch.Tensor] = {}
        self.sent = SentCalls(communicator.scheme.rounds.shared)

    def dispatch(
        self,
        tensors: Named,
        row_format: RowFormat,
        out: Any,
        wait: bool,
        joined: Callable[[DispatchOutput], DispatchOutput],
        known: DispatchHandle | None = None,
        *,
        per_rank: bool = False,
    ) -> DispatchOutput | Pending[DispatchOutput]:
        """A dispatch of one round.

        Args:
            tensors: every one that it takes.
            row_format: how rows travel.
            out: of `EPBuffer.dispatch`.
            wait: whether for the rows too, or only until they are sent.
            joined: what becomes of its output where it was the first round of more.
            known: the handle whose routing it has, or None. Ids and mask are among the tensors all the same.
            per_rank: whether a token is sent once to each rank.

        Raises:
            ArgumentError: a bad argument. Nothing was sent.
        """
        communicator = self.communicator
        if known is None:
            tensors = self.with_ids_of_kernels(tensors)
        modes = self.modes_of(tensors, row_format, wait and self.bypasses(tensors), known is not None)
        modes["per_rank"] = per_rank
        plan = self.find(DISPATCH_OF_BUFFER, DispatchOfBuffer, tensors, modes)
        given: dict[str, torch.Tensor] = {}
        if communicator.has_outputs_in_window:
            given["tokens"] = communicator.window_tensor("rows", plan.specs["tokens"][1])
        asked = {} if out is None else self._asked(plan, tensors, out)
        given |= asked if self.fitting is None else self.fitting.as_written(plan.made_specs, asked)
        fitted = self.fitted(plan, tensors)
        bindings = plan.bind(fitted)
        if known is not None:
            given["expand_idx"] = known.expand_idx
            if known.results_idx is not None:
                given["results_idx"] = bindings["results_idx"] = known.results_idx
            bindings["send_counts"] = self._send_counts(known, plan, bindings)
        outputs = plan.make(given)
        if self.tables and not self.host.is_asynchronous:
            self.tables.keep(bindings | plan.bound(outputs))
        handle = DispatchHandle(
            buffer_id=self.buffer_id,
            number=communicator.counts["dispatch"],
            dtype=tensors["x"].dtype,
            topk_idx=bindings["topk_idx"],
            expand_idx=outputs["expand_idx"],
            recv_offsets=outputs["recv_offsets"],
            assist_info=outputs["assist_info"],
            digest=communicator.digest_ids(bindings["topk_idx"], bindings.get("mask")),
            num_ranks=communicator.config.num_ranks,
            num_local_experts=communicator.config.experts_on(communicator.rank),
            num_shared_experts=communicator.config.num_shared_experts,
            exchange_counts=outputs.get("exchange_counts"),
            active_mask=bindings.get("mask"),
            tables=outputs.get("tables"),
            **({} if known is None else {"send_counts": bindings["send_counts"]}),
            **{name: outputs[name] for name in OF_RANKS if name in outputs},
        )
        seen = outputs
        if self.fitting is not None:
            seen = self.fitting.all_seen(plan.specs, outputs)
        behind = {name: seen[name] for name in asked if name not in given}
        seen = {**seen, **asked}
        get = seen.get
        made = DispatchOutput(
            seen["tokens"], get("scales"), seen["tokens_per_expert"], get("weights"), handle
        )

        def finish() -> DispatchOutput:
            if self.fitting is not None:
                self.fitting.give_back(plan.symbols, tensors, fitted)
                for name, written in behind.items():
                    rows = None if name == "tokens_per_expert" else self._num_received(handle)
                    self.fitting.copied(written, asked[name], rows)
            return joined(made) if known is None and communicator.is_rung else made

        answer: DispatchOutput | Pending[DispatchOutput]
        answer = self._run(plan, bindings | plan.bound(outputs), finish, wait)
        if communicator.memory.posts and not self.host.is_asynchronous:
            handle.note_traffic(communicator.memory.traffic("dispatch"))
        return answer

    def combine(
        self, tensors: Named, handle: DispatchHandle, comm_quantize: str | None, out: Any, wait: bool
    ) -> torch.Tensor | Pending[torch.Tensor]:
        """A combine.

        Args:
            tensors: every one that it takes besides those of the handle.
            handle: a checked one.
            comm_quantize: of `EPBuffer.combine`.
            out: where sums are to go, or None.
            wait: whether for the results too, or only until they are sent.

        Raises:
            ArgumentError: a bad argument. Nothing was sent.
        """
        communicator, y = self.communicator, tensors["y"]
        tensors = tensors | {name: getattr(handle, name) for name in OF_HANDLE}
        ids, mask = handle.topk_idx, handle.active_mask
        if handle.results_idx is not None:
            # Ranks that a mask leaves out are not among these.
            tensors |= {"topk_idx": handle.results_idx, "active_mask": None}
        modes = {
            "comm_quant_mode": 0 if comm_quantize is None else 2,
            "local_bypass": wait and comm_quantize is None and self.bypasses(tensors),
            "in_place": False,
        }
        if not modes["local_bypass"]:
            tensors["expand_idx"] = None
        results = y
        if self.fitting is not None and self.fitting.has_room(y):
            y = tensors["y"] = self.fitting.stand_in(y)
        shape = "n", communicator.config.hidden
        check_tensor("y", y, shape=shape, dtypes=(handle.dtype,), device=self.host.device)
        if communicator.has_outputs_in_window:
            place = communicator.window_tensor("results", y.dtype)
            modes["in_place"] = arguments.starts_at(place, y)
        plan = self.find(COMBINE_OF_BUFFER, CombineOfBuffer, tensors, modes)
        arguments.check_results(y, handle, communicator)
        fitted = self.fitted(plan, tensors)
        if self.fitting is not None:
            rows = self._num_received(handle)
            fitted["y"] = self.fitting.results(results, rows, quantized=comm_quantize is not None)
        bindings = plan.bind(fitted)
        if handle.results_idx is None:
            ids, mask = bindings["topk_idx"], bindings.get("mask")
        if handle.digest != communicator.digest_ids(ids, mask):
            raise other_ids_error(
                "handle.topk_idx", f"dispatch {handle.number}", "Pass output.handle as dispatch made it."
            )
        communicator.masks.mark_handle(handle)
        if out is not None:
            out = given_outputs.sized("out", out, plan.specs["out"], self.host.device)
            read = {plan.symbols.operator.called(name): tensor for name, tensor in tensors.items()}
            given_outputs.check_apart({"out": out}, read | {"y": results})
        outputs = plan.make({} if out is None or self.fitting else {"out": out})

        def finish() -> torch.Tensor:
            if self.fitting is None:
                return outputs["out"]
            seen = self.fitting.all_seen(plan.specs, outputs)["out"]
            return self.fitting.copied(seen, out)

        answer: torch.Tensor | Pending[torch.Tensor]
        bindings = bindings | plan.bound(outputs) | {DISPATCHED: handle.dispatched}
        answer = self._run(plan, bindings, finish, wait)
        return answer

    def _asked(self, plan: BufferPlan, tensors: Named, out: Any) -> dict[str, torch.Tensor]:
        """Outputs that a dispatch's caller gives, by name; see `given_outputs.of_dispatch`."""
        return self.asked(plan.specs, tensors, out)

    def asked(self, specs: Mapping[str, TensorSpec], tensors: Named, out: Any) -> dict[str, torch.Tensor]:
        """Outputs that a dispatch's caller gives, by name; see `given_outputs.of_dispatch`."""
        self.communicator.scheme.check_offers("out", "out", "given")
        fitting = self.fitting

        def contiguous(tokens: torch.Tensor) -> torch.Tensor:
            has_gaps = fitting is not None and fitting.has_room(tokens)
            return fitting.stand_in(tokens) if fitting is not None and has_gaps else tokens

        return given_outputs.of_dispatch(out, specs, tensors, self.host.device, contiguous)

    def call_header(self, *values: int) -> torch.Tensor:
        """A `moe_triton.core.records.CALL_HEADER` on the device; most calls have that of an earlier one."""
        header = self._headers.get(values)
        if header is None:
            if len(self._headers) >= MAX_HEADERS:
                self._headers.clear()
            words = [*values, *(0,) * (CALL_HEADER.num_words - len(values))]
            header = torch.tensor(words, dtype=torch.int32, device=self.communicator.backend.device)
            self._headers[values] = header
        return header

    @cached_property
    def no_counts(self) -> torch.Tensor:
        """The counts of a round to which this rank brings no token."""
        experts = self.communicator.context.config.num_experts
        return torch.zeros(experts, dtype=torch.int32, device=self.communicator.backend.device)

    def with_ids_of_kernels(self, tensors: Named) -> Named:
        """What a dispatch takes, with ids as kernels number experts."""
        if self.fitting is None:
            return tensors
        ids = self.fitting.ids_of_kernels(tensors["topk_idx"], tensors["active_mask"])
        return tensors | {"topk_idx": ids}

    def modes_of(
        self, tensors: Named, row_format: RowFormat, bypasses: bool, is_known: bool
    ) -> dict[str, Any]:
        """What a dispatch's plan depends on besides its tensors.

        Args:
            tensors: every one that it takes.
            row_format: how rows travel.
            bypasses: whether rows of this rank for itself go straight to their places.
            is_known: whether it goes by the routing of an earlier one.

        Raises:
            ArgumentError: the scheme has no such rows.
        """
        self.communicator.scheme.check_rows(row_format)
        is_copied_there = self.host.is_asynchronous and not is_known
        return {
            "row_format": row_format,
            "quant_mode": 2 * row_format.is_quantized,  # to rules, one quantisation is as good as another
            "local_bypass": bypasses,
            # a host that does not read ids leaves their copy to a kernel
            "given_ids": getattr(tensors["topk_idx"], "dtype", None) if is_copied_there else None,
            "is_routed": is_known,
            "is_known": is_known,
            "is_announced": BY_HANDLE if is_known else 0,
        }

    def _send_counts(self, known: DispatchHandle, plan: BufferPlan, bindings: Bindings) -> torch.Tensor:
        """This rank's rows for each expert by a known routing: counted when it is first used again."""
        counts: torch.Tensor | None = known.__dict__.get("send_counts")
        if counts is None:
            empty, c = self.communicator.backend.empty, self.communicator.context.config
            sizes = {
                "send_counts": c.num_experts,
                "call_counts": c.num_experts,
                "expand_idx": bindings["num_ids"],
            }
            if c.num_shared_ranks:
                sizes["call_shared_counts"] = c.num_shared_ranks
            made = {name: empty((size,), torch.int32) for name, size in sizes.items()}
            variant = replace(plan.variant, placed=True)
            self.communicator.run_phase(PhaseRun(variant, bindings | made | {"is_later_round": 0}, "routing"))
            counts = known.__dict__["send_counts"] = made["send_counts"]
        return counts

    @property
    def is_fitted(self) -> bool:
        """Whether kernels have other sizes than callers: native code has no calls of such a buffer."""
        return self.fitting is not None

    def fitted(self, plan: BufferPlan, tensors: Named) -> Named:
        """Tensors as kernels read them."""
        if self.fitting is None or plan.kernels is None:
            return tensors
        return self.fitting.given(plan.symbols, plan.kernels, tensors)

    def _num_received(self, handle: DispatchHandle) -> int | None:
        """How many rows a dispatch has delivered; None if that is to be waited for, or a peer has more."""
        is_unknown = self.host.is_asynchronous or handle.exchange_counts is not None
        return None if is_unknown else handle.num_received()

    def forget(self) -> None:
        """Lets go of everything, once the buffer is closed. What callers hold of a call stays theirs."""
        self._plans.clear()
        self.sent.forget()

    def bypasses(self, tensors: Named) -> bool:
        """Whether rows of this rank for itself may go straight to their places: in plain calls only."""
        context = self.communicator.context
        if (
            not context.local_bypass
            or context.exchange_rank is not None
            or context.config.num_special_experts
        ):
            return False
        return all(tensors.get(name) is None for name in UNUSUAL)

    def find(
        self, operator: Operator, kind: type[BufferPlan], tensors: Named, modes: dict[str, Any]
    ) -> BufferPlan:
        """The plan of a call, checked by every rule that does not depend on data.

        Args:
            operator: dispatch or combine.
            kind: of the plan.
            tensors: every one that the call takes.
            modes: what else its kernels depend on.

        Raises:
            ArgumentError: an argument breaks a rule.
        """
        described = self.host.describe(*tensors.values())
        key = operator.name, described, *modes.values()
        plan = self._plans.get(key) if described is not None else None
        if plan is None:
            plan = self._make(operator, kind, tensors, modes)
            described = described or plain_tensors.describe(*tensors.values())
            key = operator.name, described, *modes.values()
            self._plans.put(key, plan)
        return plan

    def _make(
        self, operator: Operator, kind: type[BufferPlan], tensors: Named, modes: dict[str, Any]
    ) -> BufferPlan:
        """Checks every argument by every rule that does not depend on data."""
        config, device, attributes = self.communicator.config, self.host.device, self._attributes[operator]
        for position, argument in enumerate(operator.tensors):
            value: Any = tensors.get(argument.name)
            needed = position < 2 or attributes.get(NEEDED_WITH.get(argument.only_with, ""), 0)
            if value is None and not needed:
                continue
            error = not_plain_error(operator.called(argument.name), value, device)
            if error is not None:
                raise error
            if argument.name in LARGE and not value.is_contiguous():
                name = operator.called(argument.name)
                rule = "it must be contiguous"
                raise ArgumentError(name, f"strided {value.stride()}", rule, f"Pass {name}.contiguous().")
        arguments.check_order(tensors["topk_idx"], tensors["topk_weights"])
        s = Symbols(operator, {**attributes, **modes, **tensors})
        for position, argument in enumerate(operator.tensors):
            check_argument(s, argument, tensors.get(argument.name), device)
            if position == 0 and argument.name == "x" and not s["placed"]:
                arguments.check_num_tokens("x", config, s["BS"])
        call = replace(call_of(s), is_of_buffer=True)
        if s["placed"] or s.get("is_long"):  # in as many rounds as it takes
            call = replace(call, num_tokens=min(call.num_tokens, config.num_max_tokens_per_rank))
        try:
            check_call(config, call)
        except ArgumentError as error:
            raise _as_called(error, operator.names) from None
        check_given(self.communicator.scheme, config, s)
        if s["comm_quant_mode"]:
            self.communicator.scheme.check_offers("comm_quantize", "comm_quantize", "'int8'")
        kernels = None
        if self.fitting is not None:
            kernels = Symbols(operator, {**self._of_kernels, **modes, **tensors})
        return kind(config, self._context, s.variant(), s, *inputs_of(s, tensors), kernels)

    def _run(self, plan: BufferPlan, bindings: Bindings, made: Callable[[], Any], wait: bool) -> Any:
        run, variant, operator = self.communicator.run, plan.variant, plan.symbols.operator.name
        if not wait:
            self.communicator.scheme.check_offers("wait", "wait", False)
        if wait:
            run(variant, bindings)
            return made()

        def finish() -> Any:
            self.sent.end(operator)
            run(variant, bindings, "teardown")
            return made()

        run(variant, bindings, "setup")
        return self.sent.begin(operator, finish)


# What an `EPBuffer` has instead of numbers that torch_npu's callers pass.
INSTEAD = {"comm_quant_mode": "comm_quantize", "tp_world_size": "tp_group", "quant_mode": "quantize"}


def _as_called(error: ArgumentError, names: Mapping[str, str]) -> ArgumentError:
    """The error of a rule about what the buffer's caller passed."""
    # Of the values that callers have other words for, rules refuse this one.
    value = "'int8'" if error.argument == "comm_quant_mode" else error.value
    reworded = ArgumentError(error.argument, value, error.rule, error.remedy, code=error.code)
    return reworded.renamed({**names, **INSTEAD})
