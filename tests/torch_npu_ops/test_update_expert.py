"""npu_moe_update_expert: as op-plugin's own test has it, what is refused, and where it is traced."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import moe_triton.torch_npu_ops as ops
from moe_triton import ArgumentError

BS, K, E, F, WORLD = 16, 4, 12, 5, 8


@pytest.fixture(autouse=True)
def usual_settings() -> Iterator[None]:
    """As a process that has configured nothing."""
    ops.configure()
    yield
    ops.configure()


def drawn(seed: int, dtype: torch.dtype = torch.int32) -> dict[str, torch.Tensor]:
    """A call as op-plugin's test makes it: ids may repeat in a row, and replicas in the table."""
    draw = torch.Generator().manual_seed(seed)
    table = torch.stack([torch.randperm(WORLD, generator=draw)[:F] for _ in range(E)]).int()
    table[:, 0] = torch.randint(1, F, (E,), generator=draw)
    scales = torch.rand(BS, K, generator=draw).sort(1, descending=True).values / 4
    return {
        "expert_ids": torch.randint(0, E, (BS, K), generator=draw).to(dtype),
        "eplb_table": table,
        "expert_scales": scales,
        "pruning_threshold": torch.rand(1, K, generator=draw) * 0.3,
        "active_mask": torch.arange(BS) < 11,
    }


