"""What it adds to a kernel that it reads rows out of other ranks' memory: `direct`'s combine.

The kernel's own body knows addresses only, not whose they are. Reads are limited as writes are
(`autotune.model.kernel_costs.movement`): by the wire, and by how many can be on their way, each of them there
and back.
"""

from __future__ import annotations

import numpy as np

from autotune.model.constants import Machine
from autotune.model.cost import Cost, KernelCost, Work
from autotune.model.kernel_costs import movement
from autotune.model.kernel_costs.remembered import KernelCosts
from moe_triton.core.kernel import AscendCKernel, TritonKernel
from moe_triton.kernels.zones import ZONE_STRIDE

PULLING = "weighted_sum", "offsets"
"""The kernel, and its argument, that say in any rank's memory where each result lies. Blocks have it too, for
places in the own window: there it looks up the zone (`ZONE_STRIDE`), which direct's host knows.
"""
_THERE_AND_BACK = 2


def with_pulls(kernel_costs: KernelCosts) -> KernelCosts:
    """Costs of kernels that know what reading from other ranks takes."""

    def kernel_cost_of(kernel: AscendCKernel | TritonKernel) -> KernelCost:
        kernel_cost = kernel_costs(kernel)
        return _pulling(kernel_cost) if is_pulling(kernel) else kernel_cost

    return kernel_cost_of


def is_pulling(kernel: AscendCKernel | TritonKernel) -> bool:
    """Whether it reads results where their experts left them."""
    name, argument = PULLING
    names = {arg.name for arg in kernel.args}
    return kernel.name == name and argument in names and ZONE_STRIDE.name not in names


def pulled(work: Work) -> tuple[np.ndarray, int]:
    """(EP,) rows that a launch reads from each rank's memory, and bytes of each."""
    assert isinstance(work.kernel, TritonKernel)
    tokens = work.traffic.topk_idx.shape[0]
    share = work.number("num_tokens") / tokens if tokens else 0.0
    slots = next(arg for arg in work.kernel.args if arg.name == "slots")
    return work.traffic.sent * share, work.kernel.constants["HIDDEN"] * slots.dtype.itemsize


def _pulling(kernel_cost: KernelCost) -> KernelCost:
    def pulls(work: Work, machine: Machine) -> Cost:
        cost = kernel_cost(work, machine)
        rows, row_bytes = pulled(work)
        tiers, away = work.traffic.tiers, movement.remote(rows, work.traffic.tiers)
        num_bytes = round(float(away.sum()) * row_bytes)
        wire_us = movement.wire(machine, num_bytes, float(away.max()) * row_bytes, reads=True)
        hops_us = movement.hops(machine, _THERE_AND_BACK * away, tiers, work.blocks)
        # As for rows that are sent: what cores do is hidden behind both.
        cores = {"cores": max(0.0, cost.us - wire_us - hops_us)}
        read = max(0, cost.read - num_bytes)
        return Cost({"wire": wire_us, "hops": hops_us, **cores}, read, cost.written, num_bytes, cost.detail)

    return pulls
