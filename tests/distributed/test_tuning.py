"""Settings change speed, never bits; who waits long sleeps; a late rank is named whatever the parts."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from moe_triton import CommunicationTimeoutError, Tuning
from moe_triton.core.config import Config
from moe_triton.processes import RankGroup
from moe_triton.schemes import product_of
from tests.distributed.cases import Case, inputs_of, small_case
from tests.distributed.workers import expected_round, make_buffer, one_round, patient_buffer
from tests.patience import seconds

Groups = Callable[[int], RankGroup]

TUNINGS = {
    "one part": (Tuning(1000, 1000), 1),
    "parts": (Tuning(2, 3), 1),
    "parts on two blocks": (Tuning(2, 3), 2),
    "streams beside each other": (Tuning(2, 3, communication_blocks=1), 3),
    "one block receives": (Tuning(receiving_blocks=1), 2),
    "two blocks receive": (Tuning(receiving_blocks=2), 3),
    "all rows streamed": (Tuning(cached_bytes=0), 1),
    "asleep at once": (Tuning(spins=0, yields=0), 2),
}


def wrong_bits(rank: int, num_ranks: int, case: Case, tuning: Tuning, num_blocks: int) -> list[str]:
    wrong = []
    with make_buffer(case, tuning=tuning, num_blocks=num_blocks) as buffer:
        for number in range(case.rounds):
            _, combined = one_round(buffer, case, inputs_of(case, rank, number), None)
            if not combined.equal(expected_round(case, number)[1][rank]):
                wrong.append(f"round {number}")
    return wrong


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "direct", "fullmesh"])
@pytest.mark.parametrize("name", TUNINGS)
def test_every_setting_gives_the_same_bits(ranks: Groups, name: str, scheme: str) -> None:
    config = Config(3, 9, 64, 2, 6, product=product_of(scheme), scheme=scheme, relaxed=True)
    case = Case(config, seed=3, routing="sparse", tokens=(9, 0, 8), quantize="int8", rounds=4)
    assert ranks(3).run(wrong_bits, case, *TUNINGS[name]) == [[]] * 3


@pytest.mark.parametrize("scheme", ["fullmesh_v1", "fullmesh_v2", "direct", "fullmesh"])
@pytest.mark.parametrize(("cached_bytes", "num_blocks"), [(0, 1), (10_000, 1), (10_000, 2)])
def test_streamed_rows_have_the_same_bits(
    ranks: Groups, scheme: str, cached_bytes: int, num_blocks: int
) -> None:
    # 4160 and 2080 bytes: longer than a piece of what is streamed, and than what peers poll
    config = Config(3, 9, 2080, 4, 6, product=product_of(scheme), scheme=scheme, relaxed=True)
    tuning = Tuning(dispatch_tokens=4, combine_tokens=4, cached_bytes=cached_bytes)
    for quantize in (None, "int8"):
        case = Case(config, seed=5, routing="sparse", tokens=(9, 0, 8), quantize=quantize, rounds=3)
        assert ranks(3).run(wrong_bits, case, tuning, num_blocks) == [[]] * 3


def share_of_a_core_while_waiting(rank: int, num_ranks: int, case: Case) -> float:
    with make_buffer(case) as buffer:
        one_round(buffer, case, inputs_of(case, rank, 0), None)
        if rank == 0:
            time.sleep(1.0)  # what the others have to wait for
        begin, busy = time.monotonic(), time.process_time()
        one_round(buffer, case, inputs_of(case, rank, 1), None)
        return (time.process_time() - busy) / (time.monotonic() - begin)


def test_who_waits_long_sleeps(ranks: Groups) -> None:
    shares = ranks(3).run(share_of_a_core_while_waiting, small_case(3))
    assert max(shares[1:]) < 0.5


def missing_where_rows_are_received(rank: int, num_ranks: int, case: Case, stays_away: int) -> list[int]:
    tuning = Tuning(receiving_blocks=1)
    with patient_buffer(case, tuning=tuning, num_blocks=2, timeout_s=seconds(1.0)) as buffer:
        inputs = inputs_of(case, rank, 0)
        if rank == stays_away:
            time.sleep(seconds(2.5))  # past the others' deadline
            return [stays_away]
        with pytest.raises(CommunicationTimeoutError) as raised:
            buffer.dispatch(inputs.x, inputs.topk_idx)
        return list(raised.value.missing_ranks)


def test_a_late_rank_is_named_by_those_that_receive(ranks: Groups) -> None:
    assert ranks(3).run(missing_where_rows_are_received, small_case(3), 2) == [[2]] * 3


def missing_in_parts(rank: int, num_ranks: int, case: Case, stays_away: int) -> list[int]:
    with patient_buffer(case, tuning=Tuning(2, 2), timeout_s=seconds(1.0)) as buffer:
        inputs = inputs_of(case, rank, 0)
        output = buffer.dispatch(inputs.x, inputs.topk_idx)
        if rank == stays_away:
            time.sleep(seconds(2.5))  # past the others' deadline
            return [stays_away]
        with pytest.raises(CommunicationTimeoutError) as raised:
            buffer.combine(output.tokens, output.handle, inputs.topk_weights)
        return list(raised.value.missing_ranks)


def test_a_late_rank_is_named_whatever_part_waits(ranks: Groups) -> None:
    assert ranks(3).run(missing_in_parts, small_case(3), 2) == [[2]] * 3
