"""The programs by which native code makes `EPBuffer`'s usual calls, from the operators' descriptions.

Sizes by name: T tokens, "rows" of results. The rest are numbers of the rank's context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_triton.backends.base import Calls, Executable
from moe_triton.core.call_program import (
    MAX_KEPT,
    Argument,
    ArgumentAt,
    CallProgram,
    Kept,
    Output,
    PlanProgram,
    Registers,
    Seen,
    Size,
    TensorAt,
)
from moe_triton.core.handle import OF_RANKS, DispatchHandle, DispatchOutput
from moe_triton.core.row_formats import ROW_FORMATS
from moe_triton.layout.call_word import BY_HANDLE
from moe_triton.operators.buffer import COMBINE_OF_BUFFER, DISPATCH_OF_BUFFER, attributes_of, symbols_like
from moe_triton.operators.description import Operator, Symbols
from moe_triton.operators.variants import CombineVariant, DispatchVariant, Mask, Variant
from moe_triton.runtime.executables import PlanCalls
from moe_triton.schemes.rank_context import OPERATORS, RankContext

TOKEN_DTYPES = (torch.bfloat16, torch.float16)
# The tensors that native code takes of a dispatch, in this order.
USUAL = tuple(tensor for tensor in DISPATCH_OF_BUFFER.tensors if tensor.is_usual)
T, ROWS = Size("T"), Size("rows")
DISPATCH, COMBINE = OPERATORS.index("dispatch"), OPERATORS.index("combine")
# What a dispatch's handle keeps for combine, in this order.
KEPT = ("T", "ids", "topk", "num_offsets", "num_assist", "dtype", "digest", "takes_weights", "results_idx")
KEPT += ("mask", "ids_per_flag", "mask_kind")
KEPT_TENSORS = ("topk_idx", "expand_idx", "recv_offsets", "assist_info")
MASKS: tuple[Mask, ...] = ("none", "tokens", "entries")
# Dispatch's arguments: how rows travel, `USUAL`, and with options these. A mask is in the place of its kind.
OPTIONS = ("tokens", "entries", "performance_info", "out", "scales", "tokens_per_expert", "weights")
FIRST_OPTION = 1 + len(USUAL)
# By a known routing, behind them: fields of its handle, whose ids and mask stand where a caller's do.
OF_KNOWN = ("expand_idx", "send_counts", "digest")
FIRST_OF_KNOWN = FIRST_OPTION + len(OPTIONS)
IDS = 1 + [tensor.name for tensor in USUAL].index("topk_idx")
# Combine's: results, handle, weights, and with options these.
COMBINE_OPTIONS = ("comm_quantize", "performance_info", "out")
HELD_BY_HANDLE = 2  # number of the memory that a handle holds
NO_OUTPUT, ROWS_ALONE, WHOLE_OUTPUT = 0, 1, 3  # what a caller gives for outputs, as programs find it out
# Where outputs of an earlier dispatch stand among `OPTIONS`, by their names.
SLOT_OF = {name: FIRST_OPTION + OPTIONS.index("out" if name == "tokens" else name)
           for name in ("tokens", "scales", "tokens_per_expert", "weights")}


@dataclass(frozen=True)
class Way:
    """A way of dispatch's arguments, with a program of its own.

    Attributes:
        label: of the program.
        is_per_rank: tokens are sent once to each rank (``do_expand=False``).
        has_options: it takes `OPTIONS`.
        is_known: it takes the routing of an earlier dispatch.
    """

    label: str = ""
    is_per_rank: bool = False
    has_options: bool = False
    is_known: bool = False


PLAIN, PER_RANK = Way(), Way("dispatch per rank", is_per_rank=True)
WITH_OPTIONS = Way("dispatch with options", has_options=True)
KNOWN = Way("dispatch by a known routing", has_options=True, is_known=True)
WITH = "combine with options"


@dataclass(frozen=True)
class Program:
    """One of a dispatch's programs, and what its plans go on with.

    Attributes:
        way: of its arguments.
        program: as native code takes it.
        seen: its tensor arguments, by placeholder.
        mask: register of the mask's address.
        digest: register of that of a known routing.
    """

    way: Way
    program: CallProgram
    seen: dict[str, Seen]
    mask: int
    digest: int


def _usual_modes(variant: DispatchVariant) -> dict[str, Any]:
    return {tensor.mode: getattr(variant, tensor.mode) for tensor in USUAL if tensor.mode}


def _by_kind(mask: Any) -> tuple[Any, Any]:
    """A mask in the place of its kind."""
    return (mask, None) if type(mask) is torch.Tensor and mask.dim() == 1 else (None, mask)


class BufferCalls(PlanCalls):
    """The native calls of one buffer.

    Args:
        context: where its plans run.
        calls: the back end's.
        buffer_id: which buffer it is.
        window_base: address of this rank's window.
        results: where combine looks for results first, in each zone; none with most schemes.

    Attributes:
        dispatch: called with quantize of `EPBuffer.dispatch` and the tensors of `USUAL`: its output, or None
            where the call is anything but usual: nothing has happened then.
        dispatch_per_rank: the same with ``do_expand=False``.
        combine: called with y, handle and topk_weights of `EPBuffer.combine`, likewise.
    """

    def __init__(
        self,
        context: RankContext,
        calls: Calls,
        buffer_id: int,
        window_base: int,
        results: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(calls)
        self._context, self._buffer_id, self._window_base = context, buffer_id, window_base
        self._ranks = torch.arange(context.config.num_ranks, dtype=torch.int32)
        ways = (PLAIN, PER_RANK, WITH_OPTIONS, KNOWN)
        self._dispatches = [self._dispatch_program(way) for way in ways]
        self._combines = {label: self._combine_program(label, results) for label in ("", WITH)}
        made = [calls.operator(each.program) for each in self._dispatches]
        self.dispatch: Callable[..., Any] = made[0]
        self.dispatch_per_rank: Callable[..., Any] = made[1]
        self._with_options, self._by_known = made[2:]
        combines = [calls.operator(program) for program, _ in self._combines.values()]
        self.combine: Callable[..., Any] = combines[0]
        self.combine_with: Callable[..., Any] = combines[1]
        """The same with `COMBINE_OPTIONS` behind them."""

    def dispatch_with(
        self, usual: tuple[Any, ...], mask: Any, performance_info: Any, out: Any, handle: Any
    ) -> DispatchOutput | None:
        """A dispatch with options.

        Args:
            usual: what `dispatch` takes.
            mask: active_mask of `EPBuffer.dispatch`.
            performance_info: of it.
            out: of it.
            handle: of it.
        """
        outputs: tuple[Any, ...] = (out, None, None, None)
        if type(out) is DispatchOutput:
            outputs = out[:-1]
        made: DispatchOutput | None
        if handle is None:
            made = self._with_options(*usual, *_by_kind(mask), performance_info, *outputs)
            return made
        if type(handle) is not DispatchHandle or handle.buffer_id != self._buffer_id:
            return None
        counts = handle.__dict__.get("send_counts")  # by which it has dispatched before
        if counts is None or not (mask is usual[IDS] is handle.results_idx is None):
            return None
        usual = (*usual[:IDS], handle.topk_idx, *usual[IDS + 1 :])
        known = handle.expand_idx, counts, handle.digest
        masks = _by_kind(handle.active_mask)
        made = self._by_known(*usual, *masks, performance_info, *outputs, *known)
        return made

    def add(
        self, variant: Variant, zone: int, parts: int, tokens: torch.Tensor | None, executable: Executable
    ) -> None:
        """Lets native code run calls like this one, where they are usual."""
        own = self._context.local_bypass
        if isinstance(variant, CombineVariant):
            names = ("weights", "mask", "waits", "in_place", "block_quantize")
            modes = {name: getattr(variant, name) for name in names}
            is_plain = variant.mask == "none" and not variant.waits
            bypasses = own and is_plain and not variant.block_quantize
            if variant != CombineVariant(variant.dtype, **modes, local_bypass=bypasses):
                return
            if not variant.waits and not variant.block_quantize:
                self._calls.add(self._combine_plan("", variant, zone, parts), executable)
            for has_out in (False, True):
                self._calls.add(self._combine_plan(WITH, variant, zone, parts, has_out), executable)
            return
        is_plain = variant.mask == "none" and not variant.waits
        like = DispatchVariant(
            variant.dtype, variant.row_format, local_bypass=own and is_plain, per_rank=variant.per_rank
        )
        like = replace(like, **_usual_modes(variant))
        for each in self._dispatches:
            way = each.way
            wanted = like
            if way.has_options:
                wanted = replace(wanted, mask=variant.mask, waits=variant.waits)
            if way.is_known:
                wanted = replace(wanted, routed=True, announced=BY_HANDLE)
            if variant != wanted or variant.per_rank is not way.is_per_rank:
                continue
            outputs = (NO_OUTPUT, ROWS_ALONE, WHOLE_OUTPUT) if way.has_options and tokens is None else (0,)
            for given in outputs:
                self._calls.add(self._dispatch_plan(each, variant, zone, parts, tokens, given), executable)

    def _dispatch_program(self, way: Way) -> Program:
        config, registers = self._context.config, Registers()
        arguments = self._arguments(DISPATCH_OF_BUFFER)
        names = [row_format.name for row_format in ROW_FORMATS.values()]
        quantize = registers.choice(0, 0, len(names))
        seen = {
            tensor.placeholders[0]: registers.tensor(slot, arguments[tensor.placeholders[0]])
            for slot, tensor in enumerate(USUAL, start=1)
        }
        registers.check("AT_MOST", registers.size(T), registers.constant(config.num_max_tokens_per_rank))
        none = registers.constant(0)
        registers.check("AT_MOST", seen["smooth_scales"].given, none if way.is_per_rank else quantize)
        key = [seen["x"].dtype, quantize]
        key += [seen[tensor.placeholders[0]].given for tensor in USUAL if tensor.mode]
        mask, options = none, []
        if way.has_options:
            mask, options = self._options(registers, arguments, seen)
        digest = none
        if way.is_known:
            registers.check("EQUAL", seen["topk_idx"].dtype, registers.constant(torch.int32))
            sizes = {"expand_idx": T * config.num_topk, "send_counts": config.num_experts}
            for slot, (name, size) in enumerate(sizes.items(), start=FIRST_OF_KNOWN):
                seen[name] = registers.tensor(slot, Argument(name, (size,), (torch.int32,)))
            digest = registers.do("NUMBER", FIRST_OF_KNOWN + len(sizes))
        each = registers.constant(self._context.part_tokens["dispatch"].tokens)
        key += [*options, registers.do("ZONE"), self._parts(registers, each)]
        count = FIRST_OPTION + len(OPTIONS) * way.has_options + len(OF_KNOWN) * way.is_known
        program = CallProgram(DISPATCH, "dispatch", count, registers, tuple(key), tuple(names), way.label)
        return Program(way, program, seen, mask, digest)

    def _options(
        self, registers: Registers, arguments: dict[str, Argument], seen: dict[str, Seen]
    ) -> tuple[int, list[int]]:
        """Takes what options a dispatch has.

        Returns:
            The register of a mask's address, 0 where there is none; those that plans differ by.
        """
        by_token = replace(arguments["mask"], optional=True)
        by_entry = replace(by_token, shape=(T, self._context.config.num_topk))
        of_tokens, of_entries = (
            registers.tensor(FIRST_OPTION + number, each) for number, each in enumerate((by_token, by_entry))
        )
        mask = registers.plus(of_tokens.address, of_entries.address)  # of which one is 0
        kind = registers.do("MULTIPLY_ADD", of_entries.given, registers.constant(2), of_tokens.given)
        waited = replace(arguments["performance_info"], optional=True)
        slot = FIRST_OPTION + OPTIONS.index("performance_info")
        seen["performance_info"] = registers.tensor(slot, waited)
        rows, counts_of_rows = (
            registers.do("GIVEN", SLOT_OF[name], 0) for name in ("tokens", "tokens_per_expert")
        )
        outputs = registers.do("MULTIPLY_ADD", counts_of_rows, registers.constant(2), rows)
        return mask, [kind, seen["performance_info"].given, outputs]

    def _symbols(self, operator: Operator, dtype: torch.dtype, **modes: Any) -> Symbols:
        """Sizes of a call whose number of tokens is not known yet."""
        config = self._context.config
        attributes = attributes_of(config, self._context.rank)
        return symbols_like(operator, config, dtype, BS=T, rows=ROWS, **attributes, **modes)

    def _arguments(self, operator: Operator) -> dict[str, Argument]:
        """What native code takes of an operator's tensors, by the names of their placeholders."""
        s = self._symbols(operator, torch.bfloat16)
        taken = {}
        for position, each in enumerate(t for t in operator.tensors if t.shape and t.placeholders):
            dtypes = s.dtypes(each) if each.read_as is None else (each.read_as,)
            name = each.placeholders[0]
            taken[name] = Argument(name, s.expected(each), dtypes, optional=position > 1)
        return taken

    def _dispatch_plan(
        self,
        made_for: Program,
        variant: DispatchVariant,
        zone: int,
        parts: int,
        tokens: torch.Tensor | None,
        given: int,
    ) -> PlanProgram:
        """How a dispatch runs a plan, with so much of `NO_OUTPUT`, `ROWS_ALONE` and `WHOLE_OUTPUT`."""
        way, program, seen = made_for.way, made_for.program, made_for.seen
        registers = Registers(program.registers)
        config, operator = self._context.config, DISPATCH_OF_BUFFER
        modes = {"row_format": variant.row_format, "per_rank": variant.per_rank}
        s = self._symbols(operator, variant.dtype, **modes)
        described = operator.returned(variant)
        outputs = {o.name: Output(o.name, *s.spec(o)) for o in described}
        asked: dict[str, Seen] = {}
        for name in SLOT_OF if given == WHOLE_OUTPUT else ("tokens",) if given else ():
            if name in outputs:
                made_by_call = outputs.pop(name)
                argument = Argument(name, made_by_call.shape, (made_by_call.dtype,))
                asked[name] = registers.tensor(SLOT_OF[name], argument)
        count, num_ids = registers.size(T), registers.size(T * config.num_topk)
        per_flag = config.num_topk if variant.mask == "tokens" else 1
        small = [Output("topk_idx", (T, config.num_topk), torch.int32)]
        if variant.mask != "none":
            shape = (T, config.num_topk)[: 1 + (variant.mask == "entries")]
            small.append(Output("mask", shape, torch.bool))
        rows = [outputs.pop("tokens")] if "tokens" in outputs and tokens is None else []
        outputs.pop("tokens", None)
        made = registers.allocate([*small, *outputs.values()], hold=0)
        if rows:
            made |= registers.allocate(rows, hold=1)
        mask = made["mask"].address if "mask" in made else registers.constant(0)
        flags = registers.elements(small[1].shape) if "mask" in made else mask
        if "mask" in made:
            registers.check("COPY", made_for.mask, mask, flags)
        limits = registers.constant(config.num_topk), registers.constant(config.num_experts)
        taken = made["topk_idx"]
        if way.is_known:
            word = registers.constant(torch.int32.itemsize)
            num_bytes = registers.do("MULTIPLY_ADD", num_ids, word, registers.constant(0))
            for name in ("topk_idx", "expand_idx"):
                registers.check("COPY", seen[name].address, made[name].address, num_bytes)
        else:
            ids, by_token = seen["topk_idx"], registers.constant(int(variant.mask == "tokens"))
            masked = (mask, by_token)
            registers.check("TAKE_IDS", ids.address, ids.dtype, taken.address, count, *limits, *masked)
        digest = registers.do("DIGEST", taken.address, num_ids, mask, registers.constant(per_flag))
        if way.is_known:
            registers.check("EQUAL", digest, made_for.digest)
        for name in asked:
            registers.check("APART", SLOT_OF[name])
        placeholders = {name: tensor.address for name, tensor in seen.items()}
        for o in described:
            if o.name in asked:
                placeholders[o.placeholder] = asked[o.name].address
            elif o.name in made:
                placeholders[o.placeholder] = made[o.name].address
        placeholders |= {"topk_idx": taken.address, "num_tokens": count, "num_ids": num_ids, "mask": mask}
        placeholders |= self._ranks_waited_for(registers)
        if tokens is not None:
            placeholders["tokens"] = registers.new(tokens)
        seen_by_caller: dict[str, Any] = {**made, **{name: ArgumentAt(SLOT_OF[name]) for name in asked}}
        if tokens is not None:
            seen_by_caller["tokens"] = tokens
        quantize = program.objects.index(variant.row_format.name)
        key = [variant.dtype, quantize, *map(int, _usual_modes(variant).values())]
        if way.has_options:
            key += [MASKS.index(variant.mask), int(variant.waits), given]
        return PlanProgram(
            program.label or program.name,
            (*key, zone, parts),
            registers,
            placeholders,
            tuple(map(seen_by_caller.get, ("tokens", "scales", "tokens_per_expert", "weights"))),
            DispatchOutput,
            {"topk_idx": taken, "num_tokens": count},
            self._handle(registers, variant, made, digest, per_flag, is_known=way.is_known),
        )

    def _ranks_waited_for(self, registers: Registers) -> dict[str, int]:
        """What the record of waits needs besides its tensor."""
        return {
            "rank_table": registers.new(self._ranks),
            "num_performance_entries": registers.constant(len(self._ranks)),
        }

    def _handle(
        self,
        registers: Registers,
        variant: DispatchVariant,
        made: dict[str, TensorAt],
        digest: int,
        per_flag: int,
        *,
        is_known: bool,
    ) -> Kept:
        names = [*KEPT_TENSORS, *(name for name in OF_RANKS if name in made)]
        tensors, config = [made[name] for name in names], self._context.config
        results_idx = made.get("results_idx", made["topk_idx"])
        numbers = (
            registers.size(T),
            registers.size(T * self._context.config.num_topk),
            registers.constant(self._context.config.num_topk),
            *tensors[2].sizes,
            *tensors[3].sizes,
            registers.constant(variant.dtype),
            digest,
            registers.constant(0 if variant.per_rank else 1),
            results_idx.address,
            made["mask"].address if "mask" in made else registers.constant(0),
            registers.constant(per_flag),
            registers.constant(MASKS.index(variant.mask)),
        )
        addresses = [
            *(tensor.address for tensor in tensors),
            *(tensors[-1].sizes[:1] if variant.per_rank else ()),  # their columns are there already
        ]
        kept = (*numbers, *addresses)
        if "mask" in made:
            names, tensors = [*names, "active_mask"], [*tensors, made["mask"]]
        attributes: dict[str, TensorAt | int] = {
            name: TensorAt(kept.index(tensor.address), tuple(map(kept.index, tensor.sizes)), tensor.dtype)
            for name, tensor in zip(names, tensors, strict=True)
        }
        attributes["digest"] = KEPT.index("digest")
        same = {"num_ranks": config.num_ranks, "num_local_experts": config.experts_on(self._context.rank)}
        fields: dict[str, object] = {"buffer_id": self._buffer_id, "dtype": variant.dtype, **same}
        if is_known:
            fields["send_counts"] = ArgumentAt(FIRST_OF_KNOWN + OF_KNOWN.index("send_counts"))
        return Kept(kept, attributes, fields)

    def _combine_program(
        self, label: str, results: Sequence[torch.Tensor]
    ) -> tuple[CallProgram, dict[str, int]]:
        context, registers = self._context, Registers()
        of_any = int(not results)
        first = registers.do("KEPT", 1, DISPATCH, HELD_BY_HANDLE, of_any, size=MAX_KEPT)
        kept = dict(zip((*KEPT, *KEPT_TENSORS), range(first, first + MAX_KEPT), strict=False))
        registers.symbols[T] = kept["T"]
        ids = kept["topk_idx"], kept["ids"], kept["mask"], kept["ids_per_flag"]
        registers.check("EQUAL", registers.do("DIGEST", *ids), kept["digest"])
        arguments = self._arguments(COMBINE_OF_BUFFER)
        weights = registers.tensor(2, arguments["topk_weights"])
        registers.check("AT_MOST", weights.given, kept["takes_weights"])
        y = registers.tensor(0, arguments["y"])
        registers.check("EQUAL", y.dtype, kept["dtype"])
        last = registers.plus(kept["recv_offsets"], registers.constant(4 * (context.num_entries - 1)))
        rows = registers.do("MINIMUM", registers.do("LOAD", last), registers.constant(context.capacity))
        registers.check("AT_MOST", rows, registers.size(ROWS))
        zone = registers.do("ZONE")
        in_place = registers.constant(0)
        if results:
            # Addresses: this outlives the window, which goes when nobody holds a tensor of it.
            place = registers.do("PICK", registers.new(*(view.data_ptr() for view in results)), zone)
            in_place = registers.do("STARTS", y.address, place, registers.constant(results[0].nbytes))
        each = registers.constant(context.part_tokens["combine"].tokens)
        key = [y.dtype, weights.given, kept["mask_kind"], in_place]
        kept |= {"y": y.address, "topk_weights": weights.address}
        first = 3
        if label:
            quantize = registers.choice(first, 0, 2)
            waited = replace(arguments["performance_info"], optional=True)
            info = registers.tensor(first + COMBINE_OPTIONS.index("performance_info"), waited)
            given = registers.do("GIVEN", first + COMBINE_OPTIONS.index("out"), 0)
            key += [quantize, info.given, given]
            kept["performance_info"] = info.address
        count, objects = first + (len(COMBINE_OPTIONS) if label else 0), (None, "int8") if label else ()
        key += [zone, self._parts(registers, each)]
        return CallProgram(COMBINE, "combine", count, registers, tuple(key), objects, label), kept

    def _combine_plan(
        self, label: str, variant: CombineVariant, zone: int, parts: int, has_out: bool = False
    ) -> PlanProgram:
        program, kept = self._combines[label]
        registers = Registers(program.registers)
        (out,), dtype = COMBINE_OF_BUFFER.outputs[:1], variant.dtype
        output = Output("out", *self._symbols(COMBINE_OF_BUFFER, dtype).spec(out))
        if has_out:
            slot = program.num_arguments - 1
            address = registers.tensor(slot, Argument("out", output.shape, (dtype,))).address
            word = registers.constant(torch.int32.itemsize)
            sizes = {"topk_idx": "ids", "expand_idx": "ids"}
            sizes |= {"recv_offsets": "num_offsets", "assist_info": "num_assist"}
            for position, (name, size) in enumerate(sizes.items(), start=1):
                num_bytes = registers.do("MULTIPLY_ADD", kept[size], word, registers.constant(0))
                registers.check("READ", slot + position, kept[name], num_bytes)
            if variant.mask != "none":
                flags = kept["T" if variant.mask == "tokens" else "ids"]
                registers.check("READ", slot + 1 + len(sizes), kept["mask"], flags)
            registers.check("APART", slot)
            answer: TensorAt | ArgumentAt = ArgumentAt(slot)
        else:
            made = registers.allocate([output], hold=1)["out"]
            address, answer = made.address, made
        # In elements, as the sum finds them beside those that came; the difference is a whole number of them.
        ahead = registers.plus(kept["y"], registers.constant(-self._window_base))
        own_results = registers.do("DIVIDE", ahead, registers.constant(dtype.itemsize))
        names = ("y", "topk_weights", "expand_idx", "recv_offsets", "mask")
        placeholders = {name: kept[name] for name in names}
        placeholders |= {
            "topk_idx": kept["results_idx"],
            "origins": kept["assist_info"],
            "num_rows": registers.size(ROWS),
            "num_tokens": registers.size(T),
            "num_ids": kept["ids"],
            "out": address,
            "own_results": own_results,
        }
        key = [dtype, int(variant.weights), MASKS.index(variant.mask), int(variant.in_place)]
        if label:
            key += [int(variant.block_quantize), int(variant.waits), int(has_out)]
            placeholders["performance_info"] = kept["performance_info"]
        placeholders |= self._ranks_waited_for(registers)
        ids = TensorAt(kept["results_idx"], (kept["T"], kept["topk"]), torch.int32, HELD_BY_HANDLE)
        return PlanProgram(
            label or "combine",
            (*key, zone, parts),
            registers,
            placeholders,
            (answer,),
            bindings={"topk_idx": ids, "num_tokens": registers.size(T)},
        )

    def _parts(self, registers: Registers, each: int) -> int:
        return registers.do("PARTS", registers.size(T), each)
