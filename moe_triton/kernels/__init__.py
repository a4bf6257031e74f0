"""Triton kernels, one operator per file: the kernel, its torch fallback, and one host function each."""

from moe_triton.kernels.add_rows import add_rows, add_rows_kernel
from moe_triton.kernels.append import append, append_kernel, gather_counts, gather_counts_kernel
from moe_triton.kernels.arrange import arrange, arrange_kernel
from moe_triton.kernels.block_quantize import block_quantize, block_quantize_kernel, dequantize_blocks
from moe_triton.kernels.const_experts import const_alphas, const_alphas_kernel
from moe_triton.kernels.keep import keep, keep_kernel, result_offsets_kernel
from moe_triton.kernels.pack import pack, pack_kernel
from moe_triton.kernels.places import places, places_kernel, starts, starts_kernel
from moe_triton.kernels.returns import (
    own_offsets,
    own_offsets_kernel,
    returns,
    returns_kernel,
    returns_shared,
)
from moe_triton.kernels.rms_norm import rms_norm, rms_norm_kernel
from moe_triton.kernels.route import offsets, offsets_kernel, route, route_kernel
from moe_triton.kernels.select import select, select_kernel
from moe_triton.kernels.share import share, share_kernel
from moe_triton.kernels.stamps import split_stamps, stamps_kernel
from moe_triton.kernels.waits import (
    waits_of_combine,
    waits_of_combine_kernel,
    waits_of_dispatch,
    waits_of_dispatch_kernel,
)
from moe_triton.kernels.weighted_sum import SumFeatures, weighted_sum, weighted_sum_kernel
from moe_triton.kernels.zones import turn, turn_kernel

__all__ = [
    "SumFeatures",
    "add_rows",
    "add_rows_kernel",
    "append",
    "append_kernel",
    "arrange",
    "arrange_kernel",
    "block_quantize",
    "block_quantize_kernel",
    "const_alphas",
    "const_alphas_kernel",
    "dequantize_blocks",
    "gather_counts",
    "gather_counts_kernel",
    "keep",
    "keep_kernel",
    "offsets",
    "offsets_kernel",
    "own_offsets",
    "own_offsets_kernel",
    "pack",
    "pack_kernel",
    "places",
    "places_kernel",
    "result_offsets_kernel",
    "returns",
    "returns_kernel",
    "returns_shared",
    "rms_norm",
    "rms_norm_kernel",
    "route",
    "route_kernel",
    "select",
    "select_kernel",
    "share",
    "share_kernel",
    "split_stamps",
    "stamps_kernel",
    "starts",
    "starts_kernel",
    "turn",
    "turn_kernel",
    "waits_of_combine",
    "waits_of_combine_kernel",
    "waits_of_dispatch",
    "waits_of_dispatch_kernel",
    "weighted_sum",
    "weighted_sum_kernel",
]
