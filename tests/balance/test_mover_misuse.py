"""What a mover is told, and tells others, where it is used as it should not be, or left in the middle."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_triton import ArgumentError, BufferStateError, ConfigMismatchError, EPBuffer
from moe_triton.backends.cpu.side_copies import CpuSideCopies
from moe_triton.balance import ExpertWeights, Mover, Placement, adopt, allocate
from moe_triton.balance.agreement import LATE_STEPS, InMemory
from moe_triton.balance.weights import HEADER_BYTES, Parts
from moe_triton.core.topology import Topology
from moe_triton.processes import RankGroup
from tests.balance.test_mover import (
    EXPERTS,
    LAYERS,
    SLOTS,
    SPECS,
    Ranks,
    SharedArrays,
    adopted,
    fill_is_right,
    turned,
)
from tests.patience import seconds

Groups = Callable[[int], RankGroup]


def steps(ranks: Ranks, first: int, last: int) -> None:
    """Steps of all ranks in turn."""
    for number in range(first, last):
        for mover in ranks.movers:
            mover.switch(number)
        for mover in ranks.movers:
            mover.step(1 << 30)


def test_a_second_mover_knows_which_halves_are_in_use() -> None:
    ranks = Ranks(2, "double", 3)
    there = turned(ranks.old, [0])
    for mover in ranks.movers:
        mover.begin(there)
    steps(ranks, 0, 4)
    assert not any(mover.is_moving for mover in ranks.movers)
    first = ranks.movers[0]
    ranks.movers = [Mover(weights, there, 2 * SLOTS) for weights in ranks.weights]
    with pytest.raises(BufferStateError, match="another Mover has these weights now"):
        first.switch(4)
    goal = Placement(there.phy2log.roll(1, 1), EXPERTS, 2)
    for mover in ranks.movers:
        mover.begin(goal)
    with pytest.raises(BufferStateError, match="another Mover is moving these weights"):
        Mover(ranks.weights[0], there, 2 * SLOTS)
    steps(ranks, 4, 9)
    fill_is_right(ranks, goal)


def test_nothing_is_read_before_its_rank_has_taken_a_step() -> None:
    ranks = Ranks(2, "layer", 3)
    late, early = ranks.movers
    for mover in ranks.movers:
        mover.begin(turned(ranks.old, [0, 1]))
    early.switch(0)
    assert early.step(1 << 30) == 0
    late.switch(0)
    assert early.step(1 << 30) > 0


class Counted(SharedArrays):
    """Memory of one of several ranks, which counts dispatches by itself."""

    def __init__(self, shared: SharedArrays) -> None:
        self._all = shared._all
        self.count = 0

    def num_dispatches(self) -> int:  # type: ignore[override]
        return self.count


def test_steps_that_are_not_the_same_are_found_by_the_dispatches_before_them() -> None:
    shared = SharedArrays(2, HEADER_BYTES)
    memories = [Counted(shared) for _ in range(2)]
    first, second = (InMemory(memory, rank, 2) for rank, memory in enumerate(memories))
    for agreement in (first, second):
        agreement.begin(7)
    for memory in memories:
        memory.count = 10
    first.arrive(1, False, 7)
    second.arrive(2, False, 7)
    memories[0].count = 20
    said = "before step 2 rank 1 has begun 10 dispatches, and rank 0 20"
    with pytest.raises(ConfigMismatchError, match=said):
        first.arrive(2, False, 7)


def test_moves_that_ranks_count_differently_are_compared_by_where_they_lead() -> None:
    ranks = Ranks(2, "layer", 3)
    ranks.movers[1].begin(ranks.old)  # a move of nothing, which the other rank does not make
    steps(ranks, 0, 2)
    ranks.movers[0].begin(turned(ranks.old, [0]))
    ranks.movers[1].begin(turned(ranks.old, [1]))
    with pytest.raises((ConfigMismatchError, BufferStateError)) as caught:
        steps(ranks, 2, 9)
    assert "to another placement" in str(caught.value)
    assert all(mover.placement == ranks.old for mover in ranks.movers)
    for mover in ranks.movers:  # both are told, whoever has found it
        with pytest.raises(BufferStateError):
            mover.switch(4)


def test_a_rank_that_never_steps_is_named() -> None:
    ranks = Ranks(2, "layer", 3)
    mover = ranks.movers[0]
    mover.begin(turned(ranks.old, [0]))
    for number in range(2):
        mover.switch(number)
    with pytest.raises(ConfigMismatchError, match=r"\{1: -1\}"):
        mover.switch(2)


def test_a_rank_that_does_not_begin_is_named() -> None:
    ranks = Ranks(2, "layer", 3)
    ranks.movers[0].begin(turned(ranks.old, [0]))
    with pytest.raises(ConfigMismatchError, match=r"rank\(s\) \[1\] have not begun move 1 of rank 0"):
        steps(ranks, 0, LATE_STEPS + 3)


@pytest.mark.parametrize("held", ["allocated", "stacked"])
def test_a_move_that_is_left_in_the_middle_is_of_no_use_to_anybody(held: str) -> None:
    ranks = Ranks(2, "layer", 3, held)
    first, second = ranks.movers
    for mover in ranks.movers:
        mover.switch(0)
        mover.begin(turned(ranks.old, [0, 1]))
    copy = CpuSideCopies.copy

    def interrupted(self: CpuSideCopies, to: torch.Tensor, source: torch.Tensor) -> None:
        copy(self, to, source)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuSideCopies, "copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            first.step(1 << 30)
    with pytest.raises(BufferStateError, match=r"left by KeyboardInterrupt\. Load weights anew"):
        first.step(1)
    with pytest.raises(BufferStateError, match=r"rank\(s\) \[0\] have given up"):
        second.switch(1)
    with pytest.raises(BufferStateError, match="left by KeyboardInterrupt"):
        Mover(ranks.weights[0], ranks.old, 2 * SLOTS)


def test_a_rank_that_closes_in_a_move_is_named() -> None:
    ranks = Ranks(2, "layer", 3)
    for mover in ranks.movers:
        mover.switch(0)
        mover.begin(turned(ranks.old, [0]))
    ranks.weights[0].agreement.give_up()  # as `close` does before the memory goes, which others keep
    with pytest.raises(BufferStateError, match=r"rank\(s\) \[0\]"):
        ranks.movers[1].switch(1)


OTHERS = {
    "ranks": (Placement.initial(LAYERS, EXPERTS, 8, 4), "with 4 ranks, but weights have"),
    "shared ranks": (
        Placement(torch.tensor([[0, 1, 2, 3]] * LAYERS), EXPERTS, 3, num_shared_ranks=1),
        "with 3 ranks, 1 ranks of shared experts",
    ),
    "experts": (Placement.initial(LAYERS, 3, 4, 2), "with 3 experts"),
}


@pytest.mark.parametrize(("other", "pattern"), OTHERS.values(), ids=OTHERS.keys())
def test_a_placement_of_other_sizes_leaves_all_as_it_was(other: Placement, pattern: str) -> None:
    ranks = Ranks(2, "layer", 3)
    with pytest.raises(ArgumentError, match=pattern):
        ranks.movers[0].begin(other)
    assert not ranks.movers[0].is_moving
    goal = turned(ranks.old, [0])
    for mover in ranks.movers:
        mover.begin(goal)
    steps(ranks, 0, 4)
    assert all(mover.placement == goal for mover in ranks.movers)


def test_tensors_without_bytes_end_too() -> None:
    specs = {"w": ((2,), torch.int8), "none": ((0, 3), torch.int8)}
    held = Placement(torch.tensor([[0, 1, 2, 3]]), EXPERTS, 2)
    for only in (specs, {"none": specs["none"]}):
        parts = Parts(1, SLOTS, only, 1)
        memory = SharedArrays(2, parts.num_bytes)
        agreements = [InMemory(memory, rank, 2) for rank in range(2)]
        weights = [
            ExpertWeights(parts, memory, rank, Topology((2,)), 0, agreement)
            for rank, agreement in enumerate(agreements)
        ]
        movers = [Mover(each, held) for each in weights]
        for mover in movers:
            mover.begin(Placement(held.phy2log.flip(1), EXPERTS, 2))
        for number in range(6):
            for mover in movers:
                mover.switch(number)
            for mover in movers:
                mover.step(2)
        assert not any(mover.is_moving for mover in movers)


def test_there_is_no_such_layer() -> None:
    ranks = Ranks(2, "layer", 3)
    for call in (ranks.weights[0].layer, ranks.movers[0].table):
        for layer in (-1, LAYERS, "0"):
            with pytest.raises(ArgumentError, match="layer"):
                call(layer)  # type: ignore[arg-type]
    own = adopted(Parts(LAYERS, SLOTS, SPECS, 1), 2, "stacked", 64)[0]
    with pytest.raises(ArgumentError, match="layer is -1"):
        own.layer(-1)
    for columns in (1 << 40, 1 << 70):
        with pytest.raises(ArgumentError, match="num_columns"):
            Mover(ranks.weights[0], ranks.old, columns)
    with pytest.raises(ArgumentError, match="step is"):
        ranks.movers[0].switch(1 << 63)


def two(tensor: torch.Tensor) -> list[dict[str, Any]]:
    return [{"w": [tensor, tensor.clone()]}]


def unusual(rank: int, num_ranks: int) -> list[str]:
    """What adopting other tensors says, and weights that are used in a forked child."""
    said = []
    w = torch.zeros(2, 3)
    with EPBuffer(
        num_max_tokens_per_rank=4, hidden=64, num_topk=1, num_experts=2, relaxed=True, timeout_s=seconds(30.0)
    ) as buffer:
        calls: list[Callable[[], object]] = [
            lambda: adopt(buffer, [{"w": w}, {"w": w}]),
            lambda: adopt(buffer, [{"w": w[:1].expand(2, 3)}]),
            lambda: adopt(buffer, [{"w": [w[0], w[0]]}]),
            lambda: adopt(buffer, two(torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.quint8))),
            lambda: adopt(buffer, [{"w": torch.zeros(2, 3, dtype=torch.complex64).conj()}]),
            lambda: allocate(buffer, 1, {"w": ((3,), torch.quint8)}),
        ]
        for call in calls:
            with pytest.raises(ArgumentError) as caught:
                call()
            said.append(str(caught.value))
        parameter = torch.nn.Parameter(torch.zeros(2, 3))
        weights = adopt(buffer, [{"w": parameter}])
        mover = Mover(weights, Placement(torch.tensor([[0, 1]]), 2, 1))
        child = os.fork()
        if child == 0:
            status = 1
            try:
                weights.close()
                mover.switch(0)
            except BufferStateError as error:
                status = 0 if "forked" in str(error) else 2
            finally:
                os._exit(status)
        said.append(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
        parameter.data = torch.ones(2, 3)
        with pytest.raises(ArgumentError) as caught:
            mover.begin(Placement(torch.tensor([[1, 0]]), 2, 1))
        said.append(str(caught.value))
        weights.close()
    return said


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_tensors_that_cannot_be_moved_are_refused(ranks: Groups) -> None:
    (said,) = ranks(1).run(unusual)
    shares = "shares memory with"
    wanted = (shares, shares, shares, "quint8", "resolve_conj", "quint8", "0", "another one than when")
    assert len(said) == len(wanted)
    for text, part in zip(said, wanted, strict=True):
        assert part in text
