"""Every rule on the other arguments of a call, where it just holds and where it just does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_triton.core.config import Config
from moe_triton.core.errors import INVALID_ARGUMENT, NULL_ARGUMENT, ArgumentError
from moe_triton.limits.rule import CallRule
from moe_triton.schemes.rules import call_rules_for, check_call, check_rules
from tests.limits_cases import (
    A2,
    A2_V1,
    A3,
    A3_HIERARCHY,
    CALL,
    FAMILIES,
    HIERARCHY,
    HIERARCHY_V1,
    INBAND,
    V1,
    VARIANTS,
    CallCase,
    argument,
    arguments,
    call_of,
    check_message,
    family_of,
    in_all_generations,
    name_of,
    needed,
    refused,
    variant_of,
)

LONG, TOO_LONG = "x" * 127, "x" * 128
PAIR = {"tp_world_size": 2, "tp_group": "tp"}
QUANTIZES_RESULTS = (A3, INBAND, V1, HIERARCHY, HIERARCHY_V1, A3_HIERARCHY)


def is_inband_of_v3(base: Config) -> bool:
    """Flags in band in the limits of v3, which have no masks there and the same batch on every rank."""
    return family_of(base) == INBAND and base.generation == "v3"


def is_restricted(base: Config) -> bool:
    """Whether every rank has the same batch."""
    return is_inband_of_v3(base) or family_of(base) == A3_HIERARCHY


def takes_mask(base: Config) -> bool:
    return family_of(base) != V1 and not is_inband_of_v3(base)


def has_pairs(base: Config) -> bool:
    """Whether two tensor-parallel ranks are possible."""
    return family_of(base) in (A3, V1) and base.generation != "v4"


def common_calls(base: Config) -> list[CallCase]:
    """Rules that every variant has. Where it could not take the passing side, nothing stands in its place."""
    ep = base.num_ranks
    total = 64 * ep
    quantized = 2 if family_of(base) in QUANTIZES_RESULTS else 0
    const = {"operator": "combine", "num_const_experts": 1} if base.product == "A3" else {}
    return [
        argument("group", "x", "", base, code=NULL_ARGUMENT),
        argument("group", LONG, TOO_LONG, base, code=NULL_ARGUMENT),
        argument("x_dims", 2, 3, base, shown="x is of 3 dimensions"),
        argument("x_dims", 2, 1, base, shown="y is of 1 dimensions", operator="combine"),
        argument("ids_dims", 2, 1, base, shown="topk_idx is of 1 dimensions"),
        argument("ids_dims", 2, 3, base, shown="topk_idx is of 3 dimensions", operator="combine"),
        argument("rank", ep - 1, ep, base, shown=f"rank is {ep}"),
        argument("rank", 0, -1, base, shown="rank is -1"),
        argument("expert_shard_type", 0, 1, base),
        argument("expert_token_nums_type", 1, 2, base),
        argument("expert_token_nums_type", 0, -1, base),
        argument("global_bs", total, total - 1, base),
        argument("global_bs", total, total - ep, base),
        argument("global_bs", 0, -ep, base),
        argument("global_bs", total + (0 if is_restricted(base) else ep), total + 4, base),
        argument("num_tokens", 0, -1, base),
        argument("num_tokens", 64, 65, base),
        *(argument("quant_mode", 2, mode, base) for mode in (1, 3, 4, 5, 6)),
        argument("quant_mode", 0, -1, base),
        *(argument("comm_quant_mode", quantized, mode, base) for mode in (1, 3, 4, 5, 6)),
        argument("comm_quant_mode", 0, -1, base),
        argument("out_dtype", 0, 1, base),
        argument("group_list_type", 0, 1, base),
        argument("comm_type", 0, 2, base),
        *(refused(name, base) for name in ("activation_scale", "weight_scale", "group_list")),
        *(refused(name, base, INVALID_ARGUMENT) for name in ("y_dtype", "x_dtype", "scales_dtype")),
        *(argument(f"num_{kind}_experts", 0, -1, base) for kind in ("zero", "copy", "const")),
        argument("num_zero_experts", 2**31 - 66, 2**31 - 65, base, shown="num_experts is 64"),
        needed("ori_x", "has_ori_x", base, operator="combine", num_copy_experts=1),
        arguments(
            "ori_x is None",
            {"has_ori_x": True, "has_const_args": True, **const},
            {"has_const_args": True, "operator": "combine", "num_const_experts": 1},
            base,
            NULL_ARGUMENT,
        ),
        arguments(
            "const_expert_alpha_1, const_expert_alpha_2 or const_expert_v is None",
            {"has_ori_x": True, "has_const_args": True, **const},
            {"has_ori_x": True, "operator": "combine_teardown", "num_const_experts": 1},
            base,
            NULL_ARGUMENT,
        ),
        arguments(
            "active_mask is given",
            {"has_active_mask": takes_mask(base), "global_bs": total},
            {"has_active_mask": True, "global_bs": total + ep},
            base,
        ),
    ]


def tensor_parallel_cases(base: Config) -> list[CallCase]:
    """In both versions of A3. Where there are no pairs, nothing stands in their place."""
    ranks = base.num_ranks
    one_expert, two_experts = replace(base, num_experts=ranks), replace(base, num_experts=2 * ranks)
    pair = PAIR if has_pairs(base) else {}
    cases = [
        arguments("tp_world_size is 3", pair, {"tp_world_size": 3, "tp_group": "tp"}, one_expert),
        argument("tp_world_size", 0, -1, one_expert),
        argument("tp_world_size", 1, 2, two_experts, tp_group="tp"),
    ]
    if base.generation == "v4":
        return [*cases, argument("tp_world_size", 1, 2, one_expert, tp_group="tp")]
    several = replace(one_expert, ranks_per_server=4)
    if family_of(base) == A3_HIERARCHY:
        several = replace(base, num_ranks=32, num_experts=32)
    second = {**PAIR, "tp_rank_id": 1} if pair else {}
    long = {**PAIR, "tp_group": LONG} if pair else {}
    return [
        *cases,
        arguments("tp_rank_id is 2", second, {**PAIR, "tp_rank_id": 2}, one_expert),
        arguments("tp_rank_id is -1", pair, {**PAIR, "tp_rank_id": -1}, one_expert),
        arguments("tp_group is ''", pair, {"tp_world_size": 2}, one_expert, INVALID_ARGUMENT),
        arguments(
            f"tp_group is {TOO_LONG!r}", long, {**PAIR, "tp_group": TOO_LONG}, one_expert, INVALID_ARGUMENT
        ),
        arguments("tp_group is 'ep'", pair, {**PAIR, "tp_group": "ep"}, one_expert, INVALID_ARGUMENT),
        arguments("comm_quant_mode is 2", pair, {**PAIR, "comm_quant_mode": 2}, one_expert),
        arguments("tp_world_size is 2", {"tp_world_size": 1}, PAIR, several),
    ]


def a3_calls(base: Config) -> list[CallCase]:
    """What both schemes of V2 have in common."""
    one_expert = replace(base, num_experts=base.num_ranks)
    takes_elastic = family_of(base) == A3 and base.generation != "v4"
    # Without v4 they are refused together with a pair, and in v4 alone.
    pair = {} if base.generation == "v4" else PAIR
    return [
        argument(
            "is_of_buffer",
            True,
            False,
            replace(base, num_ranks=1, num_experts=16, relaxed=True),
            shown="num_ranks is 1",
            global_bs=0,
        ),
        arguments(
            "elastic_info is given",
            {"has_elastic_info": takes_elastic},
            {**pair, "has_elastic_info": True},
            one_expert,
        ),
        arguments(
            "smooth_scales is given",
            {"quant_mode": 2, "has_smooth_scales": family_of(base) != A3_HIERARCHY},
            {"quant_mode": 0, "has_smooth_scales": True},
            base,
        ),
        *mask_calls(base),
    ]


def shared_rank_calls(base: Config) -> list[CallCase]:
    """Of both schemes that have ranks of shared experts."""
    shared = replace(base, num_shared_experts=1, num_shared_ranks=4)
    operators = "combine", "combine_add_rms_norm"
    return [refused("shared_expert_x", shared, operator=operator) for operator in operators]


def mask_calls(base: Config) -> list[CallCase]:
    """By token, or by token and expert, which A3's hierarchy does not take."""
    mask = {"has_active_mask": takes_mask(base)}
    pairs = ((1, 0), (1 if family_of(base) == A3_HIERARCHY else 2, 3))
    return [
        arguments(
            f"active_mask is of {bad} dimensions",
            {**mask, "mask_dims": good},
            {"has_active_mask": True, "mask_dims": bad},
            base,
        )
        for good, bad in pairs
    ]


