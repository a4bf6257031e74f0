"""The rules on a `Config` and on a call, each with its message: the one table of limits.

Their page is docs/limits.md, "Limits". ``relaxed`` lifts lower bounds that only a real product has, so
that tests and demos can be small; nothing else.
"""

from __future__ import annotations

from moe_triton.limits.buffer_size import (
    check_buffer_size,
    needed_buffer_bytes,
)
from moe_triton.limits.call import Call
from moe_triton.limits.check import check_argument, check_call, check_config, offering, torch_npu_names
from moe_triton.limits.choice import Choice, scheme_of
from moe_triton.limits.common import GENERATIONS, MAX_GROUP_NAME

__all__ = [
    "GENERATIONS",
    "MAX_GROUP_NAME",
    "Call",
    "Choice",
    "check_argument",
    "check_buffer_size",
    "check_call",
    "check_config",
    "needed_buffer_bytes",
    "offering",
    "scheme_of",
    "torch_npu_names",
]
