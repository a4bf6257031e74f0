"""The kernels' tables in the package: of this source, of the sizes that the docs name, and still true."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from autotune import results, verification
from autotune.kernels import occasions
from autotune.kernels.scope import Scope
from autotune.kernels.tunables import Tunable, tunables_of
from autotune.kernels.versions import code_of
from moe_triton import tables
from moe_triton.core.space import settings_of
from moe_triton.core.tables import Table
from tests.test_docs import page

CHIPS = "Ascend910_9391", "Ascend910B3"
ROWS_PRICED = 6


@functools.cache
def shipped(chip: str) -> Table:
    return tables.checked_table(tables.FOLDER / f"kernels-{chip}.json")


def tunables(chip: str, hidden: int) -> list[Tunable]:
    (scope,) = (each for each in occasions.shipped(Scope(chip)) if each.hidden == (hidden,))
    return tunables_of(scope)


def test_the_docs_name_tables_sizes_and_rows() -> None:
    text = " ".join(page("autotune.md").split())
    assert " and ".join(f"`kernels-{chip}`" for chip in CHIPS) + " have all of these" in text
    assert " and ".join(str(len(shipped(chip).rows)) for chip in CHIPS) + " rows" in text
    assert f"H {', '.join(map(str, occasions.HIDDEN))}, K {', '.join(map(str, occasions.TOPK))}" in text


@pytest.mark.parametrize("chip", CHIPS)
def test_they_are_of_this_source_and_say_how_to_make_them(chip: str) -> None:
    table = shipped(chip)
    assert table.source == results.source_of(Scope(chip)), f"make it again: {table.command}"
    assert table.command == f"moe-triton tune kernels --soc {chip} --all-shipped --write-shipped"
    kernels = {tunable.kernel.name: tunable.kernel for tunable in tunables_of(Scope(chip))}
    assert {row.keys[0] for row in table.rows} <= set(table.code)
    for name, code in table.code.items():
        assert code == code_of(kernels[name]), f"{name} has changed; make it again: {table.command}"


@pytest.mark.parametrize("chip", CHIPS)
def test_they_cover_all_sizes(chip: str) -> None:
    table = shipped(chip)
    for hidden in occasions.HIDDEN:
        for tunable in tunables(chip, hidden):
            any_dtype = (*tunable.keys[:2], tables.ANY_DTYPE)
            row = table.nearest(tunable.keys, tunable.sizes, any_dtype)
            assert row is not None, tunable.label
            assert row.sizes == tunable.sizes, tunable.label
            tunable.kernel.with_settings(settings_of(str(row.values[0])))


@pytest.mark.parametrize("chip", CHIPS)
def test_nothing_chosen_is_slower_than_the_default(chip: str) -> None:
    for row in shipped(chip).rows:
        settings, ns, default_ns = row.values
        assert int(ns) <= int(default_ns)
        assert settings != "default" or ns == default_ns
        assert settings == "default" or int(ns) <= 0.97 * int(default_ns) + 1, row


@pytest.mark.parametrize("chip", CHIPS)
def test_prices_are_the_models(chip: str) -> None:
    """A few, of kernels that are soon compiled: `moe-triton tune verify --most 0` prices all."""
    quick = [name for name in shipped(chip).code if name != "weighted_sum"]
    lines = list(verification.verified(shipped(chip), Scope(chip), quick, ROWS_PRICED, 0))
    assert lines == []


def test_rows_of_all_k_are_priced_with_all_k() -> None:
    """A table of another command is of the scope's own K."""
    table = shipped("Ascend910_9391")
    rows = tuple(row for row in table.rows if row.keys[:2] == ("route", "plain"))[:1]
    one = replace(table, rows=rows)
    assert list(verification.verified(one, Scope("A3"), [], 0, 0)) == []
    by_hand = replace(one, command=tables.COMMAND)
    (line,) = verification.verified(by_hand, Scope("A3", topk=(1,)), [], 0, 0)
    assert " -> " in line
