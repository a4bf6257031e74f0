from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from moe_triton import limits
from moe_triton.checks import check_choice, check_positive, check_tensor
from moe_triton.config import Config
from moe_triton.errors import INVALID_ARGUMENT, NULL_ARGUMENT, TILING_FAILED, ArgumentError
from moe_triton.layout import layout_of
from moe_triton.limits import (
    RULE_SETS,
    Call,
    CallRule,
    ConfigRule,
    call_rules_for,
    check_buffer_size,
    check_call,
    check_config,
    check_rules,
    needed_buffer_bytes,
    rule_sets_for,
    rules_for,
    scheme_of,
    torch_npu_names,
)

A3 = Config(num_ranks=8, num_max_tokens_per_rank=64, hidden=7168, num_topk=8, num_experts=64)
INBAND = replace(A3, scheme="fullmesh_v2")
V1 = replace(A3, version=1)
SHARED_V1 = replace(V1, num_shared_experts=1, num_shared_ranks=4)
A2 = replace(A3, product="A2", scheme="fullmesh", num_ranks=16)
HIERARCHY = replace(A2, scheme="hierarchy")
ONE_EXPERT = replace(A3, num_experts=8)

CALL = Call(batch=64, group_ep="ep", has_expert_scales=True)


class ConfigCase(NamedTuple):
    """The sizes that just pass and those that just fail."""

    shown: str  # argument and value, as the message begins
    passes: dict[str, Any]
    fails: dict[str, Any]
    base: Config


class CallCase(NamedTuple):
    """The same for the other arguments of a call."""

    shown: str
    passes: dict[str, Any]
    fails: dict[str, Any]
    base: Config
    code: int


def size(field: str, passing: int, failing: int, base: Config = A3, **also: Any) -> ConfigCase:
    """One field at its edge; other fields as given, the same on both sides."""
    return ConfigCase(f"{field} is {failing}", {field: passing, **also}, {field: failing, **also}, base)


def sizes(shown: str, passes: dict[str, Any], fails: dict[str, Any], base: Config = A3) -> ConfigCase:
    """Several fields at once."""
    return ConfigCase(shown, passes, fails, base)


def argument(
    field: str,
    passing: Any,
    failing: Any,
    base: Config = A3,
    shown: str = "",
    code: int = TILING_FAILED,
    **also: Any,
) -> CallCase:
    """One argument at its edge; other arguments as given, the same on both sides."""
    shown = shown or f"{field} is {failing!r}"
    return CallCase(shown, {field: passing, **also}, {field: failing, **also}, base, code)


def refused(name: str, base: Config = A3, code: int = TILING_FAILED, **also: Any) -> CallCase:
    """A tensor that may not be given."""
    field = "has_mask" if name == "x_active_mask" else f"has_{name}"
    return argument(field, False, True, base, f"{name} is given", code, **also)


def needed(name: str, field: str, base: Config = A3, **also: Any) -> CallCase:
    """A tensor that must be given."""
    return argument(field, True, False, base, f"{name} is None", NULL_ARGUMENT, **also)


COMMON_SIZES = [
    sizes("product is 'A5'", {}, {"product": "A5"}),
    size("version", 2, 3),
    size("version", 1, 0),
]