INBAND_V3 = replace(INBAND, generation="v3")
A3_CALLS = [
    # What fullmesh_v1 takes of all that fullmesh_v2 refuses is on the passing sides of the cases above.
    *(case for base in in_all_generations(A3, INBAND, A3_HIERARCHY) for case in a3_calls(base)),
    *(case for base in in_all_generations(A3, INBAND) for case in shared_rank_calls(base)),
    refused("active_mask", INBAND_V3),
    argument("global_bs", 512, 520, INBAND_V3),
    *(refused("elastic_info", base) for base in in_all_generations(INBAND)),
    *(
        argument("tp_world_size", 1, 2, replace(base, num_experts=8), tp_group="tp")
        for base in in_all_generations(INBAND)
    ),
]


def v1_calls(base: Config) -> list[CallCase]:
    shared = replace(base, num_shared_experts=1, num_shared_ranks=4)
    return [
        refused("active_mask", base),
        refused("shared_expert_x", base, operator="combine"),
        argument("global_bs", 512, 520, shared),
    ]


def a2_calls(base: Config) -> list[CallCase]:
    return [
        argument("tp_world_size", 1, 2, base),
        argument("tp_world_size", 0, -1, base),
        *mask_calls(base),
        refused("elastic_info", base),
        refused("shared_expert_x", base, operator="combine"),
        argument("num_const_experts", 0, 1, base),
        *(a2_v4_calls(base) if base.generation == "v4" else ()),
    ]


