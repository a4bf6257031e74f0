"""What vLLM calls to move experts: in all its forms, beside dispatches, and with peers that are wrong."""

from __future__ import annotations

import random
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
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
    MoeTritonError,
)
from moe_triton.backends.cpu.nic import NicSettings, emulated_nic
from moe_triton.balance import EplbCommunicator
from moe_triton.processes import RankGroup
from tests.patience import seconds

Groups = Callable[[int], RankGroup]


class TodaysBase(ABC):
    """The shape of vLLM's base class in autumn 2026."""

    @abstractmethod
    def add_send(self, tensors: list[torch.Tensor], dst_rank: int, expert_id: int) -> None: ...

    @abstractmethod
    def add_recv(self, tensors: list[torch.Tensor], src_rank: int, expert_id: int) -> None: ...

    @abstractmethod
    def execute(self, old_indices: Any = None) -> None: ...

    @property
    def needs_profile_buffer_reservation(self) -> bool:
        return True

    def set_stream(self, cuda_stream: Any) -> None:
        raise AssertionError("the base's own is in the way")


class Ours(EplbCommunicator, TodaysBase):
    """What a user of vLLM registers."""


def small_buffer(num_ranks: int, servers: tuple[int, ...] | None = None) -> EPBuffer:
    return EPBuffer(
        num_max_tokens_per_rank=4,
        hidden=64,
        num_topk=1,
        num_experts=num_ranks,
        relaxed=True,
        ranks_per_server=servers,
        timeout_s=seconds(30.0),
    )


def weights_of(expert: int, layer: int) -> list[torch.Tensor]:
    """An expert's tensors: of several dtypes, one transposed, one of a single element, one empty."""
    draw = torch.Generator().manual_seed(100 * layer + expert)
    return [
        torch.randn(5, 7, generator=draw).bfloat16(),
        torch.randint(-9, 9, (3, 4), generator=draw, dtype=torch.int8).T,
        torch.tensor(float(expert)),
        torch.empty(0, 3),
    ]


def rearranged(rank: int, num_ranks: int, layers: int, servers: tuple[int, ...] | None = None) -> list[str]:
    """Layers of random moves, called by a thread beside dispatches; what is wrong.

    Args:
        servers: ranks of each; messages between them come in any order that queues have.
    """
    wrong: list[str] = []
    nic = NicSettings(seed=1 + rank, keeps_order=False, ring_items=8) if servers else NicSettings()
    with emulated_nic(nic), small_buffer(num_ranks, servers) as buffer:
        communicator = Ours(buffer, stage_bytes=64 * num_ranks, timeout_s=seconds(30.0))
        assert not communicator.needs_profile_buffer_reservation
        communicator.set_stream(object())

        def move() -> None:
            for layer in range(layers):
                # The same on all ranks: who sends which expert to whom. Some are idle.
                draw = random.Random(layer)
                moves = [
                    (draw.randrange(num_ranks), draw.randrange(num_ranks), expert)
                    for expert in draw.sample(range(64), draw.randrange(12))
                ]
                # By rank in another order: experts have numbers.
                random.Random((layer, rank).__hash__()).shuffle(moves)
                came = {}
                for source, to, expert in moves:
                    given = weights_of(expert, layer)
                    if source == rank:
                        communicator.add_send(given, to, expert)
                    if to == rank:
                        # Of the same order in memory, as slots of one parameter are.
                        came[expert] = [torch.empty_like(each) for each in given]
                        communicator.add_recv(came[expert], source, expert)
                communicator.execute(None if layer % 2 else [[0]])
                for expert, tensors in came.items():
                    if not all(map(torch.equal, tensors, weights_of(expert, layer))):
                        wrong.append(f"expert {expert} of layer {layer}")

        thread = threading.Thread(target=move)
        thread.start()
        x, ids = torch.ones(2, 64).bfloat16(), torch.full((2, 1), (rank + 1) % num_ranks).int()
        for _ in range(20):  # the same on all ranks, while the thread moves
            received = buffer.dispatch(x, ids)
            out = buffer.combine(received.tokens, received.handle, torch.ones(2, 1))
            if not torch.equal(out, x):
                wrong.append("a dispatch beside it")
        thread.join(seconds(60.0))
        wrong += ["the thread hangs"] * thread.is_alive()
        dist.barrier()
        communicator.close()
        communicator.close()
    return wrong


def test_layers_of_moves_beside_dispatches(ranks: Groups) -> None:
    assert ranks(3).run(rearranged, 12) == [[]] * 3


def test_experts_go_between_servers_by_queues(ranks: Groups) -> None:
    assert ranks(3).run(rearranged, 12, (1, 2)) == [[]] * 3


