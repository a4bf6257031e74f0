"""The model of dispatch against examples worked out by hand."""

from __future__ import annotations

import pytest
import torch

from moe_triton.core.row_formats import BY_QUANT_MODE
from moe_triton.reference import Deployment, DispatchInputs, DispatchReference, dispatch_all
from tests.reference_helpers import dispatch_shapes, elastic_info_of

HIDDEN = 32


def numbered(rank: int, tokens: int) -> torch.Tensor:
    """Tokens that say whose they are: 10 * rank + token."""
    return (10 * rank + torch.arange(tokens)).bfloat16()[:, None].expand(tokens, HIDDEN).contiguous()


def inputs_of(*ids: list[list[int]], **changes: list[torch.Tensor]) -> list[DispatchInputs]:
    return [
        DispatchInputs(
            x=numbered(rank, len(of_rank)),
            expert_ids=torch.tensor(of_rank, dtype=torch.int32),
            **{name: values[rank] for name, values in changes.items()},
        )
        for rank, of_rank in enumerate(ids)
    ]


def dispatched(
    deployment: Deployment, inputs: list[DispatchInputs], quant_mode: int = 0, nums_type: int = 1
) -> list[DispatchReference]:
    outputs = dispatch_all(
        deployment, inputs, row_format=BY_QUANT_MODE[quant_mode], expert_token_nums_type=nums_type
    )
    return [own for own in outputs if own is not None]


def names_of(own: DispatchReference) -> list[int]:
    """Which tokens' rows arrived."""
    return own.expand_x[:, 0].int().tolist()


def test_rows_come_by_expert_then_source_then_token() -> None:
    weights = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])]
    inputs = inputs_of([[0, 3], [2, 0]], [[3, 1], [0, 2]], expert_scales=weights)
    first, second = dispatched(Deployment(ep_world_size=2, moe_expert_num=4), inputs)
    assert names_of(first) == [0, 1, 11, 10]
    assert first.assist_info.tolist() == [[0, 0, 0], [0, 1, 1], [1, 1, 0], [1, 0, 1]]
    assert first.ep_recv_counts.tolist() == [2, 3, 3, 4]
    assert first.expert_token_nums.tolist() == [3, 1]
    assert first.expand_idx.tolist() == [0, 0, 0, 1]
    assert first.expand_scales is not None
    assert first.expand_scales.tolist() == [1.0, 4.0, 7.0, 6.0]
    assert first.tp_recv_counts is None
    assert first.dynamic_scales is None
    assert names_of(second) == [1, 11, 0, 10]
    assert second.ep_recv_counts.tolist() == [1, 2, 3, 4]
    assert second.expand_idx.tolist() == [0, 0, 0, 0]


def test_counts_may_be_running_totals() -> None:
    inputs = inputs_of([[0, 3], [2, 0]], [[3, 1], [0, 2]])
    first, _ = dispatched(Deployment(ep_world_size=2, moe_expert_num=4), inputs, nums_type=0)
    assert first.expert_token_nums.tolist() == [3, 4]
    assert first.expand_scales is None


def test_entries_without_an_expert_and_special_experts_are_not_sent() -> None:
    deployment = Deployment(ep_world_size=2, moe_expert_num=2, zero_expert_num=1, copy_expert_num=1)
    first, second = dispatched(deployment, inputs_of([[-1, 1], [2, 0]], [[3, 2], [-1, -1]]))
    assert first.assist_info.tolist() == [[0, 1, 1]]
    assert second.assist_info.tolist() == [[0, 0, 1]]
    assert second.ep_recv_counts.tolist() == [1, 1]
    assert first.expand_idx.tolist() == [0, 0, 0, 0]


def test_ranks_may_have_different_numbers_of_tokens() -> None:
    inputs = inputs_of([[0, 1], [1, 0], [0, 1]], [[1, 0]])
    first, second = dispatched(Deployment(ep_world_size=2, moe_expert_num=2), inputs)
    assert names_of(first) == [0, 1, 2, 10]
    assert second.ep_recv_counts.tolist() == [3, 4]


def test_a_mask_of_tokens_leaves_the_first() -> None:
    masks = [torch.tensor([True, False]), torch.tensor([True, True]), torch.tensor([False, False])]
    inputs = inputs_of([[0, 1], [1, 0]], [[1, 0], [1, 0]], [[0, 1], [0, 1]], x_active_mask=masks)
    deployment = Deployment(ep_world_size=3, moe_expert_num=2, shared_expert_rank_num=1)
    shared, first, second = dispatched(deployment, inputs)
    assert shared.assist_info.tolist() == [[0, 0, 2], [1, 0, 2], [1, 1, 2]]
    assert shared.ep_recv_counts.tolist() == [1, 3, 3]
    assert shared.expert_token_nums.tolist() == [3]
    assert first.assist_info.tolist() == [[0, 0, 0], [1, 0, 1], [1, 1, 1]]
    assert second.assist_info.tolist() == [[0, 0, 1], [1, 0, 0], [1, 1, 0]]


