"""Triton kernels, one operator per file: the kernel, its torch fallback, and one host function each."""

from moe_triton.kernels.arrange import arrange, arrange_kernel
from moe_triton.kernels.pack import pack, pack_kernel
from moe_triton.kernels.route import offsets, offsets_kernel, route, route_kernel
from moe_triton.kernels.weighted_sum import weighted_sum, weighted_sum_kernel

__all__ = [
    "arrange",
    "arrange_kernel",
    "offsets",
    "offsets_kernel",
    "pack",
    "pack_kernel",
    "route",
    "route_kernel",
    "weighted_sum",
    "weighted_sum_kernel",
]
