from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.kernels.keep import keep_kernel, result_offsets_kernel
from tests.kernels.calls import keep
from tests.kernels.routes import LAUNCHES, Guarded, Launch, assert_same_bits, kernel_settings

I32, F32 = torch.int32, torch.float32
WORDS, TOPK, NUM_RANKS, RANK, LOCAL, FIRST = 8, 2, 3, 1, 2, 2  # experts 2 and 3 of 6 are this rank's


def draw(seed: int, tokens: int, honest: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, their numbers within their experts, and where the entries of this rank end."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((tokens, 6)), axis=1)[:, :TOPK].astype(np.int32)
    ids[rng.random(ids.shape) < 0.2] = -1
    index, seen = np.zeros_like(ids), np.zeros(6, np.int32)
    for i, expert in enumerate(ids.flat):
        if expert >= 0:
            index.flat[i] = seen[expert]
            seen[expert] += 1
    counts = rng.integers(0, 4, (LOCAL, NUM_RANKS))
    counts[:, RANK] = seen[FIRST : FIRST + LOCAL] if honest else rng.integers(0, 3, LOCAL)
    return ids, index, np.cumsum(counts).astype(np.int32)


def own_row(expert: int, index: int, ends: np.ndarray) -> int:
    """The definition: after what earlier experts and sources sent, if it is among what this source did."""
    if not FIRST <= expert < FIRST + LOCAL:
        return -1
    entry = (expert - FIRST) * NUM_RANKS + RANK
    row = (int(ends[entry - 1]) if entry else 0) + index
    return row if row < ends[entry] else -1


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("rows_per_token", [1, TOPK + 1])
@kernel_settings
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 12),
    programs=st.integers(1, 4),
    honest=st.booleans(),
)
def test_rows_go_where_they_belong_and_nowhere_else(
    launch: Launch, rows_per_token: int, seed: int, tokens: int, programs: int, honest: bool
) -> None:
    ids, index, ends = draw(seed, tokens, honest)
    rng = np.random.default_rng(seed + 1)
    stride = WORDS + 1
    rows = rng.integers(-(2**31), 2**31, (tokens * rows_per_token + 1, stride), dtype=np.int32)
    weights = rng.random((tokens, TOPK), dtype=np.float32)
    capacity = int(ends[-1])
    out, origins = Guarded((capacity, WORDS), I32), Guarded((capacity, 3), I32)
    floats = {name: Guarded((capacity,), F32) for name in ("scales", "weights")}
    source = torch.from_numpy(rows.reshape(-1).copy())
    tables = [torch.from_numpy(table.reshape(-1).copy()) for table in (ids, weights, index, ends)]
    arguments = [source, source.view(F32)[WORDS:], *tables, out.tensor, floats["scales"].tensor]
    arguments += [origins.tensor, floats["weights"].tensor]
    sizes = [stride, FIRST, LOCAL, NUM_RANKS, RANK, tokens]
    launch(keep_kernel(WORDS, TOPK, 1, True, rows_per_token), [*arguments, *sizes], programs)
    want_rows, want_origins = out.untouched().clone(), origins.untouched().clone()
    want = {name: output.untouched().clone() for name, output in floats.items()}
    for token, k in np.ndindex(ids.shape):
        row = own_row(int(ids[token, k]), int(index[token, k]), ends)
        if row >= 0:
            at = token * rows_per_token + k if rows_per_token > 1 else token
            want_rows[row] = torch.from_numpy(rows[at, :WORDS])
            want_origins[row] = torch.tensor([RANK, token, k])
            want["scales"][row] = torch.from_numpy(rows[at, WORDS:].view(np.float32))[0]
            want["weights"][row] = float(weights[token, k])
    assert_same_bits(out.check(), want_rows)
    assert_same_bits(origins.check(), want_origins)
    for name, output in floats.items():
        assert_same_bits(output.check(), want[name])


@pytest.mark.parametrize("launch", LAUNCHES)
@kernel_settings
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 12),
    programs=st.integers(1, 4),
    honest=st.booleans(),
    own_results=st.sampled_from([0, -(2**40), 2**40]),
)
def test_results_are_found_in_slots_or_where_experts_left_them(
    launch: Launch, seed: int, tokens: int, programs: int, honest: bool, own_results: int
) -> None:
    ids, index, ends = draw(seed, tokens, honest)
    offsets = Guarded((tokens, TOPK + 1), torch.int64)
    tables = [torch.from_numpy(table.reshape(-1).copy()) for table in (ids, index, ends)]
    sizes = [own_results, 1000, 100, 64, FIRST, LOCAL, NUM_RANKS, RANK, tokens]
    launch(result_offsets_kernel(TOPK, 1), [*tables, offsets.tensor, *sizes], programs)
    want = torch.arange(tokens)[:, None] * 1000 + torch.arange(TOPK + 1) * 100
    for token, k in np.ndindex(ids.shape):
        row = own_row(int(ids[token, k]), int(index[token, k]), ends)
        if row >= 0:
            want[token, k] = own_results + row * 64
    assert torch.equal(offsets.check(), want)


def test_keep_by_hand() -> None:
    from moe_triton.backends.cpu.triton import launch

    rows = torch.arange(6, dtype=I32).view(2, 3)
    ids = torch.tensor([[2, 0], [3, 2]], dtype=I32)
    expand_idx, ends = torch.tensor([0, 0, 0, 1], dtype=I32), torch.tensor([1, 3, 3, 3, 4, 4], dtype=I32)
    out, scales, origins = keep(rows, ids, expand_idx, ends, launch, first_expert=2, num_ranks=3, rank=1)
    assert out.tolist() == [[0, 0], [0, 1], [3, 4], [3, 4]]
    assert scales.view(I32).tolist() == [0, 2, 5, 5]
    assert origins.tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]]
