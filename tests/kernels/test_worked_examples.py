"""Examples in docstrings of kernels that compute places: what stands there is what the kernels give."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable

import pytest
import torch

from moe_triton.core.kernel import TritonKernel
from moe_triton.kernels.block_places import block_places_kernel
from moe_triton.kernels.inner_table import inner_table_kernel
from moe_triton.kernels.map_experts import map_experts_kernel
from moe_triton.kernels.outer_table import outer_table_kernel
from moe_triton.kernels.returns import own_offsets_kernel, returns_kernel
from moe_triton.kernels.route import route_kernel
from moe_triton.kernels.select import select_kernel
from moe_triton.kernels.share import share_kernel

DTYPES = {"*i8": torch.int8, "*i32": torch.int32, "*i64": torch.int64}
KERNELS = [
    (route_kernel, route_kernel()),
    (returns_kernel, returns_kernel(shared=False)),
    (own_offsets_kernel, own_offsets_kernel()),
    (block_places_kernel, block_places_kernel()),
    (select_kernel, select_kernel(2, per_entry=False)),
    (map_experts_kernel, map_experts_kernel(2)),
    (outer_table_kernel, outer_table_kernel(2, 2)),
    (inner_table_kernel, inner_table_kernel(2)),
    (share_kernel, share_kernel(by_position=True, masked=False)),
]


@pytest.mark.parametrize(("made_by", "kernel"), KERNELS, ids=[kernel.name for _, kernel in KERNELS])
def test_the_example_is_what_the_kernel_gives(
    made_by: Callable[..., TritonKernel], kernel: TritonKernel
) -> None:
    _, example = re.split(r"^Example.*::$", inspect.getdoc(made_by) or "", flags=re.MULTILINE)
    lines = re.findall(r"^    (\w+) = (.+)$", example, flags=re.MULTILINE)
    values = {name: ast.literal_eval(value) for name, value in lines}
    arguments: dict[str, object] = {}
    expected = {}
    for arg in kernel.args:
        value = values.pop(arg.name, [0] * 64)
        if arg.direction in ("out", "inout"):
            arguments[arg.name] = torch.zeros(len(value), dtype=DTYPES[arg.type])
            expected[arg.name] = value
        else:
            is_table = arg.is_pointer
            arguments[arg.name] = torch.tensor(value, dtype=DTYPES[arg.type]) if is_table else value
    assert not values
    assert kernel.fallback is not None
    kernel.fallback(1, **arguments, **kernel.constants)
    shown = {name for name, _ in lines} & expected.keys()
    assert shown
    for name in shown:
        table = arguments[name]
        assert isinstance(table, torch.Tensor)
        assert table.tolist() == expected[name], name
