"""Rules that every product, generation and scheme has (docs/limits.md, "Limits")."""

from __future__ import annotations

from collections.abc import Callable

from moe_triton.core.config import Config
from moe_triton.core.errors import INVALID_ARGUMENT, NULL_ARGUMENT
from moe_triton.core.group_sizes import RANKS_PER_SERVER, REMEDY
from moe_triton.core.topology import fits
from moe_triton.limits.call import Call
from moe_triton.limits.rule import EITHER, CallRule, Rule, RuleSet, absent, between, only, value_of

PRODUCTS = ("A2", "A3")
GENERATIONS = EITHER
MIN_HIDDEN_RELAXED, HIDDEN_STEP = 32, 32
MAX_GROUP_NAME = 127
# What an `EPBuffer` takes of every product and scheme.
MAX_TOPK_OF_BUFFER, MAX_EXPERTS_OF_BUFFER = 32, 2048
MAX_IDS = 2**31 - 1
EXPERTS_PER_RANK = "experts_per_rank"

# Quantisation modes of the original that need Ascend 950's formats (docs/operators.md, "Quantisation").
MODES_OF_950 = {1: "static", 3: "fp8 in groups of 128", 4: "MX", 5: "MX"}

hidden_step = Rule[[Config]](
    "hidden",
    f"a multiple of {HIDDEN_STEP}",
    lambda c: c.hidden % HIDDEN_STEP == 0,
    f"it must be a multiple of {HIDDEN_STEP}: rows move in 32-byte blocks",
    "Pad the hidden dimension.",
)

topk = between("num_topk", 1, 16, "Send a token to fewer experts.", buffer_high=MAX_TOPK_OF_BUFFER)

topk_of_experts = Rule[[Config]](
    "num_topk",
    "at most the number of experts, special ones included",
    lambda c: c.num_topk <= c.num_experts + c.num_special_experts,
    lambda c: f"a token's experts are distinct and there are {c.num_experts + c.num_special_experts}",
    "Send a token to fewer experts, or use more experts.",
)

experts_per_rank = Rule[[Config]](
    "num_experts",
    "a multiple of the ranks that hold routed experts",
    lambda c: c.experts_per_rank is not None or c.num_experts % c.num_moe_ranks == 0,
    lambda c: f"it must be a multiple of the {c.num_moe_ranks} ranks that hold routed experts",
    lambda c: (
        "Change the number of routed experts, the group's size or the number of shared ranks"
        + (", or pass experts_per_rank." if c.is_of_buffer else ".")
    ),
    of_buffer="the same, or experts_per_rank says which rank has how many",
)

# Without quantisation no step makes the rows that smooth scales are multiplied into.
scales_only_quantized = Rule[[Config, Call]](
    "smooth_scales",
    "only with quant_mode 2",
    lambda c, call: not call.has_smooth_scales or call.quant_mode != 0,
    "only quantised rows are smoothed, and quant_mode is 0",
    "Use quant_mode=2, or no scales.",
    value="given",
)

mask_dimensions = Rule[[Config, Call]](
    "active_mask",
    "1-D (BS,) or 2-D (BS, K)",
    lambda c, call: not call.has_active_mask or call.mask_dims in (1, 2),
    "it must have 1, by token, or 2, by token and expert",
    "Reshape it.",
    value=lambda c, call: f"of {call.mask_dims} dimensions",
)


def _two_dimensional(argument: str, dims: Callable[[Call], int], applies: Callable[[Call], bool]) -> CallRule:
    return Rule(
        argument,
        "2-D",
        lambda c, call: not applies(call) or dims(call) == 2,
        "it must have 2",
        "Reshape it.",
        value=lambda c, call: f"of {dims(call)} dimensions",
    )


