"""Redundant experts in training: bits, delays and lost ranks, beside what torch says; and what is refused."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_triton import (
    ArgumentError,
    BufferStateError,
    CommunicationTimeoutError,
    ConfigMismatchError,
    EPBuffer,
)
from moe_triton.balance import RedundantExperts, allocate_redundant_experts
from moe_triton.balance.training import ENDED, NUMBER, Replica
from moe_triton.balance.weights import Parts
from moe_triton.core.checks import CPU
from moe_triton.core.topology import Topology
from moe_triton.processes import RankFailedError, RankGroup, run_ranks
from tests.balance.test_mover import SharedArrays
from tests.patience import seconds

Groups = Callable[[int], RankGroup]
Result = TypeVar("Result")
SPECS = {
    "w13": ((4, 3), torch.bfloat16),
    "scale": ((5,), torch.int8),
    "grads": ((7,), torch.float32),
    "bias_grads": ((2, 3), torch.float32),
}


class Server:
    """Ranks of one process: one after the other, or each in a thread."""

    def __init__(self, num_ranks: int, num_slots: int, sizes: Sequence[int] = ()) -> None:
        parts = Parts(1, num_slots, SPECS, 1)
        self.memory = SharedArrays(num_ranks, parts.num_bytes)
        wait = threading.Barrier(num_ranks)
        topology = Topology(tuple(sizes) or (num_ranks,))
        self.ranks = [
            RedundantExperts(
                parts, self.memory, lambda: wait.wait(seconds(30.0)) and None, rank, topology, CPU
            )
            for rank in range(num_ranks)
        ]

    def run(self, call: Callable[[int, RedundantExperts], Result]) -> list[Result]:
        """What a call gives on each rank."""
        with futures.ThreadPoolExecutor(len(self.ranks)) as threads:
            return list(threads.map(call, range(len(self.ranks)), self.ranks))


def a_mapping(draw: random.Random, num_ranks: int, num_local: int, num_slots: int) -> torch.Tensor:
    """Any there is, of int32 or int64."""
    rows = []
    for rank in range(num_ranks):
        others = [e for e in range(num_ranks * num_local) if e // num_local != rank]
        rows.append([draw.choice([-1, *others]) for _ in range(num_slots)])
    return torch.tensor(rows, dtype=draw.choice([torch.int32, torch.int64]))


def grads_of(seed: int, rank: int, shape: Sequence[int]) -> torch.Tensor:
    """Gradients of such sizes that the order of a sum shows in its bits."""
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(*shape, generator=draw) * 10.0 ** torch.randint(-4, 5, tuple(shape), generator=draw)


def reduced(
    own: torch.Tensor, of_slots: Sequence[torch.Tensor], mapping: torch.Tensor, rank: int
) -> torch.Tensor:
    """What a rank's own gradients become: by rank, then by slot."""
    result = own.clone()
    for row, slots in zip(mapping.tolist(), of_slots, strict=True):
        for expert, slot in zip(row, slots, strict=True):
            if expert >= 0 and expert // len(own) == rank:
                result[expert % len(own)] += slot
    return result


def weights_of(seed: int, rank: int, num_local: int, name: str) -> torch.Tensor:
    """A rank's own, each expert's different."""
    shape, dtype = SPECS[name]
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-100, 100, (num_local, *shape), generator=draw).to(dtype)


