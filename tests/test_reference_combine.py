"""The model of combine against examples worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.reference import (
    CombineInputs,
    CombineReference,
    Deployment,
    DispatchInputs,
    DispatchReference,
    combine_add_rms_norm_all,
    combine_all,
    dispatch_all,
    through_blocks,
)
from moe_triton.reference.arithmetic import exp_of_nonpositive, sum_of_row
from tests.reference_helpers import elastic_info_of

HIDDEN = 32
TWO = Deployment(ep_world_size=2, moe_expert_num=4)


def filled(*values: float, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A row of each value."""
    return torch.tensor(values)[:, None].expand(len(values), HIDDEN).to(dtype)


def dispatched_ids(
    deployment: Deployment, ids: list[list[list[int]] | None], mask: torch.Tensor | None = None
) -> list[DispatchReference | None]:
    """Dispatch of these ids; the mask is rank 0's, and everyone's where there is one."""
    inputs: list[DispatchInputs | None] = []
    for of_rank in ids:
        if of_rank is None:
            inputs.append(None)
            continue
        expert_ids = torch.tensor(of_rank, dtype=torch.int32)
        inputs.append(
            DispatchInputs(x=torch.zeros(len(of_rank), HIDDEN), expert_ids=expert_ids, x_active_mask=mask)
        )
    return dispatch_all(deployment, inputs)


def combined(
    deployment: Deployment,
    ids: list[list[list[int]] | None],
    results: dict[tuple[int, int, int], float],
    comm_quant_mode: int = 0,
    mask: torch.Tensor | None = None,
    **tensors: Any,
) -> list[CombineReference | None]:
    """Combine where experts answer (source, token, k) with rows of ``results``, and else with 0."""
    dispatched = dispatched_ids(deployment, ids, mask)
    inputs: list[CombineInputs | None] = []
    for of_rank, own in zip(ids, dispatched, strict=True):
        if of_rank is None or own is None:
            inputs.append(None)
            continue
        rows = [results.get((source, token, k), 0.0) for source, token, k in own.assist_info.tolist()]
        inputs.append(
            CombineInputs(
                expand_x=filled(*rows),
                expert_ids=torch.tensor(of_rank, dtype=torch.int32),
                x_active_mask=mask,
                **tensors,
            )
        )
    return combine_all(deployment, dispatched, inputs, comm_quant_mode=comm_quant_mode)


def values_of(own: CombineReference | None) -> list[float]:
    """The value that fills each row that is written."""
    assert own is not None
    assert (own.x == own.x[:, :1]).all()
    return own.x[:, 0].tolist()


def test_results_are_weighted_and_summed() -> None:
    answers = {(0, 0, 0): 2.0, (0, 0, 1): 3.0, (1, 0, 0): 5.0, (1, 0, 1): 7.0}
    weights = torch.tensor([[0.5, 2.0]])
    first, second = combined(TWO, [[[3, 0]], [[1, 2]]], answers, expert_scales=weights)
    assert values_of(first) == [7.0]
    assert values_of(second) == [16.5]
    assert first is not None
    assert first.performance_ranks == (0, 1)
    assert values_of(combined(TWO, [[[3, 0]], [[1, 2]]], answers)[1]) == [12.0]


def test_the_order_of_the_sum_is_k_then_shared_experts_then_shared_expert_x() -> None:
    # 2^25 + 1 is 2^25 in fp32: what comes after a large number is lost, what comes after its opposite is not.
    large, ids = 2.0**25, [[[0, 1]], [[0, 1]]]
    deployment = Deployment(ep_world_size=2, moe_expert_num=2, shared_expert_rank_num=1)
    cases: list[tuple[dict[tuple[int, int, int], float], float]] = [
        ({(0, 0, 0): large, (0, 0, 1): 1.0, (0, 0, 2): -large}, 0.0),
        ({(0, 0, 0): large, (0, 0, 1): -large, (0, 0, 2): 1.0}, 1.0),
    ]
    for answers, expected in cases:
        assert values_of(combined(deployment, [*ids], answers)[0]) == [expected]
    answers = {(0, 0, 0): large, (0, 0, 1): -large}
    assert values_of(combined(TWO, [*ids], answers, shared_expert_x=filled(1.0))[0]) == [1.0]
    answers = {(0, 0, 0): 1.0, (0, 0, 1): large}
    assert values_of(combined(TWO, [*ids], answers, shared_expert_x=filled(-large))[0]) == [0.0]