def test_a_mask_of_entries_sends_what_is_left_and_the_token_to_shared_experts() -> None:
    masks = [torch.tensor([[False, False], [False, True]]), torch.tensor([[True, True], [False, False]])]
    inputs = inputs_of([[0, 1], [1, 0]], [[1, 0], [0, 1]], x_active_mask=masks)
    deployment = Deployment(ep_world_size=2, moe_expert_num=2, shared_expert_rank_num=1)
    shared, routed = dispatched(deployment, inputs)
    assert shared.assist_info.tolist() == [[0, 1, 2], [1, 0, 2]]
    assert routed.assist_info.tolist() == [[0, 1, 1], [1, 0, 1], [1, 0, 0]]
    assert routed.ep_recv_counts.tolist() == [1, 2, 2, 3]


def test_version_2_chooses_a_replica_by_the_source_rank() -> None:
    deployment = Deployment(ep_world_size=5, moe_expert_num=1, shared_expert_num=2, shared_expert_rank_num=4)
    weights = [torch.full((1, 1), 0.5)] * 5
    ranks = dispatched(deployment, inputs_of(*[[[0]]] * 5, expert_scales=weights))
    assert [names_of(own) for own in ranks] == [
        [0, 20, 40],
        [10, 30],
        [0, 20, 40],
        [10, 30],
        [0, 10, 20, 30, 40],
    ]
    assert ranks[0].assist_info[:, 2].eq(1).all()
    assert ranks[3].assist_info[:, 2].eq(2).all()
    assert ranks[1].ep_recv_counts.tolist() == [0, 1, 1, 2, 2]
    assert ranks[2].expand_scales is not None
    assert not ranks[2].expand_scales.any()


def test_version_1_cuts_tokens_into_runs() -> None:
    # R = 2, BS = 3. m = ceil((t + 1 + floor(3r / 2)) * 2 / 3) - 1 - r: rank 2's tokens are cut into 0 | 1 2,
    # rank 3's into 0 1 | 2.
    deployment = Deployment(ep_world_size=4, moe_expert_num=2, shared_expert_rank_num=2, version=1)
    first, second, *_ = dispatched(deployment, inputs_of(*[[[0], [0], [1]]] * 4))
    assert names_of(first) == [0, 1, 2, 20, 30, 31]
    assert names_of(second) == [10, 11, 12, 21, 22, 32]
    # Their own tokens are reported in two runs: rank 0's are 0 | 1 2, rank 1's 0 1 | 2.
    assert first.ep_recv_counts.tolist() == [1, 3, 4, 6]
    assert second.ep_recv_counts.tolist() == [2, 3, 5, 6]
    assert first.expert_token_nums.tolist() == [6]


def test_int8_rows_and_the_smooth_scales_that_apply() -> None:
    x = torch.zeros(1, HIDDEN).bfloat16()
    x[0, :2] = torch.tensor([127.0, 63.5])
    scales = torch.ones(3, HIDDEN)
    scales[1, 0] = 2.0  # the row of routed expert 0, behind the shared expert's
    inputs = [
        DispatchInputs(x=x, expert_ids=torch.tensor([[0, 1]], dtype=torch.int32), scales=scales)
        for _ in range(3)
    ]
    deployment = Deployment(ep_world_size=3, moe_expert_num=2, shared_expert_rank_num=1)
    shared, first, second = dispatched(deployment, inputs, quant_mode=2)
    for own in (shared, second):  # a tie goes to the even code
        assert own.expand_x[:, :3].tolist() == [[127, 64, 0]] * 3
        assert own.dynamic_scales is not None
        assert own.dynamic_scales.tolist() == [1.0] * 3
    assert first.expand_x[:, :3].tolist() == [[127, 32, 0]] * 3
    assert first.dynamic_scales is not None
    assert first.dynamic_scales.tolist() == [2.0] * 3


def test_version_1_quantises_wherever_scales_are_given() -> None:
    inputs = inputs_of([[0]], [[1]], scales=[torch.ones(2, HIDDEN)] * 2)
    deployment = Deployment(ep_world_size=2, moe_expert_num=2, version=1)
    assert dispatched(deployment, inputs)[0].expand_x.dtype == torch.int8


