"""Counts of rows: what ranks publish of the last steps, and what is put together of it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moe_triton import ArgumentError, BufferStateError, ConfigMismatchError, EPBuffer
from moe_triton.balance import ExpertCounts, ExpertLoad, Placement
from moe_triton.balance.counts import _read, _written
from moe_triton.processes import RankGroup
from tests.patience import seconds

Groups = Callable[[int], RankGroup]
LAYERS, K, T = 2, 2, 6


def make(num_ranks: int, **options: Any) -> EPBuffer:
    experts = 2 * (num_ranks - options.get("num_shared_ranks", 0))
    sizes = {"num_max_tokens_per_rank": T, "hidden": 64, "num_topk": K, "num_experts": experts}
    return EPBuffer(relaxed=True, timeout_s=seconds(30.0), **sizes, **options)


def ids_of(num_experts: int, step: int, layer: int, rank: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(step * 100 + layer * 10 + rank)
    return torch.rand(T - rank, num_experts, generator=draw).topk(K).indices.int()


def published(counts: ExpertCounts) -> None:
    """Waits for this rank's last sums to be there, and then for everybody's."""
    assert counts._publishing is not None
    counts._publishing.result(seconds(30.0))
    dist.barrier()


def windows_of_steps(rank: int, num_ranks: int, shared: int) -> list[str]:
    """Sums of each interval beside what all ranks' ids say."""
    wrong = []
    options = {"num_shared_experts": 1, "num_shared_ranks": shared} if shared else {}
    with make(num_ranks, **options) as buffer:
        counts = ExpertCounts(buffer, LAYERS, window=4, interval=2)
        counts._rows.fill_(2**31 - 5)  # they overflow within the first steps
        counts._before[0][:] = 2**31 - 5
        if counts.latest() is not None:
            wrong.append("there were sums before any step")
        rows = np.zeros((12, LAYERS, buffer.config.num_experts), dtype=np.int64)
        for step in range(12):
            for layer in range(LAYERS):
                for each in range(num_ranks):
                    ids = ids_of(buffer.config.num_experts, step, layer, each)
                    rows[step, layer] += np.bincount(ids.flatten(), minlength=rows.shape[-1])
                ids = ids_of(buffer.config.num_experts, step, layer, rank)
                x = torch.ones(len(ids), 64, dtype=torch.bfloat16)
                stats = counts.of_layer(layer)
                received = buffer.dispatch(x, ids, cumulative_local_expert_recv_stats=stats)
                buffer.combine(received.tokens, received.handle)
            counts.end_step()
            if (step + 1) % 2 == 0:
                published(counts)
                found = counts.latest()
                assert found is not None
                expected = rows[max(0, step - 3) : step + 1]
                if (found.step, found.steps) != (step + 1, len(expected)):
                    wrong.append(f"step {step}: sums of {found.step}, {found.steps}")
                if not np.array_equal(found.physical.numpy(), expected.sum(0)):
                    wrong.append(f"step {step}: {found.physical.tolist()}")
                dist.barrier()
        counts.close()
        dist.barrier()
        if ExpertCounts(buffer, LAYERS, window=4, interval=2).latest() is not None:
            wrong.append("sums are left in the store")
    return wrong


@pytest.mark.parametrize("shared", [0, 1])
def test_sums_are_of_all_ranks_over_the_last_steps(ranks: Groups, shared: int) -> None:
    assert ranks(3).run(windows_of_steps, shared) == [[]] * 3


def a_rank_behind(rank: int, num_ranks: int) -> list[Any]:
    """Rank 1 has ended fewer intervals, and then none that rank 0 still has."""
    said: list[Any] = []
    with make(num_ranks) as buffer:
        counts = ExpertCounts(buffer, 1, window=1, interval=1)
        for ahead in (1, 2, 3):
            if rank == 0 or ahead == 1:
                counts.end_step()
            published(counts)
            found = counts.latest()
            said.append(found and found.step)
            dist.barrier()
        counts = ExpertCounts(buffer, 1, window=1, interval=1)
        said.append(counts.latest())
    return said


def test_a_rank_that_is_behind_leaves_the_sums_before(ranks: Groups) -> None:
    # What was found before stays where nothing newer is whole.
    assert ranks(2).run(a_rank_behind) == [[1, 1, 1, None]] * 2


def others(rank: int, num_ranks: int) -> list[str]:
    said = []
    with make(num_ranks) as buffer:
        counts = ExpertCounts(buffer, 1 + rank, window=2, interval=1)
        counts.end_step()
        published(counts)
        for call in (counts.latest, lambda: buffer.left(3), lambda: buffer.leave("here", b"text")):
            try:
                call()
            except (ConfigMismatchError, ArgumentError) as error:
                said.append(str(error))
        dist.barrier()
    for closed in (counts.latest, lambda: buffer.left("counts")):
        try:
            closed()
        except BufferStateError as error:
            said.append(str(error))
    return said


