"""Limits of fullmesh_v2, besides those of all that A3 has, and published formulas of both schemes."""

from __future__ import annotations

from moe_triton.core.config import Config
from moe_triton.core.hccl import MEGABYTE
from moe_triton.layout import BLOCK_BYTES, BLOCK_DATA_BYTES, SLOT_ALIGN, SlotLayout, align
from moe_triton.limits.call import Call
from moe_triton.limits.common import MAX_TOPK_OF_BUFFER
from moe_triton.limits.formula import ITEM_BYTES, Formula
from moe_triton.limits.rule import ONLY_V3, UNTIL_V3, Rule, RuleSet, absent, between, only

BANNED_REMEDY = "Use fullmesh_v1, or choose generation 'v4' or none."

_INBAND_RULES = RuleSet(
    "A3, V2, fullmesh_v2",
    config=(
        between("num_max_tokens_per_rank", 1, 256, "Use fullmesh_v1 for larger batches, or split them."),
        between(
            "num_topk",
            1,
            12,
            "Use fullmesh_v1, or send a token to fewer experts.",
            buffer_high=MAX_TOPK_OF_BUFFER,
        ),
        only(
            "num_special_experts",
            (0,),
            "fullmesh_v2 has no special experts in the limits of v3",
            BANNED_REMEDY,
        ).of(ONLY_V3),
    ),
    call=(
        absent("active_mask", "fullmesh_v2 takes no mask in the limits of v3", BANNED_REMEDY).of(ONLY_V3),
        absent("elastic_info", "fullmesh_v2 takes none", "Use fullmesh_v1.").of(UNTIL_V3),
        Rule[[Config, Call]](
            "global_bs",
            "0 or BS * ep_world_size",
            lambda c, call: not call.has_variable_batch(c.num_ranks),
            lambda c, call: (
                f"in the limits of v3 fullmesh_v2 has as many tokens on every rank, here {call.num_tokens}"
            ),
            BANNED_REMEDY,
        ).of(ONLY_V3),
        only("tp_world_size", (0, 1), "fullmesh_v2 has no tensor parallelism", "Use fullmesh_v1.").of(
            UNTIL_V3
        ),
    ),
)

INBAND_RULES = {2: _INBAND_RULES}


def _packed_bytes(c: Config) -> int:
    """A row, its scale and its stamp, before they are cut into blocks or rounded up to a slot."""
    return SlotLayout(c.hidden, ITEM_BYTES).packed_bytes


def _two_zones(c: Config, dispatch_slot: int) -> int:
    dispatch = c.num_local_experts * c.num_max_tokens_per_rank * c.num_ranks * dispatch_slot
    combine_slot = align(ITEM_BYTES * c.hidden, SLOT_ALIGN)
    return 2 * (dispatch + c.num_results_per_token * c.num_max_tokens_per_rank * combine_slot)


def _in_slots(c: Config) -> int:
    return _two_zones(c, align(_packed_bytes(c), SLOT_ALIGN))


def _in_blocks(c: Config) -> int:
    return _two_zones(c, -(-_packed_bytes(c) // BLOCK_DATA_BYTES) * BLOCK_BYTES)


def _first_version(c: Config) -> int:
    slots = c.num_ranks * c.num_local_experts + c.num_topk + 1
    return 2 * c.num_max_tokens_per_rank * ITEM_BYTES * (c.hidden + 128) * slots + 2 * MEGABYTE


FORMULAS = {
    1: (Formula("A3, V1", "2 * maxBs * 2 * (H + 128) * (EP * localE + K + 1) + 2 MB", _first_version),),
    2: (
        Formula(
            "A3, V2, fullmesh_v1",
            "2 * (localE * maxBs * EP * Align512(Align32(2 * H) + 64) + (K + S) * maxBs * Align512(2 * H))",
            _in_slots,
        ),
    ),
}
INBAND_FORMULAS = {
    2: (
        Formula(
            "A3, V2, fullmesh_v2",
            "2 * (localE * maxBs * EP * ceil((Align32(2 * H) + 64) / 480) * 512 "
            "+ (K + S) * maxBs * Align512(2 * H))",
            _in_blocks,
        ),
    )
}
