from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_triton.backends.cpu.triton import launch as launch_triton
from moe_triton.core.errors import ArgumentError
from moe_triton.core.kernel import TritonKernel
from moe_triton.kernels import Case, Shape, Sizes, families
from moe_triton.kernels.map_experts import REPLICA_BY, map_experts_kernel
from tests.kernels.models import replica_model
from tests.kernels.routes import FORMS, Guarded, Launch, kernel_settings

E, K, P = 12, 3, 20
few_examples = settings(kernel_settings, max_examples=12)


def in_small_tiles(kernel: TritonKernel) -> TritonKernel:
    """With several tiles of a small table, where an AI core has one: compiled in a second instead of ten."""
    return replace(kernel, constants={**kernel.constants, "ROWS": 8, "ONE_TILE": False})


def tables(num_columns: int) -> st.SearchStrategy[list[list[int]]]:
    """Tables of E experts, with rows that no placement has among them."""
    ids = st.lists(st.integers(-1, P), min_size=num_columns - 1, max_size=num_columns - 1)
    row = st.tuples(st.integers(0, num_columns), ids).map(lambda made: [made[0], *made[1]])
    return st.lists(row, min_size=E, max_size=E)


# By "server" an AI core counts own replicas by eights: here in tiles of one, one, and four.
@pytest.mark.parametrize(("launch", "target"), FORMS)
@pytest.mark.parametrize(
    ("by", "num_columns"), [*((by, 5) for by in REPLICA_BY), ("server", 9), ("server", 20)]
)
@few_examples
@given(data=st.data(), tokens=st.integers(0, 11), programs=st.integers(1, 4))
def test_each_entry_goes_to_the_replica_that_the_docstring_names(
    launch: Launch,
    target: str,
    by: Any,
    num_columns: int,
    data: st.DataObject,
    tokens: int,
    programs: int,
) -> None:
    table = data.draw(tables(num_columns))
    ids = data.draw(st.lists(st.integers(-2, E + 3), min_size=tokens * K, max_size=tokens * K))
    world_size = data.draw(st.integers(1, 9))
    rank = data.draw(st.integers(0, world_size - 1))
    first = data.draw(st.integers(0, P))
    own = first, data.draw(st.integers(first, P))
    if by == "row":
        table = [[row[c] for row in table] for c in range(num_columns)]
    out = Guarded((tokens, K), torch.int32)
    numbers = [tokens, E, num_columns, P]
    numbers += {"rank": [rank, world_size], "token": [rank], "server": [rank, *own]}.get(by, [])
    kernel = in_small_tiles(map_experts_kernel(K, by, E, num_columns, target))
    given_ids = torch.tensor(ids, dtype=torch.int32)
    launch(kernel, [given_ids, torch.tensor(table, dtype=torch.int32), out.tensor, *numbers], programs)
    expected = [
        replica_model(table, id_, n // K, by, P, own, (rank, world_size))
        if 0 <= id_ < E
        else (id_ + P - E if id_ >= E else -1)
        for n, id_ in enumerate(ids)
    ]
    assert out.check().flatten().tolist() == expected


@pytest.mark.parametrize(("launch", "target"), FORMS)
@pytest.mark.parametrize("masked", [False, True])
@few_examples
@given(data=st.data(), tokens=st.integers(1, 9))
def test_what_is_pruned_is_compared_in_fp32_with_the_sum_ascending(
    launch: Launch, target: str, masked: bool, data: st.DataObject, tokens: int
) -> None:
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    scales, threshold = torch.rand(tokens, K, generator=draw), torch.rand(K, generator=draw)
    mask = torch.arange(tokens) < data.draw(st.integers(0, tokens))
    total = torch.zeros(tokens)
    for k in range(K):
        total = total + scales[:, k]
    edge = data.draw(st.integers(0, tokens - 1))  # what is just as much is kept
    threshold[1] = scales[edge, 1] / total[edge]
    expected = scales >= total[:, None] * threshold
    if masked:
        expected &= mask[:, None]
    kept, out = Guarded((tokens, K), torch.int8), Guarded((tokens, K), torch.int32)
    kernel = in_small_tiles(map_experts_kernel(K, "token", 1, 2, target, False, True, masked, True))
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    mask_given = [mask.to(torch.int8)] if masked else []
    ids = torch.zeros(tokens, K, dtype=torch.int32)
    launch(kernel, [ids, table, scales, threshold, *mask_given, out.tensor, kept.tensor, tokens, 1, 2, 1], 2)
    assert torch.equal(kept.check() != 0, expected)
    assert not out.check().any()


@pytest.mark.parametrize(
    "features", [("rank", "int64", "prunes", "masked"), ("server", "int64"), ("token", "plain")]
)
@pytest.mark.parametrize("target", ["cpu", "npu"])
def test_wide_ids_become_what_narrow_ones_do(target: str, features: tuple[str, ...]) -> None:
    shape = Shape(topk=8, features=frozenset(features), target=target)
    case = Case(families()["map_experts"], shape, Sizes(tokens=21, num_experts=20))

    def launch(kernel: TritonKernel, *call: Any) -> None:
        launch_triton(in_small_tiles(kernel), *call)

    got, expected = case.run(launch, 3), case.model()
    for name in case.outputs:
        assert torch.equal(got[name], expected[name]), name


def test_tables_of_the_same_tiles_are_read_by_the_same_kernel() -> None:
    """Or it would be compiled anew in the middle of serving, where an expert gets one replica more."""
    cpu = {id(map_experts_kernel(K, "token", e, f)) for e in (1, 12, 256) for f in range(2, 12)}
    assert len(cpu) == 1
    columns = [2, 3, 4, 5, 6, 9, 10, 17]
    npu = [map_experts_kernel(K, "server", 256, f, "npu") for f in columns]
    assert [kernel.constants["COLS"] for kernel in npu] == [8, 8, 8, 8, 8, 8, 16, 16]
    assert len({id(kernel) for kernel in npu}) == 2


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"topk": 0}, "topk"),
        ({"topk": 1, "num_columns": 0}, "num_columns"),
        ({"topk": 1, "by": "expert"}, "by"),
        ({"topk": 1, "masked": True}, "masked"),
        ({"topk": 1, "by": "rank", "plain": True}, "plain"),
    ],
)
def test_sizes_that_no_kernel_has_are_refused(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^{re.escape(error)}"):
        map_experts_kernel(**arguments)
