from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch

from moe_triton.backends.cpu import extension, output_pool
from moe_triton.backends.cpu.output_pool import OutputPool
from tests.headers import needs_headers
from tests.patience import seconds

pytestmark = needs_headers

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
    held = [pool.empty(SHAPE, torch.float32) for _ in range(10)]
    assert len({tensor.data_ptr() for tensor in held}) == len(held)


@pytest.mark.parametrize("shape", [(0, 64), (3,), SHAPE, (65536,)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.int64])
def test_tensors_are_contiguous_and_of_the_shape_asked_for(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = OutputPool().empty(shape, dtype)
    assert tuple(tensor.shape) == shape
    assert tensor.dtype is dtype
    assert tensor.is_contiguous()


@pytest.mark.parametrize(
    ("num_bytes", "alignment"), [((8 << 20) - 64, 64), (8 << 20, 2 << 20), (9 << 20, 2 << 20)]
)
def test_large_outputs_begin_where_huge_pages_do(num_bytes: int, alignment: int) -> None:
    pool = OutputPool()
    tensors = [pool.empty((num_bytes,), torch.int8) for _ in range(3)]
    assert all(tensor.data_ptr() % alignment == 0 for tensor in tensors)
    tensors[0][-1] = 1  # all of it is there


def test_few_sizes_are_kept() -> None:
    pool = OutputPool()
    module = extension.extension()
    assert module is not None
    assert pool.native is not None
    sizes, unit = module.MAX_SIZES, 4096
    held = [pool.empty((number, unit), torch.int8) for number in range(1, 3 * sizes + 1)]
    assert pool.native.kept_bytes() == 0
    while held:
        del held[0]
    # The newest sizes, one of each.
    assert pool.native.kept_bytes() == unit * sum(range(2 * sizes + 1, 3 * sizes + 1))


def test_what_comes_from_the_system_is_counted() -> None:
    pool = OutputPool()
    assert pool.native is not None
    held = [pool.empty(SHAPE, torch.float32) for _ in range(3)]
    del held
    again = [pool.empty(SHAPE, torch.float32) for _ in range(3)]
    assert pool.native.allocations() == 3
    again.append(pool.empty(SHAPE, torch.float32))
    assert pool.native.allocations() == 4


def test_few_of_a_size_are_kept() -> None:
    pool = OutputPool()
    module = extension.extension()
    assert module is not None
    assert pool.native is not None
    held = [pool.empty((4096,), torch.int8) for _ in range(3 * module.KEPT_PER_SIZE)]
    del held
    assert pool.native.kept_bytes() == 4096 * module.KEPT_PER_SIZE


def test_memory_that_is_held_outlives_its_pool() -> None:
    pool = OutputPool()
    held = pool.empty(SHAPE, torch.float32).fill_(3.0)
    del pool
    gc.collect()
    assert bool((held == 3.0).all())


def test_tensors_may_be_given_back_on_any_thread() -> None:
    pool = OutputPool()

    def work() -> None:
        for number in range(300):
            pool.empty((number % 7 + 1, 64), torch.float32).fill_(number)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=seconds(60))
        assert not thread.is_alive()


def test_without_the_extension_tensors_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_pool, "extension", lambda: None)
    pool = OutputPool()
    assert pool.native is None
    assert pool.empty(SHAPE, torch.float16).shape == SHAPE


def test_what_a_user_does_to_an_output_stays_with_it() -> None:
    pool = OutputPool()
    first = pool.empty(SHAPE, torch.float32)
    first.requires_grad_()
    first.note = "mine"  # type: ignore[attr-defined]
    del first
    again = pool.empty(SHAPE, torch.float32)
    assert not again.requires_grad
    assert not hasattr(again, "note")


def use_one_by_one(pool: OutputPool, sizes: range) -> None:
    for size in sizes:
        pool.empty((size,), torch.int8)


def test_kept_bytes_have_a_limit_and_the_size_used_longest_ago_goes() -> None:
    pool = OutputPool(limit=10 * 4096)
    assert pool.native is not None
    pool.empty((2048,), torch.float16)
    for size in range(8192, 8192 + 200 * 64, 64):  # several times as many bytes
        use_one_by_one(pool, range(size, size + 1))
        assert pool.native.kept_bytes() <= 10 * 4096
        before = pool.native.kept_bytes()
        held = pool.empty((2048,), torch.float16)
        assert pool.native.kept_bytes() == before - held.nbytes  # it was kept, since it was used lately
        del held


def test_what_the_latest_calls_have_in_use_at_once_is_kept() -> None:
    pool = OutputPool(limit=0)
    assert pool.native is not None
    addresses = []
    for _ in range(100):
        held = [pool.empty((size,), torch.int8) for size in (4096, 8192, 64)]
        addresses.append({tensor.data_ptr() for tensor in held})
        del held
        assert pool.native.kept_bytes() == 4096 + 8192 + 64
    assert addresses[0] == addresses[-1]
    use_one_by_one(pool, range(64, 64 * 65, 64))
    assert pool.native.kept_bytes() <= 4096


def test_a_closed_pool_keeps_nothing() -> None:
    pool = OutputPool()
    assert pool.native is not None
    held = pool.empty(SHAPE, torch.float32).fill_(3.0)
    pool.empty(SHAPE, torch.float16)
    pool.close()
    assert pool.native.kept_bytes() == 0
    assert bool((held == 3.0).all())
    del held
    assert pool.native.kept_bytes() == 0
    pool.close()
    assert pool.empty(SHAPE, torch.float16).shape == SHAPE