A3_SIZES = [
    sizes("comm_alg is 'fullmesh'", {"scheme": "fullmesh_v2"}, {"scheme": "fullmesh"}),
    size("num_ranks", 2, 1),
    size("num_ranks", 2, 1, relaxed=True),
    sizes("num_ranks is 769", {"num_ranks": 768, "num_experts": 768}, {"num_ranks": 769, "num_experts": 769}),
    size("num_max_tokens_per_rank", 1, 0),
    size("num_max_tokens_per_rank", 512, 513),
    size("hidden", 1024, 992),
    size("hidden", 8192, 8224),
    size("hidden", 32, 0, relaxed=True),
    size("hidden", 8192, 8224, relaxed=True),
    size("hidden", 1056, 1040),
    size("num_topk", 1, 0),
    size("num_topk", 16, 17),
    size("num_experts", 8, 0),
    size("num_experts", 1024, 1032),
    size("num_topk", 8, 9, num_experts=8),
    size("num_topk", 8, 9, num_experts=8, relaxed=True),
    size("num_topk", 9, 10, num_experts=8, num_special_experts=1),
    sizes(
        "num_shared_experts is 5",
        {"num_shared_experts": 4, "num_shared_ranks": 4},
        {"num_shared_experts": 5, "num_shared_ranks": 5, "num_experts": 63},
    ),
    size("num_shared_experts", 0, -1),
    size("num_shared_ranks", 7, 8, num_shared_experts=1),
    size("num_shared_ranks", 0, -1),
    size("num_shared_ranks", 4, 0, num_shared_experts=2),
    size("num_shared_ranks", 0, 4),
    size("num_shared_ranks", 6, 4, num_shared_experts=3, num_experts=60),
    size("num_experts", 72, 70),
    sizes(
        "num_experts is 1024",
        {"num_ranks": 512, "num_shared_experts": 1, "num_shared_ranks": 256, "num_experts": 1024},
        {"num_ranks": 520, "num_shared_experts": 1, "num_shared_ranks": 264, "num_experts": 1024},
    ),
    size("num_max_tokens_per_rank", 256, 257, INBAND),
    size("num_topk", 12, 13, INBAND),
    size("num_special_experts", 0, 1, INBAND),
]

V1_SIZES = [
    sizes("comm_alg is 'fullmesh_v2'", {"scheme": "fullmesh_v1"}, {"scheme": "fullmesh_v2"}, V1),
    *(
        sizes(f"num_ranks is {n + 1}", {"num_ranks": n, "num_experts": n}, {"num_ranks": n + 1}, V1)
        for n in (8, 16, 32, 64, 128, 144, 256, 288)
    ),
    size("num_ranks", 2, 1, V1, relaxed=True),
    sizes(
        "num_ranks is 289",
        {"num_ranks": 287, "num_experts": 287, "relaxed": True},
        {"num_ranks": 289, "num_experts": 289, "relaxed": True},
        V1,
    ),
    size("num_max_tokens_per_rank", 512, 513, V1),
    size("hidden", 7168, 7136, V1),
    size("hidden", 7168, 7200, V1, relaxed=True),
    size("hidden", 32, 0, V1, relaxed=True),
    size("hidden", 64, 48, V1, relaxed=True),
    size("num_topk", 8, 9, V1),
    size("num_topk", 1, 0, V1),
    size("num_experts", 512, 520, V1),
    size("num_special_experts", 0, 1, V1),
    size("num_topk", 2, 3, V1, num_ranks=2, num_experts=2, relaxed=True),
    size("num_shared_experts", 1, 2, SHARED_V1),
    size("num_shared_experts", 1, 0, SHARED_V1),
    size("num_shared_ranks", 4, 8, SHARED_V1),
    size("num_shared_ranks", 2, 3, SHARED_V1, num_experts=60),
    size("num_experts", 64, 66, SHARED_V1),
]

A2_SIZES = [
    sizes("comm_alg is 'fullmesh_v1'", {"scheme": "hierarchy"}, {"scheme": "fullmesh_v1"}, A2),
    size("num_max_tokens_per_rank", 256, 257, A2),
    size("hidden", 7168, 7200, A2),
    size("hidden", 32, 0, A2),
    size("hidden", 10240, 10272, HIERARCHY),
    size("hidden", 7168, 7200, HIERARCHY, version=1),
    size("hidden", 7136, 7152, A2),
    size("num_topk", 16, 17, A2),
    size("num_experts", 512, 528, HIERARCHY),
    size("num_topk", 8, 9, A2, num_ranks=8, num_experts=8, relaxed=True),
    sizes(
        "num_shared_experts is 1",
        {"num_shared_experts": 1, "num_shared_ranks": 0},
        {"num_shared_experts": 1, "num_shared_ranks": 1},
        A2,
    ),
    size("num_shared_ranks", 0, 1, A2),
    *(
        sizes(f"num_ranks is {n + 1}", {"num_ranks": n, "num_experts": n}, {"num_ranks": n + 1}, A2)
        for n in (16, 32, 64, 128, 192, 256)
    ),
    size("num_ranks", 4, 1, A2, relaxed=True),
    size("num_experts", 64, 65, A2),
    size("num_experts", 384, 400, A2),
    *(size("num_ranks", n, n + 1, HIERARCHY) for n in (16, 32, 64)),
    size("num_ranks", 64, 128, HIERARCHY, relaxed=True, num_experts=128),
    size("num_experts", 64, 65, HIERARCHY),
    size("num_special_experts", 0, 1, HIERARCHY),
]