def check_prefetched(
    found: torch.Tensor,
    before: torch.Tensor,
    mapping: torch.Tensor,
    rank: int,
    of_ranks: Sequence[torch.Tensor],
) -> None:
    for slot, expert in enumerate(mapping[rank].tolist()):
        num_local = len(of_ranks[0])
        wanted = before[slot] if expert < 0 else of_ranks[expert // num_local][expert % num_local]
        assert torch.equal(found[slot], wanted), f"slot {slot} of rank {rank}, expert {expert}"


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(0, 10**6))
def test_any_mapping_gives_the_bits_of_the_plain_order(
    num_ranks: int, num_local: int, num_slots: int, seed: int
) -> None:
    draw = random.Random(seed)
    mapping = a_mapping(draw, num_ranks, num_local, num_slots)
    server = Server(num_ranks, num_slots)
    names = ["w13", "scale"][: draw.randrange(1, 3)]
    of_ranks = {name: [weights_of(seed, r, num_local, name) for r in range(num_ranks)] for name in names}
    shape = SPECS["grads"][0]
    for rank, each in enumerate(server.ranks):
        for name in names:
            each.tensors[name].fill_(101)
        each.tensors["grads"].copy_(grads_of(seed, 10 + rank, (num_slots, *shape)))
    of_slots = [each.tensors["grads"].clone() for each in server.ranks]
    own = [grads_of(seed, rank, (num_local, *shape)) for rank in range(num_ranks)]
    expected = [reduced(own[rank], of_slots, mapping, rank) for rank in range(num_ranks)]

    def step(rank: int, redundant: RedundantExperts) -> None:
        tensors = redundant.tensors
        redundant.lb_prefetch_weights(
            [tensors[name] for name in names], [of_ranks[name][rank] for name in names], mapping
        )
        redundant.lb_reduce_grads(tensors["grads"], own[rank], mapping)

    server.run(step)
    for rank, each in enumerate(server.ranks):
        for name in names:
            found = each.tensors[name]
            check_prefetched(found, torch.full_like(found, 101), mapping, rank, of_ranks[name])
        assert torch.equal(own[rank].view(torch.int32), expected[rank].view(torch.int32))
        assert torch.equal(each.tensors["grads"], of_slots[rank])


def test_the_order_of_the_sum_shows_in_what_tests_add() -> None:
    of_slots = [grads_of(3, 10 + rank, (2, 7)) for rank in range(3)]
    mapping = torch.tensor([[-1, -1], [0, 0], [0, 0]])
    own = grads_of(3, 0, (1, 7))
    backwards = reduced(own, [slots.flip(0) for slots in reversed(of_slots)], mapping.flip(0), 0)
    assert not torch.equal(reduced(own, of_slots, mapping, 0), backwards)


def test_tensors_of_inference_mode_are_added_to_outside_of_it() -> None:
    server = Server(2, 2)
    server.ranks[1].tensors["grads"].fill_(1)
    with torch.inference_mode():
        own = torch.ones(2, 7)
    server.run(lambda rank, _: reduce(server, own=own if rank == 0 else torch.zeros(2, 7), rank=rank))
    assert own.tolist() == [[2.0] * 7] * 2


class Slow(RedundantExperts):
    """Is late now and then, in the middle of a call too."""

    draw = random.Random(0)

    def _replicas(self, *arguments: Any) -> tuple[list[Replica], tuple[int, int, int]]:
        self._late()
        return super()._replicas(*arguments)

    def _check_numbers(self, said: Sequence[Sequence[int]]) -> None:
        super()._check_numbers(said)
        self._late()

    def _late(self) -> None:
        if self.draw.random() < 0.3:
            time.sleep(self.draw.choice([0.0, 0.0005, 0.003]))


