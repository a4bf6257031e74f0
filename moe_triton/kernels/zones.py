"""Zones that stand in device memory: where a zone begins, and the turn to the other one.

A list of launches that is captured once and run many times has the same arguments every time. What changes
from run to run is read from memory by the kernels themselves: the zone, 0 or 1, in a cell of one int32.
"""

from __future__ import annotations

import torch

from moe_triton.core.kernel import Arg
from moe_triton.kernels.language import tl, triton

ZONE = Arg("zone", "*i32", "in")
ZONE_STRIDE = Arg("zone_stride", "i64", "value")
# Where the launch that ends an operator leaves the other zone. It reads the zone from a copy: when its last
# programs start, its first one may have turned this already.
TURNED = Arg("turned", "*i32", "out")


@triton.jit
def zone_offset(zone, zone_stride):
    """Elements from zone 0 to the zone that the cell names."""
    return tl.load(zone).to(tl.int64) * zone_stride


def in_zone(memory: torch.Tensor, zone: torch.Tensor | None, zone_stride: int) -> torch.Tensor:
    """For fallbacks: what begins in the zone that the cell names. Without a cell, the same."""
    return memory if zone is None else memory[int(zone[0]) * zone_stride :]


@triton.jit
def turn_zone(zone, turned):
    """``turned[0] = 1 - zone[0]``, by program 0. Without a cell to turn, nothing."""
    if turned is not None:
        # a loop of one turn or none: in a branch, the CPU's compiler would never free the store's buffer
        for _ in range(0, (tl.program_id(0) == 0).to(tl.int32)):
            tl.store(turned, 1 - tl.load(zone))


def turn_cell(zone: torch.Tensor | None, turned: torch.Tensor | None) -> None:
    """`turn_zone`, for fallbacks."""
    if zone is not None and turned is not None:
        turned[0] = 1 - zone[0]
