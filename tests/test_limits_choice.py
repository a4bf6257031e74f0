"""Which scheme ``comm_alg`` stands for: the product's, the environment's and the servers' say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_triton import EPBuffer
from moe_triton import torch_npu_ops as ops
from moe_triton.core.config import Config, Product
from moe_triton.core.errors import ArgumentError
from moe_triton.runtime.chosen_scheme import Asked, choose_scheme
from moe_triton.schemes import layout_of
from moe_triton.schemes.choice import Choice, scheme_of
from moe_triton.schemes.rules import check_config
from moe_triton.torch_npu_ops import check
from tests.test_scheme_tables import write

PCIE, ROCE = "HCCL_INTRA_PCIE_ENABLE", "HCCL_INTRA_ROCE_ENABLE"
HIERARCHY = {PCIE: "1", ROCE: "0"}
SIZES = {"num_max_tokens_per_rank": 4, "hidden": 64, "num_topk": 2, "num_experts": 16, "relaxed": True}


@pytest.mark.parametrize(
    ("product", "comm_alg", "environment", "servers", "scheme"),
    [
        ("A3", "", {}, 1, "fullmesh_v1"),
        ("A3", None, HIERARCHY, 1, "fullmesh_v1"),
        ("A3", "", HIERARCHY, 2, "fullmesh_v1"),
        ("A3", "fullmesh_v2", {}, 1, "fullmesh_v2"),
        ("A3", "hierarchy", {}, 1, "hierarchy"),
        ("A3", "hierarchy", HIERARCHY, 2, "hierarchy"),
        ("A2", "", {}, 2, "fullmesh"),
        ("A2", "", HIERARCHY, 2, "hierarchy"),
        ("A2", None, HIERARCHY, 2, "hierarchy"),
        ("A2", "", HIERARCHY, 1, "fullmesh"),
        ("A2", "", {PCIE: "1", ROCE: "1"}, 2, "fullmesh"),
        ("A2", "", {PCIE: "0", ROCE: "0"}, 2, "fullmesh"),
        ("A2", "", {PCIE: "1"}, 2, "fullmesh"),
        ("A2", "", {ROCE: "0"}, 2, "fullmesh"),
        ("A2", "", {PCIE: "true", ROCE: "0"}, 2, "fullmesh"),
        ("A2", "hierarchy", {}, 2, "hierarchy"),
        ("A2", "hierarchy", {}, 1, "fullmesh"),
        ("A2", "fullmesh", HIERARCHY, 2, "fullmesh"),
        ("A2", "fullmesh", HIERARCHY, 1, "fullmesh"),
        ("A2", "direct", HIERARCHY, 1, "direct"),
    ],
)
def test_schemes(
    product: str, comm_alg: str | None, environment: dict[str, str], servers: int, scheme: str
) -> None:
    choice = scheme_of(product, comm_alg, servers, environment)
    assert choice.scheme == scheme
    assert choice.is_other == (product == "A2" and scheme == "fullmesh" and servers == 1 and (
        comm_alg == "hierarchy" or (not comm_alg and environment == HIERARCHY)
    ))  # fmt: skip


def test_an_error_says_that_the_environment_has_chosen() -> None:
    error = ArgumentError("comm_alg", "'hierarchy'", "A2 has ['fullmesh'] here yet", "Use it.", code=7)
    asked: Choice = scheme_of("A2", "hierarchy", 2, HIERARCHY)
    assert asked.explained(error) is error
    by_environment = scheme_of("A2", "", 2, HIERARCHY)
    explained = by_environment.explained(error)
    shown = f"'hierarchy' (that is comm_alg='' with {PCIE}=1 and {ROCE}=0)"
    assert str(explained) == f"comm_alg is {shown}, but {error.rule}. Use it. [7]"
    other = ArgumentError("hidden", 48, "it must be a multiple of 32", "Pad it.")
    assert str(by_environment.explained(other)) == str(other)
    of_hierarchy = ArgumentError("scales", "given", "hierarchy takes none", "Pass None.")
    said = str(by_environment.explained(of_hierarchy))
    assert said.startswith(
        f"scales is given, but hierarchy takes none (hierarchy is comm_alg='' with {PCIE}=1"
    )


def chosen(
    comm_alg: str | None,
    num_ranks: int,
    servers: int | Sequence[int] | None,
    members: Sequence[int] | None = None,
) -> tuple[str, str]:
    """The scheme that a buffer of A2 takes, and what ``tuning_source`` says of it."""
    config = Config(
        num_ranks,
        4,
        64,
        2,
        num_ranks,
        product="A2",
        scheme="fullmesh",
        relaxed=True,
        ranks_per_server=servers,
    )
    found = choose_scheme(Asked(comm_alg), config, range(num_ranks) if members is None else members, False)
    return found.config.scheme, found.source


def test_a_buffer_inside_one_server_says_that_it_is_fullmesh(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "fullmesh: a group inside one server is fullmesh on A2, also with comm_alg={}"
    assert chosen("hierarchy", 4, None) == ("fullmesh", said.format("'hierarchy'"))
    assert chosen("hierarchy", 4, 8) == ("fullmesh", said.format("'hierarchy'"))
    assert chosen("", 4, None) == ("fullmesh", "fullmesh: comm_alg=''")
    for name, value in HIERARCHY.items():
        monkeypatch.setenv(name, value)
    assert chosen("", 4, None) == ("fullmesh", said.format(f"'' with {PCIE}=1 and {ROCE}=0"))
    assert chosen("fullmesh", 4, None) == ("fullmesh", "fullmesh: comm_alg='fullmesh'")
    # The switches are about the original's "", and "auto", a buffer's default, is ours.
    for own in ("auto", None):
        assert chosen(own, 4, None)[1].startswith("fullmesh: the product's own; no table")


def test_a_buffer_on_several_servers_goes_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen("", 4, 2)[0] == "fullmesh"
    for name, value in HIERARCHY.items():
        monkeypatch.setenv(name, value)
    assert chosen("", 4, 2) == ("hierarchy", f"hierarchy: comm_alg='' with {PCIE}=1 and {ROCE}=0")
    assert chosen("hierarchy", 4, 2) == ("hierarchy", "hierarchy: comm_alg='hierarchy'")
    with pytest.raises(ArgumentError, match=rf"hierarchy sends .* \(hierarchy is comm_alg='' with {PCIE}=1"):
        chosen("", 4, (3, 1))
    assert chosen("auto", 4, 2)[0] == chosen("fullmesh", 4, 2)[0] == "fullmesh"


def test_what_is_left_of_a_group_decides_where_it_is() -> None:
    """Once all servers but one are lost."""
    assert chosen("hierarchy", 4, 2, members=[2, 3])[0] == "fullmesh"
    assert chosen("hierarchy", 4, 2, members=[1, 3])[0] == "hierarchy"
    # Servers that are no longer alike: the buffer is refused with the sizes that are left.
    assert chosen("hierarchy", 4, 2, members=[1, 2, 3])[0] == "hierarchy"
    left = Config(3, 4, 64, 2, 3, product="A2", scheme="hierarchy", relaxed=True, ranks_per_server=(1, 2))
    with pytest.raises(ArgumentError, match=r"ranks_per_server is \[1, 2\], but hierarchy"):
        check_config(left)


@pytest.mark.parametrize(
    ("servers", "members", "left"),
    [(2, [0, 1], (2,)), (2, [1, 2, 3], (1, 2)), ((3, 1), [0, 2, 3], (2, 1)), ((1, 3), [0], (1,))],
)
def test_a_buffer_without_lost_ranks_keeps_their_servers(
    servers: int | tuple[int, ...], members: list[int], left: tuple[int, ...]
) -> None:
    config = Config(4, 4, 64, 2, 8, relaxed=True, ranks_per_server=servers)
    found = choose_scheme(Asked("fullmesh_v1"), config, members, False).config
    assert (found.num_ranks, found.topology.sizes) == (len(members), left)


def test_tensor_parallel_ranks_are_refused_between_servers() -> None:
    config = Config(4, 4, 64, 2, 4, relaxed=True)
    choose_scheme(Asked("fullmesh_v1"), config, range(4), True)
    several = replace(config, ranks_per_server=2)
    with pytest.raises(ArgumentError) as caught:
        choose_scheme(Asked("fullmesh_v1"), several, range(4), True)
    assert str(caught.value).startswith("tp_group is given, but tensor-parallel ranks write to each other's")
    assert "[2, 2]" in caught.value.rule
    assert caught.value.remedy == "Use a group inside one server, or no tensor parallelism."


def test_auto_takes_no_scheme_that_stays_inside_a_server(tmp_path: Path) -> None:
    write(tmp_path, {("own", 64): "fullmesh_v2", ("window", 64): "direct"})
    config = Config(4, 4, 1024, 2, 8, relaxed=True)
    for outputs, scheme in [("own", "fullmesh_v2"), ("window", "direct")]:
        asked = Asked("auto", outputs, folder=str(tmp_path))
        assert choose_scheme(asked, config, range(4), False).config.scheme == scheme
        several = choose_scheme(asked, replace(config, ranks_per_server=2), range(4), False)
        assert several.config.scheme == "fullmesh_v1"
        assert several.source.startswith(
            "fullmesh_v1: the product's own; no table names another that serves the group"
        )


@pytest.mark.parametrize("product", ["A2", "A3"])
def test_auto_takes_no_scheme_with_other_bits(tmp_path: Path, product: Product) -> None:
    """Whatever a table names: hierarchy sums in another order."""
    write(tmp_path, {("own", 64): "hierarchy"})
    config = Config(4, 4, 1024, 2, 8, product=product, relaxed=True, ranks_per_server=2)
    taken = choose_scheme(Asked("auto", folder=str(tmp_path)), config, range(4), False).config
    assert taken.scheme == {"A2": "fullmesh", "A3": "fullmesh_v1"}[product]


def test_servers_go_by_the_scheme_on_a3() -> None:
    config = Config(32, 4, 1024, 2, 32)
    for scheme, sizes in (("fullmesh_v1", (32,)), ("hierarchy", (16, 16))):
        found = choose_scheme(Asked(scheme), config, range(32), False).config
        assert (found.scheme, found.topology.sizes) == (scheme, sizes)
    lost = choose_scheme(Asked("hierarchy"), replace(config, relaxed=True), range(16, 32), False).config
    assert (lost.scheme, lost.topology.sizes) == ("hierarchy", (16,))
    uneven = choose_scheme(Asked("hierarchy"), replace(config, relaxed=True), range(1, 32), False).config
    with pytest.raises(ArgumentError, match=r"ranks_per_server is \[15, 16\], but hierarchy sends to"):
        check_config(uneven)


def test_the_size_hint_goes_by_the_same_choice() -> None:

    def hint(num_ranks: int, **options: object) -> int:
        return EPBuffer.get_buffer_size_hint(num_ranks, **(SIZES | {"product": "A2"} | options))  # type: ignore[arg-type]

    for num_ranks, servers in [(4, None), (4, 2), (4, (3, 1)), (16, 2), (16, 8)]:
        config = Config(
            num_ranks, 4, 64, 2, 16, product="A2", scheme="fullmesh", relaxed=True, ranks_per_server=servers
        )
        needed = layout_of(config).data_bytes
        assert hint(num_ranks, ranks_per_server=servers) == needed
        assert hint(num_ranks, ranks_per_server=servers, comm_alg="fullmesh") == needed
    assert hint(4, comm_alg="hierarchy") == hint(4, comm_alg="")
    by_rails = Config(4, 4, 64, 2, 16, product="A2", scheme="hierarchy", relaxed=True, ranks_per_server=2)
    assert hint(4, comm_alg="hierarchy", ranks_per_server=2) == layout_of(by_rails).data_bytes
    for num_ranks in (2**62, 1025, 0, -1):
        with pytest.raises(ArgumentError, match=f"num_ranks is {num_ranks}, but"):
            hint(num_ranks)
    assert hint(4, num_const_experts=1, product="A3") == hint(4, product="A3")
    for comm_alg in ("auto", "hierarchy"):
        with pytest.raises(ArgumentError, match=r"^num_const_experts is 1, but A2 has no constant experts"):
            hint(4, num_const_experts=1, comm_alg=comm_alg, ranks_per_server=2)
    with pytest.raises(
        ArgumentError, match=r"ranks_per_server is \(3, 2\), but the servers have the 4 ranks"
    ):
        hint(4, ranks_per_server=[3, 2])
    assert hint(4, ranks_per_server=3) == hint(4, ranks_per_server=[3, 1])
    with pytest.raises(ArgumentError, match=r"ranks_per_server is 2, but a server of A2 has 8"):
        hint(16, ranks_per_server=2, relaxed=False)


@contextmanager
def settings_of(**options: object) -> Iterator[None]:
    ops.configure(**options)  # type: ignore[arg-type]
    try:
        yield
    finally:
        ops.configure()


def test_torch_npus_functions_tell_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before they look for the group, which there is none of here."""
    check._tell.cache_clear()
    x, ids = torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int32)
    call = ops.npu_moe_distribute_dispatch_v2

    def asked(comm_alg: str | None) -> list[str]:
        caplog.clear()
        with pytest.raises(ArgumentError, match="group_ep"):
            call(x, ids, "no such group", 4, 0, 8, comm_alg=comm_alg)
        return [record.getMessage() for record in caplog.records]

    with settings_of(product="A2", relaxed=True):
        assert asked("") == asked(None) == asked("fullmesh") == []
        said = "a group inside one server is fullmesh on A2, also with comm_alg='hierarchy'"
        assert asked("hierarchy") == [said]
        assert asked("hierarchy") == []
    for name, value in HIERARCHY.items():
        monkeypatch.setenv(name, value)
    with settings_of(product="A2", relaxed=True, ranks_per_server=[3, 1]):
        with pytest.raises(ArgumentError, match=r"hierarchy sends .* \(hierarchy is comm_alg='' with"):
            call(x, ids, "no such group", 4, 0, 8, expert_scales=torch.ones(2, 1))
        with pytest.raises(ArgumentError, match=r"hierarchy sends .* \(hierarchy is comm_alg=None with"):
            call(x, ids, "no such group", 4, 0, 8, expert_scales=torch.ones(2, 1), comm_alg=None)
        with pytest.raises(ArgumentError, match=r"comm_alg is 5.*must be a string"):
            call(x, ids, "no such group", 4, 0, 8, comm_alg=5)  # type: ignore[arg-type]
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            traced = call(mode.from_tensor(x), ids, "no such group", 4, 0, 8, comm_alg=None)
            assert traced[0].shape[1:] == x.shape[1:]
        assert asked("fullmesh") == []
