from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_triton.backends.cpu.output_pool import KEPT_PER_SPEC, MAX_SPECS, OutputPool

SHAPE = (1024, 64)


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
    held = [pool.empty(SHAPE, torch.float32) for _ in range(KEPT_PER_SPEC + 3)]
    assert len({tensor.data_ptr() for tensor in held}) == len(held)


@pytest.mark.parametrize("shape", [(0, 64), (3,), SHAPE, (65536,)])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.int64])
def test_tensors_are_contiguous_and_of_the_shape_asked_for(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = OutputPool().empty(shape, dtype)
    assert tuple(tensor.shape) == shape
    assert tensor.dtype is dtype
    assert tensor.is_contiguous()


def test_few_sizes_are_kept() -> None:
    pool = OutputPool()
    held = [pool.empty((rows, 8), torch.int8) for rows in range(1, 3 * MAX_SPECS)]
    assert len(pool._kept) == MAX_SPECS
    # what was dropped is still its holder's
    held[0].fill_(1)
    assert pool.empty((1, 8), torch.int8).data_ptr() != held[0].data_ptr()


def test_what_a_user_does_to_an_output_stays_with_it() -> None:
    pool = OutputPool()
    first = pool.empty(SHAPE, torch.float32)
    first.requires_grad_()
    first.note = "mine"  # type: ignore[attr-defined]
    del first
    again = pool.empty(SHAPE, torch.float32)
    assert not again.requires_grad
    assert not hasattr(again, "note")
