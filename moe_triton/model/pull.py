"""What a sum that reads its results out of other ranks' windows takes, beside the same sum of local ones."""

from __future__ import annotations

from moe_triton.core.kernel import AscendCKernel, TritonKernel
from moe_triton.model import movement
from moe_triton.model.constants import Machine
from moe_triton.model.cost import Body, Cost, Work
from moe_triton.model.remembered import Bodies

PULLS = {("direct", "weighted_sum")}
"""Kernels that read other ranks' memory, by the scheme whose plans let them."""

THERE_AND_BACK = 2


def with_pulls(bodies: Bodies) -> Bodies:
    """Bodies in which such reads cross links as writes do, and each one's request goes there first."""

    def body_of(kernel: AscendCKernel | TritonKernel) -> Body:
        body = bodies(kernel)

        def pulled(work: Work, machine: Machine) -> Cost:
            cost = body(work, machine)
            is_pull = (work.traffic.config.scheme, kernel.name) in PULLS
            return _pulled(work, machine, cost) if is_pull else cost

        return pulled

    return body_of


def _pulled(work: Work, machine: Machine, local: Cost) -> Cost:
    traffic = work.traffic
    rows = movement.remote(traffic.sent, traffic.tiers)
    num_bytes = int(rows.sum()) * traffic.config.hidden * 2
    wire = movement.wire(machine, num_bytes)
    hops = THERE_AND_BACK * movement.hops(machine, rows, traffic.tiers, work.blocks)
    hidden = min(local.us, wire + hops)
    parts = {"wire": wire, "hops": hops} | {
        name: us * (1 - hidden / local.us) for name, us in local.parts.items() if local.us > 0
    }
    return Cost(parts, max(0, local.read - num_bytes), local.written, num_bytes, local.detail)
