"""Moves of weights: every order in which ranks may act, real ranks beside dispatches, and what is refused."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_triton import (
    ArgumentError,
    BufferStateError,
    CommunicationTimeoutError,
    ConfigMismatchError,
    EPBuffer,
)
from moe_triton.backends.cpu.nic import NicSettings, emulated_nic
from moe_triton.backends.cpu.side_copies import CpuSideCopies
from moe_triton.balance import AdoptedWeights, ExpertWeights, Mover, Placement, adopt, allocate
from moe_triton.balance.agreement import NUM_WORDS, PLACEMENTS, Agreement, AtCheckpoints, InMemory
from moe_triton.balance.carriers import Region, make_stage
from moe_triton.balance.weights import HEADER_BYTES, Parts, Side
from moe_triton.core.topology import Topology
from moe_triton.processes import RankGroup
from tests.patience import seconds

Groups = Callable[[int], RankGroup]
SPECS = {"up": ((3, 5), torch.float32), "scale": ((2,), torch.int8)}
EXPERTS, SLOTS, LAYERS = 4, 2, 2
HOW = [("layer", "allocated"), ("double", "allocated"), ("layer", "stacked"), ("double", "slot by slot")]
CHECKPOINTS = "allocated, at checkpoints"  # as on NPUs


class SharedArrays:
    """Memory of ranks that are objects of one process."""

    copies = CpuSideCopies()
    queued: frozenset[int] = frozenset()
    number, timeout_s = 0, 1.0

    @staticmethod
    def num_dispatches() -> int:
        return 0

    def __init__(self, num_ranks: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._all = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(num_ranks)]

    def of(self, rank: int) -> torch.Tensor:
        return self._all[rank]

    def close(self) -> None:
        self._all = []


def placement(draw: random.Random, num_ranks: int, layers: int = LAYERS) -> Placement:
    """Any in which each expert has a slot."""
    slots = num_ranks * SLOTS
    rows = []
    for _ in range(layers):
        held = [*range(EXPERTS), *(draw.randrange(EXPERTS) for _ in range(slots - EXPERTS))]
        draw.shuffle(held)
        rows.append(held)
    return Placement(torch.tensor(rows), EXPERTS, num_ranks)


def value(layer: int, expert: int) -> int:
    return 1 + layer * EXPERTS + expert


def fill(weights: ExpertWeights, held: Placement) -> None:
    for layer in range(weights.parts.num_layers):
        own = held.phy2log[layer].view(held.num_ranks, SLOTS)[weights.rank]
        for name in weights.layer(layer):
            for tensor, expert in zip(slots_of(weights, layer, name), own.tolist(), strict=True):
                tensor.fill_(value(layer, expert))


def own_layers(held: str) -> list[dict[str, Any]]:
    """A model's own weights: stacked, or a tensor for each slot, whose dimensions are turned in memory."""
    if held == "stacked":
        return [{n: torch.zeros(SLOTS, *s, dtype=d) for n, (s, d) in SPECS.items()} for _ in range(LAYERS)]
    return [
        {
            n: [torch.zeros(*s[::-1], dtype=d).permute(*reversed(range(len(s)))) for _ in range(SLOTS)]
            for n, (s, d) in SPECS.items()
        }
        for _ in range(LAYERS)
    ]


def adopted(parts: Parts, num_ranks: int, held: str, ring_bytes: int) -> list[ExpertWeights]:
    everyone = range(num_ranks)
    memory = SharedArrays(num_ranks, HEADER_BYTES + Region.num_bytes(num_ranks, ring_bytes))
    regions = [Region(memory, HEADER_BYTES, rank, num_ranks, ring_bytes) for rank in everyone]
    stages = [make_stage(region, Texts([""] * num_ranks, 0), "") for region in regions]
    return [
        AdoptedWeights(
            parts,
            memory,
            rank,
            Topology((num_ranks,)),
            0,
            own_layers(held),
            stages[rank],
            InMemory(memory, rank, num_ranks),
        )
        for rank in everyone
    ]


def slots_of(weights: ExpertWeights, layer: int, name: str) -> list[torch.Tensor]:
    return list(weights.layer(layer)[name])