def steps_of_training(rank: int, num_ranks: int, rounds: int, ranks_per_server: int | None) -> list[str]:
    """Rounds of both calls, with other mappings and delays in each; tensors are written over right after."""
    num_slots, num_local = 3, 2
    wrong: list[str] = []
    with EPBuffer(
        num_max_tokens_per_rank=4,
        hidden=64,
        num_topk=1,
        num_experts=num_ranks * (num_local + num_slots),
        relaxed=True,
        ranks_per_server=ranks_per_server,
        timeout_s=seconds(30.0),
    ) as buffer:
        redundant = allocate_redundant_experts(buffer, num_slots, SPECS)
        redundant.__class__ = Slow
        Slow.draw = random.Random(rank)
        server = buffer.config.topology.neighbours(rank)
        me, tensors = rank - server.start, redundant.tensors
        for number in range(rounds):
            # Of this server's ranks: others have other mappings.
            shared = random.Random(100 * number + server.start)
            mapping = a_mapping(shared, len(server), num_local, num_slots)
            names = ["w13", "scale"][: shared.randrange(1, 3)]
            before = {name: tensors[name].fill_(103).clone() for name in names}
            own = [weights_of(number, rank, num_local, name) for name in names]
            parameters = [torch.nn.Parameter(each, requires_grad=each.is_floating_point()) for each in own]
            redundant.lb_prefetch_weights([tensors[name] for name in names], parameters, mapping)
            for each in parameters:  # whoever still reads it finds no weights
                each.detach().fill_(104)
            for name in names:
                of_ranks = [weights_of(number, each, num_local, name) for each in server]
                try:
                    check_prefetched(tensors[name], before[name], mapping, me, of_ranks)
                except AssertionError as error:
                    wrong.append(f"round {number}: {name}: {error}")
            grads = ["grads", "bias_grads"][: shared.randrange(1, 3)]
            mine, wanted = [], []
            for name in grads:
                shape = SPECS[name][0]
                tensors[name].copy_(grads_of(number, 10 + rank, (num_slots, *shape)))
                mine.append(grads_of(number, rank, (num_local, *shape)))
                of_slots = [grads_of(number, 10 + each, (num_slots, *shape)) for each in server]
                wanted.append(reduced(mine[-1], of_slots, mapping, me))
            if len(grads) > 1:
                redundant.lb_reduce_grads([tensors[name] for name in grads], tuple(mine), mapping)
            else:
                redundant.lb_reduce_grads(tensors[grads[0]], mine[0], mapping)
            for name in grads:
                tensors[name].fill_(float("nan"))
            if not all(map(torch.equal, mine, wanted)):
                wrong.append(f"round {number}: gradients")
        buffer.barrier()
        redundant.close()
        try:
            redundant.lb_reduce_grads(tensors["grads"], mine[0], mapping)
            wrong.append("closed memory was used")
        except BufferStateError:
            pass
    return wrong


@pytest.mark.parametrize(("num_ranks", "ranks_per_server"), [(2, None), (3, None), (4, None), (3, 2)])
def test_steps_of_ranks_that_are_late_anywhere(
    ranks: Groups, num_ranks: int, ranks_per_server: int | None
) -> None:
    assert ranks(num_ranks).run(steps_of_training, 20, ranks_per_server) == [[]] * num_ranks


@pytest.mark.long
def test_many_steps(ranks: Groups) -> None:
    assert ranks(3).run(steps_of_training, 1500, None) == [[]] * 3


MAPPING = torch.tensor([[2, -1], [0, 1]], dtype=torch.int32)


def prefetch(server: Server, mapping: Any = MAPPING, own: Any = None, rank: int = 0, **options: Any) -> None:
    redundant = server.ranks[rank]
    own = weights_of(0, rank, 2, "w13") if own is None else own
    redundant.lb_prefetch_weights(options.pop("slots", redundant.tensors["w13"]), own, mapping, **options)


def reduce(server: Server, own: Any = None, rank: int = 0, **options: Any) -> None:
    redundant = server.ranks[rank]
    own = torch.zeros(2, 7) if own is None else own
    redundant.lb_reduce_grads(options.pop("slots", redundant.tensors["grads"]), own, MAPPING, **options)


def with_entry(value: int) -> torch.Tensor:
    changed = MAPPING.clone()
    changed[1, 0] = value
    return changed


