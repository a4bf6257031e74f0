"""What is kept for later calls is bounded, and given back by `close`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from moe_triton import ArgumentError, EPBuffer
from moe_triton.core.kept_memory import USUAL_MB, VARIABLE, kept_bytes
from moe_triton.runtime.executables import FIRST_CALL_BYTES, call_bytes
from moe_triton.runtime.plan_cache import LATEST, PlanCache
from tests.headers import needs_headers

TOKENS, HIDDEN, TOPK = 4, 64, 2
SIZES = {"num_max_tokens_per_rank": TOKENS, "hidden": HIDDEN, "num_topk": TOPK, "num_experts": 2}


@contextmanager
def alone(**options: object) -> Iterator[EPBuffer]:
    """A buffer of one process by itself."""
    buffer = EPBuffer(**SIZES, **{"relaxed": True, **options})  # type: ignore[arg-type]
    try:
        yield buffer
    finally:
        buffer.close()


def rounds(buffer: EPBuffer) -> torch.Tensor:
    """Tokens of the last of some rounds, with plans of native code and of Python."""
    x, ids = torch.ones(TOKENS, HIDDEN).bfloat16(), torch.arange(TOPK).expand(TOKENS, TOPK).contiguous()
    for _ in range(2):
        received = buffer.dispatch(x, ids)
        buffer.combine(received.tokens, received.handle)
        combined = buffer.combine(received.tokens, buffer.dispatch(x, ids).handle, out=torch.empty_like(x))
    assert torch.equal(combined, 2 * x)
    return received.tokens


def windows() -> set[str]:
    """Lines of this process's map of memory."""
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if line.count("/moe_triton-")}


@pytest.fixture
def maps_a_window() -> Callable[[], bool]:
    """Whether there is a window that was not there before: those of earlier tests go when they go."""
    others = windows()
    return lambda: bool(windows() - others)


def test_the_window_goes_with_the_last_tensor_that_lies_in_it(maps_a_window: Callable[[], bool]) -> None:
    with alone(comm_alg="direct") as buffer:
        tokens = rounds(buffer)
        y = buffer.expert_output()
        before = tokens.clone()
        assert maps_a_window()
        buffer.close()
        assert maps_a_window()
        assert torch.equal(tokens, before)
        del tokens
        assert maps_a_window()
        del y
        assert not maps_a_window()


@pytest.mark.parametrize("comm_alg", ["fullmesh_v1", "fullmesh_v2", "direct"])
def test_what_calls_take_is_known_before(comm_alg: str) -> None:
    with alone(comm_alg=comm_alg) as buffer:
        communicator, is_own = buffer._communicator, comm_alg != "direct"
        shared = communicator.scratch_bytes()
        x, ids = torch.ones(TOKENS, HIDDEN).bfloat16(), torch.arange(TOPK).expand(TOKENS, TOPK).contiguous()
        received = buffer.dispatch(x, ids)
        outputs = [buffer.combine(received.tokens, received.handle), received.tokens_per_expert]
        outputs += [received.handle.expand_idx, received.handle.recv_offsets, received.handle.assist_info]
        outputs += [received.tokens] * is_own
        taken = communicator.scratch_bytes() - shared + sum(output.nbytes for output in outputs)
        assert taken == call_bytes(communicator.scheme) - FIRST_CALL_BYTES


@needs_headers
def test_a_closed_buffer_keeps_no_outputs(maps_a_window: Callable[[], bool]) -> None:
    with alone(comm_alg="fullmesh_v1") as buffer:
        tokens = rounds(buffer)
        before = tokens.clone()
        pool = buffer._communicator.backend._outputs.native  # type: ignore[attr-defined]
        assert pool.kept_bytes() > 0
        buffer.close()
        assert pool.kept_bytes() == 0
        assert torch.equal(tokens, before)
        del tokens
        assert pool.kept_bytes() == 0
        assert not maps_a_window()
        assert len(buffer._plans._plans) == 0


def test_a_sent_call_of_a_closed_buffer_keeps_nothing(maps_a_window: Callable[[], bool]) -> None:
    with alone(comm_alg="fullmesh_v1") as buffer:
        x, ids = torch.ones(TOKENS, HIDDEN).bfloat16(), torch.arange(TOPK).expand(TOKENS, TOPK).contiguous()
        buffer.dispatch(x, ids, wait=False)
        buffer.close()
        assert not buffer._plans.sent.calls
        assert not maps_a_window()


@dataclass
class Plan:
    kept_bytes: int = 10


def test_the_oldest_plans_go_first() -> None:
    cache: PlanCache[Plan] = PlanCache(10 * 2 * LATEST)
    for number in range(2 * LATEST):
        cache.put(number, Plan())
    assert len(cache) == 2 * LATEST
    cache.put("new", Plan())
    assert cache.get(0) is None
    assert cache.get(1) is not None
    cache.put("new", Plan(20))  # in place of the one before
    assert (len(cache), cache.get(1)) == (2 * LATEST - 1, None)
    cache.clear()
    assert len(cache) == 0
    cache.put(0, Plan())
    assert len(cache) == 1


def test_the_plans_of_the_latest_calls_are_kept_whatever_they_take() -> None:
    cache: PlanCache[Plan] = PlanCache(0)
    for number in range(2 * LATEST):
        cache.put(number, Plan())
    assert [number for number in range(2 * LATEST) if cache.get(number)] == list(range(LATEST, 2 * LATEST))


def test_the_limit_is_the_variables() -> None:
    assert kept_bytes({}) == kept_bytes({VARIABLE: ""}) == USUAL_MB << 20
    assert kept_bytes({VARIABLE: "0"}) == 0
    assert kept_bytes({VARIABLE: "7"}) == 7 << 20


@pytest.mark.parametrize("text", ["-1", "64 MB", "6.5", "nan", "٣", "9" * 30])
def test_a_limit_that_is_none_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch, maps_a_window: Callable[[], bool]
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ArgumentError, match=rf"{VARIABLE} is .*, but it must be a whole number of MB"):
        EPBuffer(**SIZES, relaxed=True)  # type: ignore[arg-type]
    assert not maps_a_window()