CONFIG_CASES = [*COMMON_SIZES, *A3_SIZES, *V1_SIZES, *A2_SIZES]

LONG, TOO_LONG = "x" * 127, "x" * 128

COMMON_CALLS = [
    argument("group_ep", "x", "", code=INVALID_ARGUMENT),
    argument("group_ep", LONG, TOO_LONG, code=INVALID_ARGUMENT),
    argument("group_tp", LONG, TOO_LONG, code=INVALID_ARGUMENT),
    argument("x_dims", 2, 3, shown="x is of 3 dimensions"),
    argument("x_dims", 2, 1, shown="expand_x is of 1 dimensions", operator="combine"),
    argument("ids_dims", 2, 1, shown="expert_ids is of 1 dimensions"),
    argument("rank", 7, 8, shown="ep_rank_id is 8"),
    argument("rank", 0, -1, shown="ep_rank_id is -1"),
    argument("expert_shard_type", 0, 1),
    argument("expert_token_nums_type", 1, 2),
    argument("expert_token_nums_type", 0, -1),
    argument("global_bs", 512, 511),
    argument("global_bs", 512, 504),
    argument("global_bs", 520, 516),
    argument("batch", 1, 0, shown="expert_ids.shape[0] is 0"),
    argument("batch", 64, 65, shown="expert_ids.shape[0] is 65"),
    *(argument("quant_mode", 2, mode) for mode in (-1, 1, 3, 4, 5, 6)),
    *(argument("comm_quant_mode", 2, mode) for mode in (-1, 1, 3)),
    argument("out_dtype", 0, 1),
    argument("group_list_type", 0, 1),
    argument("comm_type", 0, 2),
    *(refused(name) for name in ("activation_scale", "weight_scale", "group_list")),
    *(refused(name, code=INVALID_ARGUMENT) for name in ("y_dtype", "x_dtype", "scales_dtype")),
    *(argument(f"num_{kind}", 0, -1, shown=f"{kind}_expert_num is -1") for kind in ("zero", "copy", "const")),
    argument("num_zero", 2**31 - 66, 2**31 - 65, shown="moe_expert_num is 64"),
    needed("ori_x", "has_ori_x", operator="combine", num_copy=1),
    needed("ori_x", "has_ori_x", operator="combine", num_const=1, has_const_args=True),
    needed(
        "const_expert_alpha_1, const_expert_alpha_2 or const_expert_v",
        "has_const_args",
        operator="combine",
        num_const=1,
        has_ori_x=True,
    ),
    argument("global_bs", 512, 520, shown="x_active_mask is given", has_mask=True),
]


def tensor_parallel_cases(base: Config, one_expert: Config) -> list[CallCase]:
    pair = {"tp_world_size": 2, "group_tp": "tp"}
    return [
        argument("tp_world_size", 2, 3, one_expert, group_tp="tp"),
        argument("tp_world_size", 0, -1, one_expert),
        argument("tp_rank_id", 1, 2, one_expert, **pair),
        argument("tp_rank_id", 0, 1, base),
        argument("group_tp", "tp", "", one_expert, code=INVALID_ARGUMENT, tp_world_size=2),
        argument("group_tp", "tp", "ep", base, code=INVALID_ARGUMENT),
        argument("tp_world_size", 1, 2, base, group_tp="tp"),
        argument("comm_quant_mode", 0, 2, one_expert, **pair),
    ]


A3_CALLS = [
    *tensor_parallel_cases(A3, ONE_EXPERT),
    refused("elastic_info", ONE_EXPERT, tp_world_size=2, group_tp="tp"),
    argument("quant_mode", 2, 0, shown="scales is given", has_scales=True),
    refused("shared_expert_x", replace(A3, num_shared_experts=1, num_shared_ranks=4), operator="combine"),
    *(
        argument("mask_dims", good, bad, shown=f"x_active_mask is of {bad} dimensions", has_mask=True)
        for good, bad in ((1, 0), (2, 3))
    ),
    refused("x_active_mask", INBAND),
    refused("elastic_info", INBAND),
    argument("global_bs", 512, 520, INBAND),
    argument("tp_world_size", 1, 2, replace(ONE_EXPERT, scheme="fullmesh_v2"), group_tp="tp"),
]

