"""A combine by other ids than its dispatch: it is named; where nobody can know, no later round changes.

Where calls are refused here, nothing was sent: the same combine by the right ids ends the round.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_triton import ArgumentError
from moe_triton import torch_npu_ops as ops
from moe_triton.processes import RankGroup
from moe_triton.tools.selftest.cases import expected_round
from tests.distributed.cases import experts_of, inputs_of, small_case
from tests.distributed.workers import make_buffer
from tests.patience import seconds
from tests.torch_npu_ops.setting import fresh

Groups = Callable[[int], RankGroup]
ROUNDS, LATE_S = 6, 0.05


def said_of(call: Callable[[], Any]) -> str:
    with pytest.raises(ArgumentError) as raised:
        call()
    return str(raised.value)


def written_handles(rank: int, num_ranks: int, scheme: str) -> tuple[list[str], list[bool]]:
    """What rank 0 is told of handles that were written to, and whether all sums are the reference's."""
    case, said, good = small_case(num_ranks, scheme), [], []
    with make_buffer(case) as buffer:
        for number in range(4):
            own = inputs_of(case, rank, number)
            mask = torch.ones(len(own.x), dtype=torch.bool) if number == 3 and scheme != "direct" else None
            output = buffer.dispatch(own.x, own.topk_idx, own.topk_weights, active_mask=mask)
            y, handle, out = experts_of(case, rank, output.tokens), output.handle, None
            if rank == 0 and number > 0:
                written = handle.topk_idx if mask is None else handle.active_mask
                before = written.clone()
                written[-1] = -1 if mask is None else False
                out = torch.empty_like(own.x) if number == 2 else None  # Python's way
                said.append(said_of(lambda o=output, y=y, out=out: buffer.combine(y, o.handle, out=out)))
                said.append(said_of(lambda o=output, y=y: buffer.combine(y, copy.copy(o.handle))))
                written.copy_(before)
            sums = buffer.combine(y, handle, own.topk_weights, out=out)
            good.append(torch.equal(sums, expected_round(case, number)[1][rank]))
    return said, good


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "direct", "fullmesh", "hierarchy"])
def test_handles_that_were_written_to(ranks: Groups, scheme: str) -> None:
    (said, good), others = ranks(2).run(written_handles, scheme)
    assert [text.split()[0] for text in said] == ["handle.topk_idx"] * 6
    for number, text in enumerate(said, start=2):
        assert f"other than what dispatch {number // 2} had" in text
    assert good == others[1] == [True] * 4


def other_ids(rank: int, num_ranks: int, function: str, options: dict[str, str]) -> list[str]:
    """What both ranks are told where ids or mask differ, with several dispatches before their combines."""
    tokens, hidden, experts, said = 4, 64, 4, []
    dispatch = getattr(ops, f"npu_moe_distribute_dispatch{function}")
    combine = getattr(ops, f"npu_moe_distribute_combine{function}")
    ids = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]], dtype=torch.int32)
    x = torch.arange(tokens * hidden).view(tokens, hidden).remainder(7).bfloat16() + rank
    weights = torch.full((tokens, 2), 0.5)
    mask = torch.tensor([True, True, True, False])
    with fresh():
        if options.get("comm_alg") == "fullmesh":
            ops.configure(product="A2", relaxed=True, timeout_s=seconds(20.0))
        group: tuple[Any, ...] = (ops.group_name(), num_ranks, rank, experts)

        def send(named: torch.Tensor, active: torch.Tensor | None) -> Callable[..., Any]:
            rows, _, index, _, counts, tp_counts, _ = dispatch(
                x, named, *group, x_active_mask=active, **options
            )

            def finish(by: torch.Tensor, behind: torch.Tensor | None) -> torch.Tensor:
                out: torch.Tensor = combine(
                    rows, by, index, counts, weights, *group, tp_send_counts=tp_counts,
                    x_active_mask=behind, **options,
                )  # fmt: skip
                return out

            return finish

        def check(finish: Callable[..., Any], right: tuple[Any, Any], *wrong: tuple[Any, Any]) -> None:
            said.extend(said_of(lambda pair=pair: finish(*pair)) for pair in wrong)
            active = slice(None) if right[1] is None else slice(3)
            assert torch.equal(finish(*right)[active], x[active])

        takes_masks = function == "_v2"
        for _ in range(3):  # the last time in native calls
            finish = send(ids, None)
            check(finish, (ids, None), (torch.full_like(ids, -1), None), (ids.flip(0), None))
            if not takes_masks:
                continue
            check(send(ids, None), (ids.long(), None), (ids, mask))
            check(send(ids, mask), (ids.long(), mask), (ids, None))
            # What an entry behind the mask holds does not matter.
            check(send(ids, mask), (torch.where(mask[:, None], ids, -1), mask), (ids, ~mask | mask))
        if options.get("comm_alg") == "fullmesh_v1":
            one, other = send(ids, None), send(ids.flip(0), None)
            check(one, (ids, None), (ids.flip(0), None))
            check(other, (ids.flip(0), None), (ids, None))
    return said


WAYS = {
    "fullmesh_v1": ("_v2", {"comm_alg": "fullmesh_v1"}),
    "fullmesh_v2": ("_v2", {"comm_alg": "fullmesh_v2"}),
    "version 1": ("", {}),
    "A2": ("_v2", {"comm_alg": "fullmesh"}),
}


@pytest.mark.parametrize("way", WAYS)
def test_ids_of_torch_npus_functions(ranks: Groups, way: str) -> None:
    for said in ranks(2).run(other_ids, *WAYS[way]):
        assert len(said) == {"fullmesh_v1": 17, "version 1": 6}.get(way, 15)
        for text in said:
            index = "expand_idx" if way == "version 1" else "assist_info_for_combine"
            assert text.startswith("expert_ids is other than what")
            assert f"the dispatch that returned this {index} had" in text


def unknown_index(rank: int, num_ranks: int, comm_alg: str) -> list[bool]:
    """Whether sums are right after a combine by other ids whose index is a copy."""
    tokens, hidden, experts, good = 4, 64, 4, []
    ids = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]], dtype=torch.int32)
    x = torch.arange(tokens * hidden).view(tokens, hidden).remainder(7).bfloat16() + rank
    weights = torch.full((tokens, 2), 0.5)
    with fresh():
        group: tuple[Any, ...] = (ops.group_name(), num_ranks, rank, experts)
        options = {"comm_alg": comm_alg}
        for number in range(ROUNDS):
            rows, _, assist, _, counts, tp_counts, _ = ops.npu_moe_distribute_dispatch_v2(
                x, ids, *group, **options
            )
            is_misused = number == 0 and rank == 0
            if rank == 1 and number > 0:
                time.sleep(LATE_S)
            out = ops.npu_moe_distribute_combine_v2(
                rows + number,
                torch.full_like(ids, -1) if is_misused else ids,
                assist.clone(),
                counts,
                weights,
                *group,
                tp_send_counts=tp_counts,
                **options,
            )
            if not is_misused:
                good.append(torch.equal(out, x + number))
    return good


@pytest.mark.parametrize("comm_alg", ["fullmesh_v1", "fullmesh_v2"])
def test_a_round_that_nobody_could_know_to_be_misused(ranks: Groups, comm_alg: str) -> None:
    assert ranks(2).run(unknown_index, comm_alg) == [[True] * (ROUNDS - 1), [True] * ROUNDS]
