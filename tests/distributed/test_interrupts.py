"""Ctrl-C and other signals in a wait, and what is logged of a wait that lasts."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from moe_triton.processes import RankGroup
from moe_triton.runtime.diagnosis import patience_s
from tests.distributed import interrupted
from tests.distributed.interrupted import WAYS, Way

Groups = Callable[[int], RankGroup]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_ctrl_c_ends_a_wait_and_the_buffer_says_so(ranks: Groups, way: Way) -> None:
    first, then = ranks(2).run(interrupted.interrupt, way)[0]
    assert first == ("KeyboardInterrupt", "", True)
    assert then[0] == "BufferStateError"
    assert re.search(rf"broken: {way.operator} number \d ended in KeyboardInterrupt", then[1])


def test_ctrl_c_ends_a_barrier(ranks: Groups) -> None:
    first, then = ranks(2).run(interrupted.barrier_interrupted)[0]
    assert first == ("KeyboardInterrupt", "", True)
    assert "barrier number 0 ended in KeyboardInterrupt" in then[1]


def test_ctrl_c_ends_a_call_in_rounds_that_waits_for_nobody(ranks: Groups) -> None:
    said, is_ended, then = ranks(1).run(interrupted.interrupt_between_rounds)[0]
    assert (said, is_ended) == (("KeyboardInterrupt", ""), True)
    assert "broken: dispatch number of the last ended in KeyboardInterrupt" in then


def test_ctrl_c_ends_a_function_of_torch_npu(ranks: Groups) -> None:
    first, then = ranks(2).run(interrupted.interrupt_torch_npu)[0]
    assert first == ("KeyboardInterrupt", "", True)
    assert "dispatch number 1 ended in KeyboardInterrupt" in then[1]
    assert "npu_moe_distribute_buffer_reset" in then[1]


def test_what_any_signals_handler_raises_ends_a_wait(ranks: Groups) -> None:
    first, then = ranks(2).run(interrupted.raise_in_handlers)[0]
    assert first == ("Raised", "by a handler", True)
    assert "ended in Raised" in then[1]


@pytest.mark.parametrize("way", [Way(), Way("torch", operator="combine")], ids=str)
def test_a_wait_goes_on_after_a_handler_that_does_not_raise(ranks: Groups, way: Way) -> None:
    assert ranks(2).run(interrupted.go_on_after_handlers, way)[0]


def test_ctrl_c_is_the_main_threads(ranks: Groups) -> None:
    interrupt, closed = ranks(2).run(interrupted.interrupt_elsewhere)[0]
    assert interrupt == ("main thread", False)
    assert closed == ("BufferStateError", "the buffer was closed while it was in a dispatch", True)


@pytest.mark.parametrize(
    "way",
    [
        Way(num_blocks=2),
        Way(operator="combine", num_blocks=2),
        Way("torch", "direct"),
    ],
    ids=str,
)
def test_a_wait_that_lasts_names_whom_it_is_for(ranks: Groups, way: Way) -> None:
    said = ranks(4).run(interrupted.wait_long, way)
    assert said[1] == said[3] == []
    for rank in (0, 2):
        (message,) = said[rank]
        of_rank, says = message.split(": ", 1)
        assert re.fullmatch(rf"rank {rank} of 4(?: \[group \w+\])?", of_rank)
        found = re.fullmatch(
            rf"{way.operator} number 3 \(zone 1\) has waited (\d+\.\d) s for rank\(s\) \[1, 3\]", says
        )
        assert found
        assert patience_s(interrupted.LONG_S) <= float(found[1]) < interrupted.LONG_S


def test_a_rank_that_is_stuck_behind_another_is_not_missing(ranks: Groups) -> None:
    behind, first, _ = ranks(3).run(interrupted.wait_behind)
    assert first[:2] == ("combine", (2,))
    assert behind[:2] == ("dispatch", (2,))
    assert "rank 1 waited itself for rank(s) [2] in combine number 0" in behind[2]
