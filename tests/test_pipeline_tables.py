"""Tables of pipelines: what they fill in, what goes before them, where they do not count, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_triton import ArgumentError, EPBuffer, Tuning
from moe_triton.core.config import Config
from moe_triton.core.tables import Row, Table
from moe_triton.tables import machine_of
from moe_triton.tables.pipelines import COMMAND, KEYS, KIND, SIZES, VALUES, columns_of, filled
from tests.test_scheme_tables import nothing_shipped as nothing_shipped

CORES = 2
CONFIG = Config(4, 64, 1024, 8, 32)
MACHINE = machine_of("cpu", "A3")
SETTINGS = "dispatch_tokens=16 communication_blocks=1 cached_bytes=0 num_blocks=3"


def write(folder: Path, rows: dict[tuple[int, ...], str], scheme: str = "fullmesh_v1") -> Path:
    """A table of one scheme, by cores, ranks, H, K and tokens."""
    made = tuple(Row((scheme,), sizes, (settings, 900, 1000)) for sizes, settings in rows.items())
    table = Table(f"{KIND}-{MACHINE}", COMMAND, "by hand", KEYS, SIZES, VALUES, made)
    folder.mkdir(exist_ok=True)
    path = folder / f"{table.name}.json"
    path.write_text(table.to_json())
    return path


def fill(folder: Path, num_blocks: int | None = None, cores: int = CORES, **given: Any) -> Any:
    tuning = Tuning(tables=folder, **given) if given else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_TRITON_TABLES", str(folder))
        return filled(MACHINE, CONFIG, cores, tuning, num_blocks)


def test_what_the_caller_leaves_open_is_filled_in_with_its_source(tmp_path: Path) -> None:
    write(tmp_path, {columns_of(CONFIG, CORES): SETTINGS})
    found = fill(tmp_path)
    assert found.tuning == Tuning(16, None, 1, 0)
    assert found.num_blocks == 3
    assert set(found.sources) == {"dispatch_tokens", "communication_blocks", "cached_bytes", "num_blocks"}
    row = "row of scheme fullmesh_v1, cores 2, ranks 4, hidden 1024, topk 8, tokens 64"
    assert all(row in source and "by hand" in source for source in found.sources.values())


@pytest.mark.parametrize(
    ("given", "blocks", "expected", "expected_blocks"),
    [
        ({"dispatch_tokens": 8}, None, (8, None, 0, 0), 3),
        ({"cached_bytes": 7, "communication_blocks": 2}, None, (16, None, 2, 7), 3),
        ({}, 1, (16, None, 0, 0), 1),  # communication_blocks goes with the blocks
        ({"spins": 1}, 2, (16, None, 0, 0), 2),
    ],
)
def test_the_caller_goes_before_the_table_field_by_field(
    tmp_path: Path, given: dict[str, Any], blocks: int | None, expected: tuple[Any, ...], expected_blocks: int
) -> None:
    write(tmp_path, {columns_of(CONFIG, CORES): SETTINGS})
    found = fill(tmp_path, blocks, **given)
    t = found.tuning
    assert (t.dispatch_tokens, t.combine_tokens, t.communication_blocks, t.cached_bytes) == expected
    assert found.num_blocks == expected_blocks
    assert not found.sources.keys() & given.keys()


def test_a_row_counts_for_as_many_ranks_and_cores_and_of_those_the_nearest(
    tmp_path: Path, nothing_shipped: Path
) -> None:
    write(
        tmp_path,
        {
            (2, 4, 7168, 8, 64): "spins=1",
            (2, 4, 1024, 8, 16): "spins=2",
            (2, 4, 1024, 8, 512): "spins=3",
            (2, 8, 1024, 8, 64): "spins=4",
        },
    )
    assert fill(tmp_path).tuning.spins == 2
    assert fill(tmp_path, cores=4).tuning == Tuning()
    other = tmp_path / "other"
    write(other, {(2, 4, 1024, 8, 64): "spins=2"}, scheme="direct")
    assert fill(other).tuning == Tuning()


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ("sp1ns", "words NAME=NUMBER"),
        ("tiles=3", "no setting tiles"),
        ("tables=3", "no setting tables"),
        ("num_blocks=0", "num_blocks must be 1 to"),
        ("num_blocks=1000", "num_blocks must be 1 to"),
        ("num_blocks=2 communication_blocks=2", "less than the rank's 2 blocks"),
        ("dispatch_tokens=0", "it must be 1 to"),
    ],
)
def test_settings_that_there_are_not_are_refused(tmp_path: Path, settings: str, rule: str) -> None:
    path = write(tmp_path, {columns_of(CONFIG, CORES): settings})
    with pytest.raises(ArgumentError, match=rule) as raised:
        fill(tmp_path)
    assert COMMAND in str(raised.value)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-30],
        lambda text: text.replace('"version": 1', '"version": 2'),
        lambda text: text.replace('"cores", "ranks"', '"ranks", "cores"'),
    ],
)
def test_a_damaged_foreign_or_newer_table_is_refused(tmp_path: Path, damage: Callable[[str], str]) -> None:
    path = write(tmp_path, {columns_of(CONFIG, CORES): "spins=1"})
    path.write_text(damage(path.read_text()))
    with pytest.raises(ArgumentError, match=r"it must be a table that can be read"):
        fill(tmp_path)


def test_a_buffer_runs_with_them_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_TRITON_TABLES", str(tmp_path))
    sizes = {"num_max_tokens_per_rank": 4, "hidden": 64, "num_topk": 2, "num_experts": 4}
    with EPBuffer(**sizes, relaxed=True, kernels="torch") as buffer:
        assert buffer.tuning_source()["combine_tokens"].startswith("64: 64 tokens a part")
        cores = buffer._backend.cores()
        row = columns_of(buffer.config, cores)
    write(tmp_path, {row: "combine_tokens=3 spins=5 num_blocks=2"})
    with EPBuffer(**sizes, relaxed=True, kernels="torch") as buffer:
        said = buffer.tuning_source()
        assert said["combine_tokens"].startswith("3: table pipelines-cpu-")
        assert said["spins"].startswith("5: table pipelines-cpu-")
        assert said["num_blocks"].startswith("2: table pipelines-cpu-")
        assert buffer._backend.tuning == Tuning(combine_tokens=3, spins=5)
        assert buffer._communicator.context.num_blocks == 2
    with EPBuffer(**sizes, relaxed=True, kernels="torch", num_blocks=1, tuning=Tuning(spins=7)) as buffer:
        assert "spins" not in buffer.tuning_source()
        assert buffer._backend.tuning == Tuning(combine_tokens=3, spins=7)
