"""The buffer as an object: sizes, closing, dropping, and ranks that err and come back."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_triton import ArgumentError, BufferStateError, EPBuffer
from moe_triton.processes import RankGroup
from tests.distributed.cases import experts_of, inputs_of, small_case
from tests.distributed.workers import expected_round, make_buffer, one_round

Groups = Callable[[int], RankGroup]
SIZES = {"num_max_tokens_per_rank": 16, "hidden": 7168, "num_topk": 8, "num_experts": 64}


def test_the_size_hint_follows_the_published_formula() -> None:
    slot, result = 14848, 14336  # 2 * 7168 + 64 and 2 * 7168, rounded up to 512
    expected = 2 * (16 * 16 * 4 * slot + 8 * 16 * result)
    assert EPBuffer.get_buffer_size_hint(4, **SIZES) == expected
    with pytest.raises(ArgumentError, match="num_experts is 64"):
        EPBuffer.get_buffer_size_hint(5, **SIZES)


def window_takes_the_hint(rank: int, num_ranks: int) -> bool:
    hint = EPBuffer.get_buffer_size_hint(num_ranks, **SIZES)
    with EPBuffer(num_bytes=hint, **SIZES) as buffer:
        return buffer.layout.data_bytes == hint


def test_the_hint_is_enough(ranks: Groups) -> None:
    assert ranks(4).run(window_takes_the_hint) == [True] * 4


def err_once_then_join(rank: int, num_ranks: int) -> list[str]:
    """Rank 1 passes nonsense while the others already wait for it, and then what it should."""
    case = small_case(num_ranks)
    wrong = []
    with make_buffer(case) as buffer:
        for number in range(3):
            inputs = inputs_of(case, rank, number)
            if rank == 1:
                with pytest.raises(ArgumentError):
                    buffer.dispatch(inputs.x, inputs.topk_idx + 100)
            _, combined = one_round(buffer, case, inputs, None)
            if not torch.equal(combined, expected_round(case, number)[1][rank]):
                wrong.append(f"round {number}")
    return wrong


def test_a_bad_argument_on_one_rank_does_not_put_the_ranks_out_of_step(ranks: Groups) -> None:
    assert ranks(3).run(err_once_then_join) == [[]] * 3


def drop(rank: int, num_ranks: int, explicitly_destroy: bool, close: bool) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        buffer = make_buffer(small_case(num_ranks), explicitly_destroy=explicitly_destroy)
        if close:
            buffer.close()
            buffer.close()
        del buffer
        gc.collect()
    return sum(issubclass(w.category, ResourceWarning) and "EPBuffer" in str(w.message) for w in caught)


@pytest.mark.parametrize(
    ("explicitly_destroy", "close", "warned"), [(True, False, 1), (True, True, 0), (False, False, 0)]
)
def test_a_dropped_buffer_warns_where_that_was_asked_for(
    ranks: Groups, explicitly_destroy: bool, close: bool, warned: int
) -> None:
    assert ranks(2).run(drop, explicitly_destroy, close) == [warned] * 2


def combine_twice(rank: int, num_ranks: int) -> bool:
    case = small_case(num_ranks)
    with make_buffer(case) as buffer:
        inputs = inputs_of(case, rank, 0)
        output, first = one_round(buffer, case, inputs, None)
        again = buffer.combine(experts_of(case, rank, output.tokens), output.handle, inputs.topk_weights)
        return torch.equal(first, again)


def test_a_handle_may_be_combined_again(ranks: Groups) -> None:
    assert ranks(2).run(combine_twice) == [True, True]


def two_threads(rank: int, num_ranks: int) -> list[str]:
    """While one thread waits inside dispatch, another one calls."""
    case = small_case(num_ranks)
    said: list[str] = []
    with make_buffer(case) as buffer:
        inputs = inputs_of(case, rank, 0)
        arguments: tuple[Any, ...] = (inputs.x, inputs.topk_idx)
        if rank == 0:
            waiting = threading.Thread(target=buffer.dispatch, args=arguments)
            waiting.start()
            while not buffer._communicator._lock.locked() and waiting.is_alive():
                pass
            try:
                buffer.dispatch(*arguments)
            except BufferStateError as error:
                said.append(str(error))
            torch.distributed.barrier()
            waiting.join()
        else:
            torch.distributed.barrier()
            buffer.dispatch(*arguments)
    return said


def test_calls_from_two_threads_do_not_mix(ranks: Groups) -> None:
    first, second = ranks(2).run(two_threads)
    assert len(first) == 1
    assert "another thread" in first[0]
    assert second == []