REFUSED: dict[str, tuple[Callable[[Server], Any], str]] = {
    "an id too large": (
        lambda s: prefetch(s, with_entry(4)),
        r"mapping is 4 at \[1, 0\], but 2 rank\(s\) with 2 expert\(s\) have 0 to 3, and -1 is none",
    ),
    "an id too small": (lambda s: prefetch(s, with_entry(-2)), r"redundancy_mapping is -2 at \[1, 0\]"),
    # DeepEP's README: replicas go to peers, and no rank's slots have its own experts.
    "an own expert": (
        lambda s: prefetch(s, with_entry(3)),
        r"redundancy_mapping is 3 at \[1, 0\], but rank 1 has that expert itself",
    ),
    "a mapping of other ranks": (
        lambda s: prefetch(s, torch.full((3, 2), -1)),
        r"redundancy_mapping is of shape \(3, 2\), but it must be \(2, 2\)",
    ),
    "a mapping of other slots": (lambda s: prefetch(s, MAPPING[:, :1]), r"redundancy_mapping is of shape"),
    "a mapping of numbers": (
        lambda s: prefetch(s, MAPPING.float()),
        r"redundancy_mapping is of dtype .*float",
    ),
    "a mapping of lists": (lambda s: prefetch(s, MAPPING.tolist()), r"redundancy_mapping is a list"),
    "no mapping": (lambda s: prefetch(s, None), r"redundancy_mapping is None"),
    "cores": (lambda s: prefetch(s, num_sms=8), r"num_sms is 8.*Pass 0"),
    "cores in words": (lambda s: reduce(s, num_sms="all"), r"num_sms is 'all'"),
    "an event": (lambda s: reduce(s, previous_event=object()), r"previous_event is .*Pass None"),
    "slots elsewhere": (
        lambda s: prefetch(s, slots=torch.zeros(2, 4, 3, dtype=torch.bfloat16)),
        r"redundant_expert_weights is elsewhere, but .*allocate_redundant_experts",
    ),
    "slots of another rank": (
        lambda s: prefetch(s, slots=s.ranks[1].tensors["w13"]),
        r"redundant_expert_weights is elsewhere",
    ),
    "slots that reach beyond": (
        lambda s: prefetch(
            s, slots=s.memory.of(0)[-48:].view(torch.bfloat16).view(2, 12).as_strided((2, 12), (8, 1))
        ),
        r"redundant_expert_weights is strided",
    ),
    "other bytes": (
        lambda s: prefetch(s, own=torch.zeros(2, 5, dtype=torch.int8)),
        r"redundant_expert_weights is of shape \(2, 4, 3\) and dtype .*bfloat16, but an expert has 5 bytes",
    ),
    "no tensors": (lambda s: prefetch(s, slots=[], own=[]), r"redundant_expert_weights is \[\]"),
    "no tensor": (lambda s: prefetch(s, slots=[None], own=[None]), r"redundant_expert_weights is None"),
    "text": (lambda s: prefetch(s, own="w13"), r"expert_weights is 'w13'"),
    "more of one": (lambda s: prefetch(s, own=[torch.zeros(2, 12)] * 2), r"expert_weights is 2 tensor\(s\)"),
    "no experts": (
        lambda s: prefetch(s, own=torch.zeros(0, 4, 3, dtype=torch.bfloat16)),
        r"expert_weights is of shape \(0, 4, 3\), but each rank has experts of its own",
    ),
    "a number": (lambda s: prefetch(s, own=torch.tensor(1)), r"expert_weights is of shape \(\)"),
    "other experts in the second": (
        lambda s: prefetch(
            s,
            slots=[s.ranks[0].tensors[name] for name in ("w13", "scale")],
            own=[weights_of(0, 0, 2, "w13"), weights_of(0, 0, 3, "scale")],
        ),
        r"expert_weights is of shape \(3, 5\), but it must be \(2, any\)",
    ),
    "strided experts": (
        lambda s: prefetch(s, own=torch.zeros(2, 4, 6, dtype=torch.bfloat16)[..., ::2]),
        r"expert_weights is strided",
    ),
    "own experts in slots": (
        lambda s: prefetch(s, own=s.ranks[0].tensors["w13"]),
        r"expert_weights is a part of that, but it must share no memory with redundant_expert_weights",
    ),
    "gradients of 16 bits": (
        lambda s: reduce(s, own=torch.zeros(2, 7).bfloat16()),
        r"expert_grads is of dtype torch.bfloat16, but it must be float32",
    ),
    "slots of 16 bits": (
        lambda s: reduce(s, slots=s.ranks[0].tensors["w13"]),
        r"redundant_expert_grads is of dtype torch.bfloat16, but it must be float32",
    ),
    "no buffer": (lambda s: allocate_redundant_experts(None, 2, SPECS), "buffer is None"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("call", "pattern"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused_before_anything_is_sent(call: Callable[[Server], Any], pattern: str) -> None:
    server = Server(2, 2)  # whose other rank never comes: nothing waits for it
    with pytest.raises(ArgumentError) as caught:
        call(server)
    assert re.search(pattern, str(caught.value)), str(caught.value)
    assert all(words == [0] * len(words) for words in server.ranks[0]._all_said())


def test_alone_there_is_nothing_to_add() -> None:
    with EPBuffer(num_max_tokens_per_rank=4, hidden=64, num_topk=1, num_experts=4, relaxed=True) as buffer:
        alone = allocate_redundant_experts(buffer, 2, SPECS)
        own = torch.ones(4, 7)
        alone.lb_reduce_grads(alone.tensors["grads"], own, torch.full((1, 2), -1))
        assert (own == 1).all()


def said_by(call: Callable[[], Any]) -> str:
    with pytest.raises(ConfigMismatchError) as caught:
        call()
    return str(caught.value)


def test_ranks_that_pass_different_things_are_all_told_and_may_go_on() -> None:
    server = Server(3, 2, sizes=(1, 2))
    alone = torch.tensor([[-1, -1]])

    def calls(rank: int, redundant: RedundantExperts) -> list[str]:
        tensors = redundant.tensors
        mappings = [alone if rank == 0 else each for each in (MAPPING, with_entry(-1))]
        w13, scale = ((tensors[name], weights_of(0, rank, 2, name)) for name in ("w13", "scale"))
        grads = tensors["grads"], torch.zeros(2, 7)
        fewer = weights_of(0, rank, 1, "w13"), torch.full_like(mappings[0], -1)
        late = rank == 2
        said = [
            said_by(lambda: redundant.lb_prefetch_weights(*w13, mappings[late])),
            said_by(lambda: redundant.lb_prefetch_weights(*(scale if late else w13), mappings[0])),
            said_by(
                lambda: redundant.lb_prefetch_weights(w13[0], *(fewer if late else (w13[1], mappings[0])))
            ),
            said_by(
                lambda: (
                    redundant.lb_reduce_grads(*grads, mappings[0])
                    if late
                    else redundant.lb_prefetch_weights(*w13, mappings[0])
                )
            ),
        ]
        redundant.lb_prefetch_weights(*w13, mappings[0])
        return said

    first, *others = server.run(calls)
    assert others == [first] * 2
    names = (
        "redundancy_mapping",
        "the places and sizes of redundant tensors",
        "the number of their own experts",
    )
    for text, name in zip(first, (*names, "their calls"), strict=True):
        assert f"ranks differ in {name}: rank(s) [2] from rank 1" in text
    assert "{1: 2, 2: 1}" in first[2]
    assert "{1: 'lb_prefetch_weights', 2: 'lb_reduce_grads'}" in first[3]
    check_prefetched(
        server.ranks[2].tensors["w13"],
        server.ranks[0].tensors["w13"],
        MAPPING,
        1,
        [weights_of(0, 1, 2, "w13")],
    )


def test_a_rank_that_comes_from_another_call_is_named() -> None:
    one, another = Server(2, 2), Server(2, 2)
    wait = threading.Barrier(2)
    for each in (*one.ranks, *another.ranks):
        each._barrier = lambda: wait.wait(seconds(30.0)) and None

    def calls(rank: int, _: RedundantExperts) -> list[str]:
        said = [said_by(lambda: prefetch((one, another)[rank], rank=rank))]
        with pytest.raises(BufferStateError) as caught:
            prefetch((one, another)[rank], rank=rank)
        return [*said, str(caught.value)]

    for rank, (text, again) in enumerate(one.run(calls)):
        assert f"rank(s) [{1 - rank}] did not make call number 1 of these" in text
        assert "broken: lb_prefetch_weights ended in ConfigMismatchError" in again


def test_a_rank_that_is_interrupted_in_a_call_is_not_taken_for_done() -> None:
    server = Server(2, 2)

    def interrupted(rank: int, redundant: RedundantExperts) -> str:
        if rank == 0:
            return said_by(lambda: prefetch(server))
        redundant._memory = Interrupting(server.memory)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            prefetch(server, rank=1)
        redundant._memory = server.memory
        with pytest.raises(BufferStateError, match="ended in KeyboardInterrupt"):
            prefetch(server, rank=1)
        redundant._barrier()  # of something else
        return ""

    said, _ = server.run(interrupted)
    assert re.match(r"rank\(s\) \[1\] left lb_prefetch_weights number 1 before its end", said)
    assert [words[ENDED] for words in server.ranks[0]._all_said()] == [1, 0]


class Interrupting(SharedArrays):
    """Memory whose owner presses Ctrl-C as it turns to a peer's in the call."""

    def __init__(self, memory: SharedArrays) -> None:
        self._all = memory._all

    def of(self, rank: int) -> torch.Tensor:
        if rank == 0 and self._all[1][:8].view(torch.int64)[NUMBER] == 1:
            raise KeyboardInterrupt
        return super().of(rank)


def test_two_threads_of_a_rank_are_not_inside_at_once() -> None:
    server = Server(2, 2)
    first = threading.Thread(target=prefetch, args=(server,))
    first.start()
    while not server.ranks[0]._inside.locked():
        time.sleep(0.001)
    with pytest.raises(BufferStateError, match="another thread is inside"):
        prefetch(server)
    prefetch(server, rank=1)
    first.join()


def lose_a_rank(rank: int, num_ranks: int, moment: str) -> tuple[tuple[int, ...], str, float]:
    """Rank 1 dies before a call, or in the middle of one."""
    with EPBuffer(
        num_max_tokens_per_rank=4, hidden=64, num_topk=1, num_experts=9, relaxed=True, timeout_s=1.0
    ) as buffer:
        redundant = allocate_redundant_experts(buffer, 2, SPECS)
        mapping = torch.tensor([[1, 2], [0, 2], [1, 0]])
        own = torch.zeros(1, 7)
        redundant.lb_reduce_grads(redundant.tensors["grads"], own, mapping)
        if rank == 1:
            if moment == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            redundant._check_numbers = lambda said: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
        began = time.monotonic()
        with pytest.raises(CommunicationTimeoutError) as caught:
            redundant.lb_reduce_grads(redundant.tensors["grads"], own, mapping)
        took = time.monotonic() - began
        with pytest.raises(BufferStateError, match="broken"):
            redundant.lb_reduce_grads(redundant.tensors["grads"], own, mapping)
        return caught.value.missing_ranks, str(caught.value), took


@pytest.mark.parametrize("moment", ["before", "inside"])
def test_a_rank_that_dies_is_named_and_holds_nobody_up(moment: str) -> None:
    lost = run_ranks(lose_a_rank, 3, (moment,), allow_failures=True)
    assert isinstance(lost[1], RankFailedError)
    for missing, said, took in (lost[0], lost[2]):
        assert missing == (1,), said
        assert took < seconds(15.0)


def allocations(rank: int, num_ranks: int) -> list[str]:
    """What all ranks are told where one asks for something else."""
    said = []
    with EPBuffer(
        num_max_tokens_per_rank=4, hidden=64, num_topk=1, num_experts=4, relaxed=True, timeout_s=seconds(30.0)
    ) as buffer:
        calls: list[tuple[Any, Any]] = [(1 + rank, SPECS), (1, SPECS if rank else {}), (rank, SPECS)]
        for call in calls:
            try:
                allocate_redundant_experts(buffer, *call)
            except (ArgumentError, ConfigMismatchError) as error:
                said.append(str(error))
        dist.barrier()
    with EPBuffer(
        num_max_tokens_per_rank=4,
        hidden=64,
        num_topk=1,
        num_experts=4,
        num_shared_experts=1,
        num_shared_ranks=1,
        relaxed=True,
        timeout_s=seconds(30.0),
    ) as buffer:
        try:
            allocate_redundant_experts(buffer, 1, SPECS)
        except ArgumentError as error:
            said.append(str(error))
    return said


def test_ranks_that_ask_for_other_memory_are_told_at_once(ranks: Groups) -> None:
    first, second = ranks(2).run(allocations)
    assert all("num_redundant_experts" in said[0] for said in (first, second))
    assert first[1].startswith("specs is {}")
    assert "rank 0 cannot be constructed: specs" in second[1]
    assert first[2].startswith("num_redundant_experts is 0")
    assert "rank 0 cannot be constructed: num_redundant_experts" in second[2]
    assert all(re.match(r"buffer is with 1 rank\(s\) of shared experts", said[3]) for said in (first, second))