def a2_v4_calls(base: Config) -> list[CallCase]:
    return [
        argument("tp_group", "", "ep", base, code=INVALID_ARGUMENT),
        argument(
            "operator",
            "combine",
            "combine_add_rms_norm",
            base,
            shown="combine_add_rms_norm is called",
        ),
    ]


def a2_fullmesh_calls(base: Config) -> list[CallCase]:
    smoothing = argument("quant_mode", 2, 0, base, shown="smooth_scales is given", has_smooth_scales=True)
    return [
        argument("comm_quant_mode", 0, 2, base),
        *([smoothing] if base.version == 2 else ()),  # V1 quantises then
    ]


def hierarchy_calls(base: Config) -> list[CallCase]:
    return [
        needed("topk_weights", "has_topk_weights", base),
        needed("topk_weights", "has_topk_weights", base, operator="combine"),
        refused("smooth_scales", base, quant_mode=2),
    ]


def a3_hierarchy_calls(base: Config) -> list[CallCase]:
    one_expert, ranks = replace(base, num_experts=base.num_ranks), base.num_ranks
    cases = [
        *hierarchy_calls(base),
        argument("mask_dims", 1, 2, base, shown="active_mask is of 2 dimensions", has_active_mask=True),
        argument("global_bs", 64 * ranks, 65 * ranks, base),
        refused("shared_expert_x", base, operator="combine"),
    ]
    if base.generation == "v4":  # whose own rules refuse these
        return cases
    pair = argument("tp_world_size", 1, 2, one_expert, tp_group="tp")
    return [*cases, refused("elastic_info", base), pair]


CASES = [
    *(case for base in VARIANTS for case in common_calls(base)),
    *(
        case
        for base in in_all_generations(A3, INBAND, V1, A3_HIERARCHY)
        for case in tensor_parallel_cases(base)
    ),
    *A3_CALLS,
    *(case for base in in_all_generations(V1) for case in v1_calls(base)),
    *(case for base in in_all_generations(A2, A2_V1, HIERARCHY, HIERARCHY_V1) for case in a2_calls(base)),
    *(case for base in in_all_generations(A2, A2_V1) for case in a2_fullmesh_calls(base)),
    *(case for base in in_all_generations(HIERARCHY, HIERARCHY_V1) for case in hierarchy_calls(base)),
    *(case for base in in_all_generations(A3_HIERARCHY) for case in a3_hierarchy_calls(base)),
]
# Where no rank holds shared experts, nothing asks whether one does.
OUT_OF_REACH = {(A3_HIERARCHY, "shared_expert_x", "only with shared_expert_rank_num 0")}