class Texts:
    """Of ranks that are objects of one process."""

    def __init__(self, texts: list[str], rank: int) -> None:
        self._texts, self._rank = texts, rank

    def leave(self, name: str, text: str) -> None:
        self._texts[self._rank] = text

    def left(self, name: str) -> list[str]:
        return self._texts


class Ranks:
    """Ranks of one process, each of which takes its steps when told.

    A step is begun (`switch`, `step`), and ended by its dispatch, for which all ranks must have begun it.
    """

    def __init__(self, num_ranks: int, side: Side, seed: int, held: str = "allocated") -> None:
        self.draw = random.Random(seed)
        self.old = placement(self.draw, num_ranks)
        parts = Parts(LAYERS, SLOTS, SPECS, 1 if side == "layer" else 2)
        everyone = range(num_ranks)
        if held in ("allocated", CHECKPOINTS):
            memory, texts = SharedArrays(num_ranks, parts.num_bytes), [""] * num_ranks
            agreements: list[Agreement] = [InMemory(memory, rank, num_ranks) for rank in everyone]
            if held == CHECKPOINTS:
                agreements = [
                    AtCheckpoints(memory, Texts(texts, rank), "moves", rank, num_ranks, 1, 0.5)
                    for rank in everyone
                ]
            self.weights = [
                ExpertWeights(parts, memory, rank, Topology((num_ranks,)), 0, agreements[rank])
                for rank in everyone
            ]
        else:
            self.weights = adopted(parts, num_ranks, held, self.draw.choice([64, 128]))
        for each in self.weights:
            fill(each, self.old)
        # Of any placement: an expert may be on a rank twice.
        self.movers = [Mover(each, self.old, num_ranks * SLOTS) for each in self.weights]
        self.begun = [-1] * num_ranks
        self.ended = [-1] * num_ranks
        self.tables: dict[int, list[torch.Tensor]] = {}
        self.switched: dict[int, dict[int, tuple[int, ...]]] = {}

    def may(self, rank: int) -> str:
        """What a rank may do next; empty if it has to wait."""
        if self.begun[rank] == self.ended[rank]:
            return "begin"
        return "end" if min(self.begun) >= self.begun[rank] else ""

    def act(self, rank: int, next_one: Placement | None = None, most: int = 1 << 30) -> None:
        mover = self.movers[rank]
        if self.may(rank) == "begin":
            step = self.begun[rank] = self.begun[rank] + 1
            self.switched.setdefault(step, {})[rank] = mover.switch(step)
            if next_one is not None and not mover.is_moving:
                mover.begin(next_one)
            mover.step(most)
            self.tables.setdefault(step, []).append(
                torch.stack([mover.table(layer) for layer in range(LAYERS)])
            )
            return
        # The experts run: rows have come by the tables of this step, on whatever rank.
        step = self.ended[rank] = self.ended[rank] + 1
        first, *others = self.tables[step]
        assert all(torch.equal(first, each) for each in others), f"tables differ in step {step}"
        self.check(rank)

    def check(self, rank: int) -> None:
        """That weights and tables are those of the rank's placement."""
        mover = self.movers[rank]
        own = mover.placement.phy2log.view(LAYERS, -1, SLOTS)[:, rank]
        for layer in range(LAYERS):
            table = mover.table(layer)
            assert torch.equal(table, mover.placement.table(layer, table.shape[1]))
            for name in self.weights[rank].layer(layer):
                for tensor, expert in zip(
                    slots_of(self.weights[rank], layer, name), own[layer].tolist(), strict=True
                ):
                    assert (tensor == value(layer, expert)).all(), f"{name} of rank {rank}"


def orders(begun: tuple[int, ...], ended: tuple[int, ...], last: int) -> Iterator[tuple[int, ...]]:
    """Every order in which ranks may act until all have begun a step."""
    if min(begun) == last:
        yield ()
    for rank, (b, e) in enumerate(zip(begun, ended, strict=True)):
        if b == e < last:
            one = (*begun[:rank], b + 1, *begun[rank + 1 :])
            yield from ((rank, *rest) for rest in orders(one, ended, last))
        elif e < b <= min(begun) and b < last:
            one = (*ended[:rank], e + 1, *ended[rank + 1 :])
            yield from ((rank, *rest) for rest in orders(begun, one, last))


