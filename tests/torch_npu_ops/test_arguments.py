"""The table of arguments: it has every one, and says of each what calls show."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from moe_triton import EPBuffer
from moe_triton import torch_npu_ops as ops
from moe_triton.processes import RankGroup
from moe_triton.tools.pages.arguments import OF_BUFFER, ROWS, TABLE, Function, Scheme
from tests.torch_npu_ops.argument_calls import walk

Groups = Callable[[int], RankGroup]


def operators() -> dict[str, Callable[..., Any]]:
    """Every public function that moves tokens, or makes ranks wait."""
    of_torch_npu = {name: getattr(ops, name) for name in ops.__all__ if "npu_" in name}
    return {
        **of_torch_npu,
        **{f"EPBuffer.{name}": getattr(EPBuffer, name) for name in ("dispatch", "combine")},
    }


def test_the_table_has_every_operator_and_no_row_that_none_has() -> None:
    assert TABLE.keys() == operators().keys()
    declared = {name for function in operators().values() for name in inspect.signature(function).parameters}
    assert {name for rows in ROWS.values() for name in rows} == declared - {"self"}


@pytest.mark.parametrize("scheme", OF_BUFFER, ids="-".join)
def test_calls_do_with_each_argument_what_the_table_says(ranks: Groups, scheme: Scheme) -> None:
    num_ranks = 4 if scheme[1] == "hierarchy" else 2  # which has servers, of two
    assert ranks(num_ranks).run(walk, scheme) == [[]] * num_ranks


@pytest.mark.parametrize("name", TABLE)
def test_what_is_ignored_has_a_source(name: str) -> None:
    function: Function = TABLE[name]
    assert [a for a, row in function.rows.items() if "ignored" in row.standings and not row.why] == []
    assert [a for a, row in function.rows.items() if "refused" in row.standings and not row.why] == []
