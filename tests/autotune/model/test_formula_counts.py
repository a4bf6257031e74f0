"""What the formulas of the Ascend C kernels count, against what the kernels do in the emulation: every number
of every block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from autotune.model.bodies.ascendc import COUNTS
from moe_triton.layout import NUM_ZONES
from moe_triton.schemes.ascendc import KERNELS
from moe_triton.schemes.hierarchy.ascendc import KERNELS as HIERARCHY
from tests.ascendc.blocks import BlocksWorld
from tests.ascendc.blocks_case import BlocksCase, Outputs
from tests.ascendc.call_words import expecting, posting
from tests.ascendc.case import Case, check_reports, draw_routing, results_of
from tests.ascendc.counting import NAMES, CountingLibrary
from tests.ascendc.direct import DirectCase, DirectWorld
from tests.ascendc.driver import World
from tests.ascendc.exchange import Exchange, ExchangeCase
from tests.ascendc.inband import check_outputs, receive_inband
from tests.ascendc.memory import Guarded
from tests.ascendc.offsets import OffsetsCase, Received
from tests.ascendc.offsets import launch as launch_offsets
from tests.ascendc.parts import CombineInParts
from tests.ascendc.posts import PostingCase, PostingWorld
from tests.ascendc.receiving import ReceivingCase, ReceivingWorld
from tests.ascendc.takes import check_taken, take_rows

from .formula_cases import (
    BLOCKS,
    DIRECT,
    EXCHANGE,
    FULLMESH,
    IN_PARTS,
    INBAND,
    OFFSETS,
    POSTED_BLOCKS,
    POSTED_ROWS,
    RECEIVED,
    TAKEN,
)
from .formula_launches import Ranks, check, own_lines, ranks_of, traffic_on

pytestmark = pytest.mark.long  # compiles a build of the kernels that no other test needs


@pytest.fixture(scope="module")
def kernels() -> CountingLibrary:
    return CountingLibrary()


def run_fullmesh(kernels: CountingLibrary, case: Case, is_kept: bool = False) -> None:
    """Dispatch, and unless it is in-band, combine.

    Args:
        kernels: that are counted.
        case: what the ranks do.
        is_kept: whether each rank keeps its own rows.
    """
    world = World(kernels, case)
    world.peers = own_lines(world.peers)
    ranks = ranks_of(kernels, case, [window.bytes for window in world.windows])
    routings = [draw_routing(case, 0, 0, rank) for rank in range(len(case.tokens))]

    def kept_rank_of(rank: int) -> int:
        return rank if is_kept else -1

    for rank in ranks:
        call = world.calls.sending(rank, 0)
        check_reports(world.send_rows(rank, routings[rank], 0, **call, kept_rank=kept_rank_of(rank)))
    for rank in ranks:
        waited = world.times(case.config.experts_on(rank) * case.config.num_ranks)
        counts, report = world.wait_for_status(rank, 0, waited, **world.calls.waiting(rank, 0))
        check_reports(report)
        world.check_counts(rank, 0, counts)
        if case.inband and not is_kept:
            offsets = world.expected_rows(rank, 0)["offsets"]
            check_reports(receive_inband(world, rank, 0, offsets, waited)[1])
        if not case.inband:
            check_reports(world.wait_for_rows(rank, 0, counts, waited, kept_rank=kept_rank_of(rank)))
    if not case.inband:
        run_combine(world, ranks, is_kept)


def run_combine(world: World, ranks: Ranks, is_kept: bool) -> None:
    """Results back, and a wait for them or for whole ranks."""
    case = world.case
    for rank in ranks:
        received = world.expected_rows(rank, 0)
        rows = results_of(case, received["origins"], 0)
        kept = {**world.calls.combining(rank, 0), "kept_rank": rank if is_kept else -1}
        check_reports(world.send_results(rank, rows, received, 0, **kept))
        if case.full_wait:
            count = np.array([100 + rank], np.int32)
            check_reports(world.post_status(rank, 0, count, **posting("C", 0)))
    for rank in ranks:
        if case.full_wait:
            wait = {"num_local_experts": 1, "status": world.peer_status, **expecting("C", 0)}
            check_reports(world.wait_for_status(rank, 0, world.times(case.config.num_ranks), **wait)[1])
            continue
        waited = world.times(case.tokens[rank] * case.topk)
        check_reports(world.wait_for_results(rank, draw_routing(case, 0, 0, rank), 0, waited))


@pytest.mark.parametrize("case", FULLMESH.values(), ids=list(FULLMESH))
def test_fullmesh(kernels: CountingLibrary, case: Case) -> None:
    run_fullmesh(kernels, case)


@pytest.mark.parametrize("case", TAKEN.values(), ids=list(TAKEN))
def test_dispatch_in_parts(kernels: CountingLibrary, case: Case) -> None:
    """All ranks' rows of a part are there before anybody takes them."""
    world = World(kernels, case)
    world.peers = own_lines(world.peers)
    ranks = ranks_of(kernels, case, [window.bytes for window in world.windows])
    routings = [draw_routing(case, 0, 0, rank) for rank in range(len(case.tokens))]
    sizes = [(case.config.num_ranks, case.config.experts_on(rank)) for rank in range(len(case.tokens))]
    tables = [[Guarded(size, np.int32) for _ in range(case.takes + 1)] for size in sizes]
    counts: dict[int, np.ndarray] = {}
    for part in range(case.takes):
        for rank in ranks:
            first, last = (case.tokens[rank] * (part + i) // case.takes for i in range(2))
            call = world.calls.sending(rank, 0) | {"post_status": int(part == 0)}
            call |= {"first_token": first, "num_tokens": last - first}
            check_reports(world.send_rows(rank, routings[rank], 0, **call))
        for rank in ranks:
            waited = world.times(case.config.experts_on(rank) * case.config.num_ranks)
            if part == 0:
                wait = world.calls.waiting(rank, 0)
                counts[rank], report = world.wait_for_status(rank, 0, waited, **wait)
                check_reports(report)
            check_reports(take_rows(world, rank, 0, counts[rank], tables[rank], part, waited))
            check_taken(world, counts[rank], tables[rank], part)


@pytest.mark.parametrize("case", RECEIVED.values(), ids=list(RECEIVED))
@pytest.mark.parametrize("inband", [False, True], ids=["stamps", "inband"])
def test_received_while_others_send(kernels: CountingLibrary, case: ReceivingCase, inband: bool) -> None:
    """All rows are there before they are received, and all blocks' flags before one looks.

    So the zone is turned before all blocks have looked which it is: in a word of its own here.
    """
    case = replace(case, inband=inband)
    world = ReceivingWorld(kernels, case)
    world.peers = own_lines(world.peers)
    ranks = ranks_of(kernels, case, [window.bytes for window in world.windows])
    for rank in ranks:
        call = {**world.calls.sending(rank, 0), "begun": world.begun[rank].array}
        check_reports(world.send_rows(rank, draw_routing(case, 0, 0, rank), 0, **call))
    for rank in ranks:
        waited = world.times(case.config.experts_on(rank) * case.config.num_ranks)
        wait = world.calls.waiting(rank, 0)
        counts, report = world.wait_for_status(rank, 0, waited, sees_all=True, **wait)
        check_reports(report)
        rows = world.room_for(int(counts.sum()))
        world.begun[rank].array[: case.blocks] = 1.0
        turned = np.zeros(1, np.int32)
        arguments = world.receiving(rank, 0, waited, (counts, counts), rows) | {"turned": turned}
        world._zones[rank][0] = 0
        kernel = "inband_collect" if inband else "dispatch_receive"
        check_reports(kernels.launch(kernel, case.blocks, **arguments))
        assert turned[0] == 1
        check_outputs(world, rank, 0, rows)


@pytest.mark.parametrize("case", IN_PARTS.values(), ids=list(IN_PARTS))
def test_combine_in_parts(kernels: CountingLibrary, case: Case) -> None:
    """All results are there before a part asks for them: they are sent once more in parts."""
    world = World(kernels, case)
    world.peers = own_lines(world.peers)
    ranks = ranks_of(kernels, case, [window.bytes for window in world.windows])
    received = [world.expected_rows(rank, 0) for rank in range(len(case.tokens))]
    rows = [results_of(case, of_rank["origins"], 0) for of_rank in received]
    for rank in ranks:
        check_reports(world.send_results(rank, rows[rank], received[rank], 0))
    for rank in ranks:
        parts = CombineInParts(world, rank, 0, 0)
        for part in range(parts.num_parts):
            check_reports(parts.launch(part, rows[rank], received[rank], draw_routing(case, 0, 0, rank)))
        assert parts.ready.array.tolist() == list(range(case.tokens[rank]))


@pytest.mark.parametrize("case", INBAND.values(), ids=list(INBAND))
def test_in_band(kernels: CountingLibrary, case: Case) -> None:
    run_fullmesh(kernels, replace(case, inband=True))


def test_rows_that_stay(kernels: CountingLibrary) -> None:
    case = Case(tokens=(9, 7, 5), blocks=3, topk=3, experts_per_rank=4)
    run_fullmesh(kernels, case, is_kept=True)
    run_fullmesh(kernels, replace(case, inband=True), is_kept=True)


@pytest.mark.parametrize("case", DIRECT.values(), ids=list(DIRECT))
def test_direct(kernels: CountingLibrary, case: DirectCase) -> None:
    world = DirectWorld(kernels, case)
    world.peers = own_lines(world.peers)
    ranks = ranks_of(kernels, case, world.windows)
    routings = [draw_routing(case, 0, 0, rank) for rank in range(len(case.tokens))]
    for rank in ranks:
        check_reports(world.send_counts(rank, routings[rank], 0))
    for rank in ranks:
        call = world.calls.in_one_launch(rank, 0)
        check_reports(world.wait(rank, world.layout.counts_status, 0, **call, dispatch_word=0)[1])
        check_reports(world.send_rows(rank, routings[rank], 0))
        world.check_tables(rank, 0)
        check_reports(world.post(rank, world.layout.rows_status, 0, **posting("D", 0)))
    for rank in ranks:
        check_reports(world.wait(rank, world.layout.rows_status, 0, **expecting("D", 0))[1])
        world.check_rows(rank, 0)
        sources = world.received(rank, 0)
        check_reports(world.copy_results(rank, np.zeros((len(sources), case.result_bytes), np.uint8), 0))


@pytest.mark.parametrize("case", BLOCKS.values(), ids=list(BLOCKS))
def test_blocks(kernels: CountingLibrary, case: BlocksCase) -> None:
    """One launch after the other, each for all ranks; a round's number stands in the word of the zone."""
    world, c = BlocksWorld(kernels, case), case.config
    world.tables = [own_lines(table) for table in world.tables]
    ranks = ranks_of(kernels, case, world.windows)
    sizes = c.num_local_experts, c.num_ranks, c.routed_capacity
    outputs = [Outputs.of(*sizes) for _ in case.tokens]
    counts = np.zeros((1, c.num_ranks), np.int32)
    for number in range(4):
        for rank in ranks:
            name, arguments = world.phases(rank, draw_routing(case, 0, 0, rank), 0, 0, outputs[rank])[number]
            check_reports(kernels.launch(name, case.blocks, **arguments))
    for rank in range(c.num_ranks):
        world.check_outputs(rank, 0, 0, outputs[rank])
    for number in range(3):
        for rank in ranks:
            name, arguments = world.return_phases(rank, 0, 0, 1, counts)[number]
            check_reports(kernels.launch(name, case.blocks, **arguments))
    for rank in range(c.num_ranks):
        world.check_results(rank, 0, 0, 1)


def launch(
    ranks: Ranks, world: BlocksWorld | PostingWorld, phase: Callable[[int], tuple[str, dict[str, object]]]
) -> None:
    """One launch of each rank, and all that it posts is delivered."""
    for rank in ranks:
        name, arguments = phase(rank)
        assert world.nics
        world.nics.use(rank)
        check_reports(ranks.kernels.launch(name, world.case.blocks, **arguments))
    assert world.nics
    world.nics.close()
    world.nics = world.make_nics()


@pytest.mark.parametrize("case", POSTED_BLOCKS.values(), ids=list(POSTED_BLOCKS))
def test_posted_blocks(kernels: CountingLibrary, case: BlocksCase) -> None:
    world, c = BlocksWorld(kernels, case), case.config
    world.tables = [own_lines(table) for table in world.tables]
    ranks = ranks_of(kernels, case, world.windows)
    sizes = c.num_local_experts, c.num_ranks, c.routed_capacity
    outputs = [Outputs.of(*sizes) for _ in case.tokens]
    counts = np.zeros((1, c.num_ranks), np.int32)
    for number in range(3):
        launch(
            ranks,
            world,
            lambda rank: world.phases(rank, draw_routing(case, 0, 0, rank), 0, 0, outputs[rank])[number],  # noqa: B023
        )
    for number in range(2):
        launch(ranks, world, lambda rank: world.return_phases(rank, 0, 0, 1, counts)[number])  # noqa: B023
    for rank in range(c.num_ranks):
        world.check_outputs(rank, 0, 0, outputs[rank])
        world.check_results(rank, 0, 0, 1)
    world.nics.close()


@pytest.mark.parametrize("case", POSTED_ROWS.values(), ids=list(POSTED_ROWS))
def test_posted_rows(kernels: CountingLibrary, case: PostingCase) -> None:
    """What sends and what posts, of a dispatch and a combine."""
    world = PostingWorld(kernels, case)
    world.tables = [own_lines(table) for table in world.tables]
    ranks = ranks_of(kernels, case, [window.bytes for window in world.windows])
    received = [world.expected_rows(rank, 0) for rank in range(len(case.tokens))]
    sends = [world.sending_phases(rank, 0, 0, received[rank]) for rank in range(len(case.tokens))]
    launch(ranks, world, lambda rank: world.phases(rank, 0, 0, None)[1][0])
    launch(ranks, world, lambda rank: world.dispatch_post(rank, 0, 0))
    for number in range(len(sends[0])):
        launch(ranks, world, lambda rank: sends[rank][number])  # noqa: B023
    world.nics.close()


@pytest.mark.parametrize(("case", "asked"), OFFSETS.values(), ids=list(OFFSETS))
def test_offsets(kernels: CountingLibrary, case: Case, asked: dict[str, object]) -> None:
    c = case.config
    size = {"experts": c.num_local_experts, "tokens": c.num_max_tokens_per_rank}
    offsets = OffsetsCase(c.num_ranks, **size, **asked)  # type: ignore[arg-type]
    routings = [draw_routing(case, 0, 0, rank) for rank in range(c.num_ranks)]
    traffic = traffic_on(c, offsets.rank, [routing.sent_ids for routing in routings])
    stats = np.zeros(c.num_local_experts, np.int32)
    received = Received(traffic.recv_counts, stats)
    kernels.run_on(offsets.rank, [])
    for zone in range(NUM_ZONES):
        launch_offsets(kernels, offsets, received, zone)
        check(kernels.launched[-1], traffic)


@pytest.mark.parametrize("case", EXCHANGE.values(), ids=list(EXCHANGE))
def test_exchange(kernels: CountingLibrary, case: ExchangeCase) -> None:
    world = Exchange(kernels, case)
    world.peers = own_lines(world.peers)
    two = Case(tokens=(1, 1))
    ranks = ranks_of(kernels, two, [window.array for window in world.windows])
    for rank in ranks:
        load = world.load(rank, 0)
        check_reports(world.send(rank, load, 0))
        check_reports(world.post(rank, load, 0))
    for rank in ranks:
        counts, report = world.wait(rank, 0)
        check_reports(report)
        world.check(rank, 0, 0, counts)


@pytest.mark.parametrize("name", NAMES)
def test_a_number_that_differs_is_found(kernels: CountingLibrary, name: str) -> None:
    """In any block, of any kind; and each kind occurs."""
    case = Case(tokens=(9, 7), blocks=3, topk=3, experts_per_rank=4)
    world = World(kernels, case)
    world.peers = own_lines(world.peers)
    ranks = ranks_of(kernels, case, [window.bytes for window in world.windows])
    for rank in ranks:
        routing = draw_routing(case, 0, 0, rank)
        world.send_rows(rank, routing, 0, **world.calls.sending(rank, 0))
        launched = kernels.launched[-1]
        assert launched.numbers[name].all()
        wrong = {**launched.numbers, name: launched.numbers[name] + first_of(3)}
        with pytest.raises(AssertionError):
            check(replace(launched, numbers=wrong), ranks.traffics[rank])


def first_of(blocks: int) -> np.ndarray:
    """One more for the first of them."""
    return (np.arange(blocks) == 0).astype(np.int64)


def test_every_kernel_is_counted() -> None:
    """Those of the hierarchy have no formula."""
    assert COUNTS.keys() == {kernel.name for kernel in KERNELS if kernel not in HIERARCHY}
