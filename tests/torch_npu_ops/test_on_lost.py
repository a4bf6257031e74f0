"""`configure(on_lost="mask")`: calls by a group's name go on without ranks that die or do not come."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from moe_triton import ArgumentError, BufferStateError, ConfigMismatchError, RankMaskedError
from moe_triton import torch_npu_ops as ops
from moe_triton.processes import RankFailedError, RankGroup, run_ranks
from moe_triton.rendezvous.meeting import shared_store_of
from moe_triton.torch_npu_ops import registry
from tests.patience import UNTIL_MASKED_S, seconds
from tests.torch_npu_ops.setting import HIDDEN, TOKENS, Round, make_round
from tests.torch_npu_ops.test_masks import Layer, lost_of

Groups = Callable[[int], RankGroup]
RANKS, GONE = 3, 2


@contextmanager
def going_on(timeout_s: float) -> Iterator[str]:
    """Settings for small sizes with which calls go on, and the group's name."""
    ops.configure(relaxed=True, timeout_s=timeout_s, on_lost="mask")
    try:
        yield ops.group_name()
    finally:
        ops.release(ops.group_name())
        ops.configure()


def layers_of(r: Round) -> list[Layer]:
    """Layers whose calls have windows of their own."""
    layers = [Layer("V2", r), Layer("V1", r), Layer("fullmesh_v2", r)]
    layers[1].common["global_bs"] *= 2
    return layers


def expected_of(layer: Layer, r: Round, gone: int) -> list[torch.Tensor]:
    """What a rank gets where one has no tokens and nobody sends to it."""
    nowhere = lost_of(layer.kind, r, (gone,)) | (r.group[2] == gone)
    for _ in range(3):
        made = layer.both(torch.where(nowhere, -1, r.ids))
    return made


def masks_of_windows(name: str) -> set[frozenset[int]]:
    return {made.masks.masked for _, made in registry.windows(name)}


def go_on(
    name: str, r: Round, layers: list[Layer], expected: list[list[torch.Tensor]], gone: int
) -> list[str]:
    """What is wrong behind the call in which a rank was masked."""
    wrong = []
    has_fault, mask = ops.query_fault(name)
    assert has_fault
    assert mask.tolist() == [int(rank == gone) for rank in range(RANKS)]
    assert not ops.query_fault(name)[0]
    assert masks_of_windows(name) == {frozenset({gone})}
    for number in range(3):
        for layer, wanted in zip(layers, expected, strict=True):
            same = list(map(torch.equal, layer.both(r.ids), wanted))
            wrong += [] if all(same) else [f"{layer.kind}, round {number}: {same}"]
    if not torch.equal(ops.lost(name, r.ids), lost_of("V2", r, (gone,))):
        wrong.append("lost")
    with pytest.raises(BufferStateError, match=rf"without rank\(s\) \[{gone}\], which are masked"):
        Layer("V2", make_round(r.group[2], RANKS, num_experts=3 * RANKS)).dispatch(r.ids)
    with pytest.raises(BufferStateError, match=r"have missed calls"):
        ops.clean_mask(name)
    return wrong


def without_who_is_late(rank: int, num_ranks: int) -> list[str]:
    """What is wrong where a rank does not come in one window, and comes later in another."""
    r, store = make_round(rank, num_ranks), shared_store_of(dist.group.WORLD)
    layers, wait_s = layers_of(r), seconds(60.0)
    with going_on(UNTIL_MASKED_S) as name:
        expected = [expected_of(layer, r, GONE) for layer in layers]
        wrong = []
        if rank == GONE:
            store.wait([f"on/{other}" for other in range(GONE)], timedelta(seconds=wait_s))
            with pytest.raises(RankMaskedError, match=rf"rank {GONE} is masked, and all others go on"):
                layers[1].both(r.ids)  # nobody has waited for it in this window
            assert not any(masked for masked in masks_of_windows(name))
        else:
            same = list(map(torch.equal, layers[0].both(r.ids), expected[0]))
            wrong += [] if all(same) else [f"the call in which it was masked: {same}"]
            wrong += go_on(name, r, layers, expected, GONE)
            store.set(f"on/{rank}", "1")
        dist.barrier()  # nobody gives windows back while others go on
    return wrong