def test_shared_experts_are_not_weighted() -> None:
    deployment = Deployment(ep_world_size=3, moe_expert_num=1, shared_expert_num=2, shared_expert_rank_num=2)
    answers = {(2, 0, 0): 1.0, (2, 0, 1): 10.0, (2, 0, 2): 100.0}
    weights = torch.tensor([[0.5]])
    assert values_of(combined(deployment, [[[0]]] * 3, answers, expert_scales=weights)[2]) == [110.5]


def test_version_1_finds_the_same_results() -> None:
    deployment = Deployment(ep_world_size=4, moe_expert_num=2, shared_expert_rank_num=2, version=1)
    answers = {(2, 0, 0): 1.0, (2, 0, 1): 10.0, (2, 1, 0): 2.0, (2, 1, 1): 20.0, (0, 1, 1): 30.0}
    ranks = combined(deployment, [[[1], [0]]] * 4, answers)
    assert values_of(ranks[2]) == [11.0, 22.0]
    assert values_of(ranks[0]) == [0.0, 30.0]


def test_entries_without_an_expert_add_nothing_whatever_their_weight() -> None:
    weights = torch.tensor([[float("nan"), 2.0]])
    answers = {(0, 0, 1): 4.0}
    assert values_of(combined(TWO, [[[-1, 0]], [[-1, -1]]], answers, expert_scales=weights)[0]) == [8.0]


@pytest.mark.parametrize(
    ("expert", "alphas", "expected"),
    [
        (4, [3.0, 0.5], 0.0),  # zero
        (5, [3.0, 0.5], 4.0),  # copy: x
        (6, [3.0, 0.5], 3.0 * 4.0 + 0.5 * 8.0),  # constant: a1 * x + a2 * v
        (6, [1.0, 1.0], 12.0),
    ],
)
def test_special_experts(expert: int, alphas: list[float], expected: float) -> None:
    deployment = Deployment(
        ep_world_size=2, moe_expert_num=4, zero_expert_num=1, copy_expert_num=1, const_expert_num=1
    )
    ranks = combined(
        deployment,
        [[[expert, 0]], [[0, 1]]],
        {(0, 0, 1): 1.0},
        expert_scales=torch.tensor([[2.0, 1.0]]),
        ori_x=filled(4.0),
        const_expert_alpha_1=torch.tensor(alphas[:1]),
        const_expert_alpha_2=torch.tensor(alphas[1:]),
        const_expert_v=filled(8.0),
    )
    assert values_of(ranks[0]) == [2 * expected + 1]


def test_alphas_by_softmax() -> None:
    deployment = Deployment(ep_world_size=2, moe_expert_num=4, const_expert_num=1)

    def constant(alpha1: float, alpha2: float) -> float:
        ranks = combined(
            deployment,
            [[[4]], [[0]]],
            {},
            ori_x=filled(4.0),
            const_expert_alpha_1=filled(alpha1),
            const_expert_alpha_2=filled(alpha2),
            const_expert_v=filled(8.0),
        )
        return values_of(ranks[0])[0]

    assert constant(0.5, 0.5) == 6.0  # equal logits: the mean of x and v
    assert constant(2.0, 0.0) == 4.0  # exp(-256) is 0: x alone
    assert constant(0.0, 2.0) == 8.0


