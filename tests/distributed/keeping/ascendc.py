"""The argument list of its kernel, and which kernels run in one launch."""

from __future__ import annotations

from moe_triton.core.ascendc import DISPATCH_WAIT, POST_STATUS
from moe_triton.core.kernel import Arg, AscendCKernel, FusedKernel

KEEP_ROWS = AscendCKernel(
    "keep_rows",
    (
        Arg("rows", "*i8", "in"),
        Arg("row_bytes", "i64", "value"),  # a multiple of 32
        Arg("num_rows", "*i32", "in"),
        Arg("capacity", "i64", "value"),  # rows in `rows`
        Arg("window", "*i8", "out"),  # this rank's own
        Arg("zone", "i64", "value"),
        Arg("zone_at", "*i32", "in"),
        Arg("slots", "indexed_slots", "value"),
        Arg("report", "*i32", "out"),
    ),
)
KERNELS = (KEEP_ROWS,)
FUSED = (FusedKernel("keeping_combine", (KEEP_ROWS, POST_STATUS, DISPATCH_WAIT), frozenset({1})),)