def check_every_order(num_ranks: int, side: Side, last: int, held: str = "allocated") -> int:
    """Moves in every order of the steps after the first, in which rank 0 is late; how many orders there are.

    Of ranks that are not late, those with higher numbers begin later: they are alike.
    """
    made = set(orders((0,) * num_ranks, (-1,) * num_ranks, last))
    every = [order for order in made if num_ranks < 3 or order.index(1) < order.index(2)]
    for order in every:
        ranks = Ranks(num_ranks, side, 1, held)
        new = placement(ranks.draw, num_ranks)
        for rank in range(num_ranks):  # step 0, in which one copies next to nothing
            ranks.act(rank, new, 1 if rank == 0 else 1 << 30)
        for rank in order:
            assert ranks.may(rank)
            ranks.act(rank)
        while any(mover.is_moving for mover in ranks.movers):
            ranks.act(next(rank for rank in range(num_ranks) if ranks.may(rank)))
            assert max(ranks.begun) < 40
        assert all(mover.placement == new for mover in ranks.movers)
        assert sum(len(set(of_rank.values())) > 1 for of_rank in ranks.switched.values()) == 0
    return len(every)


@pytest.mark.parametrize(("side", "held"), [HOW[0], HOW[3], ("layer", CHECKPOINTS)])
def test_every_order_of_two_ranks_in_three_steps(side: Side, held: str) -> None:
    assert check_every_order(2, side, 3, held) >= 50


@pytest.mark.long
@pytest.mark.parametrize(("side", "held"), [HOW[0], HOW[3]])
def test_every_order_of_three_ranks_in_three_steps(side: Side, held: str) -> None:
    assert check_every_order(3, side, 2, held) == 4050


@pytest.mark.parametrize(("side", "held"), [*HOW, ("layer", CHECKPOINTS), ("double", CHECKPOINTS)])
@pytest.mark.parametrize("seed", range(2))
def test_many_moves_in_any_order(side: Side, seed: int, held: str) -> None:
    ranks = Ranks(4, side, seed, held)
    moves = [placement(ranks.draw, 4) for _ in range(5)]
    done = [0] * 4
    while min(ranks.begun) < 90 or any(mover.is_moving for mover in ranks.movers):
        rank = ranks.draw.randrange(4)
        if not ranks.may(rank):
            continue
        mover = ranks.movers[rank]
        before = mover.is_moving, ranks.may(rank)
        next_one = moves[done[rank]] if before == (False, "begin") and done[rank] < len(moves) else None
        ranks.act(rank, next_one, ranks.draw.choice([30, 64, 1000]))
        done[rank] += next_one is not None
    assert done == [5] * 4
    assert all(mover.placement == moves[-1] for mover in ranks.movers)


@pytest.mark.parametrize(("side", "held"), HOW[:2])
def test_a_lost_rank_leaves_one_placement_to_all_others(side: Side, held: str) -> None:
    switched = set()
    for seed in range(40):
        ranks = Ranks(3, side, seed, held)
        goal, steps = placement(ranks.draw, 3), ranks.draw.randrange(1, 40)
        began = [False] * 3
        for _ in range(steps):
            rank = ranks.draw.randrange(3)
            if what := ranks.may(rank):
                ranks.act(rank, None if began[rank] else goal, 200)
                began[rank] |= what == "begin"
        others = [0, 1]  # the third does nothing any more
        while any(ranks.may(rank) for rank in others):
            for rank in others:
                if what := ranks.may(rank):
                    ranks.act(rank, None if began[rank] else goal, 200)
                    began[rank] |= what == "begin"
        first, second = (ranks.movers[rank] for rank in others)
        assert first.placement == second.placement
        for rank in others:  # as after a step of all: weights and tables are those of the placement
            ranks.check(rank)
        switched.add((first.placement == ranks.old, first.placement == goal))
    assert len(switched) > 1


