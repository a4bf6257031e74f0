"""Which rules apply to what, what is served, and how errors name arguments."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_triton.core.checks import check_choice, check_positive, check_tensor
from moe_triton.core.config import Config
from moe_triton.core.errors import INVALID_ARGUMENT, NULL_ARGUMENT, TILING_FAILED, ArgumentError
from moe_triton.limits import Call
from moe_triton.operators.combine import COMBINE
from moe_triton.operators.dispatch import DISPATCH
from moe_triton.schemes import SCHEMES
from moe_triton.schemes.fullmesh.scheme import Fullmesh
from moe_triton.schemes.rules import check_config, check_rules, rule_sets, rule_sets_for
from moe_triton.torch_npu_ops.names import names_for
from tests.limits_cases import (
    A2,
    A2_V1,
    A3,
    CALL,
    HIERARCHY,
    INBAND,
    SHARED_V1,
    V1,
    VARIANTS,
    check_message,
    in_all_generations,
    variant_of,
)


def test_the_variants_of_the_tests_reach_every_set_of_rules() -> None:
    """The cases of each rule are counted by variant, so a set that no variant has would go without."""
    reached = [rule_set for base in VARIANTS for rule_set in rule_sets_for(*variant_of(base)[:3])]
    assert not [rule_set.title for rule_set in rule_sets() if rule_set not in reached]
    assert not [rule_set.title for rule_set in reached if rule_set not in rule_sets()]


def test_a_scheme_that_cannot_be_served_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES, "A2", {"fullmesh": "moe_triton.schemes.direct.scheme:Direct"})
    on_one_server = {"ranks_per_server": 16, "relaxed": True}
    check_config(replace(A2, **on_one_server))
    with pytest.raises(ArgumentError, match="comm_alg is 'hierarchy'"):
        check_config(replace(HIERARCHY, **on_one_server))


@pytest.mark.parametrize(
    ("scheme", "why"),
    [
        ("fullmesh_v2", "with comm_alg='fullmesh_v2' a flag and the 480 bytes before it land together"),
        ("direct", "with comm_alg='direct' results are read where they are"),
    ],
)
def test_what_cannot_leave_a_server_says_why(scheme: str, why: str) -> None:
    base = replace(A3, scheme=scheme)
    check_config(replace(base, ranks_per_server=8))
    with pytest.raises(ArgumentError) as caught:
        check_config(replace(base, ranks_per_server=(2, 6)))
    check_message(caught.value, "ranks_per_server is [2, 6]", TILING_FAILED)
    assert why in caught.value.rule
    assert caught.value.remedy == "Use comm_alg='fullmesh_v1', or make a group of each server's ranks."


def test_a_scheme_that_says_nothing_of_servers_stays_inside_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fullmesh, "crosses_servers", False)
    several = replace(A3, ranks_per_server=(2, 6))
    with pytest.raises(
        ArgumentError, match=r"ranks_per_server is \[2, 6\], but .* only those of a server share"
    ):
        check_config(several)
    monkeypatch.undo()
    check_config(several)
    with pytest.raises(ArgumentError, match="480 bytes"):  # whatever it inherits
        check_config(replace(several, scheme="fullmesh_v2"))


@pytest.mark.parametrize("sizes", [(3, 1), (1, 3), (2, 2), (2, 1, 1)])
def test_servers_of_fullmesh_need_not_be_alike(sizes: tuple[int, ...]) -> None:
    small = replace(A2, num_ranks=4, num_experts=8, ranks_per_server=sizes, relaxed=True)
    check_config(small)
    hierarchy = replace(small, scheme="hierarchy")
    if len(set(sizes)) == 1:
        check_config(hierarchy)
        return
    with pytest.raises(ArgumentError) as caught:
        check_config(hierarchy)
    check_message(caught.value, f"ranks_per_server is {list(sizes)}", TILING_FAILED)
    assert "hierarchy sends to the rank of the same number" in caught.value.rule


def test_the_last_of_a2s_servers_may_have_fewer_ranks_unless_hierarchy_is_asked_for() -> None:
    twelve = replace(A2, num_ranks=12, num_experts=12, relaxed=True)
    check_rules(twelve)
    with pytest.raises(ArgumentError, match=r"ranks_per_server is \[8, 4\], but hierarchy"):
        check_rules(replace(twelve, scheme="hierarchy"))


@pytest.mark.parametrize("base", [A3, INBAND, V1, SHARED_V1, replace(A2, num_ranks=8)])
def test_what_is_served(base: Config) -> None:
    check_config(base)


@pytest.mark.parametrize("base", in_all_generations(A2, A2_V1))
def test_a2_is_served_by_either_generation(base: Config) -> None:
    check_config(base)
    wide = replace(base, num_ranks=384, num_experts=768, hidden=10240)
    if base.version == 2 and base.generation != "v3":
        check_config(wide)
    else:
        with pytest.raises(
            ArgumentError, match="hidden is 10240" if base.generation is None else "num_ranks is 384"
        ):
            check_config(wide)


@pytest.mark.parametrize("base", [A2, A2_V1, HIERARCHY])
def test_a2_takes_the_groups_that_host_checks_take_unless_a_page_is_chosen(base: Config) -> None:
    """Pages list only some of the sizes that the published host code accepts."""
    three_servers = replace(base, num_ranks=24, num_experts=48)
    check_config(three_servers)
    for generation in ("v3", "v4"):
        with pytest.raises(ArgumentError, match="num_ranks is 24"):
            check_config(replace(three_servers, generation=generation))


def test_the_default_of_torch_npu_means_no_shared_experts() -> None:
    config = replace(A3, num_shared_experts=1, num_shared_ranks=0)
    assert config.normalized().num_shared_experts == 0
    check_config(config)


def test_receive_capacity() -> None:
    assert A3.receive_capacity(0) == 8 * 64 * 8
    assert replace(A3, num_topk=2).receive_capacity(0) == 8 * 64 * 2
    # Three ranks share one replica when five sources are split over two: the rounding up matters.
    shared = Config(5, 4, 1024, 2, 6, num_shared_experts=1, num_shared_ranks=2)
    assert shared.receive_capacity(0) == 4 * 3


def test_an_error_is_renamed_for_the_caller() -> None:
    with pytest.raises(ArgumentError) as caught:
        check_config(replace(A3, num_ranks=0))
    renamed = caught.value.renamed(names_for(CALL))
    assert str(renamed) == str(caught.value).replace("num_ranks", "ep_world_size")
    assert renamed.code == caught.value.code
    assert caught.value.renamed({"hidden": "H"}).argument == "num_ranks"


def test_names_depend_on_the_call() -> None:
    names = names_for(CALL)
    assert (names["hidden"], names["num_max_tokens_per_rank"]) == ("x.shape[1]", "expert_ids.shape[0]")
    names = names_for(replace(CALL, operator="combine", global_bs=512))
    assert (names["hidden"], names["num_max_tokens_per_rank"]) == (
        "expand_x.shape[1]",
        "global_bs / ep_world_size",
    )
    tensors = {argument.name for operator in (DISPATCH, COMBINE) for argument in operator.tensors}
    assert names.keys() <= tensors | Config.__dataclass_fields__.keys() | Call.__dataclass_fields__.keys()


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