V1_CALLS = [
    *tensor_parallel_cases(V1, replace(V1, num_experts=8)),
    refused("x_active_mask", V1),
    refused("shared_expert_x", V1, operator="combine"),
    argument("global_bs", 512, 520, SHARED_V1),
]

A2_CALLS = [
    argument("tp_world_size", 1, 2, A2),
    argument("tp_world_size", 0, -1, A2),
    refused("elastic_info", A2),
    refused("shared_expert_x", A2, operator="combine"),
    argument("num_const", 0, 1, A2, shown="const_expert_num is 1"),
    argument("mask_dims", 1, 2, A2, shown="x_active_mask is of 2 dimensions", has_mask=True),
    argument("comm_quant_mode", 0, 2, A2),
    needed("expert_scales", "has_expert_scales", HIERARCHY),
    refused("scales", HIERARCHY, quant_mode=2),
    refused("x_active_mask", HIERARCHY),
]

CALL_CASES = [*COMMON_CALLS, *A3_CALLS, *V1_CALLS, *A2_CALLS]


def call_of(case: CallCase, changes: dict[str, Any]) -> Call:
    return replace(CALL, version=case.base.version, **changes)


def name_of(case: ConfigCase | CallCase) -> str:
    return f"{case.base.product}-v{case.base.version}-{case.base.scheme}: {case.shown[:50]}"


def check_message(error: ArgumentError, shown: str, code: int) -> None:
    assert str(error) == f"{shown}, but {error.rule}. {error.remedy} [{code}]"
    assert f"{error.argument} is {error.value}" == shown
    assert error.code == code
    assert error.rule
    assert error.remedy.endswith(".")


@pytest.mark.parametrize("case", CONFIG_CASES, ids=name_of)
def test_each_size_at_its_edge(case: ConfigCase) -> None:
    check_rules(replace(case.base, **case.passes))
    with pytest.raises(ArgumentError) as caught:
        check_rules(replace(case.base, **case.fails))
    check_message(caught.value, case.shown, TILING_FAILED)


@pytest.mark.parametrize("case", CALL_CASES, ids=name_of)
def test_each_argument_at_its_edge(case: CallCase) -> None:
    check_rules(case.base)
    check_call(case.base, call_of(case, case.passes))
    with pytest.raises(ArgumentError) as caught:
        check_call(case.base, call_of(case, case.fails))
    check_message(caught.value, case.shown, case.code)


def test_every_rule_has_a_case_in_every_set_that_holds_it() -> None:
    covered: set[tuple[str, ConfigRule | CallRule]] = set()
    for case in CONFIG_CASES:
        c = replace(case.base, **case.fails).normalized()
        size_rule = next(rule for rule in rules_for(c) if not rule.holds(c))
        sets = rule_sets_for(c.product, c.version, c.scheme)
        covered |= {(s.title, size_rule) for s in sets if size_rule in s.config}
    for asked in CALL_CASES:
        c, call = asked.base, call_of(asked, asked.fails)
        rule = next(rule for rule in call_rules_for(c, call) if not rule.holds(c, call))
        sets = rule_sets_for(c.product, call.version, c.scheme)
        covered |= {(s.title, rule) for s in sets if rule in s.call}
    table = {(s.title, rule) for s in RULE_SETS for rule in (*s.config, *s.call)}
    assert not [f"{title}: {rule.argument}, {rule.limit}" for title, rule in table - covered]


def test_modes_of_ascend_950_are_named() -> None:
    for mode, name in ((1, "static"), (3, "fp8"), (4, "MX"), (5, "MX")):
        with pytest.raises(ArgumentError, match=rf"mode {mode} \({name}.*\) exists only on Ascend 950"):
            check_call(A3, replace(CALL, quant_mode=mode))


@pytest.mark.parametrize("base", [A2, replace(A2, version=1), HIERARCHY])
def test_a_product_that_keeps_its_rules_but_cannot_be_served_is_refused(base: Config) -> None:
    check_rules(base)
    with pytest.raises(ArgumentError, match=r"product is 'A2', but only .* can be served yet"):
        check_config(base)
    with pytest.raises(ArgumentError, match="hidden is 48"):
        check_config(replace(base, hidden=48))


