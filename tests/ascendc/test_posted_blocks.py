"""Blocks that are posted to other servers: every byte in its place, whatever the order of arrival."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_triton.backends.cpu.nic import NicSettings
from moe_triton.core.ascendc import REPORT_BAD_ROW, REPORT_TIMEOUT
from moe_triton.core.reach import Queues

from .blocks import BlocksWorld
from .blocks_case import BlocksCase, Outputs
from .blocks_hostile import TOO_MANY, HostileBlockCase, check_hostile
from .case import check_reports, draw_routing
from .library import Library, address
from .memory import across_lines
from .nics import Nics

SHORT_US = 20_000

CASES = {
    "two_ranks": BlocksCase(tokens=(3, 2), servers=(1, 1), blocks=1, topk=1),
    "two_and_two": BlocksCase(tokens=(3, 2, 4, 1), servers=(2, 2), blocks=3, topk=3, timed=True),
    "three_and_one": BlocksCase(tokens=(3, 0, 2, 5), servers=(3, 1), topk=4, scaled=True, absent=0.3),
    "each_by_itself": BlocksCase(tokens=(2, 1, 3), servers=(1, 1, 1), blocks=5, experts_per_rank=3),
    "special_ids": BlocksCase(tokens=(3, 4), servers=(1, 1), topk=4, experts_per_rank=3, special=0.4),
    "masked_tokens": BlocksCase(tokens=(5, 4, 3), servers=(1, 2), blocks=2, inactive=0.4),
    "nothing_at_all": BlocksCase(tokens=(0, 0, 0), servers=(2, 1), schedule="DCC"),
    "skewed": BlocksCase(tokens=(2, 3, 1, 2), servers=(2, 2), blocks=4, topk=2, skewed=True),
    "stragglers": BlocksCase(tokens=(3, 3), servers=(1, 1), straggle=0.5, rounds=4),
    "dispatch_only": BlocksCase(tokens=(2, 3, 2), servers=(2, 1), straggle=0.4, rounds=5, schedule="D"),
    "two_combines": BlocksCase(tokens=(3, 2), servers=(1, 1), straggle=0.4, rounds=3, schedule="DCC"),
    "old_limits": BlocksCase(
        tokens=(2, 3), servers=(1, 1), experts_per_rank=24, topk=3, old_limits=True, rounds=3
    ),
    "last_number": BlocksCase(tokens=(2, 3), servers=(1, 1), first_number=2**31 - 3, rounds=3),
    "rows_like_flags": BlocksCase(
        tokens=(3, 2), servers=(1, 1), mimicked=True, schedule="D", rounds=4, straggle=0.3
    ),
    "a_part_for_each_rank": BlocksCase(tokens=(3, 2, 4, 1), servers=(2, 2), blocks=2, topk=3, post_parts=4),
    "parts_of_several_blocks": BlocksCase(
        tokens=(3, 2, 4, 1, 3), servers=(2, 2, 1), blocks=3, topk=4, post_parts=3, straggle=0.3
    ),
    "one_part": BlocksCase(tokens=(3, 2, 4), servers=(1, 1, 1), blocks=3, post_parts=1),
    "long_row": BlocksCase(tokens=(1, 2), servers=(1, 1), blocks=1, hidden=512 * 7),
}


@pytest.mark.parametrize("keeps_order", [True, False])
@pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
def test_strict(strict: Library, case: BlocksCase, keeps_order: bool) -> None:
    for seed in range(4):
        BlocksWorld(strict, replace(case, keeps_order=keeps_order), seed).run()


@pytest.mark.parametrize("keeps_order", [True, False])
@pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
def test_fast(fast: Library, case: BlocksCase, keeps_order: bool) -> None:
    for seed in range(3):
        BlocksWorld(fast, replace(case, keeps_order=keeps_order), seed).run()


def _sent(world: BlocksWorld, rank: int, changes: dict[str, object]) -> None:
    """One rank's dispatch up to its posts."""
    case = world.case
    outputs = Outputs.of(case.experts_per_rank, len(case.tokens), 100)
    assert world.nics
    world.nics.use(rank)
    for name, arguments in world.sending(world.phases(rank, draw_routing(case, 0, 0, rank), 0, 0, outputs)):
        check_reports(world.library.launch(name, 1, **{**arguments, **changes}))


