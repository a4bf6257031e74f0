"""An entry to every rank, and the wait for every rank's: what guards whole ranks at a time."""

from __future__ import annotations

from moe_triton.core import ascendc
from moe_triton.core.plan import Hole, Launch, Plan, Value, joined, launch
from moe_triton.core.region import Region
from moe_triton.layout.call_word import Kind, call_word, combine_bits
from moe_triton.schemes.common.ascendc import FUSED
from moe_triton.schemes.site import COMBINE_KIND, Operator, Peers, Site


def posting(site: Site, operator: Operator, peers: Peers | None = None) -> dict[str, Value]:
    """Arguments of a kernel that posts to the queued ones of these peers; None for all ranks of the group."""
    if (peers or site.peers).group != "expert" or not site.scheme.queued_peers:
        return {"window": 0, "out_offset": 0, "timeout_us": 0, "traffic": 0}
    return {
        "window": Hole("window"),
        "out_offset": site.layout.in_bytes,
        "timeout_us": site.timeout_us,
        "traffic": site.traffic(operator),
    }


def post(
    site: Site,
    step: str,
    status: Region,
    operator: Operator,
    zone: int,
    kind: Kind | None = None,
    *,
    keep: bool = False,
    peers: Peers | None = None,
    count: Value = 0,
    blocks: int = 1,
) -> Launch:
    """A flag to every rank, this one included: what earlier launches wrote is there.

    Args:
        site: where it runs.
        step: what it is called.
        status: whose entries it writes.
        operator: of which one, with its zone.
        zone: of the operator.
        kind: of call.
        keep: whether the next dispatch has to hear of it.
        peers: to whom; None for all ranks of the group.
        count: that goes with it.
        blocks: that post.
    """
    peers = peers or site.peers
    return launch(
        step,
        ascendc.POST_STATUS,
        "communication",
        blocks,
        peers=Hole(f"{peers.prefix}peers"),
        num_ranks=peers.num_ranks,
        count=count,
        call=call_word(peers.calls or operator, kind),
        kind=combine_bits(kind) if keep and kind else 0,
        combine_kind=COMBINE_KIND if keep else 0,
        rank=peers.rank,
        **site.zone_of(operator, zone),
        **posting(site, operator, peers),
        status=status.words(),
        report=Hole("report"),
    )


def wait_for_ranks(
    site: Site,
    step: str,
    status: Region,
    operator: Operator,
    zone: int,
    kind: Kind | None = None,
    *,
    before: Hole | None = None,
    blocks: int = 1,
    timeout_us: int | None = None,
    peers: Peers | None = None,
    num_local_experts: int = 1,
    counts: str = "barrier_counts",
    count_end: int = 0,
    keeps_zone: bool = False,
    turns: bool = False,
) -> Launch:
    """Until every rank's flag is there, of the same kind of call.

    Args:
        site: where it runs.
        step: what it is called.
        status: whose entries it looks at.
        operator: of which one, with its zone.
        zone: of the operator.
        kind: of call.
        before: where the kind of the combine before stands, if it is part of the call word.
        blocks: that look.
        timeout_us: its deadline; None for the site's.
        peers: whose flags; None for all ranks of the group.
        num_local_experts: flags of each rank.
        counts: the hole that takes what came with each flag, -1 where none came.
        count_end: what comes with a flag is below it, or reported; 0: anything may come.
        keeps_zone: whether it keeps the zone for a later launch that turns it.
        turns: whether it turns the zone: the end of an operator, with one block.
    """
    peers = peers or site.peers
    return launch(
        step,
        ascendc.DISPATCH_WAIT,
        "communication",
        blocks,
        window=Hole(f"{peers.prefix}window"),
        recv_counts=Hole(counts),
        all_counts=0,
        waited_us=0,
        num_local_experts=num_local_experts,
        count_end=count_end,
        **site.zone_of(operator, zone),
        timeout_us=site.timeout_us if timeout_us is None else timeout_us,
        call=call_word(peers.calls or operator, kind),
        combine_kind=before or 0,
        dispatch_word=0,
        kept_zone=site.keeping_zone(operator) if keeps_zone else 0,
        turned=site.turning_zone(operator) if turns else 0,
        status=status.words(),
        report=Hole("report"),
    )


def barrier_plan(site: Site, status: Region, zone: int, timeout_us: int | None) -> Plan:
    """A flag to every rank, and the wait for every rank's; None for the site's deadline."""
    flag = post(site, "flag", status, "barrier", zone)
    wait = wait_for_ranks(site, "wait", status, "barrier", zone, timeout_us=timeout_us, turns=True)
    return Plan("barrier", zone, tuple(joined([flag, wait], FUSED)))
