"""What torch_npu's operators refuse with the npu back end: before anything was sent, and with a way on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moe_triton.processes import RankGroup
from tests.npu import layers, refusal_workers

Ranks = Callable[[int], RankGroup]


def test_bad_arguments_that_the_host_sees_are_named(ranks: Ranks) -> None:
    assert ranks(2).run(refusal_workers.bad_arguments) == [[], []]


def test_what_cannot_be_in_a_graph_is_refused(ranks: Ranks) -> None:
    for good in ranks(2).run(refusal_workers.in_graphs):
        assert good == [True] * 9


def test_halves_are_in_the_same_graph_or_in_none(ranks: Ranks) -> None:
    for good in ranks(2).run(refusal_workers.split_halves):
        assert good == [True] * 4


def test_a_window_in_a_graph_is_kept(ranks: Ranks) -> None:
    assert ranks(2).run(refusal_workers.graphs_keep_windows) == [[True, True]] * 2


def test_what_kernels_find_is_raised_later(ranks: Ranks) -> None:
    for rank, said in enumerate(ranks(2).run(refusal_workers.late_errors)):
        first, second, *rest = said
        assert "combine number 0 met a row that names no place in this group" in first
        assert "npu_moe_distribute_buffer_reset does that for all buffers of a group" in second
        assert rest == ["True", *(["dispatch waits for [1]"] if rank == 0 else []), "True"]


def test_rows_that_may_be_too_few_for_an_exchange_are_refused(ranks: Ranks) -> None:
    for said in ranks(4).run(refusal_workers.exchange_rows):
        assert said.startswith("expand_x is of ")
        assert "can have received 16, whether or not it has. Pass as many rows as dispatch's expand_x" in said


def test_settings_that_it_does_not_have_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    trace = str(tmp_path / "refused.json")
    assert ranks(2).run(refusal_workers.settings_refused, layers.v2, trace) == [[True], [True]]
    assert not list(tmp_path.iterdir())
