"""Ids of logical experts, mapped in dispatch: everything as of ids that were mapped beforehand."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_triton import ArgumentError, BufferStateError, DispatchOutput, EPBuffer
from moe_triton.balance import Placement
from moe_triton.kernels.map_experts import REPLICA_BY
from moe_triton.processes import RankGroup
from moe_triton.schemes import product_of
from tests.kernels.models import replica_model
from tests.patience import seconds

Groups = Callable[[int], RankGroup]
SCHEMES = ("fullmesh_v1", "fullmesh_v2", "direct", "fullmesh", "hierarchy")
E, PER_RANK, K, T, HIDDEN = 5, 4, 3, 9, 64
RANKS_PER_SERVER = 2


def server_of(num_ranks: int, scheme: str) -> int:
    """Ranks of a server."""
    return num_ranks if scheme in ("fullmesh_v2", "direct") else RANKS_PER_SERVER


def make(num_ranks: int, scheme: str, **options: Any) -> EPBuffer:
    """A buffer of physical experts."""
    return EPBuffer(
        num_max_tokens_per_rank=T,
        hidden=HIDDEN,
        num_topk=K,
        num_experts=num_ranks * PER_RANK,
        comm_alg=scheme,
        ranks_per_server=server_of(num_ranks, scheme),
        product=product_of(scheme),
        relaxed=True,
        timeout_s=seconds(30.0),
        **options,
    )


def table_of(num_ranks: int, mode: str, rank: int) -> torch.Tensor:
    """A table of a placement, in which experts have replicas on ranks of several servers."""
    placement = Placement.initial(1, E, num_ranks * PER_RANK, num_ranks)
    return placement.routing_table(0, rank, 7) if mode == "row" else placement.table(0)


def mapped(
    ids: torch.Tensor, table: torch.Tensor, mode: str, rank: int, num_ranks: int, scheme: str = "fullmesh_v1"
) -> torch.Tensor:
    """Ids of physical experts, one by one."""
    physical, size = num_ranks * PER_RANK, server_of(num_ranks, scheme) * PER_RANK
    first = rank * PER_RANK // size * size
    out = ids.clone()
    for token, row in enumerate(ids.tolist()):
        for k, expert in enumerate(row):
            if 0 <= expert < E:
                place = (first, first + size), (rank, num_ranks)
                out[token, k] = replica_model(table.tolist(), expert, token, mode, physical, *place)
            elif expert >= E:
                out[token, k] = expert - E + physical
    return out


def inputs(rank: int, seed: int, highest: int = E) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, logical ids of which some are no expert, and weights."""
    draw = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randn(T - rank % 2, HIDDEN, generator=draw).bfloat16()
    ids = torch.rand(len(x), highest, generator=draw).topk(K, dim=1).indices.int()
    ids[torch.rand(ids.shape, generator=draw) < 0.2] = -1
    return x, ids, torch.rand(ids.shape, generator=draw)


def contents(output: DispatchOutput, out: torch.Tensor) -> list[torch.Tensor]:
    """All that is defined of a round."""
    rows = output.handle.num_received()
    kept = output.handle.topk_idx, output.handle.expand_idx, output.handle.recv_offsets
    received = output.tokens[:rows], output.tokens_per_expert, output.handle.origins[:rows]
    weights = [] if output.weights is None else [output.weights[:rows]]
    return [each.clone() for each in (*kept, *received, *weights, out)]


def differences(rank: int, num_ranks: int, scheme: str, masked: tuple[int, ...] = ()) -> list[str]:
    """Rounds with a table beside rounds of mapped ids, in every mode; what is not the same to the bit.

    Args:
        rank: of this process.
        num_ranks: of the group.
        scheme: how tokens travel.
        masked: ranks that the others mask first.
    """
    wrong = []
    with make(num_ranks, scheme) as buffer:
        for each in set(masked) - {rank}:
            buffer.update_mask(each, True)
        for number, mode in enumerate(() if rank in masked else REPLICA_BY * 2):
            x, ids, weights = inputs(rank, number)
            table = table_of(num_ranks, mode, rank)
            given = ids.long() if number % 2 else ids
            if number >= len(REPLICA_BY):
                table = torch.stack([table, table], 2)[..., 0]  # strided
            options = {"topk_weights": weights, "quantize": "int8" if number % 3 == 2 else None}
            made = []
            for way in (
                {"topk_idx": given, "eplb_table": table, "eplb_mode": mode},
                {"topk_idx": mapped(ids, table, mode, rank, num_ranks, scheme)},
            ):
                received = buffer.dispatch(x, **way, **options)
                y = received.tokens.to(torch.bfloat16)
                made.append(contents(received, buffer.combine(y, received.handle, weights)))
            wrong += [
                f"{mode}: {n}" for n, (a, b) in enumerate(zip(*made, strict=True)) if not torch.equal(a, b)
            ]
            if not masked and received.handle.lost.any():
                wrong.append(f"{mode}: lost")
        dist.barrier()  # nobody gives memory back while others still go on
    return wrong


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rounds_with_a_table_are_rounds_of_mapped_ids(ranks: Groups, scheme: str) -> None:
    assert ranks(4).run(differences, scheme) == [[]] * 4


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "hierarchy"])
def test_masks_are_of_physical_experts(ranks: Groups, scheme: str) -> None:
    """Rank 0 holds physical experts whose ids logical ones have as well."""
    assert ranks(4).run(differences, scheme, (0,)) == [[]] * 4


