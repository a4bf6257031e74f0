from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_triton.backends.cpu.output_pool import KEPT_PER_SIZE, POOLED_BYTES, OutputPool

SHAPE = (POOLED_BYTES // 64, 64)


def test_memory_is_used_again_once_nobody_holds_it() -> None:
    pool = OutputPool()
    first = pool.empty(SHAPE, torch.float16)
    address = first.data_ptr()
    del first
    assert pool.empty(SHAPE, torch.float16).data_ptr() == address


@pytest.mark.parametrize("hold", [lambda t: t[3:], lambda t: t.numpy(), torch.from_dlpack, lambda t: t.T])
def test_what_a_user_holds_is_not_handed_out(hold: object) -> None:
    pool = OutputPool()
    tensor = pool.empty(SHAPE, torch.float32)
    address = tensor.data_ptr()
    held = hold(tensor)  # type: ignore[operator]
    del tensor
    again = pool.empty(SHAPE, torch.float32)
    assert again.data_ptr() != address
    again.zero_()
    assert isinstance(held, torch.Tensor | np.ndarray)


def test_any_number_may_be_held_at_once() -> None:
    pool = OutputPool()
    held = [pool.empty(SHAPE, torch.float32) for _ in range(KEPT_PER_SIZE + 3)]
    assert len({tensor.data_ptr() for tensor in held}) == len(held)


@pytest.mark.parametrize("shape", [(0, 64), (3,), SHAPE, (POOLED_BYTES,)])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.int64])
def test_tensors_are_contiguous_and_of_the_shape_asked_for(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = OutputPool().empty(shape, dtype)
    assert tuple(tensor.shape) == shape
    assert tensor.dtype is dtype
    assert tensor.is_contiguous()