@pytest.mark.parametrize("count", [-1, 4, 2**31 - 1])
@pytest.mark.parametrize("keeps_order", [True, False])
def test_a_count_that_came_by_queue_is_not_trusted(library: Library, count: int, keeps_order: bool) -> None:
    posted = {"servers": (1, 2), "keeps_order": keeps_order, "ring_items": 2}
    check_hostile(library, HostileBlockCase(tokens=(2, 3, 2), header=count, **posted))  # type: ignore[arg-type]


def test_no_flag_is_looked_for_at_a_count_that_was_not_checked(library: Library) -> None:
    """Not even where it would be found: the block has no such place."""
    case = HostileBlockCase(
        tokens=(2, 3), servers=(1, 1), keeps_order=True, header=TOO_MANY, has_other_end=True
    )
    layout = case.layout
    end = layout.rows_offset + TOO_MANY * case.row.packed_bytes
    assert layout.block_bytes < end < layout.zone_bytes
    check_hostile(library, case)


def test_a_header_of_another_round_behind_a_flag_is_reported(library: Library) -> None:
    """Where FLAG2 comes first, FLAG1 has to be there: it is not waited for."""
    case = BlocksCase(tokens=(2, 3), servers=(1, 1), blocks=1, keeps_order=False)
    world = BlocksWorld(library, case)
    try:
        for rank in (1, 0):
            _sent(world, rank, {})
    finally:
        assert world.nics
        world.nics.close()
    first = world.layout.blocks.offset(zone=0, rank=1) + 4 * world.layout.flag_word
    world.windows[0][first : first + 4] = 0
    outputs = Outputs.of(case.experts_per_rank, 2, 100)
    name, arguments = world.waiting(world.phases(0, draw_routing(case, 0, 0, 0), 0, 0, outputs))[0]
    assert library.launch(name, 1, **arguments)[0, :2].tolist() == [REPORT_BAD_ROW, 1]


def test_a_server_that_is_gone_is_waited_for_until_the_deadline(library: Library) -> None:
    case = BlocksCase(tokens=(2, 3, 1), servers=(1, 2), blocks=1, timeout_us=SHORT_US)
    world = BlocksWorld(library, case)
    assert world.nics
    outputs = Outputs.of(case.experts_per_rank, 3, 100)
    try:
        _sent(world, 0, {})
        name, arguments = world.waiting(world.phases(0, draw_routing(case, 0, 0, 0), 0, 0, outputs))[0]
        assert library.launch(name, 1, **arguments)[0, :3].tolist() == [REPORT_TIMEOUT, 1, 2]
    finally:
        world.nics.close()


def test_a_queue_that_stays_full_is_waited_for_until_the_deadline(library: Library) -> None:
    """FLAG2 behind a block that the NIC is still posting, in a ring of one."""
    case = BlocksCase(tokens=(2, 3), servers=(1, 1), blocks=1)
    world = BlocksWorld(library, case)
    assert world.nics
    world.nics.close()
    queues = [Queues(frozenset({1 - rank}), (0, 1), world.layout.in_bytes) for rank in range(2)]
    settings = [NicSettings(post_us=20.0 * SHORT_US, keeps_order=False, ring_items=1)] * 2
    windows = [address(window) for window in world.windows]
    nics = Nics(library, windows, world.layout.window_bytes, queues, settings)
    world.tables = [across_lines(words) for words in nics.words]
    outputs = Outputs.of(case.experts_per_rank, 2, 100)
    try:
        nics.use(0)
        name, arguments = world.phases(0, draw_routing(case, 0, 0, 0), 0, 0, outputs)[0]
        arguments["timeout_us"] = SHORT_US
        assert library.launch(name, 1, **arguments)[0, :3].tolist() == [REPORT_TIMEOUT, 1, 1]
    finally:
        nics.close()
