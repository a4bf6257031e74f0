"""A3 fullmesh: the plans of one rank.

Zones (see `moe_triton.runtime.communicator` for who turns them): dispatch waits for an entry from every rank,
empty ones included, so a rank that starts dispatch i + 2 knows that nobody still reads what dispatch i
left. V2's combine waits for its own tokens only; a full wait between combine i and i + 2 separates those
two. V1's combine waits for every rank, and shares zones and toggle with its dispatch.
"""

from __future__ import annotations

from moe_triton.core.config import Config
from moe_triton.core.plan import Plan
from moe_triton.schemes.combine import CombinePlans
from moe_triton.schemes.dispatch import DispatchPlans
from moe_triton.schemes.flags import barrier_plan
from moe_triton.schemes.site import Site
from moe_triton.schemes.variants import DispatchVariant, Variant


class Fullmesh:
    """Builds the plans of one rank.

    Args:
        site: where they run.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self._dispatch = DispatchPlans(site)
        self._combine = CombinePlans(site)

    def setup(self, variant: Variant, zone: int, parts: int = 1) -> Plan:
        """The plan up to and including the flags."""
        if isinstance(variant, DispatchVariant):
            return self._dispatch.setup(variant, zone, parts)
        return self._combine.setup(variant, zone)

    def teardown(self, variant: Variant, zone: int, parts: int = 1) -> Plan:
        """The plan from the wait on."""
        if isinstance(variant, DispatchVariant):
            return self._dispatch.teardown(variant, zone)
        return self._combine.teardown(variant, zone, parts)

    def whole(self, variant: Variant, zone: int, parts: int = 1) -> Plan:
        """The plan of the whole operator."""
        first, second = self.setup(variant, zone, parts), self.teardown(variant, zone, parts)
        return Plan(first.operator, zone, first.launches + second.launches, self.site.overlaps)

    def barrier(self, zone: int, timeout_us: int | None = None) -> Plan:
        """See `barrier_plan`."""
        status = self.site.slots_layout.barrier_status
        return barrier_plan(self.site, status, zone, timeout_us)


def workspace_bytes(config: Config, rank: int, variant: Variant, exchange_rank: int | None = None) -> int:
    """Private bytes between the kernels of an operator on one rank, without making anything."""
    site = Site(config, rank, 1, 0, "cpu", exchange_rank)
    needed = site.scratch()
    holes = set(Fullmesh(site).whole(variant, 0).holes) & needed.keys()
    return sum(elements * dtype.itemsize for elements, dtype in (needed[hole] for hole in holes))
