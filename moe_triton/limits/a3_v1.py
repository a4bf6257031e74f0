"""Rules of A3's V1 operators."""

from __future__ import annotations

from collections.abc import Collection

from moe_triton.limits.a3 import RELAXED_HIDDEN, TP_RULES, shared_ranks_of_group
from moe_triton.limits.common import MIN_HIDDEN_RELAXED, experts_per_rank, hidden_step
from moe_triton.limits.rule import CallRule, ConfigRule, Rule, RuleSet, absent, between, one_of, only

RANKS = (8, 16, 32, 64, 128, 144, 256, 288)
HIDDEN = 7168
# As many as V2 takes: Ascend's own worked example of V1 has 12.
MAX_TOPK_RELAXED = 16

_SIZES: tuple[ConfigRule, ...] = (
    one_of("num_ranks", RANKS, "Use one of these group sizes, V2, or relaxed=True for tests.", relaxed_low=2),
    between("num_max_tokens_per_rank", 1, 512, "Split larger batches into several dispatches."),
    one_of("hidden", (HIDDEN,), f"Use V2. {RELAXED_HIDDEN}", relaxed_low=MIN_HIDDEN_RELAXED),
    hidden_step,
    between("num_topk", 1, 8, "Send a token to fewer experts, or use V2.", relaxed_high=MAX_TOPK_RELAXED),
    between("num_experts", 1, 512, "Use fewer routed experts, or V2."),
    only("num_special_experts", (0,), "V1 has no special experts", "Use V2."),
    Rule(
        "num_topk",
        "at most the number of routed experts",
        lambda c: c.num_topk <= c.num_experts,
        lambda c: f"a token's experts are distinct and there are {c.num_experts}",
        "Send a token to fewer experts, or use more experts.",
    ),
    Rule(
        "num_shared_experts",
        "1",
        lambda c: c.num_shared_experts == 1 or (c.num_shared_experts == 0 and c.num_shared_ranks == 0),
        "V1 has one shared expert, or none where it has no shared ranks",
        "Use shared_expert_num=1, or V2.",
    ),
    shared_ranks_of_group,
    Rule(
        "num_shared_ranks",
        "a divisor of the group's ranks",
        lambda c: c.num_shared_ranks == 0 or c.num_ranks % c.num_shared_ranks == 0,
        lambda c: f"the {c.num_ranks} ranks must be shared evenly among them",
        "Use a number of shared ranks that divides the group's size.",
    ),
    experts_per_rank,
)

_CALL: tuple[CallRule, ...] = (
    *TP_RULES,
    absent("active_mask", "V1 takes no mask", "Use V2, or ids of -1 for no expert."),
    absent(
        "shared_expert_x",
        "V1 of the original accepts it and does not add it: the result would be without it",
        "Use V2, or add it to the result.",
    ),
    Rule(
        "global_bs",
        "0 or BS * ep_world_size where shared_expert_rank_num > 0",
        lambda c, call: c.num_shared_ranks == 0 or not call.has_variable_batch(c.num_ranks),
        "with shared ranks V1 needs the same number of tokens on every rank: "
        "a shared rank could receive more rows than its output holds",
        "Use V2, or pad every rank to the same number of tokens.",
    ),
)


def rules(schemes: Collection[str]) -> RuleSet:
    """The rules of V1.

    Args:
        schemes: names of V2's, of which V1 has the default, the first.
    """
    default = next(iter(schemes))
    comm_alg = only(
        "comm_alg",
        (default,),
        f"V1 has one scheme, {default}",
        "Use V2 for another one.",
        limit=f'"" or {default}',
    )
    return RuleSet("A3, V1", config=(comm_alg, *_SIZES), call=_CALL)
