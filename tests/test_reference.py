from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton import reference
from moe_triton.core.config import Config
from moe_triton.core.row_formats import INT8_128

# EP 2, 32 experts, 48 ids of rank 0 (docs/operators.md, "Worked example").
RANK0_IDS = """
11 17 29 12 24 23 1 0 16 30 18 8 2 14 11 3 30 21 12 0 10 9 6 31
22 27 30 21 1 24 17 11 3 19 2 29 16 13 7 27 6 29 5 22 24 19 23 2
"""
EXPAND_IDX = """
0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 0 1 0 1 1 0 0 0 0
0 0 2 1 1 1 1 2 1 0 1 1 1 0 0 1 1 2 0 1 2 1 1 2
"""
RECV_COUNTS = """
2 3 5 6 9 11 13 16 16 17 18 22 24 27 28 30 31 32 33 34 35 36 39 41 43 44 45 46 47 47 47 50
"""
CUMULATIVE = "3 6 11 16 17 22 27 30 32 34 36 41 44 46 47 50"


def ints(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def worked_example() -> tuple[Config, list[torch.Tensor]]:
    """The example's routing. Of rank 1's ids the source gives only the counts per expert of rank 0."""
    rank0 = torch.tensor(ints(RANK0_IDS), dtype=torch.int32).view(4, 12)
    counts = np.diff([0, *ints(RECV_COUNTS)]).reshape(16, 2)[:, 1]
    wanted = [expert for expert in range(16) for _ in range(counts[expert])]
    # Fill up with experts of rank 1, and lay the ids out so that a token's are distinct.
    left = 48 - len(wanted)
    pool = sorted(wanted + [16 + i % 16 for i in range(left)])
    rank1 = torch.tensor(pool, dtype=torch.int32).view(12, 4).T.contiguous()
    assert all(len(set(row.tolist())) == 12 for row in rank1)
    config = Config(2, 4, 32, 12, 32, relaxed=True)
    return config, [rank0, rank1]


def test_worked_example_to_the_digit() -> None:
    config, ids = worked_example()
    x = [torch.zeros(4, 32, dtype=torch.bfloat16)] * 2
    received = reference.dispatch(config, x, ids)[0]
    assert received.expand_idx.tolist() == ints(EXPAND_IDX)
    assert received.recv_offsets.tolist() == ints(RECV_COUNTS)
    assert received.tokens_per_expert.cumsum(0).tolist() == ints(CUMULATIVE)


@given(st.integers(0, 2**32 - 1), st.floats(-30, 30))
def test_quantised_rows_follow_the_formula(seed: int, exponent: float) -> None:
    row = torch.randn(256, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    q, scale = reference.quantize_row(row)
    # Against float64: the published order of roundings keeps within one code of the exact quotient.
    exact = row.double() * 127 / row.abs().max().double()
    assert (q.double() - exact).abs().max() <= 0.5 + 1e-4
    assert q.abs().max() == 127
    assert abs(float(scale) * 127 / float(row.abs().max()) - 1) < 1e-6


def test_rows_that_cannot_be_quantised() -> None:
    for value, expected in ((0.0, 0.0), (3.7e-37, 0.0), (float("inf"), float("inf"))):
        row = torch.zeros(32)
        row[3] = value
        q, scale = reference.quantize_row(row)
        assert not q.any()
        assert float(scale) == expected
    row[5] = float("nan")
    assert reference.quantize_row(row)[1].isnan()
    row = torch.full((32,), 3.74e-37)
    assert reference.quantize_row(row)[0].eq(127).all()


@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_rows_in_blocks_are_rows_by_themselves(seed: int, blocks: int) -> None:
    row = torch.randn(128 * blocks, generator=torch.Generator().manual_seed(seed))
    row[:128] *= seed % 3  # zeros, at times
    q, scales = reference.quantize_row(row, INT8_128)
    assert scales.shape == (blocks,)
    for number, block in enumerate(row.view(blocks, 128)):
        own_q, own_scale = reference.quantize_row(block)
        assert torch.equal(q.view(blocks, 128)[number], own_q)
        assert torch.equal(scales[number], own_scale)
    assert (reference.dequantize(q, scales) - row).abs().max() <= scales.max()


def test_combine_sums_in_the_stated_order() -> None:
    config = Config(2, 1, 32, 3, 4, relaxed=True)
    ids = [torch.tensor([[3, 0, 2]], dtype=torch.int32), torch.empty(0, 3, dtype=torch.int32)]
    weights = [torch.tensor([[1.0, 1.0, 1.0]]), torch.empty(0, 3)]
    x = [torch.zeros(1, 32, dtype=torch.bfloat16), torch.zeros(0, 32, dtype=torch.bfloat16)]
    received = reference.dispatch(config, x, ids, weights)
    # In fp32 (2^25 + 1) - 2^25 is 0, while the other order gives 1: k ascending decides.
    value = {(0, 0): 2.0**25, (0, 1): 1.0, (0, 2): -(2.0**25)}
    y = [
        torch.tensor([[value[t, k]] * 32 for _, t, k in r.origins.tolist()], dtype=torch.bfloat16).view(
            -1, 32
        )
        for r in received
    ]
    assert reference.combine(config, y, received, ids, weights)[0].tolist() == [[0.0] * 32]


def test_shared_ranks_receive_every_token_of_their_sources() -> None:
    config = Config(5, 2, 32, 1, 3, num_shared_experts=1, num_shared_ranks=2, relaxed=True)
    ids = [torch.tensor([[0], [2]], dtype=torch.int32)] * 5
    x = [torch.full((2, 32), float(r), dtype=torch.bfloat16) for r in range(5)]
    received = reference.dispatch(config, x, ids)
    assert received[0].origins[:, 0].tolist() == [0, 0, 2, 2, 4, 4]
    assert received[1].origins[:, 0].tolist() == [1, 1, 3, 3]
    assert received[0].origins[:, 2].eq(1).all()
    assert received[2].tokens_per_expert.tolist() == [5]
    assert received[3].tokens_per_expert.tolist() == [0]
    assert received[4].tokens_per_expert.tolist() == [5]
