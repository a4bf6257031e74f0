"""Which rules apply to what, what is served, and how errors name arguments."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_triton.core.checks import check_choice, check_positive, check_tensor
from moe_triton.core.config import Config
from moe_triton.core.errors import INVALID_ARGUMENT, NULL_ARGUMENT, TILING_FAILED, ArgumentError
from moe_triton.limits import check_config, scheme_of, torch_npu_names
from moe_triton.limits.check import RULE_SETS, check_rules, rule_sets_for
from moe_triton.schemes import SCHEMES
from tests.limits_cases import (
    A2,
    A2_V1,
    A3,
    CALL,
    HIERARCHY,
    HIERARCHY_V1,
    INBAND,
    SHARED_V1,
    V1,
    VARIANTS,
    variant_of,
)


def test_the_variants_of_the_tests_reach_every_set_of_rules() -> None:
    """The cases of each rule are counted by variant, so a set that no variant has would go without."""
    reached = [rule_set for base in VARIANTS for rule_set in rule_sets_for(*variant_of(base)[:3])]
    assert not [rule_set.title for rule_set in RULE_SETS if rule_set not in reached]
    assert not [rule_set.title for rule_set in reached if rule_set not in RULE_SETS]


@pytest.mark.parametrize(
    ("base", "said"),
    [
        (A2, r"ranks_per_server is \[8, 8\], but with comm_alg='fullmesh' ranks write to memory"),
        (A2_V1, r"ranks_per_server is \[8, 8\]"),
        (HIERARCHY, r"comm_alg is 'hierarchy', but A2 has \['fullmesh'\] here yet"),
        (HIERARCHY_V1, "comm_alg is 'hierarchy'"),
    ],
)
def test_what_keeps_its_rules_but_cannot_be_served_is_refused(base: Config, said: str) -> None:
    check_rules(base)
    with pytest.raises(ArgumentError, match=said):
        check_config(base)
    with pytest.raises(ArgumentError, match="hidden is 48"):
        check_config(replace(base, hidden=48))


def test_a_scheme_that_cannot_be_served_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEMES, "A2", {"fullmesh": "moe_triton.schemes.direct:Direct"})
    on_one_server = {"ranks_per_server": 16, "relaxed": True}
    check_config(replace(A2, **on_one_server))
    with pytest.raises(ArgumentError, match="comm_alg is 'hierarchy'"):
        check_config(replace(HIERARCHY, **on_one_server))


@pytest.mark.parametrize("base", [A3, INBAND, replace(A3, scheme="direct"), V1])
def test_ranks_of_other_servers_are_out_of_reach(base: Config) -> None:
    check_config(replace(base, ranks_per_server=8))
    with pytest.raises(
        ArgumentError, match=r"ranks_per_server is \[2, 6\], but .* only those of a server share"
    ):
        check_config(replace(base, ranks_per_server=(2, 6)))


@pytest.mark.parametrize("base", [A3, INBAND, V1, SHARED_V1])
def test_what_is_served(base: Config) -> None:
    check_config(base)


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
