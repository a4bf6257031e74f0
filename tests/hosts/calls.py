"""What ranks on several hosts do in tests of a buffer's other calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from moe_triton import CommunicationTimeoutError, EPBuffer, MoeTritonError
from tests.balance.test_eplb_communicator import rearranged
from tests.balance.test_mover import beside_dispatches
from tests.distributed.cases import Case, inputs_of
from tests.distributed.workers import expected_round, make_buffer, one_round
from tests.hosts.rounds import case_of
from tests.patience import seconds


def everything(rank: int, num_ranks: int) -> dict[str, Any]:
    """What the functions below find, in one job."""
    return {"calls": calls(rank, num_ranks), "moves": moves(rank, num_ranks)}


def moves(rank: int, num_ranks: int) -> list[str]:
    """What is wrong in rounds while weights of experts move: by a mover, and by vLLM's communicator."""
    wrong = beside_dispatches(rank, num_ranks, "layer", "allocated", 60)
    wrong += beside_dispatches(rank, num_ranks, "double", "slot by slot", 60)
    return wrong + rearranged(rank, num_ranks, 8)


def calls(rank: int, num_ranks: int) -> dict[str, Any]:
    """Which calls were right, and what is said of those that cannot be."""
    flat, deep = case_of(num_ranks, "fullmesh_v1"), case_of(num_ranks, "hierarchy")
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(rank)).bfloat16()
    ids = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]], dtype=torch.int32)
    halves = torch.full((4, 2), 0.5)
    first, second = make_buffer(flat), make_buffer(deep)
    found: dict[str, Any] = {"states": [each.state for each in first.health()]}
    sizes = {"num_max_tokens_per_rank": 4, "hidden": 64, "num_topk": 2, "num_experts": 2 * num_ranks}
    named = {"ranks_per_server": 2, "relaxed": True, "comm_alg": "fullmesh_v1"}
    hint = EPBuffer.get_buffer_size_hint(num_ranks, **sizes, **named)
    found["hint"] = hint == first.layout.data_bytes
    found["two buffers"] = [right(first, flat), right(second, deep), right(first, flat)]

    def gives_back(buffer: EPBuffer, x: torch.Tensor, ids: torch.Tensor, **options: Any) -> bool:
        received = buffer.dispatch(x, ids, **options)
        return buffer.combine(received.tokens, received.handle, halves[:1].expand(len(x), 2)).equal(x)

    found["exact"] = gives_back(first, x, ids, num_recv_tokens="exact")
    found["rounds"] = gives_back(first, x.repeat(3, 1), ids.repeat(3, 1))
    before = first.dispatch(x, ids)
    rows, count = before.tokens.clone(), int(before.tokens_per_expert.sum())
    again = first.dispatch(x, handle=before.handle)
    found["handle"] = again.tokens[:count].equal(rows[:count])
    pending = first.dispatch(x, ids, wait=False)
    received = pending.wait()
    found["later"] = first.combine(received.tokens, received.handle, halves).equal(x)
    found["un-masked"] = un_masked(first, flat)
    first.leave("calls", str(rank))
    first.barrier()
    found["left"] = first.left("calls")
    found["refused"] = said_by(lambda: first.peer_memory(lambda: (64, {})))
    for buffer in (first, second) if rank % 2 else (second, first):
        buffer.close()
    with make_buffer(flat) as third:
        found["once more"] = right(third, flat)
        third.barrier()
    return found


def un_masked(buffer: EPBuffer, case: Case) -> bool:
    """Whether a rank of the other host takes part in the next round that was masked for a moment."""
    other = (buffer.rank + buffer.num_ranks // 2) % buffer.num_ranks
    buffer.update_mask(other, True)
    masked = buffer.query_mask().nonzero().flatten().tolist()
    buffer.update_mask(other, False)
    return masked == [other] and right(buffer, case)


def right(buffer: EPBuffer, case: Case) -> bool:
    """Whether a round has the reference's bits."""
    of_case, rank = replace(case, config=buffer.config), buffer.rank
    _, sums = one_round(buffer, of_case, inputs_of(of_case, rank, 0), None)
    return sums.equal(expected_round(of_case, 0)[1][rank])


def said_by(call: Callable[[], Any]) -> str:
    """The error of a call."""
    try:
        call()
    except MoeTritonError as error:
        return str(error)
    return ""


def without_one(rank: int, num_ranks: int, absent: int) -> list[int]:
    """Whom each rank names, where one has not come to a call behind which others are stuck, too."""
    case, named = case_of(num_ranks, "hierarchy"), list[int]()
    with make_buffer(case, timeout_s=seconds(2.0)) as buffer:
        of_case = replace(case, config=buffer.config)
        buffer.barrier()
        if rank != absent:
            try:
                one_round(buffer, of_case, inputs_of(of_case, rank, 0), None)
            except CommunicationTimeoutError as error:
                named = [*error.missing_ranks]
        dist.barrier()  # who closes before is named as one that has left
    return named
