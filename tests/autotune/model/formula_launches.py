"""Launches of the Ascend C kernels that are counted, and the same as the model sees them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autotune.model.bodies.ascendc import COUNTS, FORMULAS
from autotune.model.constants import machine_named
from autotune.model.cost import Table, Work
from autotune.model.topology import tiers
from autotune.model.traffic import Traffic, traffic_of
from moe_triton.core.config import Config
from moe_triton.core.region import Region
from moe_triton.schemes.ascendc import KERNELS
from tests.ascendc.case import Case, draw_routing
from tests.ascendc.counting import NAMES, CountingLibrary, Launched
from tests.ascendc.memory import CACHE_LINE_BYTES, Guarded

MACHINES = {"A2": machine_named("A2"), "A3": machine_named("A3")}


def product_of(config: Config) -> str:
    """Of groups of several servers, whose ranks post, the one with a network."""
    return "A2" if config.topology.num_servers > 1 else "A3"


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
    return traffic_of(config, rank, ids, tiers(product_of(config), config.num_ranks, rank))


def work_of(launched: Launched, traffic: Traffic) -> Work:
    """The very same launch, as the model sees it."""
    described = next(each for each in KERNELS if each.name == launched.kernel)

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
    cost = FORMULAS[launched.kernel](work, MACHINES[product_of(traffic.config)])
    sent = numbers["sent_bytes"].sum()
    assert (cost.read, cost.sent) == (numbers["load_bytes"].sum(), sent)
    assert cost.written == numbers["store_bytes"].sum() - sent


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