def older_form(rank: int, num_ranks: int) -> list[float]:
    """A tensor each, without numbers: they come in the order in which they were named."""
    with small_buffer(num_ranks) as buffer:
        communicator = EplbCommunicator(buffer, timeout_s=seconds(30.0))
        came = [torch.empty(300, 500) for _ in range(3)]
        if rank == 0:
            for n in range(3):
                communicator.add_send(torch.full((300, 500), float(n)), 1)
        else:
            for tensor in came:
                communicator.add_recv(tensor, src_rank=0)
        communicator.set_transfer_context([[0, 1]], 0)
        communicator.execute()
        dist.barrier()
        communicator.close()
    return [tensor.mean().item() for tensor in came] if rank else []


def test_the_older_form(ranks: Groups) -> None:
    assert ranks(2).run(older_form) == [[], [0.0, 1.0, 2.0]]


def disagreeing(rank: int, num_ranks: int) -> list[tuple[str, str]]:
    """What each rank is told where both do not name the same."""
    said: list[tuple[str, str]] = []

    def attempt(body: Callable[[EplbCommunicator], None], timeout_s: float = 60.0) -> None:
        with_one = EplbCommunicator(buffer, stage_bytes=1 << 12, timeout_s=seconds(timeout_s))
        try:
            body(with_one)
            with_one.execute()
            said.append(("", ""))
        except MoeTritonError as error:
            said.append((type(error).__name__, str(error)))
            with pytest.raises(BufferStateError, match="make a new one"):
                with_one.execute()
        dist.barrier()
        with_one.close()

    def other_expert(c: EplbCommunicator) -> None:
        # Larger than the stage, so that the sender has to wait for the one that is not content.
        c.add_send([torch.zeros(5000)], 1, 7) if rank == 0 else c.add_recv([torch.zeros(5000)], 0, 8)

    def other_size(c: EplbCommunicator) -> None:
        c.add_send([torch.zeros(5000)], 1, 7) if rank == 0 else c.add_recv([torch.zeros(5001)], 0, 7)

    def other_form(c: EplbCommunicator) -> None:
        w = torch.zeros(3, 5)
        c.add_send([w], 1, 7) if rank == 0 else c.add_recv([torch.zeros(5, 3).T], 0, 7)

    def nobody_sends(c: EplbCommunicator) -> None:
        if rank:
            c.add_recv([torch.zeros(3)], 0, 7)

    with small_buffer(num_ranks) as buffer:
        attempt(other_expert)
        attempt(other_size)
        attempt(nobody_sends, timeout_s=0.2)
        said.append(("", small(rank, buffer, other_form)))
    return said


def small(rank: int, buffer: EPBuffer, named: Callable[[EplbCommunicator], None]) -> str:
    """What each rank is told of a message that fits the stage: the sender learns of it in its next move."""
    communicator = EplbCommunicator(buffer, timeout_s=seconds(30.0))
    named(communicator)
    error = ""
    if rank == 0:
        communicator.execute()
        dist.barrier()
    try:
        if rank == 0:
            communicator.add_send([torch.zeros(1)], 1, 8)
        communicator.execute()
    except MoeTritonError as caught:
        error = f"{type(caught).__name__}: {caught}"
    if rank:
        dist.barrier()
    dist.barrier()
    communicator.close()
    return error


def test_ranks_that_disagree_are_told(ranks: Groups) -> None:
    first, second = ranks(2).run(disagreeing)
    assert [name for name, _ in first] == ["BufferStateError", "BufferStateError", "", ""]
    assert "a move of rank(s) [1] has failed" in first[3][1]
    assert "in other shapes, dtypes or orders in memory" in second[3][1]
    assert "rank(s) [1]" in first[0][1]
    assert [name for name, _ in second] == [
        ConfigMismatchError.__name__,
        ConfigMismatchError.__name__,
        CommunicationTimeoutError.__name__,
        "",
    ]
    assert "rank 0 sends expert 7 with 20000 bytes" in second[0][1]
    assert "expert 7 with 20004" in second[1][1]
    assert "rank(s) [0]" in second[2][1]


REFUSED: dict[str, tuple[Callable[[EplbCommunicator], Any], str]] = {
    "no tensors": (lambda c: c.add_send([], 0, 0), "tensors is"),
    "a number": (lambda c: c.add_send(3, 0, 0), "tensors is"),  # type: ignore[arg-type]
    "a list of numbers": (lambda c: c.add_recv([3], 0, 0), r"tensors\[0\] is"),  # type: ignore[list-item]
    "gaps": (lambda c: c.add_recv([torch.zeros(4, 4)[:, :2]], 0, 0), r"tensors\[0\].*contiguous"),
    "no such rank": (lambda c: c.add_send([torch.zeros(1)], 1, 0), "dst_rank is 1"),
    "a negative rank": (lambda c: c.add_recv([torch.zeros(1)], -1, 0), "src_rank is -1"),
    "a text for a rank": (lambda c: c.add_send([torch.zeros(1)], "0", 0), "dst_rank"),  # type: ignore[arg-type]
    "a negative expert": (lambda c: c.add_send([torch.zeros(1)], 0, -4), "expert_id is -4"),
    "an expert beyond 64 bits": (lambda c: c.add_send([torch.zeros(1)], 0, 1 << 63), "expert_id is"),
    "no device": (lambda c: c.add_send([torch.zeros(1, device="meta")], 0, 0), r"tensors\[0\]"),
}