def expected(call: dict[str, torch.Tensor], mode: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Entry by entry."""
    ids, kept = torch.zeros(BS, K, dtype=torch.int64), torch.zeros(BS, K, dtype=torch.bool)
    for token in range(BS):
        total = torch.zeros(())
        for scale in call["expert_scales"][token]:
            total = total + scale.float()
        for k in range(K):
            row = call["eplb_table"][call["expert_ids"][token, k]].tolist()
            place = rank // math.ceil(WORLD / row[0]) if mode == 0 else token % row[0]
            ids[token, k] = row[place + 1]
            least = total * call["pruning_threshold"].view(-1)[k]
            is_kept = call["expert_scales"][token, k].float() >= least
            kept[token, k] = bool(is_kept) and bool(call["active_mask"][token])
    return ids, kept


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_and_mask_are_those_of_the_original(kernels: str, mode: int, dtype: torch.dtype) -> None:
    ops.configure(kernels=kernels)
    for rank in range(WORLD):
        call = drawn(10 * rank + mode, dtype)
        ids, kept = ops.npu_moe_update_expert(**call, local_rank_id=rank, world_size=WORLD, balance_mode=mode)
        assert ids.dtype == dtype
        assert kept.dtype == torch.bool
        wanted, wanted_kept = expected(call, mode, rank)
        assert torch.equal(ids.long(), wanted)
        assert torch.equal(kept, wanted_kept)
        assert 0 < int(kept.sum()) < kept.numel()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_of_other_dtypes_are_compared_in_fp32(dtype: torch.dtype) -> None:
    call = drawn(3)
    call["expert_scales"] = call["expert_scales"].to(dtype)
    _, kept = ops.npu_moe_update_expert(**call, balance_mode=1)
    assert torch.equal(kept, expected(call, 1, 0)[1])


def test_nothing_is_pruned_without_scales_and_layouts_do_not_matter() -> None:
    call = drawn(5)
    ids, table = call["expert_ids"], call["eplb_table"]
    wanted = expected(call, 1, 0)[0]
    got, kept = ops.npu_moe_update_expert(ids.T.contiguous().T, table.T.contiguous().T, balance_mode=1)
    assert torch.equal(got.long(), wanted)
    assert kept.all()
    threshold = call["pruning_threshold"]
    flat = ops.npu_moe_update_expert(**{**call, "pruning_threshold": threshold.view(-1)}, balance_mode=1)
    assert all(map(torch.equal, flat, ops.npu_moe_update_expert(**call, balance_mode=1)))


def test_no_expert_stays_none_and_an_empty_batch_is_one() -> None:
    table = torch.tensor([[1, 3], [5, 4]], dtype=torch.int32)
    given = torch.tensor([[-1], [0], [1], [2], [2**31 - 1]], dtype=torch.int32)
    ids, _ = ops.npu_moe_update_expert(given, table, balance_mode=1)
    assert ids[:3].tolist() == [[-1], [3], [1 << 24]]
    assert (ids[3:] >= 1 << 24).all()
    ids, kept = ops.npu_moe_update_expert(torch.zeros(0, 2).int(), table, balance_mode=1)
    assert (ids.shape, kept.shape) == ((0, 2), (0, 2))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no ids": ({"expert_ids": None}, "^expert_ids .*161001"),
    "a list": ({"eplb_table": [[1, 0]]}, "^eplb_table .*161002"),
    "ids of floats": ({"expert_ids": torch.rand(2, 2)}, "^expert_ids .*161002"),
    "flat ids": ({"expert_ids": torch.zeros(4).int()}, "^expert_ids .*561002"),
    "a wide table": ({"eplb_table": torch.ones(12, 5).long()}, "^eplb_table .*161002"),
    "no experts": ({"eplb_table": torch.ones(0, 5).int()}, "^eplb_table .*1 to 1024.*561002"),
    "too many experts": ({"eplb_table": torch.ones(1025, 5).int()}, "^eplb_table .*1 to 1024"),
    "more choices than experts": ({"eplb_table": torch.ones(3, 5).int()}, "^expert_ids .*1 to 3"),
    "one column": ({"eplb_table": torch.ones(12, 1).int()}, "^eplb_table .*2 to 9"),
    "too many columns": ({"eplb_table": torch.ones(12, 10).int()}, "^eplb_table .*2 to 9"),
    "a world of one": ({"world_size": 1}, "^world_size .*2 to 768"),
    "a world too large": ({"world_size": 769}, "^world_size .*2 to 768"),
    "no rank": ({"local_rank_id": 8}, "^local_rank_id .*0 to 7"),
    "a rank of text": ({"local_rank_id": "0"}, "^local_rank_id .*161002"),
    "a third mode": ({"balance_mode": 2}, "^balance_mode .*0, .*1"),
    "scales alone": ({"pruning_threshold": None}, "^pruning_threshold .*161001"),
    "a threshold alone": ({"expert_scales": None}, "^expert_scales .*161001"),
    "a mask alone": ({"expert_scales": None, "pruning_threshold": None}, "^active_mask .*161001"),
    "a threshold of halves": ({"pruning_threshold": torch.ones(4).half()}, "^pruning_threshold .*161002"),
    "a mask of entries": ({"active_mask": torch.ones(16, 4).bool()}, "^active_mask .*561002"),
}


@pytest.mark.parametrize(("changes", "pattern"), REFUSED.values(), ids=REFUSED.keys())
def test_what_the_host_refuses(changes: dict[str, Any], pattern: str) -> None:
    call: dict[str, Any] = {**drawn(1), "local_rank_id": 0, "world_size": WORLD, **changes}
    with pytest.raises(ArgumentError) as caught:
        ops.npu_moe_update_expert(**call)
    assert re.search(pattern, str(caught.value), re.DOTALL), str(caught.value)


def test_a2_has_none() -> None:
    ops.configure(product="A2")
    with pytest.raises(ArgumentError, match="of A3"):
        ops.npu_moe_update_expert(**drawn(1), balance_mode=1)


def test_traced_calls_know_shapes_and_give_the_same() -> None:
    call = drawn(2, torch.int64)
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(value) for name, value in call.items()}
        ids, kept = ops.npu_moe_update_expert(**fakes, balance_mode=1)
    assert (ids.shape, ids.dtype, kept.dtype) == ((BS, K), torch.int64, torch.bool)

    def twice(**given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.npu_moe_update_expert(**given, balance_mode=1)

    # Its outputs are contiguous, of whatever layout the ids are.
    with FakeTensorMode() as mode:
        turned = mode.from_tensor(call["expert_ids"]).t()[:, :K]
        table = mode.from_tensor(call["eplb_table"])
        assert ops.npu_moe_update_expert(turned, table, balance_mode=1)[0].is_contiguous()
    compiled = torch.compile(twice, backend="eager", fullgraph=True)
    assert all(map(torch.equal, compiled(**call), twice(**call)))
