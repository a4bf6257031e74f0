"""A slow link between ranks changes times and no bits, and waits end over it as they do without."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_triton import ArgumentError, CommunicationTimeoutError, EPBuffer, Tuning
from moe_triton.backends.cpu.paced_link import PacedLink, paced
from moe_triton.core.config import Config
from moe_triton.processes import RankGroup
from moe_triton.schemes import product_of
from moe_triton.tools.selftest.cases import wrong_received
from tests.distributed.cases import Case, inputs_of, small_case
from tests.distributed.interrupted import error_of, later, send
from tests.distributed.workers import expected_round, make_buffer, one_round
from tests.patience import seconds

Groups = Callable[[int], RankGroup]
TOKENS, HIDDEN, TOPK = 64, 1024, 2
SLOW, NEVER = 0.02, 1e-9  # GB/s: the last is a byte a second


def links_of(buffer: EPBuffer) -> set[int | None]:
    """What the native settings of a buffer's plans say."""
    executables = buffer._communicator._executables
    kept: list[Any] = [executables.operator(*key) for key in list(executables.keys())]  # type: ignore[arg-type]
    return {executable._settings.link for executable in kept}


def both_ways(rank: int, num_ranks: int) -> tuple[set[int | None], bool, int]:
    case = small_case(num_ranks)
    link = PacedLink(1.0)
    with make_buffer(case) as buffer:
        one_round(buffer, case, inputs_of(case, rank, 0), None)
        off, unused = links_of(buffer), link.taken_bytes
    with paced(link), make_buffer(case) as buffer:
        one_round(buffer, case, inputs_of(case, rank, 0), None)
        on = links_of(buffer) == {link.address} and link.taken_bytes > 0
    return off, on, unused


def test_there_is_none_by_default(ranks: Groups) -> None:
    assert ranks(2).run(both_ways) == [({None}, True, 0)] * 2


@pytest.mark.parametrize("numbers", [(0.0,), (-1.0,), (1e9,), (1.0, -1.0), (1.0, 2e6), (1.0, 0.0, -1)])
def test_numbers_have_ranges(numbers: tuple[float, ...]) -> None:
    with pytest.raises(ArgumentError, match="it must be"):
        PacedLink(*numbers)  # type: ignore[arg-type]


def wrong_bits(
    rank: int, num_ranks: int, case: Case, tuning: Tuning, numbers: tuple[float, float, int]
) -> list[str]:
    wrong = []
    with paced(PacedLink(*numbers)) as link, make_buffer(case, tuning=tuning) as buffer:
        for number in range(case.rounds):
            output, combined = one_round(buffer, case, inputs_of(case, rank, number), None)
            received, sums = expected_round(case, number)
            wrong += [f"round {number}: {name}" for name in wrong_received(output, received[rank])]
            if not torch.equal(combined, sums[rank]):
                wrong.append(f"round {number}: combined")
    return wrong if link.taken_bytes else ["nothing went over the link"]


WAYS: dict[str, dict[str, Any]] = {
    "one block": {"num_blocks": 1},
    "three blocks": {"num_blocks": 3},
    "torch": {"num_blocks": 2, "kernels": "torch"},
}


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "direct", "fullmesh"])
@pytest.mark.parametrize("way", WAYS)
def test_bits_are_the_same(ranks: Groups, way: str, scheme: str) -> None:
    config = Config(3, 9, 1536, 2, 6, product=product_of(scheme), scheme=scheme, relaxed=True)
    case = Case(config, seed=3, routing="sparse", tokens=(9, 0, 8), quantize="int8", rounds=4, **WAYS[way])
    tuning = Tuning(2, 3, communication_blocks=1 if way == "three blocks" else 0)
    for numbers in ((SLOW, 0.0, 1000), (1.0, 300.0, 0)):
        assert ranks(3).run(wrong_bits, case, tuning, numbers) == [[]] * 3


def times_of_a_pair(
    rank: int,
    num_ranks: int,
    comm_alg: str,
    num_blocks: int,
    numbers: tuple[float, float, int],
    late_s: float,
) -> dict[str, tuple[float, float, int]]:
    """Begin, end and bytes that this rank sent, by operator. The last rank comes late."""
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    ids = torch.arange(TOKENS * TOPK).view(TOKENS, TOPK).int() % (2 * num_ranks)
    weights = torch.ones(TOKENS, TOPK)
    with (
        paced(PacedLink(10_000)) as link,
        EPBuffer(
            num_max_tokens_per_rank=TOKENS,
            hidden=HIDDEN,
            num_topk=TOPK,
            num_experts=2 * num_ranks,
            comm_alg=comm_alg,
            num_blocks=num_blocks,
            relaxed=True,
        ) as buffer,
    ):
        received = buffer.dispatch(x, ids)  # compiles
        buffer.combine(received.tokens, received.handle, weights)
        link.set(*numbers)
        found = {}
        for operator in ("dispatch", "combine"):
            dist.barrier()
            time.sleep(late_s if rank == num_ranks - 1 else 0.0)
            begin, before = time.monotonic(), link.taken_bytes
            if operator == "dispatch":
                received = buffer.dispatch(x, ids)
            else:
                buffer.combine(received.tokens, received.handle, weights)
            found[operator] = begin, time.monotonic(), link.taken_bytes - before
    return found


