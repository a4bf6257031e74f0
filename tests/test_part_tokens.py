"""In how many parts an operator runs, and who says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_triton import ArgumentError, Tuning
from moe_triton.backends import CAPABILITIES
from moe_triton.core.config import Config
from moe_triton.core.tables import Row, Table
from moe_triton.runtime.construction import Prepared
from moe_triton.schemes import make_scheme, part_tokens
from moe_triton.schemes.site import Site

OVERLAP = Tuning(communication_blocks=24)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two rows for combine, so that 128 tokens are cut where 16 are not."""
    path = tmp_path / "parts.json"
    rows = (Row(("A3", "fullmesh_v1", "combine"), (7168, 16, t), (n,)) for t, n in ((16, 1), (128, 4)))
    columns = part_tokens.KEYS, part_tokens.SIZES, part_tokens.VALUES
    path.write_text(Table("parts", "make it", "a test", *columns, tuple(rows)).to_json())
    monkeypatch.setattr(part_tokens, "TABLE", path)
    return path


def site(tuning: Tuning, tokens: int = 128, target: str = "npu", scheme: str = "fullmesh_v1") -> Site:
    config = Config(16, tokens, 7168, 8, 256, scheme=scheme, relaxed=True)
    return Site(config, 0, 48, 1000, CAPABILITIES[target], tuning=tuning)


@pytest.mark.usefixtures("table")
def test_where_streams_overlap_the_table_says_how_many() -> None:
    assert [site(OVERLAP, most).parts("combine", most) for most in (16, 45, 46, 128)] == [1, 1, 4, 4]
    assert [site(OVERLAP).parts("combine", tokens) for tokens in (0, 1, 32, 33, 128)] == [1, 1, 1, 2, 4]
    assert site(OVERLAP).part_tokens["combine"].source.endswith("tokens 128 (a test)")


@pytest.mark.usefixtures("table")
def test_what_the_table_has_no_row_of_is_not_cut() -> None:
    assert site(OVERLAP).parts("dispatch", 128) == 1
    assert site(OVERLAP, scheme="direct").parts("combine", 128) == 1
    assert "cannot be cut" in site(OVERLAP).part_tokens["dispatch"].source


@pytest.mark.usefixtures("table")
def test_the_caller_comes_before_the_table() -> None:
    found = site(Tuning(dispatch_tokens=8, combine_tokens=64, communication_blocks=1))
    assert [found.parts(operator, 128) for operator in ("dispatch", "combine")] == [16, 2]
    assert found.part_tokens["combine"].source == "Tuning(combine_tokens=64)"


def test_on_an_npu_without_overlap_there_is_one_part_and_no_table_is_read(table: Path) -> None:
    table.unlink()
    found = site(Tuning(dispatch_tokens=8, combine_tokens=8))
    assert [found.parts(operator, 128) for operator in ("dispatch", "combine")] == [1, 1]


@pytest.mark.parametrize("blocks", [0, 24])
def test_on_a_cpu_64_tokens_are_a_part_and_no_table_is_read(table: Path, blocks: int) -> None:
    table.unlink()
    found = site(Tuning(communication_blocks=blocks), target="cpu")
    assert [found.parts("combine", tokens) for tokens in (0, 64, 65, 128, 129)] == [1, 1, 2, 2, 3]


@pytest.mark.parametrize("content", ["{", None])
def test_a_damaged_table_is_an_error_when_ranks_would_compare_settings(
    table: Path, content: str | None
) -> None:
    table.write_text(content) if content else table.unlink()
    prepared = Prepared(make_scheme(site(OVERLAP)), None, None, None)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"moe-triton model parts --write"):
        prepared.settings()


def test_a_table_with_other_columns_is_refused(table: Path) -> None:
    table.write_text(table.read_text().replace('"hidden", "ranks"', '"ranks", "hidden"'))
    with pytest.raises(ArgumentError, match="columns must be product, scheme"):
        site(OVERLAP).parts("combine", 1)


def test_the_packages_table_is_there_for_every_scheme_that_can_be_cut() -> None:
    kept = part_tokens.kept()
    assert {row.keys for row in kept.rows} == {
        ("A3", scheme, operator)
        for scheme in ("fullmesh_v1", "fullmesh_v2")
        for operator in ("dispatch", "combine")
    }