def slow_queue(rank: int, num_ranks: int) -> list[str]:
    """More small experts than numbers can be on their way, over a queue that takes its time."""
    with emulated_nic(NicSettings(post_us=1000.0)), small_buffer(num_ranks, (1, 1)) as buffer:
        communicator = EplbCommunicator(buffer, stage_bytes=1 << 16, timeout_s=seconds(30.0))
        came = [torch.zeros(64) for _ in range(100)]
        for expert, tensor in enumerate(came):
            if rank:
                communicator.add_recv([tensor], 0, expert)
            else:
                communicator.add_send([tensor + expert], 1, expert)
        communicator.execute()
        dist.barrier()
        return [f"expert {expert}" for expert, each in enumerate(came) if rank and not (each == expert).all()]


def test_numbers_are_not_written_over_before_they_have_gone(ranks: Groups) -> None:
    assert ranks(2).run(slow_queue) == [[]] * 2


def failing(rank: int, num_ranks: int, how: str) -> str:
    """What a rank hears of the other one, rank 0, which fails while its queue is full."""
    with emulated_nic(NicSettings(post_us=1000.0, ring_items=2)), small_buffer(num_ranks, (1, 1)) as buffer:
        communicator = EplbCommunicator(buffer, stage_bytes=1 << 16, timeout_s=seconds(30.0))
        w = torch.zeros(40, 64)
        for expert in range(40):
            if rank:
                communicator.add_recv([w[expert]], 0, expert)
            else:
                communicator.add_send([w[expert]], 1, expert)
        put, calls = communicator._stage.put, []

        def interrupted(*arguments: Any) -> int:
            calls.append(0)
            if len(calls) > 39:
                raise KeyboardInterrupt
            return put(*arguments)

        if rank == 0 and how == "interrupted":
            communicator._stage.put = interrupted  # type: ignore[method-assign]
        elif rank == 0:
            communicator.add_recv([w[0]], 0, 1)
        try:
            communicator.execute()
            return "nothing"
        except (MoeTritonError, KeyboardInterrupt) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            dist.barrier()


@pytest.mark.parametrize(("how", "own"), [("interrupted", "KeyboardInterrupt"), ("refused", "ArgumentError")])
def test_a_failure_is_told_by_a_full_queue(ranks: Groups, how: str, own: str) -> None:
    first, second = ranks(2).run(failing, how)
    assert first.startswith(own)
    assert second.startswith("BufferStateError: ")
    assert "rank(s) [0]" in second


def refusals(rank: int, num_ranks: int) -> list[str]:
    wrong = []
    with small_buffer(num_ranks) as buffer:
        communicator = EplbCommunicator(buffer)
        for name, (call, pattern) in REFUSED.items():
            with pytest.raises(ArgumentError) as caught:
                call(communicator)
            if not re.search(pattern, str(caught.value)):
                wrong.append(f"{name}: {caught.value}")
        communicator.execute()  # nothing of that is left
        w = torch.zeros(4)
        overlaps: list[Callable[[], object]] = [
            lambda: (communicator.add_send([w], 0, 1), communicator.add_recv([w], 0, 1)),
            lambda: (communicator.add_recv([w[:3]], 0, 1), communicator.add_recv([w[2:]], 0, 2)),
            lambda: communicator.add_send([w], 0, 1),
            lambda: (communicator.add_send([w], 0, 1), communicator.add_recv([w.clone()], 0, 2)),
        ]
        for overlap in overlaps:
            overlap()
            try:
                communicator.execute()
                wrong.append("it moves what cannot be moved")
            except ArgumentError as error:
                wrong += [str(error)] * (not re.search("shares memory with|sends itself", str(error)))
        # To itself, from a leaf that wants a gradient, into one.
        w, came = (torch.nn.Parameter(torch.full((3,), v)) for v in (2.0, 0.0))
        communicator.add_send([w], 0, 1)
        communicator.add_recv([came], 0, 1)
        communicator.execute()
        wrong += [f"{came}"] * (came.tolist() != [2.0] * 3)
        communicator.close()
        try:
            communicator.execute()
            wrong.append("a closed one moves")
        except BufferStateError as error:
            wrong += [str(error)] * ("closed" not in str(error))
        for arguments in ({"stage_bytes": 63}, {"timeout_s": 0}):
            try:
                EplbCommunicator(buffer, **arguments)  # type: ignore[arg-type]
                wrong.append(f"{arguments}")
            except ArgumentError as error:
                wrong += [str(error)] * (next(iter(arguments)) not in str(error))
    return wrong


def test_what_is_refused(ranks: Groups) -> None:
    assert ranks(1).run(refusals) == [[]]


def test_it_takes_only_a_buffer() -> None:
    for value in (None, 3):
        with pytest.raises(ArgumentError, match="buffer"):
            EplbCommunicator(value)  # type: ignore[arg-type]
