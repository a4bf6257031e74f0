"""Combine in parts that overlap: what has come is summed, whoever is late."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_triton import CommunicationTimeoutError, Tuning
from moe_triton.core.config import Config
from moe_triton.processes import RankGroup
from moe_triton.tools.selftest.cases import combined, dispatched
from tests.distributed.cases import Case, experts_of, inputs_of, small_case
from tests.distributed.workers import expected_round, make_buffer, patient_buffer
from tests.patience import seconds

Groups = Callable[[int], RankGroup]

PARTS = Tuning(dispatch_tokens=2, combine_tokens=2, communication_blocks=1)
NAP_S, LATE = 1.0, 2


def missing_in_parts(rank: int, num_ranks: int, case: Case, stays_away: int) -> list[int]:
    with patient_buffer(case, tuning=PARTS, num_blocks=2, timeout_s=seconds(3.0)) as buffer:
        inputs = inputs_of(case, rank, 0)
        output = buffer.dispatch(inputs.x, inputs.topk_idx)
        if rank == stays_away:
            time.sleep(seconds(6.0))  # past the others' deadline
            return [stays_away]
        with pytest.raises(CommunicationTimeoutError) as raised:
            buffer.combine(output.tokens, output.handle, inputs.topk_weights)
        return list(raised.value.missing_ranks)


def test_a_late_rank_is_named(ranks: Groups) -> None:
    assert ranks(3).run(missing_in_parts, small_case(3), 2) == [[2]] * 3


def halves(rank: int, num_ranks: int, case: Case) -> list[bool]:
    """Whether the bits are right where all is sent before the first part waits."""
    right = []
    with make_buffer(case, tuning=PARTS, num_blocks=2) as buffer:
        for number in range(case.rounds):
            inputs = inputs_of(case, rank, number)
            output = dispatched(buffer, case, inputs, None)
            y = experts_of(case, rank, output.tokens)
            pending = buffer.combine(y, output.handle, inputs.topk_weights, wait=False)
            right.append(bool(pending.wait().equal(expected_round(case, number)[1][rank])))
    return right


def test_halves_have_the_same_bits(ranks: Groups) -> None:
    case = small_case(3)
    assert ranks(3).run(halves, case) == [[True] * case.rounds] * 3


def quantized(rank: int, num_ranks: int, case: Case, late: int) -> list[bool]:
    """Whether results that are quantised beside sending have the bits of others, one rank being
    late: what others might send meanwhile is not quantised yet.
    """
    right = []
    with make_buffer(case, tuning=PARTS, num_blocks=3) as parted, make_buffer(case) as whole:
        for number in range(case.rounds):
            inputs = inputs_of(case, rank, number)
            found = []
            for buffer in (whole, parted):
                output = dispatched(buffer, case, inputs, None)
                y = experts_of(case, rank, output.tokens)
                if rank == late and number > 0:
                    time.sleep(NAP_S / 4)
                handle, weights = output.handle, inputs.topk_weights
                found.append(buffer.combine(y, handle, weights, comm_quantize="int8").clone())
            right.append(found[0].equal(found[1]) and (not len(found[0]) or bool(found[0].any())))
    return right


@pytest.mark.parametrize("tokens", [(9, 9, 9), (9, 0, 4), (2, 3, 1)])
def test_what_is_quantised_in_parts_has_the_same_bits(ranks: Groups, tokens: tuple[int, ...]) -> None:
    config = Config(3, 9, 64, 2, 6, relaxed=True)
    case = Case(config, seed=4, routing="uniform", tokens=tokens, rounds=3)
    assert ranks(3).run(quantized, case, 1) == [[True] * case.rounds] * 3


def straggle(rank: int, num_ranks: int, case: Case, path: str) -> tuple[bool, float]:
    """Whether the bits are right, and when the last rank began its combine, which is late."""
    began = took = 0.0
    with make_buffer(case, tuning=PARTS, num_blocks=2, trace=path) as buffer:
        for number in range(LATE + 1):
            start = time.monotonic()
            inputs = inputs_of(case, rank, number)
            output = dispatched(buffer, case, inputs, None)
            if number == LATE and rank == num_ranks - 1:
                time.sleep(max(NAP_S, 10 * took))  # of the round before: others need no longer for their sums
                began = time.monotonic()
            result = combined(buffer, case, inputs, output)
            is_right = bool(result.equal(expected_round(case, number)[1][rank]))
            took = time.monotonic() - start
            if not is_right:
                break
    return is_right, began


def test_tokens_that_do_not_need_the_straggler_are_summed_first(ranks: Groups, tmp_path: Path) -> None:
    """With one expert each, most tokens of the others do not."""
    config = Config(4, 16, 64, 1, 8, relaxed=True)
    case = Case(config, seed=5, routing="uniform", tokens=(16,) * 4, rounds=LATE + 1)
    path = tmp_path / "trace.json"
    found = ranks(4).run(straggle, case, str(path))
    assert all(is_right for is_right, _ in found)
    began_us = found[3][1] * 1e6
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    for rank in range(3):
        sums = [
            e
            for e in events
            if e["pid"] == rank and e["name"] == "sum" and e["args"].get("of") == f"combine #{LATE}"
        ]
        assert len(sums) == 8
        before = [e for e in sums if e["ts"] + e["dur"] < began_us]
        ids = inputs_of(case, rank, LATE).topk_idx
        not_late = int((ids < 6).sum())
        # all parts but the one that the straggler's tokens are needed for, and what runs beside its wait
        assert len(before) >= not_late // 2 - 1