def test_ranks_that_count_differently_are_named(ranks: Groups) -> None:
    first, second = ranks(2).run(others)
    assert re.search("rank 0: .*'num_layers': 1.*rank 1: .*'num_layers': 2", first[0])
    assert re.search("rank 1: .*'num_layers': 2.*rank 0: .*'num_layers': 1", second[0])
    for said in (first, second):
        assert [text.split()[0] for text in said[1:3]] == ["name", "text"]
        assert all("closed" in text for text in said[3:])
        assert len(said) == 5


@pytest.fixture
def lone() -> Any:
    with make(1) as buffer:
        yield buffer


def test_a_store_that_does_not_answer_is_waited_for_no_longer_than_asked(lone: EPBuffer) -> None:
    counts = ExpertCounts(lone, 1, window=1, interval=1)
    answered = threading.Event()
    with mock.patch.object(counts, "_read", side_effect=lambda: answered.wait() and None) as read:
        for _ in range(3):
            with pytest.raises(BufferStateError, match=r"does not answer: nothing in 0\.05 s$"):
                counts.latest(0.05)
        assert read.call_count == 1  # one thread, however often it is asked
        answered.set()
        assert counts.latest(seconds(30.0)) is None
        read.side_effect = RuntimeError("gone\nat C++")
        with pytest.raises(BufferStateError, match=r"does not answer: gone$"):
            counts.latest(seconds(30.0))


def test_layers_are_those_that_are_counted(lone: EPBuffer) -> None:
    counts = ExpertCounts(lone, 2)
    assert counts.of_layer(np.int64(1)).data_ptr() == counts.of_layer(1).data_ptr()  # type: ignore[arg-type]
    for layer in (-1, 2, "0", True):
        with pytest.raises(ArgumentError, match=r"^layer"):
            counts.of_layer(layer)  # type: ignore[arg-type]


def test_any_text_may_be_left(lone: EPBuffer) -> None:
    for text in ("absent", "", "=", "a line\nand \u00e4nother"):
        lone.leave("a name/of two parts", text)
        assert lone.left("a name/of two parts") == [text]
    assert lone.left("another") == [""]


def test_sums_that_cannot_be_published_are_told_of(lone: EPBuffer, caplog: pytest.LogCaptureFixture) -> None:
    counts = ExpertCounts(lone, 1, window=1, interval=1)
    with mock.patch.object(lone, "leave", side_effect=RuntimeError("the host is gone")):
        for _ in range(3):
            counts.end_step()
            assert counts._publishing is not None
            counts._publishing.exception(seconds(30.0))
    assert caplog.text.count("the host is gone") == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"window": 0}, "interval|window"),
        ({"interval": 0}, "interval"),
        ({"window": 150}, "window is 150.*multiple of interval, 100"),
        ({"buffer": None}, "buffer"),
        ({"num_layers": 10**12}, "num_layers is 10+ .*at most"),
        ({"window": 10**30, "interval": 1}, "window is 10+ .*steps at interval 1 may be .* at most"),
    ],
)
def test_bad_arguments(lone: EPBuffer, arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ArgumentError, match=error):
        ExpertCounts(**{"buffer": lone, "num_layers": 1, **arguments})


def test_rows_of_logical_experts_are_those_of_their_replicas() -> None:
    placement = Placement(torch.tensor([[0, 1, 2, 0], [2, 1, 0, 2]]), 3, 2)
    load = ExpertLoad(1, 1, torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))
    assert load.logical(placement).tolist() == [[5, 2, 3], [7, 6, 13]]
    with pytest.raises(ArgumentError, match=r"placement is None, but it must be a Placement"):
        load.logical(None)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"placement .*places 4 experts in 2 layers, and 3 in 2"):
        ExpertLoad(1, 1, torch.ones(2, 3, dtype=torch.int64)).logical(placement)


def test_nothing_from_a_peer_is_trusted() -> None:
    rows = np.arange(6).reshape(2, 3)
    good = _written(4, 2, [2, 4, 2], rows)
    step, steps, settings, read = _read(good, 3) or (0, 0, [], rows[:0])
    assert (step, steps, settings) == (4, 2, [2, 4, 2])
    assert np.array_equal(read, rows)
    bad = ["", "[]", "[4, 2, [2, 4, 2]]", good[:-4], good.replace("[4, 2,", "[1, 2,"), f"{good}!"]
    bad += ["{}\n", "[" * 9999, _written(4, 2, [3, 4, 2], rows), _written(4, 2, [2, 4], rows)]
    bad += [_written(4, 2, [2, 4, 2], -rows), _written(4, 2, [2, 4, 2], rows + 2**32)]
    bad += [good.replace("[4", "[null"), good.replace("[4", "[Infinity")]
    assert [_read(text, 3) for text in bad] == [None] * len(bad)