def test_who_does_not_come_is_masked_in_all_windows(ranks: Groups) -> None:
    assert ranks(RANKS).run(without_who_is_late) == [[]] * RANKS


def without_who_dies(rank: int, num_ranks: int, gone: int) -> list[str]:
    """What is wrong where a rank is killed between its dispatch and its combine."""
    r = make_round(rank, num_ranks)
    layers = layers_of(r)
    with going_on(seconds(300.0)) as name:
        expected = [expected_of(layer, r, gone) for layer in layers]
        out = layers[0].dispatch(r.ids)
        if rank == gone:
            os.kill(os.getpid(), signal.SIGKILL)
        wrong = [] if torch.equal(layers[0].combine(r.ids, out), expected[0][-1]) else ["its combine"]
        return wrong + go_on(name, r, layers, expected, gone)


@pytest.mark.parametrize("gone", [0, 1])
def test_who_has_died_is_masked_in_all_windows(gone: int) -> None:
    results = run_ranks(without_who_dies, RANKS, (gone,), timeout_s=seconds(60.0), allow_failures=True)
    assert isinstance(results.pop(gone), RankFailedError)
    assert results == [[]] * (RANKS - 1)


def after_release(rank: int, num_ranks: int) -> list[int]:
    """Who is masked once all ranks have given windows back in which one was masked."""
    r = make_round(rank, num_ranks)
    with going_on(seconds(20.0)) as name:
        layer = Layer("V2", r)
        layer.both(r.ids)
        if rank == 0:
            ops.update_mask(name, GONE, True)
            (made,) = (made for _, made in registry.windows(name))
            on_lost = made.participants._on_lost
            assert on_lost is not None
            assert on_lost._sets.add([GONE]) == {GONE}
        dist.barrier()
        ops.release(name)
        layer.both(r.ids)
        masked = ops.query_mask(name).tolist()
        dist.barrier()
    return masked


def test_sets_of_masked_ranks_go_with_the_windows(ranks: Groups) -> None:
    assert ranks(RANKS).run(after_release) == [[0] * RANKS] * RANKS


def other_settings(rank: int, num_ranks: int) -> str:
    r = make_round(rank, num_ranks)
    ops.configure(relaxed=True, timeout_s=seconds(20.0), on_lost="mask" if rank == 1 else "raise")
    try:
        with pytest.raises(ConfigMismatchError) as caught:
            Layer("V2", r).dispatch(r.ids)
    finally:
        ops.release(ops.group_name())
        ops.configure()
    return str(caught.value)


def test_ranks_have_one_way(ranks: Groups) -> None:
    for said in ranks(RANKS).run(other_settings):
        assert "on_lost: 'raise' on rank(s) [0, 2], 'mask' on rank(s) [1]" in said


def of_pairs(process: int, num_processes: int) -> None:
    """A rank of two expert-parallel groups of two, which are tensor-parallel to each other."""
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][process % 2]
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][process // 2]
    name = ops.group_name(across)
    ops.configure(relaxed=True, timeout_s=seconds(20.0), on_lost="mask")
    try:
        x, ids = torch.ones(TOKENS, HIDDEN).bfloat16(), torch.zeros(TOKENS, 1, dtype=torch.int32)
        options = {"group_tp": ops.group_name(pair), "tp_world_size": 2, "tp_rank_id": process % 2}
        with pytest.raises(ArgumentError, match=r"on_lost is mask, but of tensor-parallel ranks one"):
            ops.npu_moe_distribute_dispatch_v2(
                x, ids, name, 2, process // 2, 2, shared_expert_num=0, **options
            )
    finally:
        ops.release(name)
        ops.configure()


def test_tensor_parallel_ranks_do_not_go_on(ranks: Groups) -> None:
    ranks(4).run(of_pairs)


@pytest.mark.parametrize("value", ["drop", None, True])
def test_other_ways_are_refused(value: object) -> None:
    with pytest.raises(ArgumentError, match=r"on_lost is .* but it must be one of"):
        ops.configure(on_lost=value)  # type: ignore[arg-type]
