"""What programs of dispatches and combines have in common.

Sizes by name: T tokens, "rows" of results. The rest are numbers of the rank's context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from moe_triton.core.call_program import Argument, Output, Registers, Seen, Size, TensorAt
from moe_triton.core.row_formats import ROW_FORMATS
from moe_triton.operators.buffer import DISPATCH_OF_BUFFER, attributes_of, symbols_like
from moe_triton.operators.description import Operator, Symbols
from moe_triton.operators.variants import DispatchVariant, Mask
from moe_triton.schemes.rank_context import OPERATORS, RankContext

TOKEN_DTYPES = (torch.bfloat16, torch.float16)
# The tensors that native code takes of a dispatch, in this order.
USUAL = tuple(tensor for tensor in DISPATCH_OF_BUFFER.tensors if tensor.is_usual)
T, ROWS = Size("T"), Size("rows")
DISPATCH, COMBINE = OPERATORS.index("dispatch"), OPERATORS.index("combine")
# What a dispatch's handle keeps for combine, in this order.
KEPT: tuple[str, ...] = ("T", "ids", "topk", "num_offsets", "num_assist", "dtype", "digest")
KEPT += ("takes_weights", "results_idx", "mask", "ids_per_flag", "mask_kind")
KEPT_TENSORS = ("topk_idx", "expand_idx", "recv_offsets", "assist_info")
MASKS: tuple[Mask, ...] = ("none", "tokens", "entries")
# Dispatch's arguments: how rows travel, `USUAL`, and of options first these. A mask is in its kind's place.
OPTIONS = ("tokens", "entries", "performance_info")
FIRST_OPTION = 1 + len(USUAL)
BEHIND_OPTIONS = FIRST_OPTION + len(OPTIONS)
IDS = 1 + [tensor.name for tensor in USUAL].index("topk_idx")
# Numbers of the pieces of memory that a call takes.
SMALL, LARGE, HELD_BY_HANDLE, OF_CALL = range(4)


class Taken(NamedTuple):
    """What a dispatch's program has of its arguments.

    Attributes:
        seen: tensors, by placeholder.
        key: registers that plans differ by.
        mask: register of a mask's address, 0 where there is none.
    """

    seen: dict[str, Seen]
    key: list[int]
    mask: int


class Kept(NamedTuple):
    """A dispatch's ids and mask in memory of its own.

    Attributes:
        mask: register of the mask's address, 0 where there is none.
        digest: register of what stands for the entries that take part.
        ids_per_flag: ids that a flag of the mask is for.
    """

    mask: int
    digest: int
    ids_per_flag: int


def usual_modes(variant: DispatchVariant) -> dict[str, Any]:
    """What a variant has of `USUAL`."""
    return {tensor.mode: getattr(variant, tensor.mode) for tensor in USUAL if tensor.mode}


def variant_like(
    variant: DispatchVariant, *, bypasses: bool, has_options: bool = True, **modes: Any
) -> DispatchVariant:
    """What a dispatch with a variant's tensors is specialised for, in native calls.

    Args:
        variant: of a plan.
        bypasses: whether rows of a rank for itself need not go through its window, with this scheme.
        has_options: whether calls take `OPTIONS`.
        modes: what else they are.
    """
    is_plain = variant.mask == "none" and not variant.waits
    options: dict[str, Any] = {"mask": variant.mask, "waits": variant.waits} if has_options else {}
    modes |= usual_modes(variant) | options | {"local_bypass": bypasses and is_plain}
    return DispatchVariant(variant.dtype, variant.row_format, **modes)


def by_kind(mask: Any) -> tuple[Any, Any]:
    """A mask in the place of its kind."""
    return (mask, None) if type(mask) is torch.Tensor and mask.dim() == 1 else (None, mask)


class Programs:
    """Makes programs of one rank.

    Args:
        context: where plans run.
        buffer_id: which buffer it is.
        window_base: address of this rank's window.
    """

    quantizations = tuple(row_format.name for row_format in ROW_FORMATS.values())

    def __init__(self, context: RankContext, buffer_id: int, window_base: int) -> None:
        self.context, self.config = context, context.config
        self.buffer_id, self.window_base = buffer_id, window_base
        # Native code has its address.
        self._ranks = torch.arange(context.config.num_ranks, dtype=torch.int32, device="cpu")

    def symbols(self, operator: Operator, dtype: torch.dtype, **modes: Any) -> Symbols:
        """Sizes of a call whose number of tokens is not known yet."""
        attributes = attributes_of(self.config, self.context.rank)
        return symbols_like(operator, self.config, dtype, BS=T, rows=ROWS, **attributes, **modes)

    def arguments(self, operator: Operator) -> dict[str, Argument]:
        """What native code takes of an operator's tensors, by the names of their placeholders."""
        s = self.symbols(operator, torch.bfloat16)
        taken = {}
        for position, each in enumerate(t for t in operator.tensors if t.shape and t.placeholders):
            dtypes = s.dtypes(each) if each.read_as is None else (each.read_as,)
            name = each.placeholders[0]
            taken[name] = Argument(name, s.expected(each), dtypes, optional=position > 1)
        return taken

    def take(self, registers: Registers, *, is_per_rank: bool = False, has_options: bool = False) -> Taken:
        """Takes a dispatch's arguments up to `BEHIND_OPTIONS`, or up to `FIRST_OPTION` without options."""
        arguments = self.arguments(DISPATCH_OF_BUFFER)
        quantize = registers.choice(0, 0, len(self.quantizations))
        seen = {
            tensor.placeholders[0]: registers.tensor(slot, arguments[tensor.placeholders[0]])
            for slot, tensor in enumerate(USUAL, start=1)
        }
        most, none = registers.constant(self.config.num_max_tokens_per_rank), registers.constant(0)
        registers.check("AT_MOST", registers.size(T), most)
        registers.check("AT_MOST", seen["smooth_scales"].given, none if is_per_rank else quantize)
        key = [seen["x"].dtype, quantize]
        key += [seen[tensor.placeholders[0]].given for tensor in USUAL if tensor.mode]
        if not has_options:
            return Taken(seen, key, none)
        by_token = replace(arguments["mask"], optional=True)
        by_entry = replace(by_token, shape=(T, self.config.num_topk))
        of_tokens, of_entries = (
            registers.tensor(FIRST_OPTION + number, each) for number, each in enumerate((by_token, by_entry))
        )
        mask = registers.plus(of_tokens.address, of_entries.address)  # of which one is 0
        kind = registers.do("MULTIPLY_ADD", of_entries.given, registers.constant(2), of_tokens.given)
        waited = replace(arguments["performance_info"], optional=True)
        slot = FIRST_OPTION + OPTIONS.index("performance_info")
        seen["performance_info"] = registers.tensor(slot, waited)
        return Taken(seen, [*key, kind, seen["performance_info"].given], mask)

    def key_of(self, variant: DispatchVariant, *, has_options: bool = False) -> list[int | torch.dtype]:
        """What the registers of `Taken.key` hold in calls of a variant."""
        quantize = self.quantizations.index(variant.row_format.name)
        key: list[int | torch.dtype] = [variant.dtype, quantize]
        key += map(int, usual_modes(variant).values())
        return [*key, MASKS.index(variant.mask), int(variant.waits)] if has_options else key

    def memory_of_ids(self, variant: DispatchVariant) -> list[Output]:
        """What `keep_ids` writes."""
        made = [Output("topk_idx", (T, self.config.num_topk), torch.int32)]
        if variant.mask != "none":
            shape = (T, self.config.num_topk)[: 1 + (variant.mask == "entries")]
            made.append(Output("mask", shape, torch.bool))
        return made

    def keep_ids(
        self,
        registers: Registers,
        variant: DispatchVariant,
        taken: Taken,
        made: Mapping[str, TensorAt],
        *,
        is_known: bool = False,
    ) -> Kept:
        """Private copies of what combine reads again, once they are as they should be.

        Args:
            registers: of the plan.
            variant: of the plan.
            taken: the arguments.
            made: memory of `memory_of_ids`.
            is_known: whether ids are as an earlier dispatch has left them.
        """
        ids, topk, count = taken.seen["topk_idx"], self.config.num_topk, registers.size(T)
        by_token = variant.mask == "tokens"
        mask = made["mask"].address if "mask" in made else registers.constant(0)
        if "mask" in made:
            shape = self.memory_of_ids(variant)[1].shape
            registers.check("COPY", taken.mask, mask, registers.elements(shape))
        num_ids, own = registers.size(T * topk), made["topk_idx"].address
        if is_known:
            registers.check("COPY", ids.address, own, self.bytes_of_words(registers, num_ids))
        else:
            limits = count, registers.constant(topk), registers.constant(self.config.num_experts)
            masked = mask, registers.constant(int(by_token))
            registers.check("TAKE_IDS", ids.address, ids.dtype, own, *limits, *masked)
        per_flag = topk if by_token else 1
        return Kept(mask, registers.do("DIGEST", own, num_ids, mask, registers.constant(per_flag)), per_flag)

    def numbers_of(
        self,
        registers: Registers,
        variant: DispatchVariant,
        kept: Kept,
        offsets: TensorAt,
        assist_info: TensorAt,
        results_idx: int,
    ) -> tuple[int, ...]:
        """Registers of `KEPT`."""
        topk = self.config.num_topk
        return (
            registers.size(T),
            registers.size(T * topk),
            registers.constant(topk),
            *offsets.sizes,
            *assist_info.sizes,
            registers.constant(variant.dtype),
            kept.digest,
            registers.constant(0 if variant.per_rank else 1),
            results_idx,
            kept.mask,
            registers.constant(kept.ids_per_flag),
            registers.constant(MASKS.index(variant.mask)),
        )

    def fields_of(self, variant: DispatchVariant) -> dict[str, object]:
        """What all handles of a variant's dispatches have alike."""
        num_local = self.config.experts_on(self.context.rank)
        same = {"num_ranks": self.config.num_ranks, "num_local_experts": num_local}
        same["num_shared_experts"] = self.config.num_shared_experts
        return {"buffer_id": self.buffer_id, "dtype": variant.dtype, **same}

    def ranks_waited_for(self, registers: Registers) -> dict[str, int]:
        """What the record of waits needs besides its tensor."""
        return {
            "rank_table": registers.new(self._ranks),
            "num_performance_entries": registers.constant(len(self._ranks)),
        }

    def parts(self, registers: Registers, operator: str) -> int:
        """The register of the number of parts that a call's tokens are cut into."""
        each = registers.constant(self.context.part_tokens[operator].tokens)  # type: ignore[index]
        return registers.do("PARTS", registers.size(T), each)

    @staticmethod
    def bytes_of_words(registers: Registers, count: int) -> int:
        """The register of a number of int32, in bytes."""
        word = registers.constant(torch.int32.itemsize)
        return registers.do("MULTIPLY_ADD", count, word, registers.constant(0))


def attributes_among(kept: tuple[int, ...], tensors: Mapping[str, TensorAt]) -> dict[str, TensorAt | int]:
    """Tensors by where their addresses and sizes are among what a handle keeps."""
    return {
        name: TensorAt(kept.index(tensor.address), tuple(map(kept.index, tensor.sizes)), tensor.dtype)
        for name, tensor in tensors.items()
    }