def _quantization(argument: str, meaning: str, remedy: str) -> CallRule:
    def rule(c: Config, call: Call) -> str:
        mode = getattr(call, argument)
        if mode in MODES_OF_950:
            return f"mode {mode} ({MODES_OF_950[mode]}) exists only on Ascend 950"
        return f"{c.product} takes 0 (none) or 2 ({meaning})"

    return Rule(
        argument,
        f"0 (none) or 2 ({meaning}); 1, 3, 4 and 5 exist only on Ascend 950",
        lambda c, call: getattr(call, argument) in (0, 2),
        rule,
        remedy,
    )


def _not_negative(argument: str) -> CallRule:
    return Rule(
        argument,
        "0 or more",
        lambda c, call: value_of(argument, call) >= 0,
        "it counts experts",
        "Pass 0 where there are none.",
    )


def _needed_by(argument: str, kind: str, has: str) -> CallRule:
    """What combine must be given where there are special experts of a kind."""
    count = f"num_{kind}_experts"
    return Rule(
        argument,
        f"combine needs it where {kind}_expert_num > 0",
        lambda c, call: not call.is_combine or value_of(count, call) == 0 or getattr(call, has),
        lambda c, call: f"there are {value_of(count, call)} {kind} experts, which combine computes from it",
        f"Pass it, or have no {kind} experts.",
        value="None",
        code=NULL_ARGUMENT,
    )


_LEAVE_OUT = "Leave it out."
_RESERVED = "the original reserves it and computes nothing with it"
_OF_950 = "only Ascend 950 has formats to choose from"


def _numbers_of_experts(c: Config) -> object:
    return list(c.experts_per_rank or ())


