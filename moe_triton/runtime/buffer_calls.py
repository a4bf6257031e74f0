"""The programs by which native code makes `EPBuffer`'s usual calls, from the operators' descriptions.

Sizes by name: T tokens, "rows" of results. The rest are numbers of the rank's context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from moe_triton.backends.base import Calls, Executable
from moe_triton.core.call_program import (
    MAX_KEPT,
    Argument,
    CallProgram,
    Kept,
    Output,
    PlanProgram,
    Registers,
    Seen,
    Size,
    TensorAt,
)
from moe_triton.core.handle import OF_RANKS
from moe_triton.core.row_formats import ROW_FORMATS
from moe_triton.operators.buffer import COMBINE_OF_BUFFER, DISPATCH_OF_BUFFER, attributes_of, symbols_like
from moe_triton.operators.description import Operator, Symbols
from moe_triton.operators.variants import CombineVariant, DispatchVariant, Variant
from moe_triton.runtime.executables import PlanCalls
from moe_triton.schemes.rank_context import OPERATORS, RankContext

TOKEN_DTYPES = (torch.bfloat16, torch.float16)
# The tensors that native code takes of a dispatch, in this order.
USUAL = tuple(tensor for tensor in DISPATCH_OF_BUFFER.tensors if tensor.is_usual)
T, ROWS = Size("T"), Size("rows")
DISPATCH, COMBINE = OPERATORS.index("dispatch"), OPERATORS.index("combine")
# What a dispatch's handle keeps for combine, in this order.
KEPT = ("T", "ids", "topk", "num_offsets", "num_assist", "dtype", "digest", "takes_weights", "results_idx")
KEPT_TENSORS = ("topk_idx", "expand_idx", "recv_offsets", "assist_info")
PER_RANK = "dispatch per rank"  # the program of dispatches with ``do_expand=False``


def _usual_modes(variant: DispatchVariant) -> dict[str, Any]:
    return {tensor.mode: getattr(variant, tensor.mode) for tensor in USUAL if tensor.mode}


class BufferCalls(PlanCalls):
    """The native calls of one buffer.

    Args:
        context: where its plans run.
        calls: the back end's.
        buffer_id: which buffer it is.
        window_base: address of this rank's window.
        results: where combine looks for results first, in each zone; none with most schemes.
        output_type: what dispatch returns.

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
        output_type: type,
    ) -> None:
        super().__init__(calls)
        self._context, self._buffer_id = context, buffer_id
        self._window_base, self._output_type = window_base, output_type
        self._dispatches = {per_rank: self._dispatch_program(per_rank) for per_rank in (False, True)}
        self._combine, self._kept = self._combine_program(results)
        made = {per_rank: calls.operator(program) for per_rank, (program, _) in self._dispatches.items()}
        self.dispatch: Callable[..., Any] = made[False]
        self.dispatch_per_rank: Callable[..., Any] = made[True]
        self.combine: Callable[..., Any] = calls.operator(self._combine)

    def add(
        self, variant: Variant, zone: int, parts: int, tokens: torch.Tensor | None, executable: Executable
    ) -> None:
        """Lets native code run calls like this one, where they are usual."""
        own = self._context.local_bypass
        if isinstance(variant, DispatchVariant):
            plain = DispatchVariant(
                variant.dtype, variant.row_format, local_bypass=own, per_rank=variant.per_rank
            )
            if variant == replace(plain, **_usual_modes(variant)):
                self._calls.add(self._dispatch_plan(variant, zone, parts, tokens), executable)
        elif variant == CombineVariant(
            variant.dtype, variant.weights, in_place=variant.in_place, local_bypass=own
        ):
            self._calls.add(self._combine_plan(variant, zone, parts), executable)

    def _dispatch_program(self, per_rank: bool) -> tuple[CallProgram, dict[str, Seen]]:
        config, registers = self._context.config, Registers()
        arguments = self._arguments(DISPATCH_OF_BUFFER)
        names = [row_format.name for row_format in ROW_FORMATS.values()]
        quantize = registers.choice(0, 0, len(names))
        seen = {
            tensor.placeholders[0]: registers.tensor(slot, arguments[tensor.placeholders[0]])
            for slot, tensor in enumerate(USUAL, start=1)
        }
        registers.check("AT_MOST", registers.size(T), registers.constant(config.num_max_tokens_per_rank))
        registers.check(
            "AT_MOST", seen["smooth_scales"].given, registers.constant(0) if per_rank else quantize
        )
        given = (seen[tensor.placeholders[0]].given for tensor in USUAL if tensor.mode)
        each = registers.constant(self._context.part_tokens["dispatch"].tokens)
        key = seen["x"].dtype, quantize, *given, registers.do("ZONE"), self._parts(registers, each)
        count, label = 1 + len(USUAL), PER_RANK if per_rank else ""
        return CallProgram(DISPATCH, "dispatch", count, registers, key, tuple(names), label), seen

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
        self, variant: DispatchVariant, zone: int, parts: int, tokens: torch.Tensor | None
    ) -> PlanProgram:
        program, seen = self._dispatches[variant.per_rank]
        registers = Registers(program.registers)
        config, operator = self._context.config, DISPATCH_OF_BUFFER
        modes = {"row_format": variant.row_format, "per_rank": variant.per_rank}
        s = self._symbols(operator, variant.dtype, **modes)
        described = operator.returned(variant)
        *small, rows = (Output(o.name, *s.spec(o)) for o in described)
        ids = Output("topk_idx", (T, config.num_topk), torch.int32)
        made = registers.allocate([ids, *small], hold=0)
        if tokens is None:
            made |= registers.allocate([rows], hold=1)
        given, count = seen["topk_idx"], registers.size(T)
        limits = registers.constant(config.num_topk), registers.constant(config.num_experts)
        taken = made["topk_idx"]
        registers.check("TAKE_IDS", given.address, given.dtype, taken.address, count, *limits)
        placeholders = {name: tensor.address for name, tensor in seen.items()}
        placeholders |= {o.placeholder: made[o.name].address for o in described if o.name in made}
        placeholders |= {"topk_idx": taken.address, "num_tokens": count}
        placeholders["num_ids"] = registers.size(T * config.num_topk)
        if tokens is not None:
            placeholders["tokens"] = registers.new(tokens)
        names = ("scales", "tokens_per_expert", "weights")
        quantize = program.objects.index(variant.row_format.name)
        return PlanProgram(
            program.label or program.name,
            (variant.dtype, quantize, *map(int, _usual_modes(variant).values()), zone, parts),
            registers,
            placeholders,
            (made["tokens"] if tokens is None else tokens, *map(made.get, names)),
            self._output_type,
            {"topk_idx": taken, "num_tokens": count},
            self._handle(registers, variant, made),
        )

    def _handle(self, registers: Registers, variant: DispatchVariant, made: dict[str, TensorAt]) -> Kept:
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
            registers.do("DIGEST", tensors[0].address, registers.size(T * self._context.config.num_topk)),
            registers.constant(0 if variant.per_rank else 1),
            results_idx.address,
        )
        addresses = [
            *(tensor.address for tensor in tensors),
            *(tensors[-1].sizes[:1] if variant.per_rank else ()),  # their columns are there already
        ]
        kept = (*numbers, *addresses)
        attributes: dict[str, TensorAt | int] = {
            name: TensorAt(kept.index(tensor.address), tuple(map(kept.index, tensor.sizes)), tensor.dtype)
            for name, tensor in zip(names, tensors, strict=True)
        }
        attributes["digest"] = KEPT.index("digest")
        same = {"num_ranks": config.num_ranks, "num_local_experts": config.experts_on(self._context.rank)}
        return Kept(kept, attributes, {"buffer_id": self._buffer_id, "dtype": variant.dtype, **same})

    def _combine_program(self, results: Sequence[torch.Tensor]) -> tuple[CallProgram, dict[str, int]]:
        context, registers = self._context, Registers()
        first = registers.do("KEPT", 1, DISPATCH, 0, size=MAX_KEPT)
        kept = dict(zip((*KEPT, *KEPT_TENSORS), range(first, first + MAX_KEPT), strict=False))
        registers.symbols[T] = kept["T"]
        registers.check("EQUAL", registers.do("DIGEST", kept["topk_idx"], kept["ids"]), kept["digest"])
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
        key = y.dtype, weights.given, in_place, zone, self._parts(registers, each)
        kept |= {"y": y.address, "topk_weights": weights.address}
        return CallProgram(COMBINE, "combine", 3, registers, key), kept

    def _combine_plan(self, variant: CombineVariant, zone: int, parts: int) -> PlanProgram:
        registers, kept = Registers(self._combine.registers), self._kept
        (out,), dtype = COMBINE_OF_BUFFER.outputs, variant.dtype
        made = registers.allocate([Output("out", *self._symbols(COMBINE_OF_BUFFER, dtype).spec(out))], hold=1)
        # In elements, as the sum finds them beside those that came; the difference is a whole number of them.
        ahead = registers.plus(kept["y"], registers.constant(-self._window_base))
        own_results = registers.do("DIVIDE", ahead, registers.constant(dtype.itemsize))
        names = ("y", "topk_weights", "expand_idx", "recv_offsets")
        placeholders = {name: kept[name] for name in names}
        placeholders |= {
            "topk_idx": kept["results_idx"],
            "origins": kept["assist_info"],
            "num_rows": registers.size(ROWS),
            "num_tokens": registers.size(T),
            "num_ids": kept["ids"],
            "out": made["out"].address,
            "own_results": own_results,
        }
        ids = TensorAt(kept["results_idx"], (kept["T"], kept["topk"]), torch.int32)
        return PlanProgram(
            "combine",
            (dtype, int(variant.weights), int(variant.in_place), zone, parts),
            registers,
            placeholders,
            (made["out"],),
            bindings={"topk_idx": ids, "num_tokens": registers.size(T)},
        )

    def _parts(self, registers: Registers, each: int) -> int:
        return registers.do("PARTS", registers.size(T), each)