def test_masks_leave_outputs_unwritten() -> None:
    answers = {(0, 0, 0): 1.0, (0, 0, 1): 2.0, (0, 1, 0): 4.0, (0, 1, 1): 8.0}
    ids: list[list[list[int]] | None] = [[[0, 1], [1, 2]], [[0, 1], [1, 2]]]
    own = combined(TWO, ids, answers, mask=torch.tensor([True, False]))[0]
    assert own is not None
    assert own.written.tolist() == [True, False]
    assert values_of(own) == [3.0]
    own = combined(TWO, ids, answers, mask=torch.tensor([[False, False], [False, True]]))[0]
    assert own is not None
    assert own.written.tolist() == [False, True]
    assert values_of(own) == [8.0]
    assert own.performance_ranks == (1,)


def test_blocks_of_eight_lose_what_int8_cannot_hold() -> None:
    rows = torch.zeros(1, HIDDEN).bfloat16()
    rows[0, :6] = torch.tensor([127.0, 3.5, 2.5, -0.25, 64.5, -127.0])
    rows[0, 8] = 2.0**-20
    through = through_blocks(rows)[0]
    # s = 127 * f32(1/127) is 1; ties go to the even code
    assert through[:8].tolist() == [127.0, 4.0, 2.0, 0.0, 64.0, -127.0, 0.0, 0.0]
    # the next block has a scale of its own: s = 2^-20 / 127 in bf16 is 129 * 2^-34, times 127
    assert through[8] == torch.tensor(127 * 129 * 2.0**-34).bfloat16()
    assert not through[9:].any()


def test_blocks_round_the_quotient_to_half_on_the_way() -> None:
    rows = torch.zeros(1, HIDDEN, dtype=torch.float16)
    rows[0, :2] = torch.tensor([255.0, 203.75])
    # 203.75 / s = 101.476, in half 101.5, so the code is 102; s is 2.0078125 in fp16
    assert through_blocks(rows)[0, 1] == torch.tensor(102 * 2.0078125).half()


def test_blocks_spoilt_by_an_infinity_or_a_nan() -> None:
    rows = filled(1.0, 1.0)
    rows = rows.clone()
    rows[0, 3], rows[1, 9] = float("inf"), float("nan")
    through = through_blocks(rows)
    assert through[0].isnan().tolist() == [True] * 8 + [False] * 24
    assert through[1].isnan().tolist() == [False] * 8 + [True] * 8 + [False] * 16


def test_results_may_travel_as_int8() -> None:
    answers = {(0, 0, 0): 127.0, (0, 0, 1): -127.0, (1, 0, 0): 1.0, (1, 0, 1): 1.0}
    assert values_of(combined(TWO, [[[3, 0]], [[1, 2]]], answers, comm_quant_mode=2)[0]) == [0.0]


def test_tensor_parallel_peers_add_their_halves() -> None:
    deployment = Deployment(ep_world_size=2, moe_expert_num=2, tp_world_size=2)
    dispatched = dispatched_ids(deployment, [[[0]], [[0]], [[0]], [[1]]])
    # Rows are of processes 0, 2, 1 at process 0; 1, 0, 2 at process 1; 3 at process 2 and process 3.
    rows = [filled(1.0, 2.0, 4.0), filled(8.0, 16.0, 32.0), filled(64.0), filled(256.0)]
    ids = [[[0]], [[0]], [[0]], [[1]]]
    inputs = [
        CombineInputs(expand_x=y, expert_ids=torch.tensor(i, dtype=torch.int32))
        for y, i in zip(rows, ids, strict=True)
    ]
    sums = [values_of(own) for own in combine_all(deployment, dispatched, inputs)]
    assert sums == [[17.0], [12.0], [34.0], [320.0]]