def test_what_moves_is_counted_and_bounded() -> None:
    ranks = Ranks(2, "layer", 3)
    mover, bytes_each = ranks.movers[0], ranks.weights[0].parts.expert_bytes
    assert bytes_each == 3 * 5 * 4 + 2
    new = Placement(ranks.old.phy2log.flip(1), EXPERTS, 2)
    assert mover.begin(new) == 4 * bytes_each  # both slots of both layers
    assert not mover.ready()
    assert mover.step(50) == 0  # the other rank may not have filled its weights
    for each in ranks.movers:
        each.switch(0)
    assert [mover.step(50) for _ in range(3)] == [50, 50, 24]
    assert mover.ready()
    assert mover.step(50) == 0
    with pytest.raises(BufferStateError, match="under way"):
        mover.begin(ranks.old)
    ranks = Ranks(2, "layer", 3)
    same = ranks.movers[1]
    assert same.begin(ranks.old) == 0
    assert same.ready()
    assert same.switch(0) == ()
    assert not same.is_moving


def test_of_two_halves_what_the_other_one_holds_is_not_copied_again() -> None:
    ranks = Ranks(2, "double", 3)
    mover, bytes_each = ranks.movers[0], ranks.weights[0].parts.expert_bytes
    there, back = turned(ranks.old, [0]), ranks.old
    for number, (goal, copied) in enumerate(((there, 2), (back, 0), (there, 0))):
        assert mover.begin(goal) == copied * bytes_each
        ranks.movers[1].begin(goal)
        for step in range(3 * number, 3 * number + 3):
            for each in ranks.movers:
                each.step(1000)
            switched = [each.switch(step) for each in ranks.movers]
        assert switched == [(0,), (0,)] or not mover.is_moving
        fill_is_right(ranks, goal)


def fill_is_right(ranks: Ranks, held: Placement) -> None:
    for weights in ranks.weights:
        own = held.phy2log[0].view(held.num_ranks, SLOTS)[weights.rank]
        assert weights.layer(0)["scale"][:, 0].tolist() == [value(0, int(e)) for e in own]


def turned(base: Placement, layers: Sequence[int]) -> Placement:
    ids = base.phy2log.clone()
    ids[list(layers)] = ids[list(layers)].flip(1)
    return Placement(ids, EXPERTS, base.num_ranks)


REFUSED: dict[str, tuple[Callable[[Ranks], Any], type[Exception], str]] = {
    "no weights": (lambda r: Mover(None, r.old), ArgumentError, "weights"),  # type: ignore[arg-type]
    "no placement": (lambda r: r.movers[0].begin(r.old.phy2log), ArgumentError, "placement"),  # type: ignore[arg-type]
    "other layers": (
        lambda r: r.movers[0].begin(Placement.initial(3, EXPERTS, 4, 2)),
        ArgumentError,
        "with 3 layers, but weights have 2 layers, 2 slots",
    ),
    "a step of nothing": (lambda r: r.movers[0].step(0), ArgumentError, "max_bytes is 0"),
    "a step left out": (
        lambda r: [r.movers[0].switch(n) for n in (0, 2)],
        ArgumentError,
        "step is 2.*Pass 1",
    ),
    "a step twice": (lambda r: [r.movers[0].switch(n) for n in (5, 5)], ArgumentError, "step is 5.*Pass 6"),
    "a step of text": (lambda r: r.movers[0].switch("0"), ArgumentError, "step"),  # type: ignore[arg-type]
    "too few columns": (
        lambda r: Mover(r.weights[0], Placement.initial(LAYERS, 2, 4, 2), 2),
        ArgumentError,
        "num_columns",
    ),
    "another placement": (
        lambda r: [
            r.movers[0].begin(turned(r.old, [0])),
            r.movers[1].begin(turned(r.old, [1])),
            r.movers[0].step(9),
        ],
        ConfigMismatchError,
        r"rank\(s\) \[1\] move to another placement than rank 0",
    ),
    "other steps": (
        lambda r: [
            r.movers[1].switch(7),
            r.movers[0].begin(turned(r.old, [0])),
            r.movers[0].switch(0),
        ],
        ConfigMismatchError,
        r"rank 0 is in step 0, and others, by rank, in \{1: 7\}",
    ),
}


