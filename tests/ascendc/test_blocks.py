"""The kernels that write a block for each peer: every byte in its place, whatever the order of completion."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from moe_triton.core.ascendc import REPORT_BAD_ROW, REPORT_MISMATCH, REPORT_TIMEOUT
from moe_triton.schemes.a2_fullmesh.layout import end_flag

from .blocks import BlocksWorld
from .blocks_case import BlocksCase, Outputs
from .blocks_hostile import HostileBlockCase, check_hostile
from .call_words import word_of
from .case import check_reports, draw_routing
from .library import Library

SHORT_US = 20_000

CASES = {
    "two_ranks": BlocksCase(tokens=(3, 2), blocks=1, topk=1),
    "one_row_each": BlocksCase(tokens=(1, 1), blocks=3, topk=1, experts_per_rank=1, rounds=4),
    "absent_ids": BlocksCase(tokens=(3, 4), topk=8, experts_per_rank=8, absent=0.4, weighted=False),
    "special_ids": BlocksCase(tokens=(3, 4), topk=4, experts_per_rank=3, special=0.4, absent=0.1),
    "masked_tokens": BlocksCase(tokens=(5, 4, 3), blocks=2, inactive=0.4),
    "empty_rank": BlocksCase(tokens=(4, 0, 5), blocks=3, topk=3, absent=0.2, straggle=0.2),
    "nothing_at_all": BlocksCase(tokens=(0, 0, 0), schedule="DCC"),
    "skewed": BlocksCase(tokens=(2, 3, 1, 2), blocks=4, topk=2, skewed=True),
    "scaled": BlocksCase(tokens=(4, 3), topk=3, scaled=True, hidden=96, absent=0.2, timed=True),
    "several_scales": BlocksCase(tokens=(4, 3), topk=3, scaled=True, num_scales=9, hidden=96, absent=0.2),
    "row_per_result": BlocksCase(tokens=(5, 4), topk=4, row_per_result=True, scaled=True, weighted=False),
    "eight_ranks": BlocksCase(tokens=(2, 1, 0, 3, 1, 2, 1, 1), topk=3, experts_per_rank=5, blocks=3),
    "stragglers": BlocksCase(tokens=(3, 3), straggle=0.5, rounds=4),
    "dispatch_only": BlocksCase(tokens=(2, 3, 2), straggle=0.4, rounds=5, schedule="D"),
    "two_combines": BlocksCase(tokens=(3, 2), straggle=0.4, rounds=3, schedule="DCC"),
    "two_dispatches": BlocksCase(tokens=(2, 3), straggle=0.4, rounds=3, schedule="DDC"),
    "old_limits": BlocksCase(tokens=(2, 3), experts_per_rank=24, topk=3, old_limits=True, rounds=3),
    "last_number": BlocksCase(tokens=(2, 3), first_number=2**31 - 3, rounds=3),
    "rows_like_flags": BlocksCase(tokens=(3, 2), mimicked=True, schedule="D", rounds=4, straggle=0.3),
    "long_row": BlocksCase(tokens=(1, 2), blocks=1, hidden=512 * 7),
}

# More than one load of a table, one header unit, one piece of a row.
LARGE_CASES = {
    "many_tokens": BlocksCase(tokens=(300, 200), blocks=1, topk=8, experts_per_rank=8, hidden=32, rounds=1),
    "many_experts": BlocksCase(tokens=(2, 3, 1), experts_per_rank=512, hidden=32, topk=4),
    "many_entries": BlocksCase(tokens=(2,) * 8, experts_per_rank=300, hidden=32, topk=4, rounds=1),
    "row_in_pieces": BlocksCase(tokens=(2, 1), blocks=2, hidden=48 * 1024),
}


def _by_name(cases: dict[str, BlocksCase]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", list(cases.values()), ids=list(cases))


@_by_name(CASES)
def test_strict(strict: Library, case: BlocksCase) -> None:
    for seed in range(8):
        BlocksWorld(strict, case, seed).run()


@_by_name(CASES)
def test_fast(fast: Library, case: BlocksCase) -> None:
    for seed in range(5):
        BlocksWorld(fast, case, seed).run()


@_by_name(LARGE_CASES)
def test_large(library: Library, case: BlocksCase) -> None:
    for seed in range(2):
        BlocksWorld(library, case, seed).run()


HOSTILE = {
    "nothing comes": HostileBlockCase(tokens=(2, 3, 2), timeout_us=SHORT_US),
    "rows do not come": HostileBlockCase(tokens=(2, 3, 2), header=0, has_end=False, timeout_us=SHORT_US),
    "rows do not come, and old ones are there": HostileBlockCase(
        tokens=(2, 3, 2), first_number=3, header=0, has_end=False, has_old_block=True, timeout_us=SHORT_US
    ),
    "a negative count": HostileBlockCase(tokens=(2, 3, 2), header=-1),
    "a count beyond a rank's tokens": HostileBlockCase(tokens=(2, 3, 2), header=4),
    "a count beyond everything": HostileBlockCase(tokens=(2, 3, 2), header=2**31 - 1),
}


@pytest.mark.parametrize("case", list(HOSTILE.values()), ids=list(HOSTILE))
def test_what_a_header_says_is_not_trusted(library: Library, case: HostileBlockCase) -> None:
    for seed in range(5):
        check_hostile(library, case, seed)


def test_another_call_is_reported_at_once(library: Library) -> None:
    case = BlocksCase(tokens=(2, 3, 2), blocks=1)
    world = BlocksWorld(library, case)
    outputs = Outputs.of(case.experts_per_rank, 3, 100)
    for rank in (1, 2, 0):
        changes = {"call": word_of("D", 77)} if rank == 1 else {}
        phases = world.phases(rank, draw_routing(case, 0, 0, rank), 0, 0, outputs, **changes)
        for name, arguments in phases[:2]:
            check_reports(library.launch(name, 1, **arguments))
    name, arguments = world.phases(0, draw_routing(case, 0, 0, 0), 0, 0, outputs)[2]
    words = library.launch(name, 1, **arguments)[0].tolist()
    assert words[:6] == [REPORT_MISMATCH, 1, 1, 0, word_of("D", 0), word_of("D", 77)]
    assert outputs.recv_counts.array[:, 1].tolist() == [-1, -1]


def test_a_rank_that_returns_too_few_rows_is_reported(library: Library) -> None:
    case = BlocksCase(tokens=(2, 3), blocks=1, topk=2)
    world = BlocksWorld(library, case)
    counts = np.zeros((1, 2), np.int32)
    for rank in (1, 0):
        sums = world.counts(rank, 0).reshape(-1).cumsum(dtype=np.int32)
        changes = {"recv_offsets": sums // 2} if rank == 1 else {}
        for name, arguments in world.return_phases(rank, 0, 0, 0, counts, **changes)[:2]:
            check_reports(library.launch(name, 1, **arguments))
    name, arguments = world.return_phases(0, 0, 0, 0, counts)[2]
    assert library.launch(name, 1, **arguments)[0, :3].tolist() == [REPORT_BAD_ROW, 1, 1]


@pytest.mark.parametrize("total", [-5, 1000])
def test_sums_that_nobody_can_have_are_reported(library: Library, total: int) -> None:
    case = BlocksCase(tokens=(2, 3), blocks=2)
    world = BlocksWorld(library, case)
    sums = world.counts(0, 0).reshape(-1).cumsum(dtype=np.int32)
    sums[-1] = total
    (name, arguments), *_ = world.return_phases(0, 0, 0, 0, np.zeros((1, 2), np.int32), recv_offsets=sums)
    report = library.launch(name, 2, **arguments)
    assert REPORT_BAD_ROW in report[:, 0]
    for memory in world.memory:
        memory.check_guards()


@pytest.mark.parametrize("changes", [{"max_rows": 1}, {"num_ranks": 1}])
def test_rows_that_have_no_place_are_reported(library: Library, changes: dict[str, object]) -> None:
    case = BlocksCase(tokens=(3, 3), topk=2, skewed=True, blocks=1)
    world = BlocksWorld(library, case)
    outputs = Outputs.of(case.experts_per_rank, 2, 100)
    routing = copy.deepcopy(draw_routing(case, 0, 0, 0))
    routing.sent_ids[:] = [[0, 2]] * 3
    name, arguments = world.phases(0, routing, 0, 0, outputs, **changes)[0]
    assert library.launch(name, 1, **arguments)[0, 0] == REPORT_BAD_ROW
    for memory in world.memory:
        memory.check_guards()


def test_a_reported_wait_does_not_wait_again(library: Library) -> None:
    case = BlocksCase(tokens=(2, 2), blocks=1, timeout_us=60_000_000)
    world = BlocksWorld(library, case)
    outputs = Outputs.of(case.experts_per_rank, 2, 100)
    report = np.zeros((1, 16), np.int32)
    report[0, 0] = REPORT_TIMEOUT
    name, arguments = world.phases(0, draw_routing(case, 0, 0, 0), 0, 0, outputs)[2]
    assert library.launch(name, 1, **arguments, report=report)[0, :3].tolist() == [REPORT_TIMEOUT, 0, 2]


def test_flags_of_rounds_have_no_word_in_common() -> None:
    words = [word for number in range(1, 2000) for word in end_flag(number)]
    assert len(set(words)) == len(words)