@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("comm_alg", ["fullmesh_v1", "fullmesh_v2"])
def test_no_operator_is_faster_than_the_link(ranks: Groups, comm_alg: str, num_blocks: int) -> None:
    num_ranks, bucket = 2, 2000
    payload = TOKENS * TOPK * HIDDEN * 2 // num_ranks  # to the other rank
    for found in ranks(num_ranks).run(times_of_a_pair, comm_alg, num_blocks, (SLOW / 4, 0.0, bucket), 0.0):
        for begin, end, sent in found.values():
            assert payload <= sent < 2 * payload
            assert end - begin >= sent / (SLOW / 4 * 1e9)


@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("comm_alg", ["fullmesh_v1", "fullmesh_v2"])
def test_nothing_arrives_before_the_latency(ranks: Groups, comm_alg: str, num_blocks: int) -> None:
    latency_s = 0.1
    link = 10_000.0, latency_s * 1e6, 1 << 20
    # So late that the others have long sent all of theirs.
    found = ranks(3).run(times_of_a_pair, comm_alg, num_blocks, link, 3 * latency_s)
    for operator in ("dispatch", "combine"):
        last_in = max(times[operator][0] for times in found)
        first_out = min(times[operator][1] for times in found)
        assert first_out - last_in >= latency_s


def slow_sender(rank: int, num_ranks: int, num_blocks: int, how: str) -> Any:
    """Rank 0 sends over a link that would take minutes, and is interrupted, or closed by another thread."""
    case = small_case(num_ranks, num_blocks=num_blocks)
    with paced(PacedLink(10_000)) as link:
        buffer = make_buffer(case, timeout_s=seconds(60.0))
    inputs = inputs_of(case, rank, 0)
    one_round(buffer, case, inputs, None)
    ids = torch.arange(case.config.num_topk * 4).view(4, -1).int() % case.config.num_experts
    said = None
    with buffer:
        if rank == 0:
            link.set(NEVER, 0.0, 0)
            if how == "close":
                threading.Timer(0.2, buffer.close).start()
            else:
                later(lambda: send(signal.SIGINT))
            said = error_of(lambda: buffer.dispatch(inputs.x[:1].expand(4, -1).contiguous(), ids))
        dist.barrier()
    return said


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_ctrl_c_ends_a_send(ranks: Groups, num_blocks: int) -> None:
    assert ranks(2).run(slow_sender, num_blocks, "signal")[0] == ("KeyboardInterrupt", "", True)


def test_closing_ends_a_send(ranks: Groups) -> None:
    name, _, soon = ranks(2).run(slow_sender, 2, "close")[0]
    assert (name, soon) == ("BufferStateError", True)


def who_is_missing(rank: int, num_ranks: int, way: str) -> tuple[int, ...] | None:
    """The last rank does not come, or sends too slowly. What the others say."""
    case = small_case(num_ranks, num_blocks=2)
    last = num_ranks - 1
    with paced(PacedLink(1.0, 10.0)) as link:
        buffer = make_buffer(case, timeout_s=1.0 if rank != last else 30.0)
    inputs = inputs_of(case, rank, 0)
    one_round(buffer, case, inputs, None)
    said = None
    with buffer:
        if rank != last:
            with pytest.raises(CommunicationTimeoutError) as raised:
                buffer.dispatch(inputs.x, inputs.topk_idx)
            said = raised.value.missing_ranks
        elif way == "slow":
            link.set(NEVER, 0.0, 0)
            later(lambda: send(signal.SIGINT), 2.5)  # past the others' deadline
            assert error_of(lambda: buffer.dispatch(inputs.x, inputs.topk_idx))[0] == "KeyboardInterrupt"
        dist.barrier()
    return said


@pytest.mark.parametrize("way", ["away", "slow"])
def test_a_wait_over_a_link_ends_at_its_deadline(ranks: Groups, way: str) -> None:
    assert ranks(3).run(who_is_missing, way) == [(2,), (2,), None]