def special_and_masked(rank: int, num_ranks: int) -> list[str]:
    """Special experts come behind the logical ones; what a mask leaves out may hold anything."""
    wrong = []
    special = {"num_zero_experts": 1, "num_copy_experts": 1}
    with make(num_ranks, "fullmesh_v1", **special) as buffer:
        for number, mode in enumerate(REPLICA_BY):
            x, ids, weights = inputs(rank, number, E + 2)
            table = table_of(num_ranks, mode, rank)
            tokens = torch.arange(len(x)) < len(x) - 2
            entries = torch.rand(ids.shape, generator=torch.Generator().manual_seed(number)) < 0.7
            for mask in (None, tokens, entries):
                given = ids
                if mask is not None:
                    kept = mask[:, None] if mask.dim() == 1 else mask
                    given = torch.where(kept, ids, torch.tensor([7, 2**30, -9], dtype=torch.int32))
                made = []
                for way in (
                    {"topk_idx": given, "eplb_table": table, "eplb_mode": mode},
                    {"topk_idx": mapped(ids, table, mode, rank, num_ranks)},
                ):
                    received = buffer.dispatch(x, **way, active_mask=mask)
                    y = received.tokens * 2
                    out = buffer.combine(y, received.handle, weights, ori_x=x)
                    made.append([received.tokens_per_expert, out])
                if not all(map(torch.equal, *made)):
                    wrong.append(f"{mode}, mask {None if mask is None else mask.dim()}")
    return wrong


def test_special_experts_move_up_and_masks_leave_out(ranks: Groups) -> None:
    assert ranks(2).run(special_and_masked) == [[]] * 2


TABLE = [[2, 0, 5], [1, 1, -1], [2, 2, 6], [1, 3, -1], [2, 4, 7]]
BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "a mode alone": ({"eplb_table": None, "eplb_mode": "rank"}, "^eplb_mode .*Pass eplb_table"),
    "no mode": ({"eplb_mode": "expert"}, "^eplb_mode .*one of"),
    "no tensor": ({"eplb_table": TABLE}, "^eplb_table .*torch.Tensor"),
    "wide": ({"eplb_table": torch.tensor(TABLE)}, "^eplb_table .*int32"),
    "flat": ({"eplb_table": torch.tensor(TABLE[0]).int()}, r"^eplb_table .*\(N, F\)"),
    "no replica": ({"eplb_table": torch.tensor(TABLE).int()[:, :1]}, "^eplb_table .*a count and at least"),
    "too many experts": ({"eplb_table": torch.zeros(9, 2).int()}, "^eplb_table .*1 to 8 experts"),
    "no row": ({"eplb_table": torch.zeros(0, 5).int(), "eplb_mode": "row"}, "^eplb_table .*at least a row"),
    "a count of none": ({"bad": (0, 0, 0)}, r"^eplb_table is \[0, 0, 5\].* expert 0 at token .*1 to 2"),
    "a count of too many": ({"bad": (0, 0, 3)}, r"^eplb_table is \[3, 0, 5\].*1 to 2"),
    "no physical expert": ({"bad": (0, 1, 8)}, r"^eplb_table is \[2, 8, 5\].* 0 to 7"),
    "an empty replica": ({"bad": (0, 1, -1)}, r"^eplb_table is \[2, -1, 5\].* 0 to 7"),
    "one for two": ({"bad": (0, 1, 1)}, "^eplb_table .*experts [01] and [01] are both physical expert 1"),
    "an id of none": ({"ids": 5}, "^topk_idx is 5 at token 0, k 0.* 0 to 4"),
    "ids of two": ({"ids": 1}, "^topk_idx is 1 at token 0.*distinct"),
    "more tokens": ({"topk_idx": torch.tensor([[0, 1, 2]] * (T + 1)).int()}, "^topk_idx is of shape"),
    "fewer columns": ({"topk_idx": torch.zeros(2, 1).int()}, "^topk_idx"),
    "a mask of others": ({"active_mask": torch.ones(7).bool()}, "^active_mask"),
}


def bad_calls(rank: int, num_ranks: int) -> dict[str, str]:
    """What one rank is told of bad calls while the other waits, and whether it can go on."""
    said = {}
    x = torch.ones(2, HIDDEN, dtype=torch.bfloat16)
    with make(num_ranks, "fullmesh_v1") as buffer:
        for name, (changes, _) in BAD_CALLS.items():
            ids = torch.tensor([[0, 1, 2], [3, 1, -1]], dtype=torch.int32)
            good = {"topk_idx": ids, "eplb_table": torch.tensor(TABLE, dtype=torch.int32)}
            if rank == 0:
                bad = {key: value.clone() for key, value in good.items()}
                changes = dict(changes)
                if "bad" in changes:
                    row, column, value = changes.pop("bad")
                    bad["eplb_table"][row, column] = value
                if "ids" in changes:
                    bad["topk_idx"][0, 0] = changes.pop("ids")
                try:
                    buffer.dispatch(x, **{**bad, **changes})
                except ArgumentError as error:
                    said[name] = str(error)
            received = buffer.dispatch(x, **good)
            buffer.combine(received.tokens, received.handle)
    if rank == 0:
        try:
            buffer.dispatch(x, **good)
        except BufferStateError as error:
            said["closed"] = str(error)
    return said


def test_bad_tables_are_refused_before_anything_is_sent(ranks: Groups) -> None:
    said = ranks(2).run(bad_calls)[0]
    assert "closed" in said
    for name, (_, pattern) in BAD_CALLS.items():
        assert re.search(pattern, said.get(name, "")), (name, said.get(name))
