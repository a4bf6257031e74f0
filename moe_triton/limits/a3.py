"""Rules of A3's V2 operators, whatever the scheme."""

from __future__ import annotations

from collections.abc import Mapping

from moe_triton.core.config import Config
from moe_triton.core.errors import INVALID_ARGUMENT
from moe_triton.layout import STATE_COMBINE_OFFSET, STATUS_ENTRY_BYTES
from moe_triton.limits.call import Call
from moe_triton.limits.common import (
    MAX_EXPERTS_OF_BUFFER,
    MAX_GROUP_NAME,
    MIN_HIDDEN_RELAXED,
    experts_per_rank,
    hidden_step,
    mask_dimensions,
    scales_only_quantized,
    topk,
    topk_of_experts,
)
from moe_triton.limits.rule import (
    ONLY_V4,
    UNTIL_V3,
    CallRule,
    ConfigRule,
    Rule,
    RuleSet,
    absent,
    between,
    not_of_buffer,
    only,
    use_one,
)

MAX_STATUS_ENTRIES = STATE_COMBINE_OFFSET // STATUS_ENTRY_BYTES
RELAXED_HIDDEN = f"relaxed=True allows {MIN_HIDDEN_RELAXED} and up for tests on the CPU."

shared_ranks_of_group = Rule[[Config]](
    "num_shared_ranks",
    "0 to one less than the group's ranks",
    lambda c: 0 <= c.num_shared_ranks < c.num_ranks,
    lambda c: (
        "it counts ranks"
        if c.num_shared_ranks < 0
        else f"at least one of the {c.num_ranks} ranks must hold routed experts"
    ),
    lambda c: "Pass 0 for none." if c.num_shared_ranks < 0 else "Use fewer shared ranks.",
)

shared_both_or_neither = Rule[[Config]](
    "num_shared_ranks",
    "0 without shared experts, positive with them; 1 shared expert on 0 ranks means none",
    lambda c: (c.num_shared_ranks == 0) == (c.num_shared_experts == 0),
    lambda c: (
        f"it and the number of shared experts ({c.num_shared_experts}) must be both zero or both positive"
    ),
    "Give shared experts ranks of their own, or have neither.",
)

_SIZES: tuple[ConfigRule, ...] = (
    between("num_ranks", 1, 768, "Use a smaller group."),
    between("num_max_tokens_per_rank", 1, 512, "Split larger batches into several dispatches."),
    between(
        "hidden",
        1024,
        8192,
        "Use a smaller hidden dimension.",
        too_small=RELAXED_HIDDEN,
        relaxed_low=MIN_HIDDEN_RELAXED,
        buffer_low=1,
    ),
    not_of_buffer(hidden_step),
    topk,
    between("num_experts", 1, 1024, "Use fewer routed experts.", buffer_high=MAX_EXPERTS_OF_BUFFER),
    topk_of_experts,
    between("num_shared_experts", 0, 4, "Use at most four shared experts."),
    shared_ranks_of_group,
    shared_both_or_neither,
    Rule(
        "num_shared_ranks",
        "a multiple of the shared experts",
        lambda c: c.num_shared_experts == 0 or c.num_shared_ranks % c.num_shared_experts == 0,
        lambda c: f"each of the {c.num_shared_experts} shared experts needs the same number of replicas",
        "Make the shared ranks a multiple of the shared experts.",
    ),
    experts_per_rank,
    not_of_buffer(
        Rule(
            "num_experts",
            f"experts per rank times ranks at most {MAX_STATUS_ENTRIES}",
            lambda c: c.num_local_experts * c.num_ranks <= MAX_STATUS_ENTRIES,
            lambda c: (
                f"experts per rank times ranks ({c.num_local_experts} * {c.num_ranks}) must be at most "
                f"{MAX_STATUS_ENTRIES}: the status area of a zone is {STATE_COMBINE_OFFSET // 1024} KB"
            ),
            "Use fewer experts per rank.",
        )
    ),
)


