"""Rules that every product, generation and scheme has (docs/limits.md, "Limits")."""

from __future__ import annotations

from collections.abc import Callable

from moe_triton.core.config import Config
from moe_triton.core.errors import INVALID_ARGUMENT, NULL_ARGUMENT
from moe_triton.limits.call import Call
from moe_triton.limits.rule import EITHER, CallRule, Rule, RuleSet, absent

PRODUCTS = ("A2", "A3")
VERSIONS = (1, 2)
GENERATIONS = EITHER
MIN_HIDDEN_RELAXED, HIDDEN_STEP = 32, 32
MAX_GROUP_NAME = 127
MAX_IDS = 2**31 - 1

# Quantisation modes of the original that need Ascend 950's formats (docs/operators.md, "Quantisation").
MODES_OF_950 = {1: "static", 3: "fp8 in groups of 128", 4: "MX", 5: "MX"}

hidden_step = Rule[[Config]](
    "hidden",
    f"a multiple of {HIDDEN_STEP}",
    lambda c: c.hidden % HIDDEN_STEP == 0,
    f"it must be a multiple of {HIDDEN_STEP}: rows move in 32-byte blocks",
    "Pad the hidden dimension.",
)

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
    lambda c: c.num_experts % c.num_moe_ranks == 0,
    lambda c: f"it must be a multiple of the {c.num_moe_ranks} ranks that hold routed experts",
    "Change the number of routed experts, the group's size or the number of shared ranks.",
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