@pytest.mark.parametrize(("call", "error", "pattern"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused(call: Callable[[Ranks], Any], error: type[Exception], pattern: str) -> None:
    with pytest.raises(error) as caught:
        call(Ranks(2, "layer", 0))
    assert re.search(pattern, str(caught.value)), str(caught.value)


def beside_dispatches(
    rank: int,
    num_ranks: int,
    side: Side,
    held: str,
    rounds: int,
    longest_s: float = 0.0,
    servers: tuple[int, ...] | None = None,
) -> list[str]:
    """Rounds of row-wise experts while weights move, to the bit what the model's experts give.

    Args:
        longest_s: of the naps that a rank takes at random.
        servers: ranks of each; messages between them come in any order that queues have.
    """
    with emulated_nic(
        NicSettings(seed=1 + rank, keeps_order=False, ring_items=8) if servers else NicSettings()
    ):
        return _beside_dispatches(rank, num_ranks, side, held, rounds, longest_s, servers)


def _beside_dispatches(
    rank: int,
    num_ranks: int,
    side: Side,
    held: str,
    rounds: int,
    longest_s: float,
    servers: tuple[int, ...] | None,
) -> list[str]:
    hidden, tokens, topk = 64, 6, 2
    wrong: list[str] = []
    shared = random.Random(1)
    mine = random.Random(rank)
    with EPBuffer(
        num_max_tokens_per_rank=tokens,
        hidden=hidden,
        num_topk=topk,
        num_experts=num_ranks * SLOTS,
        relaxed=True,
        ranks_per_server=servers,
        timeout_s=seconds(30.0),
    ) as buffer:
        options = {"side": side, "stage_bytes": num_ranks * 64, "checkpoint_steps": 3}
        if held == "allocated":
            weights = allocate(buffer, 1, {"w": ((hidden,), torch.bfloat16)}, **options)
        else:
            slots = [{"w": [torch.zeros(hidden).bfloat16() for _ in range(SLOTS)]}]
            weights = adopt(buffer, slots, **options)
        factors = torch.rand(EXPERTS, hidden, generator=torch.Generator().manual_seed(2)).bfloat16()
        now = placement(shared, num_ranks, 1)
        for slot, expert in enumerate(now.phy2log.view(num_ranks, SLOTS)[rank].tolist()):
            weights.layer(0)["w"][slot].copy_(factors[expert])
        mover = Mover(weights, now, num_ranks * SLOTS)
        dist.barrier()
        switches = 0
        for number in range(rounds):
            switches += len(mover.switch(number))
            if number % 10 == 0:
                goal = placement(shared, num_ranks, 1)
                if not mover.is_moving:
                    mover.begin(goal)
            mover.step(mine.choice([1, 64, 1000]))
            if longest_s and mine.random() < 0.1:
                time.sleep(mine.random() * longest_s)
            draw = torch.Generator().manual_seed(100 * number + rank)
            x = torch.randn(tokens, hidden, generator=draw).bfloat16()
            ids = torch.rand(tokens, EXPERTS, generator=draw).topk(topk).indices.int()
            scale = torch.rand(tokens, topk, generator=draw)
            received = buffer.dispatch(x, ids, eplb_table=mover.table(0))
            slots = torch.repeat_interleave(torch.arange(SLOTS), received.tokens_per_expert)
            y = torch.zeros_like(received.tokens)
            w = torch.stack(list(weights.layer(0)["w"]))
            y[: len(slots)] = received.tokens[: len(slots)] * w[slots]
            out = buffer.combine(y, received.handle, scale)
            expected = torch.zeros(tokens, hidden)
            for k in range(topk):
                expected = expected + (x * factors[ids[:, k].long()]).float() * scale[:, k : k + 1]
            if not torch.equal(out, expected.bfloat16()):
                wrong.append(f"round {number}")
        if switches < rounds // 40:
            wrong.append(f"only {switches} switches")
        weights.close()
        try:
            mover.begin(placement(shared, num_ranks, 1))
            mover.step(10)
            wrong.append("closed weights were moved")
        except BufferStateError:
            pass
    return wrong


@pytest.mark.parametrize(("side", "held"), [HOW[0], HOW[1], HOW[3]])
def test_rounds_are_those_of_the_models_experts_while_weights_move(
    ranks: Groups, side: Side, held: str
) -> None:
    assert ranks(3).run(beside_dispatches, side, held, 120) == [[]] * 3


@pytest.mark.parametrize(("side", "held"), [HOW[0], HOW[3]])
def test_weights_move_between_servers_by_queues(ranks: Groups, side: Side, held: str) -> None:
    assert ranks(3).run(beside_dispatches, side, held, 200, 0.0, (2, 1)) == [[]] * 3


def allocations(rank: int, num_ranks: int) -> list[str]:
    """What all ranks are told where one asks for something else, or for nothing that can be."""
    said = []
    with EPBuffer(
        num_max_tokens_per_rank=4, hidden=64, num_topk=1, num_experts=4, relaxed=True, timeout_s=seconds(30.0)
    ) as buffer:
        good = {"w": ((2, 3), torch.float32)}
        calls: list[tuple[Any, ...]] = [
            (1 + rank, good),
            (1, good if rank else {}),
            (1, good if rank else {"w": (2, 3)}),
            (1, good if rank else {"w": ((2, 0), torch.float32)}),
            (0 if rank else 1, good),
        ]
        for call in calls:
            try:
                allocate(buffer, *call)
            except (ArgumentError, ConfigMismatchError) as error:
                said.append(str(error))
        weights = allocate(buffer, 1, good)
        weights.layer(0)["w"].fill_(rank)
        dist.barrier()
        other = weights.parts.tensors(weights.memory.of(1 - rank), 0, 0)["w"]
        said.append(str(set(other.flatten().tolist())))
        dist.barrier()
    return said


def two_slots(*shape: int) -> list[dict[str, Any]]:
    """A layer of two slots."""
    return [{"w": torch.zeros(2, *shape)}]


def adoptions(rank: int, num_ranks: int) -> list[str]:
    """What all ranks are told where one passes other weights, or none that can be moved."""
    said = []
    with EPBuffer(
        num_max_tokens_per_rank=4, hidden=64, num_topk=1, num_experts=4, relaxed=True, timeout_s=seconds(30.0)
    ) as buffer:
        turned = [{"w": torch.zeros(2, 5, 3).mT}]
        calls: list[tuple[object, dict[str, Any]]] = [
            (two_slots(3, 5) if rank else turned, {}),
            (two_slots(3, 5) if rank else [*two_slots(3, 5), *two_slots(3, 5)], {}),
            (two_slots(3, 5), {"stage_bytes": 4096 if rank else 8192}),
            (two_slots(3, 5), {"stage_bytes": 4096 if rank else 100}),
            (two_slots(3, 5), {"side": "layer" if rank else "double"}),
            (two_slots(3, 5) if rank else [], {}),
            (two_slots(3, 5) if rank else two_slots(3, 5)[0], {}),
            (two_slots(3, 5) if rank else [{"w": torch.zeros(3, 3, 5)}], {}),
            (two_slots(3, 5) if rank else [{"w": [torch.zeros(3, 5), torch.zeros(3, 6)]}], {}),
            (two_slots(3, 5) if rank else [{"w": [torch.zeros(3, 5), None]}], {}),
            (two_slots(3, 5) if rank else [{"w": torch.zeros(2, 3, 10)[:, :, ::2]}], {}),
            (two_slots(3, 5) if rank else [*two_slots(3, 5), {"v": torch.zeros(2, 3, 5)}], {}),
            (two_slots(3, 5) if rank else [{"w": torch.zeros(2, 3, 5, device="meta")}], {}),
            (two_slots(3, 5) if rank else [{"w": 3}], {}),
        ]
        for layers, options in calls:
            try:
                adopt(buffer, layers, **options)  # type: ignore[arg-type]
                said.append("")
            except (ArgumentError, ConfigMismatchError) as error:
                said.append(str(error))
    return said


WHY = (
    "dimensions in memory",
    "num_layers",
    "ring_bytes",
    "stage_bytes is 100.*128",
    "side",
    "layers is",
    "layers is",
    "of 3.*2 slots",
    "another slot",
    "it is a tensor",
    "contiguous",
    r"layers\[1\]",
    r"layers\[0\]",
    "first dimension",
)


def test_ranks_that_adopt_other_weights_are_told_at_once(ranks: Groups) -> None:
    for said in ranks(2).run(adoptions):
        assert len(said) == len(WHY)
        for text, why in zip(said, WHY, strict=True):
            assert re.search(why, text), f"{why}: {text}"


def test_ranks_that_ask_for_other_memory_are_told_at_once(ranks: Groups) -> None:
    first, second = ranks(2).run(allocations)
    for said in (first, second):
        assert len(said) == 6
        assert "num_layers" in said[0]
    assert [text.split()[0] for text in first[1:4]] == ["specs", "specs", "specs"]
    assert "num_layers" in first[4]
    assert second[4].startswith("num_layers is 0")
    assert all("rank 0 cannot be constructed: specs" in text for text in second[1:4])
    assert (first[5], second[5]) == ("{1.0}", "{0.0}")


def test_a_rank_that_is_about_to_begin_the_next_move_is_in_this_one() -> None:
    ranks = Ranks(2, "layer", 0)
    for mover in ranks.movers:
        mover.switch(0)
        mover.begin(turned(ranks.old, [0]))
    # What stands for the placement of move 2, before its number.
    ranks.weights[1].memory.of(1)[: 8 * NUM_WORDS].view(torch.int64)[PLACEMENTS + 2 % 2] = 7
    assert ranks.movers[0].step(1 << 30) > 0


def test_a_rank_that_is_far_ahead_is_still_found_by_the_slowest() -> None:
    memory, texts = SharedArrays(2, HEADER_BYTES), ["", ""]
    first, second = (AtCheckpoints(memory, Texts(texts, r), "moves", r, 2, 4, 0.5) for r in range(2))
    for each in (first, second):
        each.enter(lambda: True)
        each.begin(7)
        assert each.readable() == [False, False]  # nobody has said that its weights are there
        assert not each.arrive(0, True, 7)
    assert first.arrive(4, True, 7)
    first.changed(lambda: True)
    first.begin(8)
    assert not any(first.arrive(step, True, 8) for step in range(5, 12))
    with pytest.raises(CommunicationTimeoutError, match=r"rank\(s\) \[1\]"):
        first.arrive(12, True, 8)
    assert first.readable() == [False, False]  # nobody has said that its device has changed
    assert second.arrive(4, True, 7)
    second.changed(lambda: False)
    second.begin(8)
    for step in (8, 12):
        assert not second.arrive(step, False, 8)
    assert not first.arrive(12, True, 8)
    assert first.readable() == [True, False]
    second.begin(9)
    assert not second.arrive(16, False, 9)
    assert not first.arrive(16, True, 8)
    with pytest.raises(ConfigMismatchError, match=r"rank\(s\) \[1\] move to another placement"):
        first.arrive(20, True, 8)


def test_a_rank_that_gives_up_is_heard_of_at_any_checkpoint() -> None:
    memory, texts = SharedArrays(2, HEADER_BYTES), ["", ""]
    first, second = (AtCheckpoints(memory, Texts(texts, rank), "moves", rank, 2, 4, 0.01) for rank in (0, 1))
    first.begin(7)
    second.give_up()
    assert not first.arrive(3001, True, 7)
    with pytest.raises(BufferStateError, match=r"rank\(s\) \[1\] have given up"):
        first.arrive(3004, True, 7)


@pytest.mark.parametrize(
    "text", ["[", "3", "[[1]]", '[[1, 2, 3, 4, "a"]]', "[" * 10000, "[[1e999, 1, 1, 1, 1]]"]
)
def test_what_a_rank_says_is_not_trusted(text: str) -> None:
    memory = SharedArrays(2, HEADER_BYTES)
    mine = AtCheckpoints(memory, Texts(["", text], 0), "moves", 0, 2, 1, 0.01)
    mine.begin(7)
    assert not mine.arrive(0, True, 7)
    with pytest.raises(CommunicationTimeoutError, match=r"rank\(s\) \[1\]"):
        mine.arrive(1, True, 7)
