"""Programs of dispatches whose rows lie one behind the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from moe_triton.core.call_program import (
    Argument,
    ArgumentAt,
    CallProgram,
    Output,
    PlanProgram,
    Registers,
    Seen,
    TensorAt,
)
from moe_triton.core.call_program import Kept as KeptByHandle
from moe_triton.core.handle import OF_RANKS, DispatchOutput
from moe_triton.layout.call_word import BY_HANDLE
from moe_triton.operators.buffer import DISPATCH_OF_BUFFER
from moe_triton.operators.variants import DispatchVariant
from moe_triton.runtime.programs.shared import (
    BEHIND_OPTIONS,
    DISPATCH,
    FIRST_OPTION,
    KEPT,
    KEPT_TENSORS,
    LARGE,
    SMALL,
    Programs,
    T,
    attributes_among,
    variant_like,
)

# Arguments behind options: an earlier dispatch's output, whole or rows alone.
OUTPUTS = ("tokens", "scales", "tokens_per_expert", "weights")
SLOT_OF = {name: BEHIND_OPTIONS + number for number, name in enumerate(OUTPUTS)}
NO_OUTPUT, ROWS_ALONE, WHOLE_OUTPUT = 0, 1, 3  # what of it there is, as programs find it out
# By a known routing, behind them: fields of its handle, whose ids and mask stand where a caller's do.
OF_KNOWN = ("expand_idx", "send_counts", "digest")
FIRST_OF_KNOWN = BEHIND_OPTIONS + len(OUTPUTS)


@dataclass(frozen=True)
class Way:
    """A way of dispatch's arguments, with a program of its own.

    Attributes:
        label: of the program.
        is_per_rank: tokens are sent once to each rank (``do_expand=False``).
        has_options: it takes options and outputs.
        is_known: it takes the routing of an earlier dispatch.
    """

    label: str = ""
    is_per_rank: bool = False
    has_options: bool = False
    is_known: bool = False

    @property
    def num_arguments(self) -> int:
        """Of a call."""
        of_known = len(OF_KNOWN) if self.is_known else 0
        return (FIRST_OF_KNOWN if self.has_options else FIRST_OPTION) + of_known

    def takes(self, variant: DispatchVariant, *, bypasses: bool) -> bool:
        """Whether calls may run a plan of a variant.

        Args:
            variant: of the plan.
            bypasses: whether rows of a rank for itself need not go through its window, with this scheme.
        """
        known: dict[str, Any] = {"routed": True, "announced": BY_HANDLE} if self.is_known else {}
        known |= {"has_options": self.has_options, "per_rank": self.is_per_rank}
        return variant == variant_like(variant, bypasses=bypasses, **known)


PLAIN, PER_RANK = Way(), Way("dispatch per rank", is_per_rank=True)
WITH_OPTIONS = Way("dispatch with options", has_options=True)
BY_KNOWN = Way("dispatch by a known routing", has_options=True, is_known=True)


class DispatchProgram:
    """The program of one way.

    Args:
        programs: of the rank.
        way: of its arguments.
    """

    def __init__(self, programs: Programs, way: Way) -> None:
        self._programs, self.way, registers = programs, way, Registers()
        self._taken = programs.take(registers, is_per_rank=way.is_per_rank, has_options=way.has_options)
        seen, key, _ = self._taken
        if way.has_options:
            rows, counts = (
                registers.do("GIVEN", SLOT_OF[name], 0) for name in ("tokens", "tokens_per_expert")
            )
            key.append(registers.do("MULTIPLY_ADD", counts, registers.constant(2), rows))
        self._digest = registers.constant(0)
        if way.is_known:
            registers.check("EQUAL", seen["topk_idx"].dtype, registers.constant(torch.int32))
            config = programs.config
            sizes: dict[str, int | str] = {
                "expand_idx": T * config.num_topk,
                "send_counts": config.num_experts,
            }
            for slot, (name, size) in enumerate(sizes.items(), start=FIRST_OF_KNOWN):
                seen[name] = registers.tensor(slot, Argument(name, (size,), (torch.int32,)))
            self._digest = registers.do("NUMBER", FIRST_OF_KNOWN + len(sizes))
        key += [registers.do("ZONE"), programs.parts(registers, "dispatch")]
        self.program = CallProgram(
            DISPATCH,
            "dispatch",
            way.num_arguments,
            registers,
            tuple(key),
            programs.quantizations,
            way.label,
        )

    def plans(
        self, variant: DispatchVariant, zone: int, parts: int, tokens: torch.Tensor | None
    ) -> Iterator[PlanProgram]:
        """How calls run a plan: one way for each of `NO_OUTPUT`, `ROWS_ALONE` and `WHOLE_OUTPUT`.

        Args:
            variant: of the plan.
            zone: of it.
            parts: of it.
            tokens: where rows arrive, where that is in the window.
        """
        has_outputs = self.way.has_options and tokens is None
        for given in (NO_OUTPUT, ROWS_ALONE, WHOLE_OUTPUT) if has_outputs else (NO_OUTPUT,):
            yield self._plan(variant, (zone, parts), tokens, given)

    def _plan(
        self, variant: DispatchVariant, run: tuple[int, int], tokens: torch.Tensor | None, given: int
    ) -> PlanProgram:
        way, programs, taken = self.way, self._programs, self._taken
        registers = Registers(self.program.registers)
        modes = {"row_format": variant.row_format, "per_rank": variant.per_rank}
        s = programs.symbols(DISPATCH_OF_BUFFER, variant.dtype, **modes)
        described = DISPATCH_OF_BUFFER.returned(variant)
        outputs = {o.name: Output(o.name, *s.spec(o)) for o in described}
        asked = self._asked(registers, outputs, given)
        for name in asked:
            del outputs[name]
        rows = outputs.pop("tokens", None) if tokens is None else None
        outputs.pop("tokens", None)
        made = registers.allocate([*programs.memory_of_ids(variant), *outputs.values()], SMALL)
        if rows is not None:
            made |= registers.allocate([rows], LARGE)
        kept = programs.keep_ids(registers, variant, taken, made, is_known=way.is_known)
        num_ids = registers.size(T * programs.config.num_topk)
        if way.is_known:
            num_bytes = programs.bytes_of_words(registers, num_ids)
            registers.check("COPY", taken.seen["expand_idx"].address, made["expand_idx"].address, num_bytes)
            registers.check("EQUAL", kept.digest, self._digest)
        for name in asked:
            registers.check("APART", SLOT_OF[name])
        placeholders = {name: tensor.address for name, tensor in taken.seen.items()}
        for o in described:
            if o.name in asked:
                placeholders[o.placeholder] = asked[o.name].address
            elif o.name in made:
                placeholders[o.placeholder] = made[o.name].address
        placeholders |= {"topk_idx": made["topk_idx"].address, "mask": kept.mask}
        placeholders |= {"num_tokens": registers.size(T), "num_ids": num_ids}
        placeholders |= programs.ranks_waited_for(registers)
        returned: dict[str, Any] = {**made, **{name: ArgumentAt(SLOT_OF[name]) for name in asked}}
        if tokens is not None:
            placeholders["tokens"], returned["tokens"] = registers.new(tokens), tokens
        key = programs.key_of(variant, has_options=way.has_options)
        names = [*KEPT_TENSORS, *(name for name in OF_RANKS if name in made)]
        results_idx = made.get("results_idx", made["topk_idx"]).address
        offsets = made["recv_offsets"], made["assist_info"]
        numbers = programs.numbers_of(registers, variant, kept, *offsets, results_idx)
        return PlanProgram(
            way.label or "dispatch",
            (*key, *([given] if way.has_options else []), *run),
            registers,
            placeholders,
            tuple(map(returned.get, OUTPUTS)),
            DispatchOutput,
            {"topk_idx": made["topk_idx"], "num_tokens": registers.size(T)},
            self._handle(variant, numbers, {name: made[name] for name in names}, made.get("mask")),
        )

    @staticmethod
    def _asked(registers: Registers, outputs: dict[str, Output], given: int) -> dict[str, Seen]:
        """Takes what the caller gives of the outputs."""
        names = OUTPUTS if given == WHOLE_OUTPUT else OUTPUTS[: int(given == ROWS_ALONE)]
        arguments = {name: outputs[name] for name in names if name in outputs}
        return {
            name: registers.tensor(SLOT_OF[name], Argument(name, output.shape, (output.dtype,)))
            for name, output in arguments.items()
        }

    def _handle(
        self,
        variant: DispatchVariant,
        numbers: tuple[int, ...],
        tensors: dict[str, TensorAt],
        mask: TensorAt | None,
    ) -> KeptByHandle:
        *_, last = tensors.values()
        addresses = [
            *(tensor.address for tensor in tensors.values()),
            *(last.sizes[:1] if variant.per_rank else ()),  # their columns are there already
        ]
        kept = (*numbers, *addresses)
        attributes = attributes_among(kept, tensors if mask is None else {**tensors, "active_mask": mask})
        fields = self._programs.fields_of(variant)
        if self.way.is_known:
            fields["send_counts"] = ArgumentAt(FIRST_OF_KNOWN + OF_KNOWN.index("send_counts"))
        return KeptByHandle(kept, {**attributes, "digest": KEPT.index("digest")}, fields)
