from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_triton.core.records import POSITION_SHIFT
from moe_triton.kernels.inner_table import inner_table_kernel
from tests.kernels.routes import CANARY, FORMS, Guarded, Launch, kernel_settings

SERVERS, TOKENS = 3, 7
UNWRITTEN = int.from_bytes(bytes([CANARY] * 4), "little")


@pytest.mark.parametrize("zoned", [False, True])
@pytest.mark.parametrize(("launch", "target"), FORMS)
@pytest.mark.parametrize("topk", [6, 8, 16])
@kernel_settings
@given(
    seed=st.integers(0, 2**31), counts=st.lists(st.integers(-1, TOKENS), min_size=SERVERS, max_size=SERVERS),
    per_server=st.integers(1, 9), programs=st.integers(1, 5),
)  # fmt: skip
def test_experts_of_this_server_ascend(
    launch: Launch,
    target: str,
    topk: int,
    zoned: bool,
    seed: int,
    counts: list[int],
    per_server: int,
    programs: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    width, first = -(-topk // 8) * 8, per_server
    stride = 2 * width + 5
    words = torch.randint(-(2**31), 2**31, (2, SERVERS, TOKENS, stride), generator=generator)
    words = words.to(torch.int32)
    words[0] = 0  # of another zone
    every = 3 * per_server
    experts = torch.randint(0, every, (SERVERS, TOKENS, width), generator=generator, dtype=torch.int32)
    positions = torch.randint(0, 1 << 14, experts.shape, generator=generator, dtype=torch.int32)
    experts[torch.rand(experts.shape, generator=generator) < 0.3] = -1
    choices = torch.where(experts >= 0, experts | positions << POSITION_SHIFT, -1)
    choices[..., topk:] = -1
    words[1, :, :, :width] = choices
    tokens = words if zoned else words[1].clone()
    shapes = [(SERVERS * TOKENS, topk)] * 3 + [(SERVERS * TOKENS,)]
    outputs = [Guarded(shape, torch.int32) for shape in shapes]
    zone: list[torch.Tensor | int] = [torch.ones(1, dtype=torch.int32)] if zoned else []
    numbers: list[torch.Tensor | int] = [SERVERS, TOKENS, first, per_server, TOKENS * stride, stride]
    launch(
        inner_table_kernel(topk, target, zoned),
        [
            tokens.view(-1),
            torch.tensor(counts, dtype=torch.int32),
            *(output.tensor for output in outputs),
            *zone,
            *numbers,
            *([SERVERS * TOKENS * stride] if zoned else []),
        ],
        programs,
    )
    found = [output.check().tolist() for output in outputs]
    for row in range(SERVERS * TOKENS):
        server, number = divmod(row, TOKENS)
        ids, places, weights, active_index = (table[row] for table in found)
        if number >= counts[server]:
            assert (ids, active_index) == ([UNWRITTEN] * topk, -1)
            continue
        of_token = words[1, server, number].tolist()
        chosen = [(word & (1 << POSITION_SHIFT) - 1, k, word) for k, word in enumerate(of_token[:topk])]
        here = sorted(c for c in chosen if c[2] >= 0 and first <= c[0] < first + per_server)
        behind = topk - len(here)
        assert active_index == 0
        assert ids == [server * per_server + expert - first for expert, _, _ in here] + [-1] * behind
        assert places == [word >> POSITION_SHIFT for _, _, word in here] + [0] * behind
        assert weights == [of_token[width + k] for _, k, _ in here] + [0] * behind
