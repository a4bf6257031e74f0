"""Tables of settings: the nearest row, the file, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_triton import ArgumentError
from moe_triton.core.tables import Row, Table, load_table

SIZES = [(4096, 16), (4096, 128), (7168, 16), (7168, 128)]
ROWS = tuple(
    Row(("A3", operator), sizes, (number,))
    for number, (operator, sizes) in enumerate(((o, s) for o in ("dispatch", "combine") for s in SIZES), 1)
)
COLUMNS = ("product", "operator"), ("hidden", "tokens"), ("parts",)
TABLE = Table("parts", "make table", "the model, 1", *COLUMNS, ROWS)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((4096, 16), (4096, 16)),
        ((1, 1), (4096, 16)),
        ((10**6, 10**6), (7168, 128)),
        ((4096, 45), (4096, 16)),  # by ratio: 45 / 16 is less than 128 / 45
        ((4096, 46), (4096, 128)),
        ((5000, 128), (4096, 128)),
        ((6000, 16), (7168, 16)),
    ],
)
@pytest.mark.parametrize("operator", ["dispatch", "combine"])
def test_the_nearest_row_of_the_same_keys(
    sizes: tuple[int, int], expected: tuple[int, int], operator: str
) -> None:
    row = TABLE.nearest(("A3", operator), sizes)
    assert row is not None
    assert (row.keys, row.sizes) == (("A3", operator), expected)
    backwards = replace(TABLE, rows=TABLE.rows[::-1])
    assert backwards.nearest(("A3", operator), sizes) == row


def test_of_two_as_near_the_smaller_and_none_of_other_keys() -> None:
    row = replace(TABLE, rows=(Row(("A",), (400,), (1,)), Row(("A",), (100,), (2,)))).nearest(("A",), (200,))
    assert row is not None
    assert row.sizes == (100,)
    assert TABLE.nearest(("A2", "combine"), (4096, 16)) is None


def test_a_row_says_where_it_stands() -> None:
    said = "table parts, row of product A3, operator dispatch, hidden 4096, tokens 16"
    assert TABLE.said(ROWS[0]) == said


def test_a_file_brings_back_the_table_and_has_a_row_a_line(tmp_path: Path) -> None:
    path = tmp_path / "parts.json"
    path.write_text(TABLE.to_json())
    assert load_table(path, "make table") == TABLE
    assert sum('["A3", ' in line for line in TABLE.to_json().splitlines()) == len(ROWS)


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (lambda d: d.update(format="other"), '"format" must be "moe_triton.table"'),
        (lambda d: d.update(version=2), '"version" must be 1, not 2'),
        (lambda d: d.update(name="tiles"), "\"name\" must be 'parts', not 'tiles'"),
        (lambda d: d.pop("command"), "must be complete .*command"),
        (lambda d: d.update(source=3), "must be complete .*texts"),
        (lambda d: d.update(keys="product"), "must be complete .*texts"),
        (lambda d: d.pop("rows"), "must be complete .*rows"),
        (lambda d: d.update(rows=3), "must be complete"),
        (lambda d: d.update(rows=[]), "must have rows"),
        (lambda d: d["rows"].append(d["rows"][0]), "of other keys and sizes"),
        (lambda d: d["rows"][1].pop(), "must have 5 cells"),
        (lambda d: d["rows"].append(3), "must have 5 cells"),
        (lambda d: d["rows"][1].__setitem__(4, 0), "integers from 1 on"),
        (lambda d: d["rows"][1].__setitem__(4, 2.0), "integers from 1 on"),
        (lambda d: d["rows"][1].__setitem__(2, True), "integers from 1 on"),
        (lambda d: d["rows"][1].__setitem__(0, 7), "must be texts"),
    ],
)
def test_a_damaged_table_is_refused_and_the_error_says_how_to_write_it(
    tmp_path: Path, damage: Callable[[dict[str, Any]], object], rule: str
) -> None:
    document = json.loads(TABLE.to_json())
    damage(document)
    path = tmp_path / "parts.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ArgumentError, match=rule) as raised:
        load_table(path, "make table")
    assert raised.value.argument == "table parts"
    assert "make table" in str(raised.value)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"3", b"\xff"])
def test_what_is_no_table_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "parts.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ArgumentError, match="it must be a table that can be read"):
        load_table(path, "make table")
