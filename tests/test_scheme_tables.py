"""``comm_alg="auto"``: which scheme tables name, what is taken where it lacks something, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_triton import ArgumentError, EPBuffer, Tuning
from moe_triton import tables as kernel_tables
from moe_triton.core.config import Config
from moe_triton.core.soc import SOC_OF_PRODUCT
from moe_triton.core.tables import Row, Table
from moe_triton.runtime.chosen_scheme import AUTO, Asked, ChosenScheme, choose_scheme
from moe_triton.schemes import SCHEMES as BY_PRODUCT
from moe_triton.schemes import layout_of
from moe_triton.tables import found, machine_of
from moe_triton.tables.schemes import COMMAND, KEYS, KIND, OUTPUTS, SIZES, VALUES, checked_table

CONFIG = Config(4, 64, 1024, 8, 32)
MACHINE = machine_of("cpu", "A3")
SCHEMES = {("own", 64): "fullmesh_v2", ("own", 512): "fullmesh_v1", ("window", 64): "direct"}


OWN = f"fullmesh_v1: the product's own; no table names another that serves the group on {MACHINE}"


def write(folder: Path, named: dict[tuple[str, int], str], machine: str = MACHINE) -> Path:
    """A table that names schemes by outputs and tokens."""
    rows = tuple(Row((o,), (1024, 8, 4, t), (scheme, 900, 1000)) for (o, t), scheme in named.items())
    table = Table(f"{KIND}-{machine}", COMMAND, "by hand", KEYS, SIZES, VALUES, rows)
    folder.mkdir(exist_ok=True)
    path = folder / f"{table.name}.json"
    path.write_text(table.to_json())
    return path


def chosen(
    folder: Path | None, outputs: str = "own", comm_alg: str = AUTO, exchange: bool = False, **sizes: Any
) -> ChosenScheme:
    config = replace(CONFIG, **sizes)
    return choose_scheme(Asked(comm_alg, outputs, folder=folder), config, range(config.num_ranks), exchange)


@pytest.fixture
def nothing_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder in the place of the package's own."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    monkeypatch.setattr(kernel_tables, "FOLDER", folder)
    return folder


def test_the_nearest_row_names_the_scheme_and_outputs_in_the_window_are_taken_only_if_allowed(
    tmp_path: Path,
) -> None:
    write(tmp_path, SCHEMES)
    assert chosen(tmp_path).config.scheme == "fullmesh_v2"
    assert chosen(tmp_path, num_max_tokens_per_rank=256).config.scheme == "fullmesh_v1"
    assert chosen(tmp_path, "window").config.scheme == "direct"
    source = chosen(tmp_path, "window").source
    assert source.startswith("direct: table schemes-")
    assert "row of outputs window, hidden 1024, topk 8, ranks 4, tokens 64" in source
    assert str(tmp_path) in source
    assert "by hand" in source


@pytest.mark.parametrize("comm_alg", ["", "fullmesh_v1", "fullmesh_v2", "direct"])
@pytest.mark.parametrize("outputs", ["own", "window"])
def test_a_scheme_by_name_is_taken_whatever_tables_and_outputs_say(
    tmp_path: Path, comm_alg: str, outputs: str
) -> None:
    write(tmp_path, SCHEMES)
    found = chosen(tmp_path, outputs, comm_alg)
    assert found.config.scheme == comm_alg or (comm_alg, found.config.scheme) == ("", "fullmesh_v1")
    assert repr(comm_alg) in found.source


@pytest.mark.parametrize(
    ("outputs", "expected", "needs"),
    [
        ("window", "fullmesh_v2", {"num_special_experts": 2}),  # direct has none
        ("window", "fullmesh_v1", {"exchange": True, "num_experts": 4, "num_topk": 4}),  # nor has fullmesh_v2
        ("own", "fullmesh_v1", {"exchange": True, "num_experts": 4, "num_topk": 4}),
        ("own", "fullmesh_v1", {"num_topk": 16}),  # fullmesh_v2 takes 12
        ("window", "direct", {"num_topk": 16}),
    ],
)
def test_what_lacks_something_that_the_group_needs_is_not_taken(
    tmp_path: Path, outputs: str, expected: str, needs: dict[str, Any]
) -> None:
    write(tmp_path, SCHEMES)
    assert chosen(tmp_path, outputs, **needs).config.scheme == expected


def test_without_a_table_the_products_own_scheme_is_taken(tmp_path: Path, nothing_shipped: Path) -> None:
    found = chosen(None)
    assert found.config.scheme == "fullmesh_v1"
    assert found.source == OWN


def test_a_users_table_goes_before_the_packages_row_by_row(tmp_path: Path, nothing_shipped: Path) -> None:
    write(nothing_shipped, {("own", 64): "fullmesh_v2", ("window", 64): "direct"})
    user = tmp_path / "user"
    write(user, {("own", 64): "fullmesh_v1"})
    assert chosen(user).config.scheme == "fullmesh_v1"
    assert chosen(None).config.scheme == "fullmesh_v2"
    assert chosen(user, "window").config.scheme == "direct"


def test_a_cpu_without_a_table_goes_by_another_ones(
    monkeypatch: pytest.MonkeyPatch, nothing_shipped: Path
) -> None:
    monkeypatch.setattr(kernel_tables, "cpu_family", lambda: "other-1-2")
    write(nothing_shipped, {("own", 64): "fullmesh_v2"}, found.CPU_WITH_TABLES)
    assert chosen(None).config.scheme == "fullmesh_v2"
    assert found.CPU_WITH_TABLES in chosen(None).source
    write(nothing_shipped, {("own", 64): "fullmesh_v1"}, "cpu-other-1-2")
    assert chosen(None).config.scheme == "fullmesh_v1"


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (lambda text: text[:-40], "Expecting"),
        (lambda text: text.replace('"version": 1', '"version": 2'), '"version" must be 1, not 2'),
        (lambda text: text.replace('"topk"', '"k"'), "columns must be outputs, hidden, topk"),
        (lambda text: text.replace('"direct"', '"ring"'), "schemes .*'fullmesh_v1'"),
        (lambda text: text.replace('["window"', '["shared"'), r"outputs are \['own', 'window'\]"),
    ],
)
def test_a_table_that_cannot_be_used_is_an_error_that_says_how_to_write_it(
    tmp_path: Path, damage: Callable[[str], str], rule: str
) -> None:
    path = write(tmp_path, SCHEMES)
    path.write_text(damage(path.read_text()))
    with pytest.raises(ArgumentError, match=rule) as raised:
        chosen(tmp_path)
    assert COMMAND in str(raised.value)
    assert str(path) in str(raised.value)


def test_other_outputs_a_folder_that_is_none_and_broken_rules_are_refused(tmp_path: Path) -> None:
    for wrong in ("", "own ", None, True):
        with pytest.raises(ArgumentError, match=r"outputs is .* must be one of \['own', 'window'\]"):
            chosen(None, wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"tuning.tables is .*/none, but it must be a folder"):
        chosen(tmp_path / "none")
    with pytest.raises(ArgumentError, match=r"^hidden is 40"):
        chosen(None, hidden=40)
    with pytest.raises(ArgumentError, match=r"^num_ranks is 0"):
        chosen(None, num_ranks=0)
    with pytest.raises(ArgumentError, match=r"comm_alg is 'ring'.*fullmesh_v1"):
        chosen(None, comm_alg="ring")


@pytest.mark.parametrize("outputs", ["own", "window"])
def test_the_size_hint_is_that_of_the_scheme_that_is_taken(tmp_path: Path, outputs: Any) -> None:
    write(tmp_path, SCHEMES)
    c = CONFIG
    sizes = {"hidden": c.hidden, "num_topk": c.num_topk, "num_experts": c.num_experts}
    bytes_of = {
        special: EPBuffer.get_buffer_size_hint(
            c.num_ranks,
            num_max_tokens_per_rank=c.num_max_tokens_per_rank,
            **sizes,
            outputs=outputs,
            num_zero_experts=special,
            tuning=Tuning(tables=tmp_path),
        )
        for special in (0, 2)
    }
    for special, hint in bytes_of.items():
        scheme = chosen(tmp_path, outputs, num_special_experts=special).config.scheme
        assert hint == layout_of(replace(c, scheme=scheme)).data_bytes
    assert (bytes_of[0] == bytes_of[2]) == (outputs == "own")


def test_the_shipped_table_can_be_used_and_leaves_own_outputs_to_the_products_scheme() -> None:
    """Of chips none is shipped: by the model no scheme of theirs is faster than the product's own."""
    (path,) = kernel_tables.FOLDER.glob(f"{KIND}-*.json")
    assert path.stem == f"{KIND}-{found.CPU_WITH_TABLES}"
    rows = checked_table(path, BY_PRODUCT["A3"]).rows
    sizes = {row.sizes for row in rows}
    assert {(row.keys, row.sizes) for row in rows} == {((o,), s) for o in OUTPUTS for s in sizes}
    # `EPBuffer`'s default: what a serving framework gets without asking is no other scheme than before.
    assert {row.values[0] for row in rows if row.keys == ("own",)} == {"fullmesh_v1"}
    assert {row.values[0] for row in rows} == {"fullmesh_v1", "direct"}
    assert all(row.values[1] <= row.values[2] for row in rows)
    assert chosen(None, "window").config.scheme == "direct"


@pytest.mark.parametrize(("product", "own"), [("A3", "fullmesh_v1"), ("A2", "fullmesh")])
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_on_a_chip_the_products_own_scheme_is_taken(product: Any, own: str, outputs: str) -> None:
    config = replace(CONFIG, num_ranks=8, num_experts=64, product=product)
    taken = choose_scheme(Asked(AUTO, outputs, "npu"), config, range(8), exchange=False)
    assert taken.config.scheme == own
    assert taken.source.endswith(f"no table names another that serves the group on {SOC_OF_PRODUCT[product]}")
