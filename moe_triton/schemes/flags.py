"""An entry to every rank, and the wait for every rank's: what guards whole ranks at a time."""

from __future__ import annotations

from moe_triton import ascendc
from moe_triton.plan import Hole, Launch, Plan, launch
from moe_triton.region import Region
from moe_triton.schemes.site import Operator, Site


def post(site: Site, step: str, status: Region, operator: Operator, zone: int) -> Launch:
    """A flag to every rank, this one included: what earlier launches wrote is there."""
    return launch(
        step,
        ascendc.POST_STATUS,
        "communication",
        1,
        peers=Hole("peers"),
        num_ranks=site.config.num_ranks,
        count=0,
        rank=site.rank,
        **site.zone_of(operator, zone),
        status=status.words(),
        report=Hole("report"),
    )


def wait_for_ranks(
    site: Site,
    step: str,
    status: Region,
    operator: Operator,
    zone: int,
    blocks: int = 1,
    timeout_us: int | None = None,
) -> Launch:
    """Until every rank's flag is there; ``barrier_counts`` says whose is not. None: the site's deadline."""
    return launch(
        step,
        ascendc.DISPATCH_WAIT,
        "communication",
        blocks,
        window=Hole("window"),
        recv_counts=Hole("barrier_counts"),
        waited_us=0,
        num_local_experts=1,
        **site.zone_of(operator, zone),
        timeout_us=site.timeout_us if timeout_us is None else timeout_us,
        status=status.words(),
        report=Hole("report"),
    )


def barrier_plan(site: Site, status: Region, zone: int, timeout_us: int | None) -> Plan:
    """A flag to every rank, and the wait for every rank's; None for the site's deadline."""
    flag = post(site, "flag", status, "barrier", zone)
    wait = wait_for_ranks(site, "wait", status, "barrier", zone, timeout_us=timeout_us)
    return Plan("barrier", zone, (flag, wait, *site.turn("barrier")))
