"""Programs of combines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_triton.core.call_program import (
    MAX_KEPT,
    Argument,
    ArgumentAt,
    CallProgram,
    Output,
    PlanProgram,
    Registers,
    TensorAt,
)
from moe_triton.core.handle import PlacedHandle
from moe_triton.operators.buffer import COMBINE_OF_BUFFER
from moe_triton.operators.variants import CombineVariant
from moe_triton.runtime.programs.placed import PLACED, STRIDE
from moe_triton.runtime.programs.shared import (
    COMBINE,
    DISPATCH,
    HELD_BY_HANDLE,
    KEPT,
    KEPT_TENSORS,
    LARGE,
    MASKS,
    ROWS,
    Programs,
    T,
)

# Arguments: results, handle, weights, and with options these.
OPTIONS = ("comm_quantize", "performance_info", "out")
FIRST_OPTION = 3
OUT = FIRST_OPTION + OPTIONS.index("out")
QUANTIZATIONS = (None, "int8")


@dataclass(frozen=True)
class Way:
    """A way of combine's arguments, with a program of its own.

    Attributes:
        label: of the program.
        has_options: it takes options.
        is_placed: its handles are `PlacedHandle`s.
        is_padded: results are (E, max, H).
    """

    label: str = ""
    has_options: bool = False
    is_placed: bool = False
    is_padded: bool = False

    @property
    def num_arguments(self) -> int:
        """Of a call."""
        return FIRST_OPTION + (len(OPTIONS) if self.has_options else 0)

    def takes(self, variant: CombineVariant, *, bypasses: bool) -> bool:
        """Whether calls may run a plan of a variant; see ``Way.takes`` of a dispatch."""
        names = ("weights", "mask", "in_place", *(("waits", "block_quantize") if self.has_options else ()))
        modes: dict[str, Any] = {name: getattr(variant, name) for name in names}
        is_plain = variant.mask == "none" and not (variant.waits or variant.block_quantize)
        modes |= {"local_bypass": bypasses and is_plain, "placed": self.is_placed}
        return variant == CombineVariant(variant.dtype, **modes)


PLAIN, WITH_OPTIONS = Way(), Way("combine with options", has_options=True)
FROM_PLACES = Way("combine from places", has_options=True, is_placed=True)
FROM_PADDED = Way("combine from padded places", has_options=True, is_placed=True, is_padded=True)


class CombineProgram:
    """The program of one way.

    Args:
        programs: of the rank.
        way: of its arguments.
        results: where combine looks for results first, in each zone; none with most schemes.
    """

    def __init__(self, programs: Programs, way: Way, results: Sequence[torch.Tensor]) -> None:
        self._programs, self.way = programs, way
        registers, context = Registers(), programs.context
        # Where results are not in the window, those of any dispatch may come back.
        of_any = int(not results)
        first = registers.do("KEPT", 1, DISPATCH, HELD_BY_HANDLE, of_any, size=MAX_KEPT)
        names = (*KEPT, *KEPT_TENSORS, *PLACED)
        kept = dict(zip(names, range(first, first + MAX_KEPT), strict=False))
        registers.symbols[T] = kept["T"]
        ids = kept["topk_idx"], kept["ids"], kept["mask"], kept["ids_per_flag"]
        registers.check("EQUAL", registers.do("DIGEST", *ids), kept["digest"])
        arguments = programs.arguments(COMBINE_OF_BUFFER)
        weights = registers.tensor(2, arguments["topk_weights"])
        registers.check("AT_MOST", weights.given, kept["takes_weights"])
        y = arguments["y"]
        if way.is_padded:
            registers.symbols[STRIDE] = kept["stride"]
            y = replace(y, shape=(programs.config.experts_on(context.rank), STRIDE, *y.shape[1:]))
        results_seen = registers.tensor(0, y)
        registers.check("EQUAL", results_seen.dtype, kept["dtype"])
        if way.is_padded:
            registers.symbols[ROWS] = registers.elements(y.shape[:2])
        if way.is_placed:
            rows = kept["num_rows"]
        else:
            last = registers.plus(kept["recv_offsets"], registers.constant(4 * (context.num_entries - 1)))
            most = registers.constant(context.capacity)
            rows = registers.do("MINIMUM", registers.do("LOAD", last), most)
        registers.check("AT_MOST", rows, registers.size(ROWS))
        zone = registers.do("ZONE")
        in_place = registers.constant(0)
        if results:
            # Addresses: this outlives the window, which goes when nobody holds a tensor of it.
            place = registers.do("PICK", registers.new(*(view.data_ptr() for view in results)), zone)
            in_place = registers.do(
                "STARTS", results_seen.address, place, registers.constant(results[0].nbytes)
            )
        key = [results_seen.dtype, weights.given, kept["mask_kind"], in_place]
        kept |= {"y": results_seen.address, "topk_weights": weights.address}
        if way.has_options:
            quantize = registers.choice(FIRST_OPTION, 0, len(QUANTIZATIONS))
            waited = replace(arguments["performance_info"], optional=True)
            info = registers.tensor(FIRST_OPTION + OPTIONS.index("performance_info"), waited)
            key += [quantize, info.given, registers.do("GIVEN", OUT, 0)]
            kept["performance_info"] = info.address
        key += [zone, programs.parts(registers, "combine")]
        self._kept = kept
        self.program = CallProgram(
            COMBINE,
            "combine",
            way.num_arguments,
            registers,
            tuple(key),
            QUANTIZATIONS,
            way.label,
            PlacedHandle if way.is_placed else None,
        )

    def plans(self, variant: CombineVariant, zone: int, parts: int) -> Iterator[PlanProgram]:
        """How calls run a plan: with and without an output that is given."""
        for has_out in (False, True) if self.way.has_options else (False,):
            yield self._plan(variant, (zone, parts), has_out)

    def _plan(self, variant: CombineVariant, run: tuple[int, int], has_out: bool) -> PlanProgram:
        way, programs, kept = self.way, self._programs, self._kept
        registers = Registers(self.program.registers)
        (out,), dtype = COMBINE_OF_BUFFER.outputs, variant.dtype
        output = Output("out", *programs.symbols(COMBINE_OF_BUFFER, dtype).spec(out))
        answer: TensorAt | ArgumentAt
        if has_out:
            address = registers.tensor(OUT, Argument("out", output.shape, (dtype,))).address
            answer = ArgumentAt(OUT)
            self._check_apart(registers, variant)
        else:
            answer = registers.allocate([output], LARGE)["out"]
            address = answer.address
        # In elements, as the sum finds them beside those that came; the difference is a whole number of them.
        ahead = registers.plus(kept["y"], registers.constant(-programs.window_base))
        own_results = registers.do("DIVIDE", ahead, registers.constant(dtype.itemsize))
        names = ("y", "topk_weights", "expand_idx", "recv_offsets", "mask", "places")
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
        placeholders |= programs.ranks_waited_for(registers)
        key: list[int | torch.dtype] = [dtype]
        key += [int(variant.weights), MASKS.index(variant.mask), int(variant.in_place)]
        if way.has_options:
            key += [int(variant.block_quantize), int(variant.waits), int(has_out)]
            placeholders["performance_info"] = kept["performance_info"]
        ids = TensorAt(kept["results_idx"], (kept["T"], kept["topk"]), torch.int32, HELD_BY_HANDLE)
        return PlanProgram(
            way.label or "combine",
            (*key, *run),
            registers,
            placeholders,
            (answer,),
            bindings={"topk_idx": ids, "num_tokens": registers.size(T)},
        )

    def _check_apart(self, registers: Registers, variant: CombineVariant) -> None:
        """Checks that the output is in the memory of nothing that is read."""
        sizes = dict(zip(KEPT_TENSORS, ("ids", "ids", "num_offsets", "num_assist"), strict=True))
        slot, kept = self.way.num_arguments, self._kept
        for slot, (name, size) in enumerate(sizes.items(), start=slot):  # noqa: B020
            num_bytes = self._programs.bytes_of_words(registers, kept[size])
            registers.check("READ", slot, kept[name], num_bytes)
        if variant.mask != "none":
            flags = kept["T" if variant.mask == "tokens" else "ids"]
            registers.check("READ", slot + 1, kept["mask"], flags)
        registers.check("APART", OUT)
