"""Dispatch and combine as data: what they take, what they return, and what an argument makes of them.

Arguments have torch_npu's names here, and the names of the holes that they fill in a plan, which are those of
`EPBuffer`. Which function takes an argument, and whether it may be left out, is in that function's signature.
"""

from __future__ import annotations

from moe_triton.operators.buffer import COMBINE_OF_BUFFER, DISPATCH_OF_BUFFER
from moe_triton.operators.combine import (
    COMBINE,
    COMBINE_ADD_RMS_NORM,
    COMBINE_SETUP,
    COMBINE_TEARDOWN,
    COMBINE_V1,
)
from moe_triton.operators.description import Operator, Output, TensorArgument
from moe_triton.operators.dispatch import (
    DISPATCH,
    DISPATCH_OF_A2,
    DISPATCH_SETUP,
    DISPATCH_TEARDOWN,
    DISPATCH_V1,
)
from moe_triton.operators.symbols import Symbols

__all__ = [
    "COMBINE",
    "COMBINE_ADD_RMS_NORM",
    "COMBINE_OF_BUFFER",
    "COMBINE_SETUP",
    "COMBINE_TEARDOWN",
    "COMBINE_V1",
    "DISPATCH",
    "DISPATCH_OF_A2",
    "DISPATCH_OF_BUFFER",
    "DISPATCH_SETUP",
    "DISPATCH_TEARDOWN",
    "DISPATCH_V1",
    "Operator",
    "Output",
    "Symbols",
    "TensorArgument",
]
