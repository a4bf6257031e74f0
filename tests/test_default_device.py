"""A default device or dtype that is in force does not reach what the library makes."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import moe_triton
from moe_triton import EPBuffer
from moe_triton import torch_npu_ops as ops
from moe_triton.processes import RankGroup
from tests.torch_npu_ops.setting import experts_of, fresh, make_round

Groups = Callable[[int], RankGroup]
X, IDS = torch.randn(4, 64).bfloat16(), torch.arange(2).expand(4, 2).contiguous()
WEIGHTS, MASK, STATS = torch.rand(4, 2), torch.tensor([True, True, False, False]), torch.zeros(2).int()
WAYS = ("fullmesh_v1", "triton"), ("direct", "triton"), ("fullmesh_v2", "torch")


@contextmanager
def set_in_torch(device: str | None, dtype: torch.dtype) -> Iterator[None]:
    """As `set_default_device` and `set_default_dtype` leave it."""
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def sums_of_rounds(comm_alg: str, kernels: str) -> list[torch.Tensor]:
    """Of a process by itself: usual calls, and others that Python runs."""
    sizes = {"num_max_tokens_per_rank": 4, "hidden": 64, "num_topk": 2, "num_experts": 2}
    options = {"comm_alg": comm_alg, "kernels": kernels, "relaxed": True}
    sums = []
    with EPBuffer(**sizes, **options) as buffer:  # type: ignore[arg-type]
        for quantize in (None, "int8"):
            received = buffer.dispatch(X, IDS, WEIGHTS, STATS, quantize=quantize)
            y = buffer.expert_output(torch.bfloat16).copy_(received.tokens)
            sums += [buffer.combine(y, received.handle, WEIGHTS), received.handle.origins]
            if comm_alg != "direct":
                many = buffer.dispatch(
                    *(torch.cat([each, each]) for each in (X, IDS, WEIGHTS)), quantize=quantize
                )
                y = many.tokens.to(torch.bfloat16)
                sums += [buffer.combine(y, many.handle), many.handle.origins, *many[:1]]
                received = buffer.dispatch(X, IDS, active_mask=MASK, quantize=quantize, wait=False).wait()
                y = received.tokens.to(torch.bfloat16)
                sums += [buffer.combine(y, received.handle, comm_quantize="int8")]
    return sums


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_buffer_gives_the_same(way: tuple[str, str], dtype: torch.dtype) -> None:
    expected = sums_of_rounds(*way)
    with set_in_torch("meta", dtype):
        found = sums_of_rounds(*way)
    with torch.device("meta"):
        found += sums_of_rounds(*way)
    for one, other in zip(found, 2 * expected, strict=True):
        num_rows = 8 if one.shape[1:] == (3,) else None  # of origins, what is written
        assert torch.equal(one[:num_rows], other[:num_rows])


def npu_rounds(rank: int, num_ranks: int, device: str | None) -> list[torch.Tensor]:
    with fresh():
        r = make_round(rank, num_ranks)
        everyone = torch.zeros(4 + 2 * num_ranks, dtype=torch.int32)
        with set_in_torch(device, torch.float64 if device else torch.float32):
            out = ops.npu_moe_distribute_dispatch_v2(r.x, r.ids, *r.group)
            one = ops.npu_moe_distribute_combine_v2(
                experts_of(out[0]), r.ids, out[2], out[4], r.weights, *r.group
            )
            y, expand_idx, ticket = ops.npu_moe_distribute_dispatch_setup(r.x, r.ids, *r.group)
            rows = ops.npu_moe_distribute_dispatch_teardown(r.x, y, r.ids, ticket, *r.group)
            ops._npu_distribute_barrier(r.x, *r.group[:2])
            ops.npu_moe_distribute_buffer_reset(everyone, *r.group[:2], need_sync=1)
        return [one, rows[0][: int(rows[3].sum())], expand_idx]


def compare_npu_rounds(rank: int, num_ranks: int) -> list[bool]:
    both = [npu_rounds(rank, num_ranks, device) for device in (None, "meta")]
    return [torch.equal(*pair) for pair in zip(*both, strict=True)]


def test_torch_npus_functions_give_the_same(ranks: Groups) -> None:
    assert ranks(2).run(compare_npu_rounds) == [[True] * 3] * 2


MAKERS = {"tensor", "as_tensor", "empty", "zeros", "ones", "full", "arange"}
ROOMS = ("backends", "operators", "rendezvous", "runtime", "schemes", "torch_npu_ops")


def without_device(source: str) -> list[int]:
    """Lines that make a tensor on whatever device is torch's default."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in MAKERS) == ("torch", True)
        and "device" not in {keyword.arg for keyword in node.keywords}
    ]


def test_whatever_runs_names_the_device_of_what_it_makes() -> None:
    assert without_device("torch.zeros(3)\ntorch.zeros(3, device=None)") == [1]
    root = Path(moe_triton.__file__).parent
    files = [root / "buffer.py", *(path for room in ROOMS for path in (root / room).rglob("*.py"))]
    assert len(files) > 100
    found = {str(path.relative_to(root)): without_device(path.read_text(encoding="utf-8")) for path in files}
    assert {path: lines for path, lines in found.items() if lines} == {}
