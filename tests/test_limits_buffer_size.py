"""HCCL_BUFFSIZE: the bytes that a window needs, and the message where they do not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_triton.backends import CAPABILITIES
from moe_triton.core.config import Config
from moe_triton.core.errors import TILING_FAILED, ArgumentError
from moe_triton.core.hccl import MEGABYTE
from moe_triton.schemes import layout_of
from moe_triton.schemes.buffer_size import check_buffer_size, needed_buffer_bytes, needed_exchange_bytes
from moe_triton.schemes.rank_context import RankContext
from tests.limits_cases import (
    A2,
    A2_V1,
    A3,
    A3_HIERARCHY,
    FAMILIES,
    HIERARCHY,
    HIERARCHY_V1,
    INBAND,
    SHARED_V1,
    V1,
    VARIANTS,
    check_message,
)

# Worked out by hand from docs/limits.md, "Window memory: HCCL_BUFFSIZE". A row of 7168 takes 14336 bytes,
# with 64 more and rounded up 14848; in blocks of 480, 30 of them, 15360; of 2 * (7168 + 128), 14592.
NEEDED = [
    (A3, 2 * (8 * 64 * 8 * 14848 + 8 * 64 * 14336)),
    (
        replace(A3, num_shared_experts=1, num_shared_ranks=4),
        2 * (16 * 64 * 8 * 14848 + 9 * 64 * 14336),
    ),
    (replace(A3, num_shared_experts=1), 2 * (8 * 64 * 8 * 14848 + 8 * 64 * 14336)),
    (INBAND, 2 * (8 * 64 * 8 * 15360 + 8 * 64 * 14336)),
    (V1, 2 * 64 * 14592 * (64 + 8 + 1) + (2 << 20)),
    (SHARED_V1, 2 * 64 * 14592 * (8 * 16 + 8 + 1) + (2 << 20)),
    (A2, 2 * (64 * 16 * 4 * 7168 * 2 + (2 << 20))),
    (replace(A2, num_topk=2), 2 * (64 * 16 * 2 * 7168 * 2 + (2 << 20))),
    (A2_V1, 2 * (64 * 16 * 4 * 7168 * 2 + (2 << 20))),
    (HIERARCHY_V1, 64 * 64 * (7168 * 2 + 4 * 8 * 4) + (104 << 20)),
    (replace(HIERARCHY, generation="v3"), 64 * 64 * (7168 * 2 + 4 * 8 * 4) + (104 << 20)),
    (replace(HIERARCHY, generation="v3", num_topk=9), 64 * 64 * (7168 * 2 + 4 * 16 * 4) + (104 << 20)),
    # 68 blocks of 64 tokens, each of which takes 14464 bytes: a multiple of 512 without rounding.
    (replace(HIERARCHY, generation="v4"), 68 * 64 * 14464 + (8 << 20)),
    (replace(HIERARCHY, generation="v4", num_topk=9), 68 * 64 * 14592 + (8 << 20)),
    (replace(HIERARCHY, generation="v4", num_max_tokens_per_rank=1), 68 * 14848 + (8 << 20)),
    # Where neither is chosen, the smaller.
    (HIERARCHY, 68 * 64 * 14464 + (8 << 20)),
    (replace(HIERARCHY, num_ranks=64, num_max_tokens_per_rank=512), 64 * 512 * 14464 + (104 << 20)),
    # From left to right: 3 * 15 / 8 is 5, so that there are 40 words; with nine experts a token 48.
    (A3_HIERARCHY, 64 * 64 * (14336 + 4 * 40 + 64) + (404 << 20)),
    (replace(A3_HIERARCHY, num_topk=9), 64 * 64 * (14336 + 4 * 48 + 64) + (404 << 20)),
    (replace(A3_HIERARCHY, num_ranks=256, num_experts=256), 256 * 64 * (14336 + 4 * 40 + 64) + (404 << 20)),
]


@pytest.mark.parametrize(("config", "needed"), NEEDED)
def test_needed_buffer_bytes(config: Config, needed: int) -> None:
    assert needed_buffer_bytes(config) == needed


def test_every_variant_has_a_formula() -> None:
    assert all(base in [config for config, _ in NEEDED] for base in FAMILIES)
    assert all(needed_buffer_bytes(base) > 0 for base in VARIANTS)


@pytest.mark.parametrize("base", [A3, INBAND, V1, SHARED_V1, replace(A3, hidden=1056, num_topk=3)])
def test_the_layout_fits_into_what_the_formula_gives(base: Config) -> None:
    assert layout_of(base).data_bytes <= needed_buffer_bytes(base)


@pytest.mark.parametrize(
    "base", [A2, A2_V1, replace(A2, num_ranks=4), replace(A2, num_max_tokens_per_rank=1)]
)
def test_the_layout_of_a2_fits_too(base: Config) -> None:
    assert layout_of(base).data_bytes <= needed_buffer_bytes(base)


def test_the_value_to_set_covers_what_a2s_formula_leaves_out() -> None:
    """Scales and stamps of the rows, which the formula's 2 MB cover in smaller groups."""
    config = replace(A2, num_ranks=384, num_experts=768, num_max_tokens_per_rank=256)
    formula, layout = needed_buffer_bytes(config), layout_of(config).data_bytes
    rows = 2 * 384 * 256 * 2
    assert formula < layout <= formula + 64 * rows
    check_buffer_size(config, -(-formula // MEGABYTE))
    with pytest.raises(ArgumentError) as caught:
        check_buffer_size(config, formula // MEGABYTE - 1)
    assert f"needs {formula} bytes" in caught.value.rule
    assert f"Set HCCL_BUFFSIZE={-(-layout // MEGABYTE)} or more" in caught.value.remedy


@pytest.mark.parametrize(("config", "needed"), NEEDED)
def test_the_message_gives_the_buffer_size_to_set(config: Config, needed: int) -> None:
    megabytes = -(-needed // (1 << 20))
    check_buffer_size(config, megabytes)
    with pytest.raises(ArgumentError) as caught:
        check_buffer_size(config, megabytes - 1)
    error = caught.value
    check_message(error, f"HCCL_BUFFSIZE is {megabytes - 1} MB", TILING_FAILED)
    # The value to set covers the layout too, which on A2 can need more than the formula says.
    whole = max(needed, layout_of(config.normalized()).data_bytes)
    assert f"HCCL_BUFFSIZE={-(-whole // MEGABYTE)} " in error.remedy
    assert f"{needed} bytes" in error.rule


def test_a_hierarchy_takes_up_to_four_times_its_formula() -> None:
    """Two zones of every region, and a place of its own for what is posted."""
    sizes = [(16, 64, 64), (16, 256, 8), (64, 64, 16), (64, 512, 512)]
    for ranks, experts, tokens in sizes:
        config = replace(HIERARCHY, num_ranks=ranks, num_experts=experts, num_max_tokens_per_rank=tokens)
        newer = replace(config, generation="v4")
        assert 2.5 < layout_of(config).data_bytes / needed_buffer_bytes(newer) < 4 or tokens <= 16, sizes


def test_the_default_buffer_size_is_200_megabytes() -> None:
    check_buffer_size(replace(A3, num_max_tokens_per_rank=96))
    check_buffer_size(replace(A3, num_max_tokens_per_rank=96), 200)
    with pytest.raises(ArgumentError, match="HCCL_BUFFSIZE is 200 MB"):
        check_buffer_size(replace(A3, num_max_tokens_per_rank=112))


PAIRS = replace(A3, num_experts=8)


@pytest.mark.parametrize(
    ("config", "capacity"),
    [
        (PAIRS, 8 * 64),
        (replace(PAIRS, version=1), 8 * 64),
        # Each of the two ranks of the shared expert takes the tokens of four.
        (replace(PAIRS, num_shared_experts=1, num_shared_ranks=2, num_experts=6), 8 * 64),
        (replace(PAIRS, num_shared_experts=4, num_shared_ranks=4, num_experts=4), 8 * 64),
    ],
)
def test_the_window_between_tensor_parallel_ranks(config: Config, capacity: int) -> None:
    needed = 2 * capacity * (14848 + 14336)
    assert needed_exchange_bytes(config) == needed
    contexts = (RankContext(config, rank, 1, 0, CAPABILITIES["cpu"]) for rank in range(8))
    assert max(context.exchange.data_bytes for context in contexts) == needed


def test_a_window_between_tensor_parallel_ranks_that_is_too_small() -> None:
    """The group's own window is the smaller one here."""
    config = replace(PAIRS, num_topk=1)
    group, pair = needed_buffer_bytes(config), needed_exchange_bytes(config)
    assert group < pair
    megabytes = -(-pair // (1 << 20))
    check_buffer_size(config, megabytes, tensor_parallel=True)
    check_buffer_size(config, megabytes - 1)
    with pytest.raises(ArgumentError) as caught:
        check_buffer_size(config, megabytes - 1, tensor_parallel=True)
    check_message(caught.value, f"HCCL_BUFFSIZE is {megabytes - 1} MB", TILING_FAILED)
    assert f"HCCL_BUFFSIZE={megabytes} " in caught.value.remedy
    assert "tensor parallelism" in caught.value.rule
    assert f"{pair} bytes" in caught.value.rule
