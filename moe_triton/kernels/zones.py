"""Zones that stand in device memory: where a zone begins, and the turn to the other one.

A list of launches that is captured once and run many times has the same arguments every time. What changes
from run to run is read from memory by the kernels themselves: the zone, 0 or 1, in a cell of one int32.
"""

from __future__ import annotations

import functools

import torch

from moe_triton.core.kernel import Arg, TritonKernel
from moe_triton.kernels.cases import Family
from moe_triton.kernels.language import tl, triton

ZONE = Arg("zone", "*i32", "in")
ZONE_STRIDE = Arg("zone_stride", "i64", "value")
# Constants of a kernel whose memory is given with its zone.
NO_ZONE: dict[str, int | None] = {"zone": None, "zone_stride": 0}


@triton.jit
def zone_offset(zone, zone_stride):
    """Elements from zone 0 to the zone that the cell names."""
    return tl.load(zone).to(tl.int64) * zone_stride


def in_zone(memory: torch.Tensor, zone: torch.Tensor | None, zone_stride: int) -> torch.Tensor:
    """For fallbacks: what begins in the zone that the cell names. Without a cell, the same."""
    return memory if zone is None else memory[int(zone[0]) * zone_stride :]


@triton.jit
def _turn_kernel(zone):
    # a loop of one turn or none: in a branch, the CPU's compiler would give the store a buffer never freed
    for _ in range(0, (tl.program_id(0) == 0).to(tl.int32)):
        tl.store(zone, 1 - tl.load(zone))


def _turn_fallback(programs: int, *, zone: torch.Tensor) -> None:
    zone[0] = 1 - zone[0]


@functools.cache
def turn_kernel() -> TritonKernel:
    """``zone[0] = 1 - zone[0]``: an operator's last launch. The same form serves every target."""
    return TritonKernel(
        name="turn",
        fn=_turn_kernel,
        args=(Arg("zone", "*i32", "inout"),),
        constants={},
        fallback=_turn_fallback,
        bytes_moved=lambda **_: 8,
    )


FAMILIES = (Family("turn", turn_kernel, lambda s, r: {"zone": torch.zeros(1, dtype=torch.int32)}),)
