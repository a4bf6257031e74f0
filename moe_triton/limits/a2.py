"""Rules of A2, both versions, and of its two schemes.

The limits of v4 widen those of the V2 operators (pages of aclnnMoeDistributeDispatchV4 and its combine); V1's
page keeps its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from moe_triton.core.config import USUAL_RANKS_PER_SERVER, Config
from moe_triton.core.errors import INVALID_ARGUMENT, NULL_ARGUMENT
from moe_triton.core.topology import RANKS_PER_SERVER
from moe_triton.limits.call import Call
from moe_triton.limits.common import (
    HIDDEN_STEP,
    experts_per_rank,
    hidden_step,
    mask_dimensions,
    scales_only_quantized,
    topk_of_experts,
)
from moe_triton.limits.rule import (
    CHOSEN,
    EITHER,
    NONE_CHOSEN,
    ONLY_V3,
    ONLY_V4,
    SINCE_V4,
    CallRule,
    ConfigRule,
    Generations,
    Rule,
    RuleSet,
    absent,
    between,
    one_of,
    only,
)

SCHEMES = ("fullmesh", "hierarchy")
MAX_LOCAL_EXPERTS = 24
GROUP_REMEDY = "Use one of these group sizes, or relaxed=True for tests."
NO_PAIRS = "A2 has no tensor parallelism"

_CARDS = USUAL_RANKS_PER_SERVER["A2"]

# Halves that a routing weight cannot be given to.
WITHOUT_EXPERT_SCALES = ("dispatch_teardown", "combine_setup")


class _Sizes(NamedTuple):
    """What a page says that a scheme takes: group sizes, and the most of the others."""

    ranks: tuple[int, ...]
    tokens: int
    hidden: int
    experts: int


_FULLMESH = _Sizes((16, 32, 64, 128, 192, 256), 256, 7168, 512)
_FULLMESH_V4 = _Sizes((*range(2, 9), 16, 32, 64, 128, 192, 256, 384), 256, 10240, 1024)
_HIERARCHY_V1 = _Sizes((16, 32, 64), 256, 7168, 512)
_HIERARCHY_V3 = _HIERARCHY_V1._replace(hidden=10240)
# With drivers from 25.0.RC1.1 on.
_HIERARCHY_V4 = _HIERARCHY_V3._replace(tokens=512)


def _ranks(sizes: _Sizes, generations: Generations) -> ConfigRule:
    rule: ConfigRule = one_of("num_ranks", sizes.ranks, GROUP_REMEDY, relaxed_low=2)
    return rule.of(generations)


def _ranks_of_host_checks(least: int, most: int) -> ConfigRule:
    """Group sizes as the operators' published host code checks them: pages list only some of these.

    Args:
        least: the fewest ranks: below those of a server any number will do.
        most: the most ranks.
    """
    one_server = f"{least} to {_CARDS}, or " if least <= _CARDS else ""
    limit = f"{one_server}a multiple of {_CARDS} from {max(least, 2 * _CARDS)} to {most}"

    relaxed_low = min(least, 2)

    def holds(c: Config) -> bool:
        if c.relaxed:
            return relaxed_low <= c.num_ranks <= most
        return least <= c.num_ranks <= most and (c.num_ranks <= _CARDS or c.num_ranks % _CARDS == 0)

    return Rule(
        "num_ranks",
        limit,
        holds,
        lambda c: f"{c.product} takes {f'{relaxed_low} to {most}' if c.relaxed else limit} here",
        GROUP_REMEDY,
        relaxed=f"{relaxed_low} to {most}",
        generations=NONE_CHOSEN,
    )


def _limits(sizes: _Sizes, generations: Generations = EITHER) -> tuple[ConfigRule, ...]:
    rules = (
        between("num_max_tokens_per_rank", 1, sizes.tokens, "Split larger batches into several dispatches."),
        between("hidden", HIDDEN_STEP, sizes.hidden, "Use a smaller hidden dimension."),
        between("num_experts", 1, sizes.experts, "Use fewer routed experts."),
    )
    return tuple(rule.of(generations) for rule in rules)


_FULLMESH_RANKS, _HIERARCHY_RANKS = _ranks_of_host_checks(1, 384), _ranks_of_host_checks(2 * _CARDS, 64)

A2 = RuleSet(
    "A2",
    config=(
        Rule(
            "comm_alg",
            '"", fullmesh or hierarchy; "" is hierarchy if HCCL_INTRA_PCIE_ENABLE=1 and '
            "HCCL_INTRA_ROCE_ENABLE=0, else fullmesh; hierarchy is fullmesh too in a group inside one server",
            lambda c: c.scheme in SCHEMES,
            lambda c: f"{c.product} has {list(SCHEMES)}",
            "Use comm_alg='hierarchy' or 'fullmesh'.",
        ),
        hidden_step,
        between("num_topk", 1, 16, "Send a token to fewer experts."),
        between("num_shared_experts", 0, 0, "A2 has no ranks of shared experts: compute them on every rank."),
        between("num_shared_ranks", 0, 0, "A2 has no ranks of shared experts: compute them on every rank."),
    ),
    call=(
        only("tp_world_size", (0, 1), NO_PAIRS, "Pass 0.", limit="0 or 1, which mean none"),
        # Host checks of A2 want it empty.
        only("group_tp", ("",), NO_PAIRS, 'Pass "".', limit='""', code=INVALID_ARGUMENT).of(ONLY_V4),
        Rule[[Config, Call]](
            "combine_add_rms_norm",
            "not there",
            lambda c, call: call.operator != "combine_add_rms_norm",
            lambda c, call: f"the limits of v4 do not have it on {c.product}",
            "Use combine, and add and normalise afterwards.",
            value="called",
        ).of(ONLY_V4),
        mask_dimensions,
        absent("elastic_info", "A2 takes none", "Pass None."),
        absent("shared_expert_x", "A2 takes no shared experts", "Add it to the result."),
        only("const_expert_num", (0,), "A2 has no constant experts", "Pass 0."),
    ),
)

_servers = Rule[[Config]](
    RANKS_PER_SERVER,
    f"{_CARDS}; all ranks of a group of no more",
    lambda c: c.relaxed or c.topology == replace(c, ranks_per_server=None).topology,
    f"a server of A2 has {_CARDS} cards",
    "Pass None, or relaxed=True for tests.",
    relaxed="any",
)

_local_experts = Rule[[Config]](
    "num_experts",
    f"at most {MAX_LOCAL_EXPERTS} per rank",
    lambda c: c.num_local_experts <= MAX_LOCAL_EXPERTS,
    lambda c: f"a rank holds at most {MAX_LOCAL_EXPERTS} experts, and it would hold {c.num_local_experts}",
    "Use more ranks, fewer experts, or hierarchy between servers.",
)

_equal_servers = Rule[[Config]](
    RANKS_PER_SERVER,
    "as many on every server",
    lambda c: len(set(c.topology.sizes)) == 1,
    "hierarchy sends to the rank of the same number on each server, so that all have as many",
    "Use fullmesh, or as many ranks of each server.",
    value=lambda c: list(c.topology.sizes),
)

_no_special_experts = only("num_special_experts", (0,), "hierarchy has no special experts", "Use fullmesh.")

_FULLMESH_CALL: tuple[CallRule, ...] = (
    only(
        "comm_quant_mode",
        (0,),
        "A2 quantises results with hierarchy only",
        "Leave it out, or use hierarchy between servers.",
    ),
)

_HIERARCHY_CALL: tuple[CallRule, ...] = (
    Rule(
        "expert_scales",
        "needed",
        lambda c, call: call.has_expert_scales or call.operator in WITHOUT_EXPERT_SCALES,
        "hierarchy sums inside a server, by weight",
        "Pass the routing weights, or use fullmesh.",
        value="None",
        code=NULL_ARGUMENT,
    ),
    absent("scales", "hierarchy takes none", "Pass None, or use fullmesh."),
)

V1_FULLMESH = RuleSet(
    "A2, V1, fullmesh",
    config=(
        _FULLMESH_RANKS,
        _ranks(_FULLMESH, CHOSEN),
        *_limits(_FULLMESH),
        _servers,
        topk_of_experts,
        experts_per_rank,
        _local_experts,
    ),
    call=_FULLMESH_CALL,
)
V2_FULLMESH = RuleSet(
    "A2, V2, fullmesh",
    config=(
        _FULLMESH_RANKS,
        _ranks(_FULLMESH, ONLY_V3),
        _ranks(_FULLMESH_V4, ONLY_V4),
        *_limits(_FULLMESH, ONLY_V3),
        *_limits(_FULLMESH_V4, SINCE_V4),
        _servers,
        topk_of_experts,
        experts_per_rank,
        _local_experts.of(ONLY_V3),
    ),
    # V1 quantises wherever it is given scales.
    call=(*_FULLMESH_CALL, scales_only_quantized),
)
V1_HIERARCHY = RuleSet(
    "A2, V1, hierarchy",
    config=(
        _HIERARCHY_RANKS,
        _ranks(_HIERARCHY_V1, CHOSEN),
        *_limits(_HIERARCHY_V1),
        _servers,
        _equal_servers,
        topk_of_experts,
        experts_per_rank,
        _no_special_experts,
    ),
    call=_HIERARCHY_CALL,
)
V2_HIERARCHY = RuleSet(
    "A2, V2, hierarchy",
    config=(
        _HIERARCHY_RANKS,
        _ranks(_HIERARCHY_V3, CHOSEN),
        *_limits(_HIERARCHY_V3, ONLY_V3),
        *_limits(_HIERARCHY_V4, SINCE_V4),
        _servers,
        _equal_servers,
        topk_of_experts,
        experts_per_rank,
        _no_special_experts,
    ),
    call=_HIERARCHY_CALL,
)