def broken_rule(case: CallCase) -> CallRule:
    """The rule that a case's failing side breaks first."""
    call = call_of(case, case.fails)
    return next(rule for rule in call_rules_for(case.base, call) if not rule.holds(case.base, call))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_each_argument_at_its_edge(case: CallCase) -> None:
    check_rules(case.base)
    check_call(case.base, call_of(case, case.passes))
    with pytest.raises(ArgumentError) as caught:
        check_call(case.base, call_of(case, case.fails))
    check_message(caught.value, case.shown, case.code)


@pytest.mark.parametrize("base", VARIANTS, ids=variant_of)
def test_every_rule_has_a_case(base: Config) -> None:
    """So that a new rule is not forgotten: each needs a case for each variant that it applies to."""
    covered = {broken_rule(case) for case in CASES if variant_of(case.base) == variant_of(base)}
    rules = call_rules_for(base, replace(CALL, version=base.version))
    missed = {(family_of(base), rule.argument, rule.limit) for rule in rules if rule not in covered}
    assert missed <= OUT_OF_REACH


def test_modes_of_ascend_950_are_named() -> None:
    for mode, name in ((1, "static"), (3, "fp8"), (4, "MX"), (5, "MX")):
        for argument_name in ("quant_mode", "comm_quant_mode"):
            with pytest.raises(ArgumentError, match=rf"mode {mode} \({name}.*\) exists only on Ascend 950"):
                check_call(A3, replace(CALL, **{argument_name: mode}))


@pytest.mark.parametrize("base", [A3, INBAND, V1, A3_HIERARCHY])
def test_results_are_quantised_on_a3_and_in_hierarchy(base: Config) -> None:
    check_call(base, replace(CALL, version=base.version, operator="combine", comm_quant_mode=2))


def test_the_halves_that_take_no_weights_need_none_in_hierarchy() -> None:
    for operator in ("dispatch_teardown", "combine_setup"):
        check_call(HIERARCHY, replace(CALL, operator=operator, has_topk_weights=False))


def test_a_buffer_on_a3_has_masks_of_entries_in_hierarchy_too() -> None:
    check_call(A3_HIERARCHY, replace(CALL, has_active_mask=True, mask_dims=2, is_of_buffer=True))


def test_dispatch_needs_nothing_of_what_combine_computes_special_experts_from() -> None:
    check_call(A3, replace(CALL, num_copy_experts=1, num_const_experts=1))


def test_scales_alone_quantise_in_v1_and_are_taken_without_a_mode() -> None:
    check_call(V1, replace(CALL, version=1, has_smooth_scales=True, quant_mode=0))


@pytest.mark.parametrize("base", in_all_generations(A3, INBAND, V1), ids=variant_of)
@pytest.mark.parametrize("group_tp", ["ep", TOO_LONG, None, 7])
@pytest.mark.parametrize("tp_world_size", [0, 1])
def test_without_a_pair_nobody_looks_at_group_tp(base: Config, group_tp: object, tp_world_size: int) -> None:
    """Serving frameworks pass the name of group_ep there."""
    check_call(base, replace(CALL, version=base.version, tp_group=group_tp, tp_world_size=tp_world_size))


@pytest.mark.parametrize("base", in_all_generations(*FAMILIES), ids=variant_of)
@pytest.mark.parametrize("tp_world_size", [0, 1])
@pytest.mark.parametrize("tp_rank_id", [1, 7, -1])
def test_without_a_pair_nobody_looks_at_tp_rank_id(base: Config, tp_rank_id: int, tp_world_size: int) -> None:
    """Host checks look at it with tp_world_size 2 only, and frameworks pass the rank that they have."""
    check_call(base, replace(CALL, version=base.version, tp_rank_id=tp_rank_id, tp_world_size=tp_world_size))


@pytest.mark.parametrize("base", in_all_generations(*FAMILIES), ids=variant_of)
def test_the_halves_pass_without_tensor_parallelism(base: Config) -> None:
    for operator in ("dispatch_setup", "dispatch_teardown", "combine_setup", "combine_teardown"):
        check_call(base, replace(CALL, version=base.version, operator=operator))
