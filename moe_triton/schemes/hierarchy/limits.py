"""Limits of hierarchy, besides those of all that A2 and A3 have, and its published formulas."""

from __future__ import annotations

from dataclasses import replace

from moe_triton.core.config import Config, usual_ranks_per_server
from moe_triton.core.errors import NULL_ARGUMENT
from moe_triton.core.group_sizes import RANKS_PER_SERVER
from moe_triton.core.hccl import MEGABYTE
from moe_triton.layout import SLOT_ALIGN, align
from moe_triton.limits.a3 import RELAXED_HIDDEN
from moe_triton.limits.call import Call
from moe_triton.limits.common import (
    MAX_EXPERTS_OF_BUFFER,
    MIN_HIDDEN_RELAXED,
    experts_per_rank,
    topk_of_experts,
)
from moe_triton.limits.formula import ITEM_BYTES, Formula
from moe_triton.limits.rule import (
    CHOSEN,
    ONLY_V3,
    ONLY_V4,
    SINCE_V4,
    UNTIL_V3,
    CallRule,
    ConfigRule,
    Rule,
    RuleSet,
    absent,
    between,
    not_of_buffer,
    only,
)
from moe_triton.schemes.common.a2_limits import (
    CARDS,
    GROUP_REMEDY,
    Sizes,
    most_of,
    ranks,
    ranks_of_host_checks,
    servers,
)

# Halves that a routing weight cannot be given to.
WITHOUT_TOPK_WEIGHTS = ("dispatch_teardown", "combine_setup")

# The product's scheme for what hierarchy does not take.
_OF_A2, _OF_A3 = "fullmesh", "fullmesh_v1"

_V1 = Sizes((16, 32, 64), 256, 7168, 512)
_V3 = _V1._replace(hidden=10240)
# With drivers from 25.0.RC1.1 on.
_V4 = _V3._replace(tokens=512)
_RANKS = ranks_of_host_checks(2 * CARDS, 64)


def _equal_servers(other: str) -> ConfigRule:
    return Rule(
        RANKS_PER_SERVER,
        "as many on every server",
        lambda c: len(set(c.topology.sizes)) == 1,
        "hierarchy sends to the rank of the same number on each server, so that all have as many",
        f"Use {other}, or as many ranks of each server.",
        value=lambda c: list(c.topology.sizes),
    )


def _no_special_experts(other: str) -> ConfigRule:
    return only("num_special_experts", (0,), "hierarchy has no special experts", f"Use {other}.")


def _needs_weights(other: str) -> CallRule:
    return Rule(
        "topk_weights",
        "needed",
        lambda c, call: call.has_topk_weights or call.operator in WITHOUT_TOPK_WEIGHTS,
        "hierarchy sums inside a server, by weight",
        f"Pass the routing weights, or use {other}.",
        value="None",
        code=NULL_ARGUMENT,
    )


NO_SMOOTH_SCALES = "with hierarchy a row goes once to each server, and one serves all experts there"


def _no_smooth_scales(other: str) -> CallRule:
    return absent("smooth_scales", NO_SMOOTH_SCALES, f"Pass None, or use {other}.")


_CALL = _needs_weights(_OF_A2), _no_smooth_scales(_OF_A2)
_ALIKE = (
    *(servers, _equal_servers(_OF_A2), topk_of_experts, experts_per_rank),
    _no_special_experts(_OF_A2),
)
RULES = {
    1: RuleSet("A2, V1, hierarchy", (_RANKS, ranks(_V1, CHOSEN), *most_of(_V1), *_ALIKE), _CALL),
    2: RuleSet(
        "A2, V2, hierarchy",
        (_RANKS, ranks(_V3, CHOSEN), *most_of(_V3, ONLY_V3), *most_of(_V4, SINCE_V4), *_ALIKE),
        _CALL,
    ),
}

DIES = usual_ranks_per_server("A3", "hierarchy")
MAX_RANKS_ON_A3 = 256
MAX_LOCAL_EXPERTS_ON_A3 = 24

