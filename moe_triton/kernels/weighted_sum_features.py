"""What a weighted sum can do beyond adding up slots, and what each variant takes and moves.

Shape symbols are those of `weighted_sum`, and W: ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import Arg, numbers
from moe_triton.core.space import named_features
from moe_triton.kernels.zones import TURNED, ZONE, ZONE_STRIDE
from moe_triton.reference.arithmetic import BLOCK_ELEMENTS


@dataclass(frozen=True)
class SumFeatures:
    """What a sum does beyond adding up slots. Each feature brings arguments that only it needs.

    Attributes:
        masked: a token is left out, its output not written, where ``active`` (T,) is negative.
        shared_x: a row of ``shared_x`` (T, H) is added last.
        special: ids from ``num_experts`` on may name special experts. ``ori_x`` (T, H) is read for copy and
            constant experts, ``alphas`` (T, K, 2) and ``const_v`` (N, H) for constant ones only; what no id
            leads to may be a null address.
        quantized: a slot is a row of int8 and, as far behind it as ``slot_scales`` is behind ``slots``, the
            scales of its blocks; the row is what `dequantize_blocks` makes of them.
        wide_blocks: of rows that are quantized, blocks have 16 elements, and not 8.
        by_expert: a slot is found by its expert and by ``expand_idx`` (T, K), its number among those of
            that expert. A token's shared result, of one expert at most, stands behind those of the last
            expert.
        by_offset: a slot starts ``offsets`` (T, K + S) elements after ``slots``, in any rank's memory. The
            offsets are trusted, also those of ids without an expert. Neither quantized nor by_expert.
        own: results of this rank's experts, from ``first_expert`` on, are read where the experts left them,
            ``own_results`` elements after ``slots``: result k of token t in row ``start + expand_idx[t, k]``,
            where ``start = recv_offsets[(expert - first_expert) * W + rank - 1]``, 0 for the first entry. A
            row that is not before the end of its entry is looked for in the slot. Only plain rows by token,
            in a zone that the host knows.
        fp32_out: the sum is not rounded.
        zoned: ``slots`` and ``slot_scales`` are zone 0's; results are in the zone that ``zone`` (1,) names,
            ``zone_stride`` elements of ``slots`` from one to the next.
        listed: instead of a range, the tokens ``tokens[bounds[0] : bounds[1]]`` are summed, each entry once:
            of ``tokens`` (T,) and ``bounds`` (2,). One that is no token is skipped. Neither by_expert nor
            by_offset.
        turns: the operator's last launch: ``turned`` (1,) becomes the zone that ``zone`` (1,) does not name.
        clears: of what is masked, the outputs of tokens that are left out become zeros.
    """

    masked: bool = False
    shared_x: bool = False
    special: bool = False
    quantized: bool = False
    wide_blocks: bool = False
    by_expert: bool = False
    by_offset: bool = False
    own: bool = False
    fp32_out: bool = False
    zoned: bool = False
    listed: bool = False
    turns: bool = False
    clears: bool = False

    @property
    def block(self) -> int:
        """Elements of a quantised block."""
        return 2 * BLOCK_ELEMENTS if self.wide_blocks else BLOCK_ELEMENTS

    def variant(self, num_shared: int, has_weights: bool) -> str:
        """What tables of settings know a sum by: its features with dashes between them."""
        return named_features(weights=has_weights, **vars(self), shared=num_shared)


def check_features(features: SumFeatures, num_shared: int) -> None:
    """Refuses features that exclude each other.

    Raises:
        ArgumentError: rows by offset, or own ones, with a feature that they do not have; several shared
            experts by expert; nothing is masked that could be cleared.
    """
    if features.clears and not features.masked:
        raise ArgumentError(
            "features.clears", True, "it is of what a mask leaves out", "Set features.masked."
        )
    if features.by_expert and num_shared > 1:
        raise ArgumentError("num_shared", num_shared, "must be 0 or 1 by expert", "Use slots by token.")
    if features.by_offset and (features.by_expert or features.quantized):
        other = "by_expert" if features.by_expert else "quantized"
        rule = "finds rows of 16 bits an element, wherever they are"
        raise ArgumentError("features.by_offset", True, rule, f"Leave out features.{other}.")
    if features.listed and (features.by_expert or features.by_offset):
        other = "by_expert" if features.by_expert else "by_offset"
        raise ArgumentError("features.listed", True, "finds rows by token", f"Leave out features.{other}.")
    others = ("by_expert", "by_offset", "quantized", "zoned")
    other = next((name for name in others if features.own and getattr(features, name)), "")
    if other:
        rule = "finds plain rows by token, from slots in a zone that is known"
        raise ArgumentError("features.own", True, rule, f"Leave out features.{other}.")


def arguments_of(features: SumFeatures, element: str) -> Iterator[tuple[bool, Arg]]:
    """Every argument of the kernel, in order, each with whether this variant has it.

    Args:
        element: Triton's name of the tokens' dtype.
    """
    f, by_token = features, not (features.by_expert or features.by_offset)
    yield True, Arg("slots", "*i8" if f.quantized else f"*{element}", "in")
    yield f.quantized, Arg("slot_scales", f"*{element}", "in", interleaved_with="slots")
    yield True, Arg("topk_idx", "*i32", "in")
    yield True, Arg("topk_weights", "*fp32", "in")
    yield f.by_expert or f.own, Arg("expand_idx", "*i32", "in")
    yield f.by_offset, Arg("offsets", "*i64", "in")
    yield f.own, Arg("recv_offsets", "*i32", "in")
    yield f.masked, Arg("active", "*i32", "in")
    yield f.listed, Arg("tokens", "*i32", "in")
    yield f.listed, Arg("bounds", "*i32", "in")
    yield f.shared_x, Arg("shared_x", f"*{element}", "in")
    yield f.special, Arg("ori_x", f"*{element}", "in")
    yield f.special, Arg("alphas", "*fp32", "in")
    yield f.special, Arg("const_v", f"*{element}", "in")
    yield True, Arg("out", "*fp32" if f.fp32_out else f"*{element}", "out")
    yield f.zoned or f.turns, ZONE
    yield f.turns, TURNED
    yield from ((by_token, arg) for arg in numbers("i64", "token_stride slot_stride"))
    yield from ((f.by_expert, arg) for arg in numbers("i64", "expert_stride index_stride"))
    yield f.own, Arg("own_results", "i64", "value")
    yield not f.listed, Arg("first_token", "i32", "value")
    yield from ((True, arg) for arg in numbers("i32", "num_tokens num_experts"))
    yield f.by_expert, Arg("max_index", "i32", "value")
    yield from ((f.own, arg) for arg in numbers("i32", "first_expert num_local_experts num_ranks rank"))
    yield from ((f.special, arg) for arg in numbers("i32", "num_zero num_copy num_const"))
    yield f.zoned, ZONE_STRIDE


def bytes_moved_by(
    features: SumFeatures, hidden: int, topk: int, num_shared: int, has_weights: bool
) -> Callable[..., int] | None:
    """Bytes read and written, from the kernel's numbers; None where the data decide."""
    if features.special or features.masked or features.listed:
        return None
    slot_bytes = hidden + hidden // features.block * 2 if features.quantized else 2 * hidden
    slots = slot_bytes * (topk + num_shared)
    rows = hidden * (2 * features.shared_x + (4 if features.fp32_out else 2))
    entries = topk * (4 + 4 * has_weights + 4 * (features.by_expert or features.own))
    entries += 8 * (topk + num_shared) * features.by_offset

    def bytes_moved(*, num_tokens: int, num_local_experts: int = 0, **_: int) -> int:
        ends = 2 * 4 * num_local_experts  # of the rows before this rank's and of these, for each expert
        return num_tokens * (slots + rows + entries) + ends

    return bytes_moved