# Rules on what two tensor-parallel ranks are given. The limits of v4 have no such pairs.
_PAIR_RULES: tuple[CallRule, ...] = (
    Rule(
        "tp_rank_id",
        "0 or 1 where tp_world_size is 2; not looked at otherwise",
        lambda c, call: call.tp_world_size != 2 or call.tp_rank_id in (0, 1),
        "it is this rank's place among two",
        "Pass 0 or 1.",
    ),
    Rule(
        "tp_group",
        f"1 to {MAX_GROUP_NAME} characters where tp_world_size is 2; not looked at otherwise",
        lambda c, call: call.tp_world_size != 2 or 1 <= len(call.tp_group) <= MAX_GROUP_NAME,
        f"tp_world_size 2 needs a group, whose name has 1 to {MAX_GROUP_NAME} characters",
        "Pass torch_npu_ops.group_name(group).",
        code=INVALID_ARGUMENT,
    ),
    Rule(
        "tp_group",
        "another group than group_ep where tp_world_size is 2",
        lambda c, call: call.tp_world_size != 2 or call.tp_group != call.group,
        "it must not be the expert-parallel group",
        "Make a group of the two tensor-parallel ranks.",
        code=INVALID_ARGUMENT,
    ),
    Rule(
        "tp_world_size",
        "2 only with one routed expert per rank",
        lambda c, call: call.tp_world_size != 2 or (c.num_local_experts == 1 and c.experts_per_rank is None),
        lambda c, call: f"2 needs one routed expert per rank, and there are {c.num_local_experts}",
        "Use as many routed experts as ranks that hold them, or no tensor parallelism.",
    ),
    Rule(
        "tp_world_size",
        "2 only in a group inside one server",
        lambda c, call: call.tp_world_size != 2 or c.topology.num_servers == 1,
        lambda c, call: (
            "tensor-parallel ranks write to each other's memory, and nothing says which share a server "
            f"in a group on several, of {list(c.topology.sizes)} ranks"
        ),
        "Use a group inside one server, or no tensor parallelism.",
    ),
    Rule(
        "comm_quant_mode",
        "0 where tp_world_size is 2",
        lambda c, call: call.tp_world_size != 2 or call.comm_quant_mode == 0,
        "tensor-parallel ranks add results before they are sent, as they are",
        "Leave it out.",
    ),
)

# Tensor parallelism, in both versions. Without it group_tp and tp_rank_id are not looked at: serving
# frameworks pass group_ep's name and a rank of their own there.
TP_RULES: tuple[CallRule, ...] = (
    only(
        "tp_world_size",
        (0, 1, 2),
        "A3 takes 0 or 1 (none) or 2",
        "Use a tensor-parallel group of two, or none.",
        limit="0 to 2; 0 and 1 mean none",
    ),
    only(
        "tp_world_size",
        (0, 1),
        "the limits of v4 have no tensor parallelism",
        "Pass 0, or choose generation 'v3' or none.",
        limit="0 or 1, which mean none",
    ).of(ONLY_V4),
    *(rule.of(UNTIL_V3) for rule in _PAIR_RULES),
)

_CALL: tuple[CallRule, ...] = (
    Rule(
        "num_ranks",
        "at least 2 for torch_npu's functions",
        lambda c, call: call.is_of_buffer or c.num_ranks > 1,
        lambda c, call: f"{c.product} takes 2 to 768",
        "Use a group of at least two ranks; on one rank there is nothing to send.",
    ),
    *TP_RULES,
    Rule[[Config, Call]](
        "elastic_info",
        "only with tp_world_size 0 or 1",
        lambda c, call: not (call.has_elastic_info and call.tp_world_size == 2),
        "a group can lose ranks only without tensor parallelism",
        "Pass None, or tp_world_size=0.",
        value="given",
    ).of(UNTIL_V3),
    absent(
        "elastic_info", "the limits of v4 have none on A3", "Pass None, or choose generation 'v3' or none."
    ).of(ONLY_V4),
    scales_only_quantized,
    Rule(
        "shared_expert_x",
        "only with shared_expert_rank_num 0",
        lambda c, call: not call.has_shared_expert_x or c.num_shared_ranks == 0,
        lambda c, call: f"{c.num_shared_ranks} ranks compute the shared experts already",
        "Pass None, or use no shared ranks.",
        value="given",
    ),
    mask_dimensions,
)


def rules(schemes: Mapping[str, tuple[str, str] | None]) -> RuleSet:
    """The rules of V2.

    Args:
        schemes: those that there are by name, the default first: of one without shared experts the rule and
            the remedy of the error.
    """
    default, *others, last = schemes
    refused = {name: said for name, said in schemes.items() if said}
    # Before all that counts ranks without those of shared experts.
    no_shared_experts = Rule[[Config]](
        "num_shared_experts",
        f"0 with {', '.join(refused)}",
        lambda c: c.num_shared_experts <= 0 or c.scheme not in refused,
        lambda c: refused[c.scheme][0],
        lambda c: refused[c.scheme][1],
    )
    comm_alg = Rule[[Config]](
        "comm_alg",
        f'"", {", ".join([f"{default} (the default)", *others])} or {last}',
        lambda c: c.scheme in schemes,
        lambda c: f"{c.product} has no such scheme",
        use_one([default, *others, last]),
    )
    own = (comm_alg, no_shared_experts) if refused else (comm_alg,)
    return RuleSet("A3, V2", config=(*own, *_SIZES), call=_CALL)
