"""Candidates on an NPU, by the model: what the slowest rank takes (`autotune.model.clusters`)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autotune.intervals import Interval
from autotune.model.clusters import cluster
from autotune.model.clusters.group import TIMEOUT_US, Group
from autotune.model.constants import Machine, machine_named
from autotune.model.cost import UnknownWorkError
from autotune.model.kernel_costs.kernel_cost import kernel_cost_of
from autotune.model.kernel_costs.remembered import Remembered
from autotune.pipeline.candidate import Candidate, Sizes
from autotune.pipeline.race import FORMATS, Result
from moe_triton import Tuning
from moe_triton.backends import CAPABILITIES
from moe_triton.core.errors import ArgumentError
from moe_triton.schemes import make_scheme
from moe_triton.schemes.rank_context import RankContext
from moe_triton.schemes.scheme import Scheme
from moe_triton.tables import kept

NS_PER_US = 1000


@dataclass(frozen=True)
class TunedGroup(Group):
    """A group whose ranks are set to something.

    Attributes:
        tuning: of each rank.
        num_blocks: of each rank; None for all cores.
    """

    tuning: Tuning = field(default_factory=Tuning)
    num_blocks: int | None = None

    @staticmethod
    def of(sizes: Sizes, candidate: Candidate, quantize: str | None) -> TunedGroup:
        """A candidate's, whose rows travel in a format.

        Raises:
            ArgumentError: what no group has.
        """
        fixed = sizes.ranks, sizes.tokens, sizes.hidden, sizes.topk, sizes.experts, quantize
        travel = *fixed, candidate.scheme, sizes.product
        return TunedGroup(*travel, tuning=candidate.tuning, num_blocks=candidate.num_blocks)

    def scheme(self, machine: Machine, rank: int = 0) -> Scheme:
        """Makes the scheme of a rank as it is tuned, on its number of blocks."""
        blocks = int(machine.cores) if self.num_blocks is None else self.num_blocks
        self.tuning.check(blocks)
        at = rank, blocks, TIMEOUT_US, CAPABILITIES["npu"]
        return make_scheme(RankContext(self.config, *at, tuning=self.tuning))


class Modelled:
    """Prices of one group's candidates, in a graph where the scheme may be captured.

    Args:
        sizes: the group.
        product: whose machine the model has.
    """

    def __init__(self, sizes: Sizes, product: str = "A3") -> None:
        self.sizes = sizes
        self.machine: Machine = machine_named(product)
        self._kernel_costs = Remembered(kernel_cost_of)
        self._known: dict[str, float] = {}
        self._tables: kept.Kept = {}

    def price(self, default: Candidate, candidate: Candidate, seed: int = 0) -> Result:
        """A candidate's time, and its ratio to that of a default, of the same experts whatever the seed."""
        try:
            own, us = self._us(default), self._us(candidate)
        except (ArgumentError, UnknownWorkError) as error:
            return Result(candidate, 0, Interval.exact(1.0), str(error))
        return Result(candidate, round(us * NS_PER_US), Interval.exact(us / own))

    def _us(self, candidate: Candidate) -> float:
        key = str(candidate)
        if key not in self._known:
            with kept.keeping(self._tables):  # each plan looks into all tables
                self._known[key] = self._priced(candidate)
        return self._known[key]

    def _priced(self, candidate: Candidate) -> float:
        groups = [TunedGroup.of(self.sizes, candidate, quantize) for quantize in FORMATS]
        if not groups[0].may_be_captured(self.machine):
            groups = [replace(group, mode="stream") for group in groups]
        return sum(cluster.price(group, self.machine, self._kernel_costs).us for group in groups)
