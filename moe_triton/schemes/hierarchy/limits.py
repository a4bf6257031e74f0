"""Limits of A2's hierarchy, besides those of all that A2 has, and its published formulas."""

from __future__ import annotations

from dataclasses import replace

from moe_triton.core.config import Config
from moe_triton.core.errors import NULL_ARGUMENT
from moe_triton.core.group_sizes import RANKS_PER_SERVER
from moe_triton.core.hccl import MEGABYTE
from moe_triton.layout import SLOT_ALIGN, align
from moe_triton.limits.common import experts_per_rank, topk_of_experts
from moe_triton.limits.formula import ITEM_BYTES, Formula
from moe_triton.limits.rule import CHOSEN, ONLY_V3, SINCE_V4, UNTIL_V3, CallRule, Rule, RuleSet, absent, only
from moe_triton.schemes.common.a2_limits import CARDS, Sizes, most_of, ranks, ranks_of_host_checks, servers

# Halves that a routing weight cannot be given to.
WITHOUT_TOPK_WEIGHTS = ("dispatch_teardown", "combine_setup")

_V1 = Sizes((16, 32, 64), 256, 7168, 512)
_V3 = _V1._replace(hidden=10240)
# With drivers from 25.0.RC1.1 on.
_V4 = _V3._replace(tokens=512)
_RANKS = ranks_of_host_checks(2 * CARDS, 64)

_equal_servers = Rule[[Config]](
    RANKS_PER_SERVER,
    "as many on every server",
    lambda c: len(set(c.topology.sizes)) == 1,
    "hierarchy sends to the rank of the same number on each server, so that all have as many",
    "Use fullmesh, or as many ranks of each server.",
    value=lambda c: list(c.topology.sizes),
)

_no_special_experts = only("num_special_experts", (0,), "hierarchy has no special experts", "Use fullmesh.")

_CALL: tuple[CallRule, ...] = (
    Rule(
        "topk_weights",
        "needed",
        lambda c, call: call.has_topk_weights or call.operator in WITHOUT_TOPK_WEIGHTS,
        "hierarchy sums inside a server, by weight",
        "Pass the routing weights, or use fullmesh.",
        value="None",
        code=NULL_ARGUMENT,
    ),
    absent("smooth_scales", "hierarchy takes none", "Pass None, or use fullmesh."),
)

_ALIKE = servers, _equal_servers, topk_of_experts, experts_per_rank, _no_special_experts
RULES = {
    1: RuleSet("A2, V1, hierarchy", (_RANKS, ranks(_V1, CHOSEN), *most_of(_V1), *_ALIKE), _CALL),
    2: RuleSet(
        "A2, V2, hierarchy",
        (_RANKS, ranks(_V3, CHOSEN), *most_of(_V3, ONLY_V3), *most_of(_V4, SINCE_V4), *_ALIKE),
        _CALL,
    ),
}


def _needed(c: Config) -> int:
    token = c.hidden * ITEM_BYTES + 4 * align(c.num_topk, 8) * 4
    return c.num_experts * c.num_max_tokens_per_rank * token + (4 + 100) * MEGABYTE


def _needed_since_v4(c: Config) -> int:
    token = c.hidden * ITEM_BYTES + 16 * align(c.num_topk, 8)
    block = align(c.num_max_tokens_per_rank * token, SLOT_ALIGN)
    return (c.num_experts + c.num_ranks // 4) * block + 8 * MEGABYTE


_FORMULA = Formula("A2, hierarchy", "M * maxBs * (H * 2 + 4 * Align8(K) * 4) + 4 MB + 100 MB", _needed)
_SINCE_V4 = Formula(
    "A2, V2, hierarchy",
    "(M + EP / 4) * Align512(maxBs * (2 * H + 16 * Align8(K))) + 8 MB",
    _needed_since_v4,
    SINCE_V4,
)
FORMULAS = {1: (_FORMULA,), 2: (replace(_FORMULA, generations=UNTIL_V3), _SINCE_V4)}
