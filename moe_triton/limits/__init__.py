"""The rules on a `Config` and on a call, each with its message: the one table of limits.

Their page is docs/limits.md, "Limits". ``relaxed`` lifts lower bounds that only a real product has, so
that tests and demos can be small; nothing else. ``python -m moe_triton.limits`` prints the table.
"""

from __future__ import annotations

from moe_triton.limits.buffer_size import (
    MEGABYTE,
    buffer_megabytes,
    check_buffer_size,
    check_num_bytes,
    check_window_limit,
    needed_buffer_bytes,
)
from moe_triton.limits.call import Call
from moe_triton.limits.check import check_argument, check_call, check_config, offering, torch_npu_names
from moe_triton.limits.choice import Choice, scheme_of
from moe_triton.limits.common import GENERATIONS, MAX_GROUP_NAME
from moe_triton.limits.environment import BUFFSIZE, read_environment

__all__ = [
    "BUFFSIZE",
    "GENERATIONS",
    "MAX_GROUP_NAME",
    "MEGABYTE",
    "Call",
    "Choice",
    "buffer_megabytes",
    "check_argument",
    "check_buffer_size",
    "check_call",
    "check_config",
    "check_num_bytes",
    "check_window_limit",
    "needed_buffer_bytes",
    "offering",
    "read_environment",
    "scheme_of",
    "torch_npu_names",
]
