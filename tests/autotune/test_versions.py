"""What makes a table stale: what prices its rows, and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autotune import results
from autotune.kernels import versions
from autotune.kernels.versions import digest_of, kernel_files, pricing_files, version_of
from autotune.model.constants import machine_named
from moe_triton import tables
from moe_triton.core import native_files
from moe_triton.core.tables import Row, Table
from moe_triton.kernels import families
from moe_triton.kernels.cases import Shape

KERNEL = "moe_triton.kernels.weighted_sum"
NAME = "kernels-Ascend910_9391"
A3 = machine_named("A3")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the two packages, to edit."""
    for package in ("moe_triton", "autotune"):
        shutil.copytree(
            versions.ROOT / package,
            tmp_path / package,
            ignore=lambda _, names: [n for n in names if n == "tables"],
        )
    return tmp_path


def edit(path: Path) -> None:
    path.write_text(path.read_text() + "\n# another line\n")


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("autotune/model/kernel_costs/replay/kernel_cost.py", True),
        ("autotune/model/kernel_costs/clock.py", True),
        ("autotune/npu_compiler/compile.py", True),
        ("autotune/kernels/occasions.py", True),
        ("autotune/model/clusters/posted.py", False),
        ("autotune/model/fits/fit.py", False),
        ("autotune/model/timelines/timeline.py", False),
        ("autotune/npu_compiler/cache.py", False),
        ("moe_triton/kernels/weighted_sum.py", False),
        ("autotune/kernels/measured.py", False),
        ("autotune/search/run.py", False),
    ],
)
def test_of_the_model_what_prices_a_launch_counts(copy: Path, file: str, counts: bool) -> None:
    before = digest_of(pricing_files(copy))
    assert before == digest_of(pricing_files())  # wherever the package lies
    edit(copy / file)
    assert (digest_of(pricing_files(copy)) != before) is counts


@pytest.mark.parametrize(
    ("old", "counts"), [("def work_of(launch", True), ("class Table:", True), ("def after_sync(self", False)]
)
def test_of_the_costs_what_a_launch_is_given_counts(copy: Path, old: str, counts: bool) -> None:
    before, path = versions.pricing_code(), copy / versions.PRICED_WITH[0]
    assert versions.pricing_code(copy) == before
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, f"{old}  ", 1))
    versions.pricing_code.cache_clear()
    assert (versions.pricing_code(copy) != before) is counts


def test_the_clock_of_cores_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = native_files.sources()
    assert sources is not None
    before = versions.pricing_code()
    changed = tmp_path / versions.CLOCK
    changed.parent.mkdir()
    changed.write_text((sources / versions.CLOCK).read_text() + "// another line\n")
    monkeypatch.setattr(native_files, "sources", lambda: tmp_path)
    versions.pricing_code.cache_clear()
    assert versions.pricing_code() != before
    monkeypatch.undo()
    versions.pricing_code.cache_clear()
    assert versions.pricing_code() == before


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("weighted_sum", True),
        ("own_rows", True),
        ("zones", True),
        ("fallbacks", False),
        ("cases", False),
        ("route", False),
    ],
)
def test_of_the_kernels_its_own_code_counts(copy: Path, file: str, counts: bool) -> None:
    before = digest_of(kernel_files(KERNEL, copy))
    edit(copy / f"moe_triton/kernels/{file}.py")
    assert (digest_of(kernel_files(KERNEL, copy)) != before) is counts


def test_every_pattern_names_files() -> None:
    for pattern in versions.PRICED_BY:
        assert list(versions.ROOT.glob(pattern)), pattern


def test_every_kernel_has_a_digest() -> None:
    for family in families().values():
        kernel = family.kernel(Shape(hidden=1024, target="npu", zoned=True))
        files = {path.stem for path in kernel_files(kernel.fn.__module__)}
        assert kernel.fn.__module__.rpartition(".")[2] in files
        assert not files & {"cases", "fallbacks"}


def test_constants_that_the_replay_reads_count() -> None:
    before = version_of(A3)
    for name in ("clock_ghz", "flag_cycles", "vector_reduce_factor", "stream_bytes_per_cycle"):
        assert version_of(A3.replaced({name: 2 * getattr(A3, name)})) != before


def test_constants_of_links_and_hosts_do_not_count() -> None:
    others = A3.constants.keys() - versions.constants_read(A3).keys()
    assert others
    assert version_of(A3.replaced({name: 2 * getattr(A3, name) for name in others})) == version_of(A3)


def test_where_a_constant_comes_from_does_not_count() -> None:
    assert version_of(A3.measured({"flag_cycles": A3.flag_cycles}, "a chip")) == version_of(A3)


def table(code: dict[str, str], *rows: tuple[str, str, int]) -> Table:
    found = tuple(
        Row((kernel, "plain", dtype), (1, 1, 16, tokens), ("default", 9, 9)) for kernel, dtype, tokens in rows
    )
    return Table(NAME, "by hand", "a source", tables.KEYS, tables.SIZES, tables.VALUES, found, code)


def rows_of(merged: Table) -> list[tuple[str, str, int]]:
    return [(row.keys[0], row.keys[2], row.sizes[3]) for row in merged.rows]


def test_rows_of_changed_kernels_go_and_others_stay() -> None:
    old = table(
        {"route": "a", "stamps": "a"}, ("route", "any", 16), ("route", "any", 128), ("stamps", "any", 16)
    )
    new = table({"route": "b"}, ("route", "any", 16))
    merged = results.merged(new, old)
    assert rows_of(merged) == [("route", "any", 16), ("stamps", "any", 16)]
    assert merged.code == {"route": "b", "stamps": "a"}
    assert "code of route: a -> b" in results.differences(old, new)
    assert results.merged(replace(new, source="another"), old).rows == new.rows


def test_a_row_of_any_dtype_replaces_those_of_each() -> None:
    old = table({"route": "a"}, ("route", "bf16", 16), ("route", "fp16", 16), ("route", "fp16", 128))
    merged = results.merged(table({"route": "a"}, ("route", "any", 16)), old)
    assert rows_of(merged) == [("route", "any", 16), ("route", "fp16", 128)]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda rows: rows, [("route", "any", 16), ("stamps", "any", 16)]),
        (
            lambda rows: [replace(rows[0], values=("BLOCK=64", 5, 9)), *rows[1:]],
            [("route", "bf16", 16), ("route", "fp16", 16), ("stamps", "any", 16)],
        ),
        (lambda rows: rows[1:], [("route", "fp16", 16), ("stamps", "any", 16)]),
    ],
)
def test_rows_that_dtypes_have_alike_are_one(
    change: Callable[[list[Row]], list[Row]], expected: list[tuple[str, str, int]]
) -> None:
    rows = list(table({}, ("route", "bf16", 16), ("route", "fp16", 16), ("stamps", "any", 16)).rows)
    folded = replace(table({}), rows=tuple(results.folded(change(rows))))
    assert rows_of(folded) == expected


def test_code_is_written_and_read_back() -> None:
    made = table({"route": "a"}, ("route", "any", 16))
    assert Table.from_json(made.to_json(), NAME) == made
    assert '"code"' not in replace(made, code={}).to_json()
    with pytest.raises(ValueError, match="complete"):
        Table.from_json(made.to_json().replace('{"route": "a"}', '["route"]'), NAME)
    with pytest.raises(ValueError, match="complete"):
        Table.from_json(made.to_json().replace('{"route": "a"}', '{"route": 1}'), NAME)