def _fixed(
    argument: str, choices: tuple[int, ...], why: str, remedy: str, *, field: str = "", limit: str = ""
) -> CallRule:
    """A number of a call that must be one of a few."""
    name = field or argument
    return Rule(
        argument,
        limit or " or ".join(str(choice) for choice in choices),
        lambda c, call: getattr(call, name) in choices,
        why,
        remedy,
        value=lambda c, call: getattr(call, name),
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


def _not_negative(argument: str, field: str) -> CallRule:
    return Rule(
        argument,
        "0 or more",
        lambda c, call: getattr(call, field) >= 0,
        "it counts experts",
        "Pass 0 where there are none.",
        value=lambda c, call: getattr(call, field),
    )


def _needed_by(argument: str, count: str, field: str, has: str) -> CallRule:
    """What combine must be given where there are special experts of a kind."""
    return Rule(
        argument,
        f"combine needs it where {count} > 0",
        lambda c, call: not call.is_combine or getattr(call, field) == 0 or getattr(call, has),
        lambda c, call: f"{count} is {getattr(call, field)} and combine computes these experts from it",
        f"Pass it, or {count}=0.",
        value="None",
        code=NULL_ARGUMENT,
    )


def _of_950(argument: str, field: str) -> CallRule:
    return absent(
        argument,
        lambda call: bool(getattr(call, field)),
        "only Ascend 950 has formats to choose from",
        "Leave it out.",
        code=INVALID_ARGUMENT,
    )


def _of_fused_experts(argument: str, field: str) -> CallRule:
    return absent(
        argument,
        lambda call: bool(getattr(call, field)),
        "the original reserves it and computes nothing with it",
        "Leave it out.",
    )


COMMON = RuleSet(
    "Every product",
    config=(
        Rule(
            "product",
            "A2 or A3",
            lambda c: c.product in PRODUCTS,
            f"it must be one of {list(PRODUCTS)}",
            "Name the product whose limits shall apply.",
        ),
        Rule(
            "version",
            "1 or 2",
            lambda c: c.version in VERSIONS,
            "it must be 1, or 2 for the operators whose names end in _v2",
            "Use version=2.",
        ),
        Rule(
            "generation",
            "None, v3 or v4",
            lambda c: c.generation in GENERATIONS,
            f"it must be one of {list(GENERATIONS)}",
            "Use generation=None for what either of the published limits accepts.",
        ),
    ),
    call=(
        Rule(
            "group_ep",
            f"1 to {MAX_GROUP_NAME} characters",
            lambda c, call: 1 <= len(call.group_ep) <= MAX_GROUP_NAME,
            f"a group's name has 1 to {MAX_GROUP_NAME} characters",
            "Pass torch_npu_ops.group_name(group).",
            code=NULL_ARGUMENT,
        ),
        _two_dimensional("x", lambda call: call.x_dims, lambda call: not call.is_combine),
        _two_dimensional("expand_x", lambda call: call.x_dims, lambda call: call.is_combine),
        _two_dimensional("expert_ids", lambda call: call.ids_dims, lambda call: True),
        Rule(
            "ep_rank_id",
            "0 to ep_world_size - 1",
            lambda c, call: 0 <= call.rank < c.num_ranks,
            lambda c, call: f"ranks are 0 to {c.num_ranks - 1}",
            "Pass this rank's place in the group.",
        ),
        _fixed("expert_shard_type", (0,), "ranks of shared experts come first, which is 0", "Pass 0."),
        _fixed(
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
                or (call.global_bs % c.num_ranks == 0 and call.global_bs >= call.batch * c.num_ranks)
            ),
            lambda c, call: (
                f"it must be 0, or a multiple of the {c.num_ranks} ranks and at least "
                f"{call.batch} * {c.num_ranks} = {call.batch * c.num_ranks}"
            ),
            "Pass the largest rank's tokens times the number of ranks, the same on every rank.",
        ),
        Rule(
            "expert_ids.shape[0]",
            "0 to the tokens per rank that the group was made for",
            lambda c, call: 0 <= call.batch <= c.num_max_tokens_per_rank,
            lambda c, call: f"a call takes 0 to {c.num_max_tokens_per_rank} tokens here",
            "Split the batch.",
        ),
        _quantization("quant_mode", "int8, dynamic per token", "Use quant_mode=2 for int8."),
        _quantization("comm_quant_mode", "int8 in blocks of 8", "Use comm_quant_mode=2 for int8."),
        _fixed("out_dtype", (0,), "it must be 0: the result has the dtype of the input", "Pass 0."),
        _fixed("group_list_type", (0,), "the original reserves it", "Pass 0."),
        _fixed(
            "comm_type",
            (0,),
            "only 0 (as the scheme does) exists here; 2 exists only on Ascend 950",
            "Pass 0.",
            limit="0; 2 exists only on Ascend 950",
        ),
        _of_fused_experts("activation_scale", "has_activation_scale"),
        _of_fused_experts("weight_scale", "has_weight_scale"),
        _of_fused_experts("group_list", "has_group_list"),
        _of_950("y_dtype", "has_y_dtype"),
        _of_950("x_dtype", "has_x_dtype"),
        _of_950("scales_dtype", "has_scales_dtype"),
        _not_negative("zero_expert_num", "num_zero"),
        _not_negative("copy_expert_num", "num_copy"),
        _not_negative("const_expert_num", "num_const"),
        Rule(
            "moe_expert_num",
            "with the special experts below 2^31 - 1",
            lambda c, call: c.num_experts + call.num_zero + call.num_copy + call.num_const < MAX_IDS,
            lambda c, call: (
                f"with {call.num_zero + call.num_copy + call.num_const} special experts "
                "the ids do not fit int32"
            ),
            "Use fewer special experts.",
        ),
        _needed_by("ori_x", "copy_expert_num", "num_copy", "has_ori_x"),
        _needed_by("ori_x", "const_expert_num", "num_const", "has_ori_x"),
        _needed_by(
            "const_expert_alpha_1, const_expert_alpha_2 or const_expert_v",
            "const_expert_num",
            "num_const",
            "has_const_args",
        ),
        Rule(
            "x_active_mask",
            "not with global_bs > BS * ep_world_size",
            lambda c, call: not (call.has_mask and call.has_variable_batch(c.num_ranks)),
            lambda c, call: (
                f"global_bs {call.global_bs} says that ranks have different numbers of tokens, "
                "and then all of them are valid"
            ),
            "Pass the mask with global_bs=0, or only the valid tokens without a mask.",
            value="given",
        ),
    ),
)
