"""The floor of an operator: the bytes that must move, at the rates that a machine has for them."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.model.constants import Machine
from autotune.model.cost import Cost
from autotune.model.traffic import Traffic
from moe_triton.layout import SlotLayout
from moe_triton.operators.variants import DispatchVariant, Variant


@dataclass(frozen=True)
class Floor:
    """What no implementation that moves these bytes can be faster than.

    Attributes:
        local_bytes: read and written in this device's memory.
        remote_bytes: that leave the device, or reach it: the larger of the two.
    """

    local_bytes: int
    remote_bytes: int

    def us(self, machine: Machine) -> float:
        """Microseconds: the longer of the two, each at its rate. A copy reads and writes each byte."""
        local = self.local_bytes / 2 / machine.memcpy_gb_per_s / 1e3
        return max(local, self.remote_bytes / machine.remote_write_gb_per_s / 1e3)


def floor_of(variant: Variant, traffic: Traffic) -> Floor:
    """The floor of an operator on one rank.

    Dispatch reads each token once and writes each row that arrives; combine reads each row's result and
    writes each token. Every row that goes to another rank crosses a link once for each of its experts, as
    the outputs have it. Counts, flags, stamps and whatever lies in a window on the way are no part of it.

    Args:
        variant: the operator, and how rows travel.
        traffic: of the rank.
    """
    hidden, tokens = traffic.config.hidden, len(traffic.topk_idx)
    plain = hidden * variant.dtype.itemsize
    row = plain
    if isinstance(variant, DispatchVariant):
        slot = SlotLayout.of(hidden, variant.row_format, variant.dtype)
        row = slot.row_bytes + slot.scale_bytes
    local = tokens * plain + traffic.num_rows * row
    is_remote = [tier != "self" for tier in traffic.tiers]
    return Floor(local, int(max(traffic.sent[is_remote].sum(), traffic.received[is_remote].sum())) * row)


def floor_of_cost(cost: Cost) -> Floor:
    """The floor of one launch: the bytes that it moves."""
    return Floor(cost.read + cost.written, cost.sent)
