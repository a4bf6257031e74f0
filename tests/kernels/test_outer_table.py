from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.core.records import POSITION_SHIFT
from moe_triton.kernels.outer_table import outer_table_kernel
from tests.kernels.routes import FORMS, Guarded, Launch, kernel_settings


@pytest.mark.parametrize(("launch", "target"), FORMS)
@pytest.mark.parametrize(("topk", "servers"), [(1, 2), (6, 3), (16, 8)])
@kernel_settings
@given(
    seed=st.integers(0, 2**31), tokens=st.integers(0, 80), per_server=st.integers(1, 9),
    programs=st.integers(1, 5),
)  # fmt: skip
def test_tokens_are_numbered_by_server(
    launch: Launch,
    target: str,
    topk: int,
    servers: int,
    seed: int,
    tokens: int,
    per_server: int,
    programs: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_experts, width = servers * per_server, -(-topk // 8) * 8
    ids = torch.randint(-2, num_experts + 3, (tokens, topk), generator=generator, dtype=torch.int32)
    positions = torch.randint(0, 1 << 14, (tokens, topk), generator=generator, dtype=torch.int32)
    shapes = (tokens, servers), (tokens, servers), (servers,), (tokens, width)
    outputs = [Guarded(shape, torch.int32) for shape in shapes]
    numbers = [tokens, num_experts, per_server]
    launch(
        outer_table_kernel(topk, servers, target),
        [ids, positions, *(output.tensor for output in outputs), *numbers],
        programs,
    )
    outer_ids, outer_rows, outer_counts, words = (output.check().tolist() for output in outputs)
    counts = [0] * servers
    for token in range(tokens):
        assert outer_rows[token] == counts
        goes = [False] * servers
        for k, (expert, position) in enumerate(
            zip(ids[token].tolist(), positions[token].tolist(), strict=True)
        ):
            is_expert = 0 <= expert < num_experts
            assert words[token][k] == (expert | position << POSITION_SHIFT if is_expert else -1)
            if is_expert:
                goes[expert // per_server] = True
        assert words[token][topk:] == [-1] * (width - topk)
        assert outer_ids[token] == [server if there else -1 for server, there in enumerate(goes)]
        counts = [count + there for count, there in zip(counts, goes, strict=True)]
    assert outer_counts == counts