COMMON = RuleSet(
    "Every product",
    config=(
        only("product", PRODUCTS, f"it must be one of {list(PRODUCTS)}", "Name the product."),
        only(
            "version", (1, 2), "it must be 1, or 2 for the operators whose names end in _v2", "Use version=2."
        ),
        only(
            "generation",
            GENERATIONS,
            f"it must be one of {list(GENERATIONS)}",
            "Use generation=None for what either of the published limits accepts.",
            limit="None, v3 or v4",
        ),
        Rule(
            RANKS_PER_SERVER,
            "None; one number, with what is left of the group in the last server; or one for each server",
            lambda c: fits(c.num_ranks, c.ranks_per_server),
            lambda c: (
                f"the servers have the {c.num_ranks} ranks of the group between them, each of them some"
            ),
            REMEDY,
        ),
        Rule(
            EXPERTS_PER_RANK,
            "None, or a number for each rank",
            lambda c: c.experts_per_rank is None or len(c.experts_per_rank) == c.num_ranks,
            lambda c: f"the group has {c.num_ranks} ranks, and it has a number for each",
            "Pass one for each rank of the group, 0 for those of shared experts.",
            value=_numbers_of_experts,
        ),
        Rule(
            EXPERTS_PER_RANK,
            "0 for ranks of shared experts",
            lambda c: c.experts_per_rank is None or not any(c.experts_per_rank[: max(0, c.num_shared_ranks)]),
            lambda c: f"the first {c.num_shared_ranks} ranks hold shared experts and nothing else",
            "Pass 0 for each of them.",
            value=_numbers_of_experts,
        ),
        Rule(
            EXPERTS_PER_RANK,
            "adding up to the number of routed experts",
            lambda c: c.experts_per_rank is None or sum(c.experts_per_rank) == c.num_experts,
            lambda c: (
                f"these are {sum(c.experts_per_rank or ())} routed experts, and there are {c.num_experts}"
            ),
            "Have it add up to the number of routed experts.",
            value=_numbers_of_experts,
        ),
    ),
    call=(
        Rule(
            "group",
            f"1 to {MAX_GROUP_NAME} characters",
            lambda c, call: 1 <= len(call.group) <= MAX_GROUP_NAME,
            f"a group's name has 1 to {MAX_GROUP_NAME} characters",
            "Pass torch_npu_ops.group_name(group).",
            code=NULL_ARGUMENT,
        ),
        _two_dimensional("x", lambda call: call.x_dims, lambda call: not call.is_combine),
        _two_dimensional("y", lambda call: call.x_dims, lambda call: call.is_combine),
        _two_dimensional("topk_idx", lambda call: call.ids_dims, lambda call: True),
        Rule(
            "rank",
            "0 to ep_world_size - 1",
            lambda c, call: 0 <= call.rank < c.num_ranks,
            lambda c, call: f"ranks are 0 to {c.num_ranks - 1}",
            "Pass this rank's place in the group.",
        ),
        only("expert_shard_type", (0,), "ranks of shared experts come first, which is 0", "Pass 0."),
        only(
            "expert_token_nums_type",
            (0, 1),
            "it must be 0 (cumulative) or 1 (counts)",
            "Pass 1 for counts.",
            limit="0 (cumulative) or 1 (counts)",
        ),
        Rule(
            "global_bs",
            "0, or a multiple of ep_world_size that is at least BS * ep_world_size",
            lambda c, call: (
                call.global_bs == 0
                or (call.global_bs % c.num_ranks == 0 and call.global_bs >= call.num_tokens * c.num_ranks)
            ),
            lambda c, call: (
                f"it must be 0, or a multiple of the {c.num_ranks} ranks and at least "
                f"{call.num_tokens} * {c.num_ranks} = {call.num_tokens * c.num_ranks}"
            ),
            "Pass the largest rank's tokens times the number of ranks, the same on every rank.",
        ),
        Rule(
            "num_tokens",
            "0 to the tokens per rank that the group was made for",
            lambda c, call: 0 <= call.num_tokens <= c.num_max_tokens_per_rank,
            lambda c, call: f"a call takes 0 to {c.num_max_tokens_per_rank} tokens here",
            "Split the batch.",
        ),
        _quantization("quant_mode", "int8, dynamic per token", "Use quant_mode=2 for int8."),
        _quantization("comm_quant_mode", "int8 in blocks of 8", "Use comm_quant_mode=2 for int8."),
        only("out_dtype", (0,), "it must be 0: the result has the dtype of the input", "Pass 0."),
        only("group_list_type", (0,), "the original reserves it", "Pass 0."),
        only(
            "comm_type",
            (0,),
            "only 0 (as the scheme does) exists here; 2 exists only on Ascend 950",
            "Pass 0.",
            limit="0; 2 exists only on Ascend 950",
        ),
        *(absent(name, _RESERVED, _LEAVE_OUT) for name in ("activation_scale", "weight_scale", "group_list")),
        *(
            absent(name, _OF_950, _LEAVE_OUT, code=INVALID_ARGUMENT)
            for name in ("y_dtype", "x_dtype", "scales_dtype")
        ),
        *map(_not_negative, ("num_zero_experts", "num_copy_experts", "num_const_experts")),
        Rule(
            "num_experts",
            "with the special experts below 2^31 - 1",
            lambda c, call: c.num_experts + call.num_special_experts < MAX_IDS,
            lambda c, call: f"with {call.num_special_experts} special experts the ids do not fit int32",
            "Use fewer special experts.",
        ),
        _needed_by("ori_x", "copy", "has_ori_x"),
        _needed_by("ori_x", "const", "has_ori_x"),
        _needed_by("const_expert_alpha_1, const_expert_alpha_2 or const_expert_v", "const", "has_const_args"),
        Rule(
            "active_mask",
            "not with global_bs > BS * ep_world_size",
            lambda c, call: not (call.has_active_mask and call.has_variable_batch(c.num_ranks)),
            lambda c, call: (
                f"global_bs {call.global_bs} says that ranks have different numbers of tokens, "
                "and then all of them are valid"
            ),
            "Pass the mask with global_bs=0, or only the valid tokens without a mask.",
            value="given",
        ),
    ),
)