def test_a_scheme_that_cannot_be_served_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(limits.IMPLEMENTED, "A2", ("fullmesh",))
    check_config(A2)
    with pytest.raises(ArgumentError, match="comm_alg is 'hierarchy'"):
        check_config(HIERARCHY)


@pytest.mark.parametrize("base", [A3, INBAND, V1, SHARED_V1])
def test_what_is_served(base: Config) -> None:
    check_config(base)


def test_the_default_of_torch_npu_means_no_shared_experts() -> None:
    config = replace(A3, num_shared_experts=1, num_shared_ranks=0)
    assert config.normalized().num_shared_experts == 0
    check_config(config)


def test_the_halves_that_take_no_weights_need_none_in_hierarchy() -> None:
    for operator in ("dispatch_teardown", "combine_setup"):
        check_call(HIERARCHY, replace(CALL, operator=operator, has_expert_scales=False))


def test_dispatch_needs_nothing_of_what_combine_computes_special_experts_from() -> None:
    check_call(A3, replace(CALL, num_copy=1, num_const=1))


def test_receive_capacity() -> None:
    assert A3.receive_capacity(0) == 8 * 64 * 8
    assert replace(A3, num_topk=2).receive_capacity(0) == 8 * 64 * 2
    # Three ranks share one replica when five sources are split over two: the rounding up matters.
    shared = Config(5, 4, 1024, 2, 6, num_shared_experts=1, num_shared_ranks=2)
    assert shared.receive_capacity(0) == 4 * 3


def test_an_error_is_renamed_for_the_caller() -> None:
    with pytest.raises(ArgumentError) as caught:
        check_config(replace(A3, num_ranks=1))
    renamed = caught.value.renamed(torch_npu_names(CALL))
    assert str(renamed) == str(caught.value).replace("num_ranks", "ep_world_size")
    assert renamed.code == caught.value.code
    assert caught.value.renamed({"hidden": "H"}).argument == "num_ranks"


def test_names_depend_on_the_call() -> None:
    names = torch_npu_names(CALL)
    assert (names["hidden"], names["num_max_tokens_per_rank"]) == ("x.shape[1]", "expert_ids.shape[0]")
    names = torch_npu_names(replace(CALL, operator="combine", global_bs=512))
    assert (names["hidden"], names["num_max_tokens_per_rank"]) == (
        "expand_x.shape[1]",
        "global_bs / ep_world_size",
    )
    assert all(name in Config.__dataclass_fields__ for name in names)


def test_messages_speak_to_both_kinds_of_callers() -> None:
    """Only the argument is renamed, so rules and remedies hold no name of a field of `Config`."""
    fields = [name for name in Config.__dataclass_fields__ if "_" in name]
    for case in CONFIG_CASES:
        with pytest.raises(ArgumentError) as caught:
            check_rules(replace(case.base, **case.fails))
        said = f"{caught.value.rule} {caught.value.remedy}"
        assert not [name for name in fields if name in said]


@pytest.mark.parametrize(
    ("product", "comm_alg", "inside", "scheme"),
    [
        ("A3", "", {}, "fullmesh_v1"),
        ("A3", None, {"HCCL_INTRA_PCIE_ENABLE": "1", "HCCL_INTRA_ROCE_ENABLE": "0"}, "fullmesh_v1"),
        ("A3", "fullmesh_v2", {}, "fullmesh_v2"),
        ("A2", "", {}, "fullmesh"),
        ("A2", None, {"HCCL_INTRA_PCIE_ENABLE": "1", "HCCL_INTRA_ROCE_ENABLE": "0"}, "hierarchy"),
        ("A2", "", {"HCCL_INTRA_PCIE_ENABLE": "1", "HCCL_INTRA_ROCE_ENABLE": "1"}, "fullmesh"),
        ("A2", "", {"HCCL_INTRA_PCIE_ENABLE": "1"}, "fullmesh"),
        ("A2", "hierarchy", {}, "hierarchy"),
        ("A2", "direct", {}, "direct"),
    ],
)
def test_default_schemes(product: str, comm_alg: str | None, inside: dict[str, str], scheme: str) -> None:
    assert scheme_of(product, comm_alg, inside) == scheme