_SIZES_ON_A3: tuple[ConfigRule, ...] = (
    Rule[[Config]](
        "comm_alg",
        "not hierarchy",
        lambda c: False,
        lambda c: f"the limits of v3 have no {c.scheme} on {c.product}",
        "Choose generation 'v4' or none.",
    ).of(ONLY_V3),
    Rule[[Config]](
        "num_ranks",
        f"a multiple of {DIES} from {DIES} to {MAX_RANKS_ON_A3}",
        lambda c: 1 <= c.num_ranks <= MAX_RANKS_ON_A3 and (c.has_any_servers or c.num_ranks % DIES == 0),
        lambda c: (
            f"hierarchy on {c.product} takes "
            + (
                f"1 to {MAX_RANKS_ON_A3}"
                if c.has_any_servers
                else f"whole machines of {DIES}, up to {MAX_RANKS_ON_A3}"
            )
        ),
        GROUP_REMEDY,
        relaxed=f"1 to {MAX_RANKS_ON_A3}",
    ),
    between("num_max_tokens_per_rank", 1, 256, f"Use {_OF_A3} for larger batches, or split them."),
    between(
        "hidden",
        1024,
        7168,
        f"Use {_OF_A3}, or a smaller hidden dimension.",
        too_small=RELAXED_HIDDEN,
        relaxed_low=MIN_HIDDEN_RELAXED,
        buffer_low=1,
    ),
    between(
        "num_experts",
        1,
        512,
        f"Use {_OF_A3}, or fewer routed experts.",
        buffer_high=MAX_EXPERTS_OF_BUFFER,
    ),
    # Documentation has it, and no host check.
    not_of_buffer(
        Rule(
            "num_experts",
            f"at most {MAX_LOCAL_EXPERTS_ON_A3} per rank",
            lambda c: c.num_local_experts <= MAX_LOCAL_EXPERTS_ON_A3,
            lambda c: (
                f"by the limits of v4 a rank holds at most {MAX_LOCAL_EXPERTS_ON_A3} experts with hierarchy, "
                f"and it would hold {c.num_local_experts}"
            ),
            "Use more ranks or fewer experts, or choose no generation.",
        ).of(ONLY_V4)
    ),
    Rule[[Config]](
        RANKS_PER_SERVER,
        f"{DIES}, the dies of a machine",
        lambda c: c.has_any_servers or set(c.topology.sizes) == {DIES},
        f"with hierarchy a server is a machine of A3, which has {DIES} dies",
        "Pass None, or relaxed=True for tests.",
        relaxed="any",
    ),
    _equal_servers(_OF_A3),
    _no_special_experts(_OF_A3),
)

_CALL_ON_A3: tuple[CallRule, ...] = (
    _needs_weights(_OF_A3),
    _no_smooth_scales(_OF_A3),
    Rule[[Config, Call]](
        "active_mask",
        "1-D (BS,)",
        lambda c, call: call.is_of_buffer or not call.has_active_mask or call.mask_dims == 1,
        "hierarchy takes a mask of tokens",
        f"Pass ids of -1 for no expert, or use {_OF_A3}.",
        value=lambda c, call: f"of {call.mask_dims} dimensions",
    ),
    Rule[[Config, Call]](
        "global_bs",
        "0 or BS * ep_world_size",
        lambda c, call: not call.has_variable_batch(c.num_ranks),
        lambda c, call: f"with hierarchy every rank has as many tokens, here {call.num_tokens}",
        f"Pad every rank's batch and mask the rest, or use {_OF_A3}.",
    ),
    absent("shared_expert_x", "hierarchy takes no shared experts", f"Add it to the result, or use {_OF_A3}."),
    absent("elastic_info", "hierarchy takes none", f"Pass None, or use {_OF_A3}.").of(UNTIL_V3),
    only("tp_world_size", (0, 1), "hierarchy has no tensor parallelism", f"Pass 0, or use {_OF_A3}.").of(
        UNTIL_V3
    ),
)

# V1 of A3 has one scheme, and it is another.
RULES_ON_A3 = {2: RuleSet("A3, V2, hierarchy", _SIZES_ON_A3, _CALL_ON_A3)}


def _needed(c: Config) -> int:
    token = c.hidden * ITEM_BYTES + 4 * align(c.num_topk, 8) * 4
    return c.num_experts * c.num_max_tokens_per_rank * token + (4 + 100) * MEGABYTE


def _needed_since_v4(c: Config) -> int:
    token = c.hidden * ITEM_BYTES + 16 * align(c.num_topk, 8)
    block = align(c.num_max_tokens_per_rank * token, SLOT_ALIGN)
    return (c.num_experts + c.num_ranks // 4) * block + 8 * MEGABYTE


def _needed_on_a3(c: Config) -> int:
    """As host code has it: whole numbers, from left to right. The page's brackets multiply a whole token."""
    token = 2 * c.hidden + 4 * (3 * (c.num_topk + 7) // 8 * 8) + 64
    return c.num_experts * c.num_max_tokens_per_rank * token + 404 * MEGABYTE


_FORMULA = Formula("A2, hierarchy", "M * maxBs * (H * 2 + 4 * Align8(K) * 4) + 4 MB + 100 MB", _needed)
_SINCE_V4 = Formula(
    "A2, V2, hierarchy",
    "(M + EP / 4) * Align512(maxBs * (2 * H + 16 * Align8(K))) + 8 MB",
    _needed_since_v4,
    SINCE_V4,
)
FORMULAS = {1: (_FORMULA,), 2: (replace(_FORMULA, generations=UNTIL_V3), _SINCE_V4)}
_ON_A3 = Formula(
    "A3, V2, hierarchy", "M * maxBs * (2 * H + 4 * (3 * (K + 7) / 8 * 8) + 64) + 404 MB", _needed_on_a3
)
FORMULAS_ON_A3: dict[int, tuple[Formula, ...]] = {2: (_ON_A3,)}
