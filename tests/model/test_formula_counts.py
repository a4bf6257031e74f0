"""What the formulas of the Ascend C kernels count, against what the kernels do in the emulation: every number
of every block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from moe_triton.core import ascendc
from moe_triton.core.config import Config
from moe_triton.core.region import Region
from moe_triton.model.bodies.ascendc import COUNTS, FORMULAS
from moe_triton.model.constants import machine_named
from moe_triton.model.cost import Table, Work
from moe_triton.model.topology import tiers
from moe_triton.model.traffic import Traffic, traffic_of
from tests.ascendc.call_words import expecting, posting
from tests.ascendc.case import Case, check_reports, draw_routing, results_of
from tests.ascendc.counting import NAMES, CountingLibrary, Launched
from tests.ascendc.direct import DirectCase, DirectWorld
from tests.ascendc.driver import World
from tests.ascendc.exchange import Exchange, ExchangeCase
from tests.ascendc.memory import CACHE_LINE_BYTES, Guarded

pytestmark = pytest.mark.long  # compiles a build of the kernels that no other test needs

A3 = machine_named("A3")

FULLMESH = {
    "one_block": Case(tokens=(3, 2), blocks=1, topk=1),
    "weights_and_scales": Case(tokens=(13, 8, 1), blocks=3, topk=4, scaled=True, timed=True, absent=0.2),
    "special_ids": Case(tokens=(7, 9), blocks=5, topk=4, experts_per_rank=3, special=0.3, weighted=False),
    "masked": Case(tokens=(11, 9), blocks=3, topk=3, experts_per_rank=4, inactive=0.4, timed=True),
    "no_rows": Case(tokens=(0, 4), blocks=2, topk=2, absent=0.9),
    "nothing_at_all": Case(tokens=(3, 2), blocks=2, absent=1.0, timed=True),
    "skewed": Case(tokens=(6, 3, 1, 2), blocks=4, topk=2, skewed=True),
    "several_launches": Case(tokens=(9, 10), blocks=3, topk=4, launches=3),
    "row_per_result": Case(tokens=(9, 10), blocks=3, topk=4, row_per_result=True),
    "many_scales": Case(tokens=(5, 8), blocks=3, topk=3, scaled=True, num_scales=9, hidden=96),
    "full_wait": Case(tokens=(5, 8, 2), blocks=2, topk=3, full_wait=True, timed=True),
    "many_results": Case(tokens=(3, 2), blocks=2, topk=40, experts_per_rank=24, hidden=32),
    "many_ranks": Case(tokens=(4,) * 18, blocks=4, topk=6, experts_per_rank=4),
    "many_blocks": Case(tokens=(40, 16), blocks=48, topk=8, experts_per_rank=16, hidden=128),
    "real_rows": Case(tokens=(16, 8), blocks=24, topk=8, experts_per_rank=16, hidden=7168, scaled=True),
    "tables_in_chunks": Case(tokens=(300, 150), blocks=2, topk=8, experts_per_rank=8, hidden=32, timed=True),
    "entries_in_chunks": Case(tokens=(2, 3), blocks=1, experts_per_rank=1100, hidden=32, timed=True),
    "row_in_pieces": Case(tokens=(3, 2), blocks=2, hidden=48 * 1024),
}
INBAND = {
    "one_block": Case(tokens=(3, 2), blocks=1, topk=1),
    "scales": Case(tokens=(40, 30), blocks=3, topk=3, scaled=True, absent=0.2, timed=True, hidden=300),
    "real_rows": Case(tokens=(16, 8), blocks=24, topk=8, experts_per_rank=16, hidden=7168, scaled=True),
    "no_scales": Case(tokens=(9, 5, 7), blocks=4, hidden=241, weighted=False, experts_per_rank=3),
    "many_scales": Case(tokens=(9, 8), topk=3, scaled=True, num_scales=57, hidden=900),
    "scales_over_blocks": Case(tokens=(9, 8), topk=3, scaled=True, num_scales=150, hidden=460),
    "stamp_alone": Case(tokens=(2, 3), hidden=240 * 3),
    "no_rows": Case(tokens=(3, 2), absent=1.0, timed=True),
    "several_launches": Case(tokens=(9, 10), blocks=3, topk=4, launches=3, row_per_result=True),
    "many_rows": Case(tokens=(300, 200), blocks=2, topk=8, experts_per_rank=8, hidden=32, timed=True),
    "entries_in_chunks": Case(tokens=(2, 3), blocks=1, experts_per_rank=1100, hidden=32, timed=True),
    "row_in_pieces": Case(tokens=(7, 8), blocks=1, hidden=48 * 1024, scaled=True),
}
DIRECT = {
    "plain": DirectCase(tokens=(7, 9), blocks=3, topk=3, experts_per_rank=4),
    "one_scale": DirectCase(tokens=(7, 9, 2), blocks=2, topk=3, scaled=True, absent=0.2),
    "many_scales": DirectCase(tokens=(7, 9), blocks=3, topk=4, scaled=True, num_scales=9, hidden=96),
    "row_per_result": DirectCase(tokens=(7, 3), blocks=3, row_per_result=True, scaled=True, weighted=False),
    "many_experts": DirectCase(tokens=(2, 3), blocks=1, experts_per_rank=1100, hidden=32),
    "no_rows": DirectCase(tokens=(3, 2), absent=1.0),
    "more_blocks_than_ranks": DirectCase(tokens=(3, 2), blocks=6),
    "real_rows": DirectCase(tokens=(16, 8), blocks=24, topk=8, experts_per_rank=16, hidden=7168, scaled=True),
    "long_rows": DirectCase(tokens=(2, 3), hidden=48 * 1024),
}
EXCHANGE = {
    "plain": ExchangeCase(),
    "no_first_row": ExchangeCase(first_row=None, header_words=0, num_scales=0),
    "scales": ExchangeCase(rows=(700, 90), num_scales=12, blocks=1),
    "header": ExchangeCase(rows=(0, 33), header_words=3000, blocks=4),
    "long_rows": ExchangeCase(rows=(3, 4), row_bytes=96 * 1024, num_scales=0),
}


@pytest.fixture(scope="module")
def kernels() -> CountingLibrary:
    return CountingLibrary()


def own_lines(peers: np.ndarray) -> np.ndarray:
    """The table of windows as an NPU has it: it begins with a line, which it shares with nothing."""
    per_line = CACHE_LINE_BYTES // peers.itemsize
    lines = Guarded((-(-len(peers) // per_line) * per_line,), np.int64, align=CACHE_LINE_BYTES)
    lines.array[: len(peers)] = peers
    return lines.array[: len(peers)]


def traffic_on(config: Config, rank: int, sent_ids: list[np.ndarray]) -> Traffic:
    """Of ranks with different numbers of tokens."""
    ids = np.full((config.num_ranks, config.num_max_tokens_per_rank, config.num_topk), -1, np.int32)
    for each, of_rank in zip(ids, sent_ids, strict=True):
        each[: len(of_rank)] = of_rank
    return traffic_of(config, rank, ids, tiers("A3", config.num_ranks, rank))


def work_of(launched: Launched, traffic: Traffic) -> Work:
    """The very same launch, as the model sees it."""
    described = next(each for each in ascendc.KERNELS if each.name == launched.kernel)

    def seen(value: object) -> int | tuple[int, ...] | Table:
        if isinstance(value, Region):
            return value.words()
        if isinstance(value, np.ndarray):
            return Table(value.reshape(-1) if value.dtype == np.int32 else None)
        assert isinstance(value, int | np.integer)
        return int(value)

    arguments = {name: seen(value) for name, value in launched.arguments.items()}
    return Work(described, launched.blocks, arguments, traffic)


def check(launched: Launched, traffic: Traffic) -> None:
    """Every number of every block, and the bytes of the cost."""
    work = work_of(launched, traffic)
    counted, numbers = COUNTS[launched.kernel](work).total, launched.numbers
    found = {name: getattr(counted, name).tolist() for name in NAMES}
    assert found == {name: numbers[name].tolist() for name in NAMES}, launched.kernel
    cost = FORMULAS[launched.kernel](work, A3)
    sent = numbers["sent_bytes"].sum()
    assert (cost.read, cost.sent) == (numbers["load_bytes"].sum(), sent)
    assert cost.written == numbers["store_bytes"].sum() - sent
    assert ("barrier" in cost.parts) == bool(numbers["syncs"].any())


@dataclass
class Ranks:
    """The ranks of a case, one launch after another."""

    kernels: CountingLibrary
    windows: list[np.ndarray]
    traffics: list[Traffic]
    checked: int = 0

    def __iter__(self) -> Iterator[int]:
        """All ranks: what is launched for each is checked."""
        for rank, traffic in enumerate(self.traffics):
            self.kernels.run_on(rank, self.windows)
            self.kernels.launched.clear()
            yield rank
            assert self.kernels.launched
            for launched in self.kernels.launched:
                check(launched, traffic)


def ranks_of(kernels: CountingLibrary, case: Case, windows: list[np.ndarray]) -> Ranks:
    sent_ids = [draw_routing(case, 0, 0, rank).sent_ids for rank in range(len(case.tokens))]
    traffics = [traffic_on(case.config, rank, sent_ids) for rank in range(len(case.tokens))]
    return Ranks(kernels, windows, traffics)


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
    for rank in ranks:
        call = world.calls.sending(rank, 0)
        kept_rank = rank if is_kept else -1
        check_reports(world.send_rows(rank, routings[rank], 0, **call, kept_rank=kept_rank))
    for rank in ranks:
        waited = world.times(case.config.experts_on(rank) * case.config.num_ranks)
        counts, report = world.wait_for_status(rank, 0, waited, **world.calls.waiting(rank, 0))
        check_reports(report)
        world.check_counts(rank, 0, counts)
        if case.inband and not is_kept:
            offsets = world.expected_rows(rank, 0)["offsets"]
            check_reports(world.receive_inband(rank, 0, offsets, waited)[1])
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
        check_reports(world.send_counts(rank, routings[rank], 0, **world.calls.sending(rank, 0)))
    for rank in ranks:
        check_reports(world.wait(rank, world.layout.counts_status, 0, **world.calls.waiting(rank, 0))[1])
        check_reports(world.send_rows(rank, routings[rank], world.places(rank, 0), 0))
        check_reports(world.post(rank, world.layout.rows_status, 0, **posting("D", 0)))
    for rank in ranks:
        check_reports(world.wait(rank, world.layout.rows_status, 0, **expecting("D", 0))[1])
        world.check_rows(rank, 0)
        sources = world.received(rank, 0)
        check_reports(world.copy_results(rank, np.zeros((len(sources), case.result_bytes), np.uint8), 0))


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
    assert COUNTS.keys() == {kernel.name for kernel in ascendc.KERNELS}
