"""What ranks agree on of a dispatch in which some are masked; and one that goes on to be repeated."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_triton.backends.cpu import native
from moe_triton.core.ascendc import REPORT_MASKED
from moe_triton.core.errors import BufferStateError, RankMaskedError
from moe_triton.core.region import region_of
from moe_triton.operators.variants import DispatchVariant
from moe_triton.runtime.outcomes import Outcomes
from moe_triton.runtime.repeated_dispatch import RepeatedDispatch, Together
from moe_triton.schemes.direct.scheme import WAIT_FOR_COUNTS
from tests.patience import seconds

REGION = region_of("indexed_slots", 0, 8, (2, 8), (1, 8), name="outcomes")


class Words:
    """The words of two zones, in memory of this process."""

    def __init__(self) -> None:
        self._words = (ctypes.c_uint64 * 2)()
        exchange = native.library().moe_exchange_word
        self.outcomes = Outcomes(REGION, ctypes.addressof(self._words), exchange)


def test_what_is_said_first_holds() -> None:
    settle = Words().outcomes.settle
    assert settle(0, 0, repeat=True)
    assert settle(0, 0, repeat=False)
    assert not settle(0, 1, repeat=False)
    assert not settle(0, 1, repeat=False)
    assert settle(1, 0, repeat=True)


def test_the_one_before_stands_beside_it() -> None:
    """A rank may ask for the first time when others are in the next one; nobody is further."""
    settle = Words().outcomes.settle
    assert settle(6, 0, repeat=True)
    assert settle(7, 0, repeat=True)
    assert settle(6, 0, repeat=False)
    assert not settle(8, 0, repeat=False)


@pytest.mark.parametrize(("said", "next_said"), [(False, None), (False, (2, 0)), (True, (0, 1))])
def test_who_was_left_behind_is_told(said: bool, next_said: tuple[int, int] | None) -> None:
    """The others have kept what it cannot; or they are in the next dispatch of the zone, or attempt."""
    settle = Words().outcomes.settle
    settle(0, 0, repeat=said)
    if next_said is not None:
        settle(*next_said, repeat=False)
    with pytest.raises(RankMaskedError, match="number 0 without this one"):
        settle(0, 0, repeat=True)


def test_all_hear_the_same() -> None:
    ranks, attempts = 4, 200
    words, heard = Words(), [[False] * attempts for _ in range(ranks)]
    together = threading.Barrier(ranks, timeout=seconds(20))

    def run(rank: int) -> None:
        for attempt in range(attempts):
            together.wait()
            # One of them cannot go on, where the others do.
            with contextlib.suppress(RankMaskedError):
                heard[rank][attempt] = words.outcomes.settle(0, attempt, repeat=attempt % ranks == rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds(20))
    assert heard == [heard[0]] * ranks
    assert len(set(heard[0])) == 2


class NeverWhole:
    """A plan in which ranks go on to have other masks."""

    failed_launch = SimpleNamespace(step=WAIT_FOR_COUNTS)

    def __init__(self) -> None:
        self.runs = 0

    def run(self, bindings: Any) -> int:
        self.runs += 1
        return REPORT_MASKED


class Recall:
    """Posts that it is to be repeated."""

    def run(self, bindings: Any) -> int:
        return 0


def test_a_dispatch_is_not_repeated_for_ever() -> None:
    scheme: Any = SimpleNamespace(context=None, statuses=())
    masks: Any = SimpleNamespace(known=SimpleNamespace(masked=frozenset({3})))
    variant = DispatchVariant(torch.bfloat16)
    run = RepeatedDispatch(scheme, masks, {}, {"num_tokens": 0}, variant, owns_ids=False)
    run._ids = lambda name="": None  # type: ignore[method-assign]
    executables: Any = SimpleNamespace(
        key_of=lambda executable: (variant, 0, "whole", 1), operator=lambda *key: Recall()
    )
    met: list[int] = []
    plan: Any = NeverWhole()
    of_all = Together(
        lambda: None, lambda: met.append(0), lambda of: None, lambda: None, Words().outcomes, 0.05
    )
    with pytest.raises(BufferStateError, match=r"repeated for 0.05 s.* here \[3\]"):
        run.go_on(7, plan, executables, of_all)
    assert len(met) == 2 * plan.runs > 0