def test_tensor_parallel_halves_are_rounded_once_added() -> None:
    deployment = Deployment(ep_world_size=2, moe_expert_num=2, tp_world_size=2)
    ids = [[[0]], [[1]], [[1]], [[1]]]
    dispatched = dispatched_ids(deployment, [*ids])
    # 256 + 1 is no bf16 number: it goes to the even neighbour before its weight and the sum see it.
    rows = [filled(256.0), filled(1.0), filled(0.0, 0.0, 0.0), filled(0.0, 0.0, 0.0)]
    inputs = [
        CombineInputs(expand_x=y, expert_ids=torch.tensor(i, dtype=torch.int32), shared_expert_x=filled(1.0))
        for y, i in zip(rows, ids, strict=True)
    ]
    first = combine_all(deployment, dispatched, inputs)[0]
    assert values_of(first) == [256.0]


def test_survivors_get_their_results_back() -> None:
    whole = Deployment(ep_world_size=3, moe_expert_num=3)
    deployment = Deployment(ep_world_size=3, moe_expert_num=3, elastic_info=elastic_info_of(whole, [1]))
    first, lost, last = combined(deployment, [[[1]], None, [[1]]], {(0, 0, 0): 2.0, (1, 0, 0): 3.0})
    assert lost is None
    assert values_of(first) == [2.0]
    assert values_of(last) == [3.0]
    assert first is not None
    assert first.performance_ranks == (2,)


def test_add_rms_norm() -> None:
    dispatched = dispatched_ids(TWO, [[[0], [1]], [[0], [1]]])
    rows = filled(1.0, 6.0, 1.0, 6.0)  # expert 0's tokens first, then expert 1's
    inputs = [
        CombineInputs(
            expand_x=torch.cat([rows[::2], rows[1::2]]) if rank == 0 else filled(),
            expert_ids=torch.tensor([[0], [1]], dtype=torch.int32),
            residual_x=filled(1.0, -2.0)[:, None],
            gamma=filled(3.0)[0],
        )
        for rank in range(2)
    ]
    first = combine_add_rms_norm_all(TWO, dispatched, inputs, norm_eps=12.0)[0]
    assert first is not None
    # xf = 2: the mean square is 4, so rstd = 1 / sqrt(16); xf = 4: 1 / sqrt(28).
    assert first.x[:, 0].tolist() == [2.0, 4.0]
    assert first.rstd.tolist() == [0.25, np.float32(1) / np.sqrt(np.float32(28))]
    assert first.y[0].tolist() == [1.5] * HIDDEN
    normed = torch.tensor(4 * float(first.rstd[1])).bfloat16().float()
    assert (first.y[1] == (normed * 3).bfloat16()).all()


def test_the_norm_takes_the_sum_before_it_is_rounded() -> None:
    dispatched = dispatched_ids(TWO, [[[0, 1]], [[0, 1]]])
    inputs = [
        CombineInputs(
            expand_x=filled(256.0, 256.0, 1.0, 1.0) if rank == 0 else filled(),
            expert_ids=torch.tensor([[0, 1]], dtype=torch.int32),
            residual_x=filled(-256.0)[:, None],
            gamma=filled(1.0)[0],
        )
        for rank in range(2)
    ]
    first = combine_add_rms_norm_all(TWO, dispatched, inputs)[0]
    assert first is not None
    assert first.x[0].tolist() == [1.0] * HIDDEN


def test_rows_are_summed_in_lanes() -> None:
    values = np.zeros(64, dtype=np.float32)
    values[0] = 2.0**24
    values[32] = 1.0  # lost: the lane is at 2^24 already
    values[1] = values[33] = 1.0  # lane 1 has 2 by itself
    assert sum_of_row(values) == 2.0**24 + 2


@given(st.floats(-110, 0, width=32))
def test_exp_is_close_to_the_true_one(x: float) -> None:
    own = float(exp_of_nonpositive(np.array([x], dtype=np.float32))[0])
    true = np.exp(np.float64(x))
    assert abs(own - true) <= max(true * 2.0**-23, 2.0**-149)


def test_exp_at_its_ends() -> None:
    ends = np.array([0.0, -104.0, -1e30, -np.inf], dtype=np.float32)
    assert exp_of_nonpositive(ends).tolist() == [1.0, 0.0, 0.0, 0.0]
