"""What belongs to a process or to a call says so where it is copied or pickled."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_triton import CopyError, EPBuffer

X, IDS = torch.ones(4, 64).bfloat16(), torch.arange(2).expand(4, 2).contiguous()
WAYS: tuple[Callable[[Any], Any], ...] = (copy.copy, copy.deepcopy, pickle.dumps)


def make_buffer() -> EPBuffer:
    """Of this process by itself."""
    return EPBuffer(num_max_tokens_per_rank=4, hidden=64, num_topk=2, num_experts=2, relaxed=True)


@pytest.mark.parametrize("way", WAYS)
def test_a_buffer_is_refused(way: Callable[[Any], Any]) -> None:
    with make_buffer() as buffer:
        with pytest.raises(CopyError, match=r"EPBuffer cannot be (copied|pickled): .* Construct one where"):
            way(buffer)
        received = buffer.dispatch(X, IDS)  # it goes on
        assert torch.equal(buffer.combine(received.tokens, received.handle), 2 * X)


def test_a_module_that_holds_a_buffer_is_refused() -> None:
    with make_buffer() as buffer:
        module = torch.nn.Linear(2, 2)
        module.buffer = buffer  # type: ignore[assignment]
        with pytest.raises(CopyError, match="a module that holds it leaves it out of its own copies"):
            copy.deepcopy(module)


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_is_under_way_is_refused(way: Callable[[Any], Any]) -> None:
    with make_buffer() as buffer:
        sent = buffer.dispatch(X, IDS, wait=False)
        with pytest.raises(CopyError, match=r"Pending cannot be (copied|pickled): .* Call wait\(\)"):
            way(sent)
        received = sent.wait()
        assert torch.equal(buffer.combine(received.tokens, received.handle), 2 * X)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy])
def test_copies_of_a_handle_can_be_combined(way: Callable[[Any], Any]) -> None:
    with make_buffer() as buffer:
        received = buffer.dispatch(X, IDS)
        handle = way(received.handle)
        assert torch.equal(handle.recv_offsets, received.handle.recv_offsets)
        assert torch.equal(buffer.combine(received.tokens, handle), 2 * X)


def test_another_process_is_given_no_handle() -> None:
    with make_buffer() as buffer:
        received = buffer.dispatch(X, IDS)
        for each in (received, received.handle):
            with pytest.raises(CopyError, match=r"DispatchHandle cannot be pickled: .* Send the tensors"):
                pickle.dumps(each)