def test_tensor_parallel_peers_get_each_others_rows_behind_their_own() -> None:
    # Processes 0 and 2 are one expert-parallel group, 1 and 3 the other; 0 and 1 are peers.
    deployment = Deployment(ep_world_size=2, moe_expert_num=2, tp_world_size=2)
    zero, one, two, three = dispatched(deployment, inputs_of([[0], [1]], [[0], [0]], [[0], [0]], [[1], [0]]))
    assert names_of(zero) == [0, 20, 21, 10, 11, 31]
    assert names_of(one) == [10, 11, 31, 0, 20, 21]
    assert names_of(two) == [1, 30]
    assert names_of(three) == [30, 1]
    assert zero.ep_recv_counts.tolist() == [1, 3, 2, 3]
    assert two.ep_recv_counts.tolist() == [1, 1, 0, 1]
    assert zero.expert_token_nums.tolist() == [6]
    assert two.tp_recv_counts is not None
    assert two.tp_recv_counts.tolist() == [1, 1]
    assert zero.assist_info.tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]


def test_words_of_elastic_info() -> None:
    deployment = Deployment(ep_world_size=4, moe_expert_num=4, shared_expert_rank_num=2)
    assert elastic_info_of(deployment, [1]) == (1, 3, 1, 4, 0, -1, 1, 2, 0, 2, 3, -1)
    assert elastic_info_of(deployment, [3]) == (1, 3, 2, 2, 0, 1, 2, -1, 0, 1, 2, -1)


def test_survivors_have_new_numbers() -> None:
    whole = Deployment(ep_world_size=4, moe_expert_num=8)
    deployment = Deployment(ep_world_size=4, moe_expert_num=8, elastic_info=elastic_info_of(whole, [1]))
    inputs: list[DispatchInputs | None] = [*inputs_of([[0, 5]], [[0, 0]], [[2, 4]], [[3, 5]])]
    inputs[1] = None
    zero, lost, two, three = dispatch_all(deployment, inputs)
    assert lost is None
    assert zero is not None
    assert two is not None
    assert three is not None
    assert zero.assist_info.tolist() == [[0, 0, 0]]
    assert two.assist_info.tolist() == [[1, 0, 0], [2, 0, 0]]  # the new experts 2 and 3
    assert names_of(three) == [20, 0, 30]  # the new experts 4 and 5
    assert three.ep_recv_counts.tolist() == [0, 1, 1, 2, 2, 3]
    assert three.performance_ranks == (0, 2, 3)


def test_an_unscaled_table_changes_nothing() -> None:
    deployment = Deployment(ep_world_size=2, moe_expert_num=2, elastic_info=(0, 9, 9, 9, -1, -1, -1, -1))
    assert dispatched(deployment, inputs_of([[0]], [[1]]))[1].assist_info.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize(
    ("deployment", "rank", "expected"),
    [
        # min(localE, K) = 2 rows of each of 8 * 3 tokens; counts 8 * 4 + 2 * 24 * 2 * (8 // 8)
        (Deployment(ep_world_size=8, moe_expert_num=32), 0, (48, 48 * 128, 4, 32 + 96)),
        # 3 tokens of ceil(8 / 3) sources
        (
            Deployment(ep_world_size=8, moe_expert_num=5, shared_expert_rank_num=3),
            1,
            (9, 9 * 128, 1, 8 + 96),
        ),
        # all 24 tokens shared out among 2
        (
            Deployment(ep_world_size=8, moe_expert_num=6, shared_expert_rank_num=2, version=1),
            1,
            (12, 6, 1, 8 + 96),
        ),
        # with elastic_info the larger of both
        (
            Deployment(
                ep_world_size=8,
                moe_expert_num=12,
                shared_expert_rank_num=2,
                elastic_info=(0,) * 20,
            ),
            1,
            (48, 48 * 128, 2, 16 + 96),
        ),
    ],
)
def test_shapes(deployment: Deployment, rank: int, expected: tuple[int, ...]) -> None:
    shapes = dispatch_shapes(deployment, rank, batch=3, hidden=HIDDEN, topk=2, has_expert_scales=True)
    capacity, index, local, counts = expected
    assert list(shapes.values()) == [
        (capacity, HIDDEN),
        (capacity,),
        (index,),
        (local,),
        (counts,),
        (0,),
        (capacity,),
    ]


def test_shapes_with_global_bs_and_a_tensor_parallel_peer() -> None:
    deployment = Deployment(ep_world_size=2, moe_expert_num=2, tp_world_size=2)
    shapes = dispatch_shapes(deployment, 0, batch=3, hidden=HIDDEN, topk=2, global_bs=10)
    assert shapes["expand_x"] == (20, HIDDEN)
    assert shapes["assist_info_for_combine"] == (10 * 128,)
    assert shapes["ep_recv_counts"] == (4,)
    assert shapes["tp_recv_counts"] == (2,)
    assert shapes["expand_scales"] == (0,)