# Worked out by hand from operators.md, section 6. A row of 7168 takes 14336 bytes, with 64 more and rounded
# up 14848; in blocks of 480, 30 of them, 15360; of 2 * (7168 + 128), 14592.
NEEDED = [
    (A3, 2 * (8 * 64 * 8 * 14848 + 8 * 64 * 14336)),
    (
        replace(A3, num_shared_experts=1, num_shared_ranks=4),
        2 * (16 * 64 * 8 * 14848 + 9 * 64 * 14336),
    ),
    (replace(A3, num_shared_experts=1), 2 * (8 * 64 * 8 * 14848 + 8 * 64 * 14336)),
    (INBAND, 2 * (8 * 64 * 8 * 15360 + 8 * 64 * 14336)),
    (V1, 2 * 64 * 14592 * (64 + 8 + 1) + (2 << 20)),
    (A2, 2 * (64 * 16 * 4 * 7168 * 2 + (2 << 20))),
    (replace(A2, num_topk=2), 2 * (64 * 16 * 2 * 7168 * 2 + (2 << 20))),
    (HIERARCHY, 64 * 64 * (7168 * 2 + 4 * 8 * 4) + (104 << 20)),
    (replace(HIERARCHY, num_topk=9), 64 * 64 * (7168 * 2 + 4 * 16 * 4) + (104 << 20)),
]


@pytest.mark.parametrize(("config", "needed"), NEEDED)
def test_needed_buffer_bytes(config: Config, needed: int) -> None:
    assert needed_buffer_bytes(config) == needed


@pytest.mark.parametrize("base", [A3, INBAND, V1, SHARED_V1, replace(A3, hidden=1056, num_topk=3)])
def test_the_layout_fits_into_what_the_formula_gives(base: Config) -> None:
    assert layout_of(base).data_bytes <= needed_buffer_bytes(base)


@pytest.mark.parametrize(("config", "needed"), NEEDED)
def test_the_message_gives_the_buffer_size_to_set(config: Config, needed: int) -> None:
    megabytes = -(-needed // (1 << 20))
    check_buffer_size(config, megabytes)
    with pytest.raises(ArgumentError) as caught:
        check_buffer_size(config, megabytes - 1)
    error = caught.value
    check_message(error, f"HCCL_BUFFSIZE is {megabytes - 1} MB", TILING_FAILED)
    assert f"HCCL_BUFFSIZE={megabytes} " in error.remedy
    assert f"{needed} bytes" in error.rule


def test_the_default_buffer_size_is_200_megabytes() -> None:
    check_buffer_size(replace(A3, num_max_tokens_per_rank=96))
    check_buffer_size(replace(A3, num_max_tokens_per_rank=96), 200)
    with pytest.raises(ArgumentError, match="HCCL_BUFFSIZE is 200 MB"):
        check_buffer_size(replace(A3, num_max_tokens_per_rank=112))


def test_an_error_about_a_tensor_carries_its_code() -> None:
    def code(value: object) -> int:
        with pytest.raises(ArgumentError) as caught:
            check_tensor("x", value, shape=(2, "H"), dtypes=(torch.float16,))
        assert str(caught.value).endswith(f" [{caught.value.code}]")
        return caught.value.code

    good = torch.zeros(2, 4, dtype=torch.float16)
    assert check_tensor("x", good, shape=(2, "H"), dtypes=(torch.float16,)) is good
    assert code(None) == NULL_ARGUMENT == 161001
    assert code([1, 2]) == INVALID_ARGUMENT == 161002
    assert code(good.float()) == INVALID_ARGUMENT
    assert code(good.to("meta")) == INVALID_ARGUMENT
    assert code(good[0]) == TILING_FAILED == 561002
    assert code(good[:1]) == TILING_FAILED
    assert code(good.t().contiguous().t()) == TILING_FAILED


def test_an_error_about_a_number_carries_its_code() -> None:
    with pytest.raises(ArgumentError) as caught:
        check_choice("quantize", "int4", (None, "int8"))
    assert caught.value.code == TILING_FAILED
    with pytest.raises(ArgumentError, match=r"\[561002\]$"):
        check_positive("timeout_s", 0.0)
    assert ArgumentError("a", 1, "b", "c").code == TILING_FAILED
