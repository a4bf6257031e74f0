"""`EPBuffer`'s two operators as data: their arguments and outputs, and the programs that native code walks.

Sizes by name: T tokens, n rows of results, "ids" entries of the routing. The rest are numbers of the site.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch

from moe_triton.backends.base import Calls, Executable, PreparedCalls, TensorSpec
from moe_triton.core.call_program import (
    MAX_KEPT,
    Argument,
    CallProgram,
    Kept,
    Output,
    PlanProgram,
    Registers,
    Seen,
    TensorAt,
)
from moe_triton.core.config import Config
from moe_triton.core.row_formats import ROW_FORMATS
from moe_triton.layout import TRAILER_WORDS
from moe_triton.operators.variants import CombineVariant, DispatchVariant, Variant
from moe_triton.schemes.site import OPERATORS, Site

TOKEN_DTYPES = (torch.bfloat16, torch.float16)
I32, I64, F32 = torch.int32, torch.int64, torch.float32
DISPATCH, COMBINE = OPERATORS.index("dispatch"), OPERATORS.index("combine")
# What a dispatch's handle keeps for combine, in this order.
KEPT = ("T", "ids", "topk", "num_offsets", "num_assist", "dtype")
KEPT_TENSORS = ("topk_idx", "expand_idx", "recv_offsets", "assist_info")


def dispatch_arguments(config: Config) -> dict[str, Argument]:
    """Tensors that `EPBuffer.dispatch` is given."""
    num_experts = config.num_shared_experts + config.num_experts
    arguments = (
        Argument("x", ("T", config.hidden), TOKEN_DTYPES),
        Argument("topk_idx", ("T", config.num_topk), (I32, I64)),
        Argument("topk_weights", ("T", config.num_topk), (F32,), optional=True),
        Argument("smooth_scales", (num_experts, config.hidden), (F32,), optional=True),
    )
    return {argument.name: argument for argument in arguments}


def combine_arguments(config: Config, dtypes: tuple[torch.dtype, ...]) -> dict[str, Argument]:
    """Tensors that `EPBuffer.combine` is given, beside the handle, for results of these dtypes."""
    weights = dispatch_arguments(config)["topk_weights"]
    return {"y": Argument("y", ("n", config.hidden), dtypes), "topk_weights": weights}


def handle_arguments(site: Site) -> list[Argument]:
    """Tensors of a handle, as combine is given them."""
    shapes: dict[str, tuple[int | str, ...]] = {
        "topk_idx": ("T", site.config.num_topk),
        "expand_idx": ("ids",),
        "recv_offsets": (site.num_entries,),
        "assist_info": (3 * site.capacity + TRAILER_WORDS,),
    }
    return [Argument(f"handle.{name}", shape, (I32,)) for name, shape in shapes.items()]


def dispatch_outputs(site: Site, variant: DispatchVariant, has_rows: bool) -> list[Output]:
    """Tensors that a dispatch makes, by the names of its plan's holes.

    Args:
        site: where it runs.
        variant: what it is specialised for.
        has_rows: whether the rows are one of them; otherwise they arrive in the window.
    """
    capacity = site.capacity
    outputs = [
        Output("expand_idx", ("ids",), I32),
        Output("tokens_per_expert", (site.num_local_experts,), I64),
        Output("recv_offsets", (site.num_entries,), I32),
        Output("origins", (3 * capacity + TRAILER_WORDS,), I32),
    ]
    if variant.row_format.is_quantized:
        outputs.append(Output("scales", variant.row_format.scales_shape(capacity, site.config.hidden), F32))
    if variant.weights:
        outputs.append(Output("weights", (capacity,), F32))
    if has_rows:
        outputs.append(Output("tokens", (capacity, site.config.hidden), variant.row_dtype, own_block=True))
    return outputs


class DispatchKind(NamedTuple):
    """Dispatches whose outputs are alike.

    Attributes:
        variant: what their plan is specialised for.
        names: of the outputs.
        specs: of all outputs but the first, which has an element for each entry of the routing.
    """

    variant: DispatchVariant
    names: tuple[str, ...]
    specs: tuple[TensorSpec, ...]

    @staticmethod
    def of(site: Site, variant: DispatchVariant, has_rows: bool) -> DispatchKind:
        """Those of a variant; the arguments are as for `dispatch_outputs`."""
        outputs = dispatch_outputs(site, variant, has_rows)
        specs = cast(list[TensorSpec], [(output.shape, output.dtype) for output in outputs[1:]])
        return DispatchKind(variant, tuple(output.name for output in outputs), tuple(specs))


class BufferCalls:
    """The native calls of one buffer.

    Args:
        site: where its plans run.
        calls: the back end's.
        buffer_id: which buffer it is.
        window_base: address of this rank's window.
        results: where combine looks for results first, in each zone; none with most schemes.
        output_type: what dispatch returns.

    Attributes:
        dispatch: called with x, topk_idx, topk_weights, quantize and smooth_scales of `EPBuffer.dispatch`:
            its output, or None where the call is anything but usual: nothing has happened then.
        combine: called with y, handle and topk_weights of `EPBuffer.combine`, likewise.
    """

    def __init__(
        self,
        site: Site,
        calls: Calls,
        buffer_id: int,
        window_base: int,
        results: Sequence[torch.Tensor],
        output_type: type,
    ) -> None:
        self._site, self._calls, self._buffer_id = site, calls, buffer_id
        self._window_base, self._output_type = window_base, output_type
        self._dispatch, self._seen = self._dispatch_program()
        self._combine, self._kept = self._combine_program(results)
        self.dispatch: Callable[..., Any] = calls.operator(self._dispatch)
        self.combine: Callable[..., Any] = calls.operator(self._combine)

    def add(
        self, variant: Variant, zone: int, parts: int, tokens: torch.Tensor | None, executable: Executable
    ) -> None:
        """Lets native code run calls like this one, where they are usual.

        Args:
            variant: what the plan is specialised for.
            zone: what it is built for.
            parts: what it is cut into.
            tokens: where a dispatch's rows arrive, where that is in the window.
            executable: the plan.
        """
        own = self._site.keeps_own
        if isinstance(variant, DispatchVariant):
            rows = variant.dtype, variant.row_format, variant.smooth, variant.weights
            if variant == DispatchVariant(*rows, keeps_own=own):
                self._calls.add(self._dispatch_plan(variant, zone, parts, tokens), executable)
        elif variant == CombineVariant(
            variant.dtype, variant.weights, in_place=variant.in_place, keeps_own=own
        ):
            self._calls.add(self._combine_plan(variant, zone, parts), executable)

    def swap(self, prepared: PreparedCalls) -> PreparedCalls:
        """See `moe_triton.backends.base.Calls`."""
        return self._calls.swap(prepared)

    def _dispatch_program(self) -> tuple[CallProgram, dict[str, Seen]]:
        config, registers = self._site.config, Registers()
        order = ("x", "topk_idx", "topk_weights", "smooth_scales")
        names = [r.name for r in ROW_FORMATS.values() if r.fits(config.hidden)]
        quantize = registers.choice(3, 0, len(names))
        seen = {
            name: registers.tensor(slot, dispatch_arguments(config)[name])
            for name, slot in zip(order, (0, 1, 2, 4), strict=True)
        }
        registers.check("AT_MOST", registers.size("T"), registers.constant(config.num_max_tokens_per_rank))
        registers.check("AT_MOST", seen["smooth_scales"].given, quantize)
        registers.symbols["ids"] = registers.elements(("T", config.num_topk))
        given = seen["topk_weights"].given, seen["smooth_scales"].given
        each = registers.constant(self._site.tuning.dispatch_tokens)
        key = seen["x"].dtype, quantize, *given, registers.do("ZONE"), self._parts(registers, each)
        return CallProgram(DISPATCH, "dispatch", 5, registers, key, tuple(names)), seen

    def _dispatch_plan(
        self, variant: DispatchVariant, zone: int, parts: int, tokens: torch.Tensor | None
    ) -> PlanProgram:
        site, seen, registers = self._site, self._seen, Registers(self._dispatch.registers)
        config = site.config
        outputs = [Output("topk_idx", ("T", config.num_topk), I32)]
        outputs += dispatch_outputs(site, variant, has_rows=tokens is None)
        made = registers.allocate([output for output in outputs if not output.own_block], hold=0)
        for output in outputs:
            if output.own_block:
                made |= registers.allocate([output], hold=1)
        ids, rows = seen["topk_idx"], registers.size("T")
        sizes = registers.constant(config.num_topk), registers.constant(config.num_experts)
        registers.check("TAKE_IDS", ids.address, ids.dtype, made["topk_idx"].address, rows, *sizes)
        holes = {name: tensor.address for name, tensor in seen.items()}
        holes |= {name: tensor.address for name, tensor in made.items()}
        holes |= {"num_tokens": rows, "num_ids": registers.size("ids")}
        if tokens is not None:
            holes["tokens"] = registers.new(tokens)
        names = ("scales", "tokens_per_expert", "weights")
        quantize = self._dispatch.objects.index(variant.row_format.name)
        return PlanProgram(
            "dispatch",
            (variant.dtype, quantize, int(variant.weights), int(variant.smooth), zone, parts),
            registers,
            holes,
            (made["tokens"] if tokens is None else tokens, *map(made.get, names)),
            self._output_type,
            {"topk_idx": made["topk_idx"], "num_tokens": rows},
            self._handle(registers, variant, made),
        )

    def _handle(self, registers: Registers, variant: DispatchVariant, made: dict[str, TensorAt]) -> Kept:
        tensors = [made["origins" if name == "assist_info" else name] for name in KEPT_TENSORS]
        numbers = (
            registers.size("T"),
            registers.size("ids"),
            registers.constant(self._site.config.num_topk),
            *tensors[2].sizes,
            *tensors[3].sizes,
            registers.constant(variant.dtype),
        )
        kept = (*numbers, *(tensor.address for tensor in tensors))
        attributes = {
            name: TensorAt(kept.index(tensor.address), tuple(map(kept.index, tensor.sizes)), tensor.dtype)
            for name, tensor in zip(KEPT_TENSORS, tensors, strict=True)
        }
        return Kept(kept, attributes, {"buffer_id": self._buffer_id, "dtype": variant.dtype})

    def _combine_program(self, results: Sequence[torch.Tensor]) -> tuple[CallProgram, dict[str, int]]:
        site, registers = self._site, Registers()
        config = site.config
        first = registers.do("KEPT", 1, DISPATCH, 0, size=MAX_KEPT)
        kept = dict(zip((*KEPT, *KEPT_TENSORS), range(first, first + MAX_KEPT), strict=False))
        registers.symbols["T"] = kept["T"]
        arguments = combine_arguments(config, TOKEN_DTYPES)
        weights = registers.tensor(2, arguments["topk_weights"])
        y = registers.tensor(0, arguments["y"])
        registers.check("EQUAL", y.dtype, kept["dtype"])
        last = registers.plus(kept["recv_offsets"], registers.constant(4 * (site.num_entries - 1)))
        rows = registers.do("MINIMUM", registers.do("LOAD", last), registers.constant(site.capacity))
        registers.check("AT_MOST", rows, registers.size("n"))
        zone = registers.do("ZONE")
        in_place = registers.constant(0)
        if results:
            place = registers.do("PICK", registers.new(*results), zone)
            in_place = registers.do("STARTS", y.address, place, registers.constant(results[0].nbytes))
        each = registers.constant(site.tuning.combine_tokens)
        key = y.dtype, weights.given, in_place, zone, self._parts(registers, each)
        kept |= {"y": y.address, "topk_weights": weights.address}
        return CallProgram(COMBINE, "combine", 3, registers, key), kept

    def _combine_plan(self, variant: CombineVariant, zone: int, parts: int) -> PlanProgram:
        registers, kept = Registers(self._combine.registers), self._kept
        hidden, dtype = self._site.config.hidden, variant.dtype
        made = registers.allocate([Output("out", ("T", hidden), dtype, own_block=True)], hold=1)
        # In elements, as the sum finds them beside those that came; the difference is a whole number of them.
        ahead = registers.plus(kept["y"], registers.constant(-self._window_base))
        own_results = registers.do("DIVIDE", ahead, registers.constant(dtype.itemsize))
        names = ("y", "topk_weights", "topk_idx", "expand_idx", "recv_offsets")
        holes = {name: kept[name] for name in names}
        holes |= {
            "origins": kept["assist_info"],
            "num_rows": registers.size("n"),
            "num_tokens": registers.size("T"),
            "out": made["out"].address,
            "own_results": own_results,
        }
        ids = TensorAt(kept["topk_idx"], (kept["T"], kept["topk"]), I32)
        return PlanProgram(
            "combine",
            (dtype, int(variant.weights), int(variant.in_place), zone, parts),
            registers,
            holes,
            (made["out"],),
            bindings={"topk_idx": ids, "num_tokens": registers.size("T")},
        )

    def _parts(self, registers: Registers, each: int) -> int:
        return registers.do("PARTS", registers.size("T"), each)
