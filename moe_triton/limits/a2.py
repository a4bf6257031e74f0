"""Rules of A2, both versions, whatever the scheme."""

from __future__ import annotations

from collections.abc import Collection

from moe_triton.core.config import Config
from moe_triton.core.errors import INVALID_ARGUMENT
from moe_triton.core.hccl import SWITCHES_SET
from moe_triton.limits.call import Call
from moe_triton.limits.common import hidden_step, mask_dimensions, topk
from moe_triton.limits.rule import (
    ONLY_V4,
    CallRule,
    ConfigRule,
    Rule,
    RuleSet,
    absent,
    between,
    not_of_buffer,
    only,
)

NO_PAIRS = "A2 has no tensor parallelism"

_SIZES: tuple[ConfigRule, ...] = (
    not_of_buffer(hidden_step),
    topk,
    between("num_shared_experts", 0, 0, "A2 has no ranks of shared experts: compute them on every rank."),
    between("num_shared_ranks", 0, 0, "A2 has no ranks of shared experts: compute them on every rank."),
)

_CALL: tuple[CallRule, ...] = (
    only("tp_world_size", (0, 1), NO_PAIRS, "Pass 0.", limit="0 or 1, which mean none"),
    # Host checks of A2 want it empty.
    only("tp_group", ("",), NO_PAIRS, 'Pass "".', limit='""', code=INVALID_ARGUMENT).of(ONLY_V4),
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
    only("num_const_experts", (0,), "A2 has no constant experts", "Pass 0."),
)


def rules(schemes: Collection[str], between_servers: str) -> RuleSet:
    """The rules of both versions.

    Args:
        schemes: names of those that there are, the default first.
        between_servers: that of them which is a way between servers.
    """
    default = next(iter(schemes))
    comm_alg = Rule[[Config]](
        "comm_alg",
        f'"", {" or ".join(schemes)}; "" is {between_servers} if {SWITCHES_SET}, else {default}; '
        f"{between_servers} is {default} too in a group inside one server",
        lambda c: c.scheme in schemes,
        lambda c: f"{c.product} has {list(schemes)}",
        lambda c: f"Use comm_alg={' or '.join(map(repr, reversed([*schemes])))}.",
    )
    return RuleSet("A2", config=(comm_alg, *_SIZES), call=_CALL)
