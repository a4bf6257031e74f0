"""Rules of A2, both generations, and of its two schemes."""

from __future__ import annotations

from moe_triton.config import Config
from moe_triton.errors import NULL_ARGUMENT
from moe_triton.limits.common import HIDDEN_STEP, experts_per_rank, hidden_step, topk_of_experts
from moe_triton.limits.rule import Rule, RuleSet, absent, between, one_of

SCHEMES = ("fullmesh", "hierarchy")
FULLMESH_RANKS = (16, 32, 64, 128, 192, 256)
HIERARCHY_RANKS = (16, 32, 64)
MAX_HIDDEN, MAX_HIDDEN_HIERARCHY = 7168, 10240
MAX_LOCAL_EXPERTS = 24
RANKS_REMEDY = "Use one of these group sizes, or relaxed=True for tests."

# Halves that a routing weight cannot be given to.
WITHOUT_EXPERT_SCALES = ("dispatch_teardown", "combine_setup")


def _max_hidden(c: Config) -> int:
    return MAX_HIDDEN_HIERARCHY if c.scheme == "hierarchy" and c.version == 2 else MAX_HIDDEN


A2 = RuleSet(
    "A2",
    config=(
        Rule(
            "comm_alg",
            '"", fullmesh or hierarchy; "" is hierarchy if HCCL_INTRA_PCIE_ENABLE=1 and '
            "HCCL_INTRA_ROCE_ENABLE=0, else fullmesh",
            lambda c: c.scheme in SCHEMES,
            lambda c: repr(c.scheme),
            lambda c: f"{c.product} has {list(SCHEMES)}",
            "Use comm_alg='hierarchy' or 'fullmesh'.",
        ),
        between("num_max_tokens_per_rank", 1, 256, "Split larger batches into several dispatches."),
        Rule(
            "hidden",
            f"{HIDDEN_STEP} to {MAX_HIDDEN}; V2 with hierarchy to {MAX_HIDDEN_HIERARCHY}",
            lambda c: HIDDEN_STEP <= c.hidden <= _max_hidden(c),
            lambda c: c.hidden,
            lambda c: f"{c.product} takes {HIDDEN_STEP} to {_max_hidden(c)} here",
            "Use a smaller hidden dimension.",
        ),
        hidden_step,
        between("num_topk", 1, 16, "Send a token to fewer experts."),
        between("num_experts", 1, 512, "Use fewer routed experts."),
        topk_of_experts,
        between("num_shared_experts", 0, 0, "A2 has no ranks of shared experts: compute them on every rank."),
        between("num_shared_ranks", 0, 0, "A2 has no ranks of shared experts: compute them on every rank."),
    ),
    call=(
        Rule(
            "tp_world_size",
            "0 or 1, which mean none",
            lambda c, call: call.tp_world_size in (0, 1),
            lambda c, call: call.tp_world_size,
            lambda c, call: f"{c.product} has no tensor parallelism",
            "Pass 0.",
        ),
        absent("elastic_info", lambda call: call.has_elastic_info, "A2 takes none", "Pass None."),
        absent(
            "shared_expert_x",
            lambda call: call.has_shared_expert_x,
            "A2 takes no shared experts",
            "Add it to the result.",
        ),
        Rule(
            "const_expert_num",
            "0",
            lambda c, call: call.num_const == 0,
            lambda c, call: call.num_const,
            lambda c, call: f"{c.product} has no constant experts",
            "Pass 0.",
        ),
    ),
)

FULLMESH = RuleSet(
    "A2, fullmesh",
    config=(
        one_of("num_ranks", FULLMESH_RANKS, RANKS_REMEDY, relaxed_low=2),
        experts_per_rank,
        Rule(
            "num_experts",
            f"at most {MAX_LOCAL_EXPERTS} per rank",
            lambda c: c.num_local_experts <= MAX_LOCAL_EXPERTS,
            lambda c: c.num_experts,
            lambda c: (
                f"a rank holds at most {MAX_LOCAL_EXPERTS} experts, and it would hold {c.num_local_experts}"
            ),
            "Use more ranks, fewer experts, or hierarchy.",
        ),
    ),
    call=(
        Rule(
            "x_active_mask",
            "1-D (BS,)",
            lambda c, call: not call.has_mask or call.mask_dims == 1,
            lambda c, call: f"of {call.mask_dims} dimensions",
            lambda c, call: "it must have 1: A2 masks whole tokens",
            "Use ids of -1 for single experts.",
        ),
        Rule(
            "comm_quant_mode",
            "0",
            lambda c, call: call.comm_quant_mode == 0,
            lambda c, call: call.comm_quant_mode,
            lambda c, call: "A2 quantises results with hierarchy only",
            "Pass 0, or use hierarchy.",
        ),
    ),
)

HIERARCHY = RuleSet(
    "A2, hierarchy",
    config=(
        one_of("num_ranks", HIERARCHY_RANKS, RANKS_REMEDY, relaxed_low=2),
        experts_per_rank,
        Rule(
            "num_special_experts",
            "0",
            lambda c: c.num_special_experts == 0,
            lambda c: c.num_special_experts,
            lambda c: "hierarchy has no special experts",
            "Use fullmesh.",
        ),
    ),
    call=(
        Rule(
            "expert_scales",
            "needed",
            lambda c, call: call.has_expert_scales or call.operator in WITHOUT_EXPERT_SCALES,
            lambda c, call: None,
            lambda c, call: "hierarchy sums inside a server, by weight",
            "Pass the routing weights, or use fullmesh.",
            code=NULL_ARGUMENT,
        ),
        absent("scales", lambda call: call.has_scales, "hierarchy takes none", "Pass None, or use fullmesh."),
        absent(
            "x_active_mask", lambda call: call.has_mask, "hierarchy takes none", "Pass None, or use fullmesh."
        ),
    ),
)
