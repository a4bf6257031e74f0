"""The program of dispatches in one round whose rows have places: with gaps, or in memory by need.

A call is two plans: until every rank is heard, and, once there is memory for what comes, the rest.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from moe_triton.core.call_program import Argument, CallProgram, Output, PlanProgram, Registers, Size, TensorAt
from moe_triton.core.call_program import Kept as KeptByHandle
from moe_triton.core.handle import DispatchOutput, PlacedHandle
from moe_triton.core.records import CALL_HEADER
from moe_triton.layout import CallRegions
from moe_triton.operators.buffer import DISPATCH_OF_BUFFER
from moe_triton.operators.variants import DispatchVariant
from moe_triton.runtime.programs.shared import (
    BEHIND_OPTIONS,
    DISPATCH,
    HELD_BY_HANDLE,
    KEPT,
    KEPT_TENSORS,
    LARGE,
    OF_CALL,
    SMALL,
    Kept,
    Programs,
    T,
    attributes_among,
    variant_like,
)
from moe_triton.runtime.said import said_table

# Arguments behind options (`Asked`), but for the header numbers.
ASKED = ("header", "most_tokens", "alignment", "num_rows", "stride", "is_padded", "zeroes")
HEADER, FIRST_NUMBER = BEHIND_OPTIONS, BEHIND_OPTIONS + 1
OUTPUT_ROWS, STRIDE = Size("output rows"), Size("stride")
# What a handle keeps behind `KEPT` and `KEPT_TENSORS`, which are those of the only round.
PLACED = ("places", "num_rows", "stride", "alignment")
LABEL = "dispatch to places"
BY_ROW = ("tokens", "scales", "weights")


class Asked(NamedTuple):
    """What a call is asked for, as its program takes it.

    Attributes:
        header: `moe_triton.core.records.CALL_HEADER` of it.
        most_tokens: that this rank may have.
        alignment: of experts' first rows.
        num_rows: of the outputs, where they are not padded; 0 for as many as come.
        stride: rows of each expert, where they are padded; 0 for as many as come for one.
        is_padded: whether experts have as many rows each.
        zeroes: whether gaps are zeros.
    """

    header: torch.Tensor
    most_tokens: int
    alignment: int
    num_rows: int
    stride: int
    is_padded: int
    zeroes: int


class Begun(NamedTuple):
    """A call that only Python can end: every rank is heard, and something is not as in most calls.

    Attributes:
        topk_idx: (T, K) int32, the ids.
        expand_idx: (T * K,) int32, how many earlier entries chose the same expert.
        send_counts: int32, this rank's rows for each expert.
        recv_offsets: (E * EP,) int32, inclusive prefix sums of the rows that come.
        assist_info: (3 A + 2,) int32, where kernels leave their origins.
        recv_stats: the caller's counts of rows as they were, or of no meaning.
        performance_info: its record of waits as it was, likewise.
    """

    topk_idx: torch.Tensor
    expand_idx: torch.Tensor
    send_counts: torch.Tensor
    recv_offsets: torch.Tensor
    assist_info: torch.Tensor
    recv_stats: torch.Tensor
    performance_info: torch.Tensor


class PlacedProgram:
    """The program, and its plans.

    Args:
        programs: of the rank.
        calls: where ranks say what a call has.
    """

    def __init__(self, programs: Programs, calls: CallRegions) -> None:
        self._programs, self._calls, registers = programs, calls, Registers()
        self._table = said_table(programs.config, programs.context.rank, calls.counts.stride("source"))
        self._taken = programs.take(registers, has_options=True)
        words = Argument("call_header", (CALL_HEADER.num_words,), (torch.int32,))
        self._header = registers.tensor(HEADER, words).address
        self._asked = {
            name: registers.do("NUMBER", slot) for slot, name in enumerate(ASKED[1:], start=FIRST_NUMBER)
        }
        registers.check("AT_MOST", registers.size(T), self._asked["most_tokens"])
        is_exact = self._is_exact(registers)
        kinds = [self._asked["is_padded"], self._asked["zeroes"], is_exact]
        key = [*self._taken.key, *kinds, registers.do("ZONE")]
        self.program = CallProgram(
            DISPATCH,
            "dispatch",
            FIRST_NUMBER + len(self._asked),
            registers,
            tuple(key),
            programs.quantizations,
            LABEL,
            PlacedHandle,
        )

    def _is_exact(self, registers: Registers) -> int:
        """The register of whether only ranks' counts say how many rows there are."""
        size = registers.plus(self._asked["num_rows"], self._asked["stride"])
        one = registers.constant(1)
        # 1 for no size and 0 for any: a size is at least 1.
        least = registers.do("MINIMUM", size, one)
        return registers.do("MULTIPLY_ADD", least, registers.constant(-1), one)

    def takes(self, variant: DispatchVariant, *, bypasses: bool) -> bool:
        """Whether calls may run plans of a variant; see `Way.takes`."""
        placed: dict[str, Any] = {"routed": True, "placed": True, "announced": 1}
        return variant == variant_like(variant, bypasses=bypasses, **placed)

    def plans(self, variant: DispatchVariant, zone: int) -> list[PlanProgram]:
        """How calls run the two plans of a variant: padded or not, with zeroed gaps, of a known size."""
        choices = (False, True)
        return [
            self._plan(variant, zone, padded, zeroes, exact)
            for padded in choices
            for zeroes in choices
            for exact in choices
        ]

    def _plan(
        self, variant: DispatchVariant, zone: int, is_padded: bool, zeroes: bool, is_exact: bool
    ) -> PlanProgram:
        programs, context = self._programs, self._programs.context
        config = programs.config
        registers = Registers(self.program.registers)
        entries, counts = (context.num_entries,), (config.num_experts,)
        s = programs.symbols(DISPATCH_OF_BUFFER, variant.dtype, row_format=variant.row_format)
        specs = {o.name: s.spec(o) for o in DISPATCH_OF_BUFFER.returned(variant)}
        kept_shapes: dict[str, tuple[Any, ...]] = {
            "expand_idx": (T * config.num_topk,),
            "recv_offsets": entries,
            "assist_info": specs["assist_info"][0],
            "places": (context.capacity,),
            "send_counts": counts,
            "call_offsets": entries,
            "first_starts": entries,
            "limits": entries,
        }
        shapes_of_call: dict[str, tuple[Any, ...]] = {
            "call_counts": counts,
            "call_shared_counts": (max(1, config.num_shared_ranks),),
            "starts": entries,
        }
        local = specs["tokens_per_expert"]
        of_call = [Output(name, shape, torch.int32) for name, shape in shapes_of_call.items()]
        of_call += [Output("of_round", *local), Output("stats", local[0], torch.int32)]
        of_call += [Output("waited", (config.num_ranks,), torch.int64)]
        small = [Output(name, shape, torch.int32) for name, shape in kept_shapes.items()]
        small = [*programs.memory_of_ids(variant), *small, Output("tokens_per_expert", *local)]
        made = registers.allocate(small, SMALL) | registers.allocate(of_call, OF_CALL)
        kept = programs.keep_ids(registers, variant, self._taken, made)
        self._keep_counters(registers, variant, made)
        placeholders = self._placeholders(registers, variant, made, kept)
        next_plan = self._rest(
            registers, variant, zone, made, kept, placeholders, is_padded, zeroes, is_exact
        )
        begun = ("topk_idx", "expand_idx", "send_counts", "recv_offsets", "assist_info", "stats", "waited")
        key = programs.key_of(variant, has_options=True)
        return PlanProgram(
            LABEL,
            (*key, int(is_padded), int(zeroes), int(is_exact), zone),
            registers,
            placeholders,
            tuple(made[name] for name in begun),
            Begun,
            {"topk_idx": made["topk_idx"], "num_tokens": registers.size(T)},
            next=next_plan,
        )

    def _keep_counters(
        self, registers: Registers, variant: DispatchVariant, made: dict[str, TensorAt]
    ) -> None:
        """Keeps what counters of the caller's hold, for a call that delivers nothing."""
        context, seen = self._programs.context, self._taken.seen
        counters = []
        if variant.recv_stats:
            counters.append(("recv_stats", made["stats"], context.num_local_experts))
        if variant.waits:
            counters.append(("performance_info", made["waited"], context.config.num_ranks))
        for placeholder, copy, count in counters:
            num_bytes = registers.constant(copy.dtype.itemsize * count)
            registers.check("COPY", seen[placeholder].address, copy.address, num_bytes)

    def _placeholders(
        self, registers: Registers, variant: DispatchVariant, made: dict[str, TensorAt], kept: Kept
    ) -> dict[str, int]:
        """What both plans bind."""
        none = registers.constant(0)
        same = "topk_idx expand_idx recv_offsets places send_counts call_offsets first_starts limits starts"
        names = {name: name for name in (*same.split(), "call_counts", "call_shared_counts")}
        names |= {"origins": "assist_info", "call_tokens_per_expert": "tokens_per_expert"}
        names |= {"tokens_per_expert": "of_round"}
        return {
            **{name: tensor.address for name, tensor in self._taken.seen.items()},
            **{placeholder: made[name].address for placeholder, name in names.items()},
            **self._programs.ranks_waited_for(registers),
            "call_header": self._header,
            "mask": kept.mask,
            "num_tokens": registers.size(T),
            "num_ids": registers.size(T * self._programs.config.num_topk),
            "bell": none,
            "is_later_round": none,
            "first_token": none,
            "alignment": self._asked["alignment"],
        }

    def _rest(
        self,
        before: Registers,
        variant: DispatchVariant,
        zone: int,
        made: dict[str, TensorAt],
        kept: Kept,
        placeholders: dict[str, int],
        is_padded: bool,
        zeroes: bool,
        is_exact: bool,
    ) -> PlanProgram:
        """Once every rank is heard."""
        programs, registers = self._programs, Registers(before)
        words = registers.new(programs.window_base + self._calls.counts.offset(zone=zone))
        said = words, registers.new(self._table)
        needed = registers.do("AGREE", *said, size=2)
        num_local = programs.config.experts_on(programs.context.rank)
        if is_padded:
            stride = self._asked["stride"]
            if is_exact:
                stride = registers.do("PARTS", needed + 1, registers.constant(1))  # at least one
            rows = registers.do("MULTIPLY_ADD", stride, registers.constant(num_local), registers.constant(0))
        else:
            stride, rows = registers.constant(0), needed if is_exact else self._asked["num_rows"]
        registers.symbols |= {OUTPUT_ROWS: rows, STRIDE: stride}
        s = programs.symbols(DISPATCH_OF_BUFFER, variant.dtype, row_format=variant.row_format)
        described = {o.name: o for o in DISPATCH_OF_BUFFER.returned(variant) if o.name in BY_ROW}
        leading: tuple[int | str, ...] = (num_local, STRIDE) if is_padded else (OUTPUT_ROWS,)
        outputs = {}
        for name, each in described.items():
            (_, *columns), dtype = s.spec(each)
            outputs[name] = Output(name, (*leading, *columns), dtype)
        large = [outputs.pop("tokens")]
        rows_made = registers.allocate(large, LARGE)
        if outputs:
            # The handle's number is free: a dispatch has none.
            rows_made |= registers.allocate(list(outputs.values()), HELD_BY_HANDLE)
        if zeroes:
            for output in (*large, *outputs.values()):
                of_row = [size for size in output.shape[len(leading) :] if isinstance(size, int)]
                row_bytes = registers.constant(math.prod(of_row) * output.dtype.itemsize)
                address = rows_made[output.name].address
                registers.check("ZERO_GAPS", *said, address, row_bytes, stride, rows)
        placeholders = placeholders | {"num_places": rows, "expert_stride": stride}
        placeholders |= {each.placeholder: rows_made[name].address for name, each in described.items()}
        returned = {**rows_made, "tokens_per_expert": made["tokens_per_expert"]}
        names = ("tokens", "scales", "tokens_per_expert", "weights")
        return PlanProgram(
            LABEL,
            (),
            registers,
            placeholders,
            tuple(map(returned.get, names)),
            DispatchOutput,
            {"topk_idx": made["topk_idx"], "num_tokens": registers.size(T)},
            self._handle(registers, variant, made, kept, (rows, stride)),
        )

    def _handle(
        self,
        registers: Registers,
        variant: DispatchVariant,
        made: dict[str, TensorAt],
        kept: Kept,
        size: tuple[int, int],
    ) -> KeptByHandle:
        programs, ids = self._programs, made["topk_idx"].address
        offsets = made["recv_offsets"], made["assist_info"]
        of_round = tuple(made[name].address for name in KEPT_TENSORS)
        placed = (made["places"].address, *size, self._asked["alignment"])
        others = ("call_offsets", "send_counts", "tokens_per_expert", "first_starts", "limits")
        registers_kept = (
            *programs.numbers_of(registers, variant, kept, *offsets, ids),
            *of_round,
            *placed,
            *(made[name].address for name in others),
            *(made[name].sizes[0] for name in ("places", "send_counts", "tokens_per_expert")),
        )
        names = {"recv_offsets": "call_offsets", "topk_idx": "topk_idx", "expand_idx": "expand_idx"}
        names |= {name: name for name in others[2:]}
        names |= {f"round_{name}": name for name in ("recv_offsets", "assist_info", "places", "send_counts")}
        if "mask" in made:
            names["active_mask"] = "mask"
        tensors = {name: made[of] for name, of in names.items()}
        first = len(KEPT) + len(KEPT_TENSORS)
        numbers = {name: first + PLACED.index(name) for name in PLACED[1:]}
        attributes = attributes_among(registers_kept, tensors) | numbers | {"digest": KEPT.index("digest")}
        fields = programs.fields_of(variant)
        fields["tokens_of_round"] = programs.config.num_max_tokens_per_rank
        return KeptByHandle(registers_kept, attributes, fields)
