"""What the windows of all schemes are made of: sizes, how a slot is packed, the call word.

Offsets come from nowhere else than from this folder and the layouts of schemes
(`moe_triton.schemes.fullmesh.layout`, `moe_triton.schemes.direct.layout`). Python asks a `Region` for them,
Triton kernels get its strides, Ascend C kernels get it as a struct from the generated header
(`moe_triton.tools.codegen`), and ``moe-triton layout`` prints it. Everything in it is linear: a base and one
stride per dimension.
"""

from __future__ import annotations

from moe_triton.core.records import ORIGIN, STAMP
from moe_triton.layout.call_word import CALL_WORD
from moe_triton.layout.common import (
    BLOCK_BYTES,
    BLOCK_DATA_BYTES,
    FLAG_BITS,
    NUM_ZONES,
    SLOT_ALIGN,
    STAMP_BYTES,
    STATE_COMBINE_OFFSET,
    STATUS_ENTRY_BYTES,
    TRAILER_MARK,
    TRAILER_WORDS,
    UB_ALIGN,
    WORD_BYTES,
    Layout,
    SlotLayout,
    align,
)
from moe_triton.layout.exchange import ExchangeLayout

__all__ = [
    "BLOCK_BYTES",
    "BLOCK_DATA_BYTES",
    "CALL_WORD",
    "FLAG_BITS",
    "NUM_ZONES",
    "ORIGIN",
    "SLOT_ALIGN",
    "STAMP",
    "STAMP_BYTES",
    "STATE_COMBINE_OFFSET",
    "STATUS_ENTRY_BYTES",
    "TRAILER_MARK",
    "TRAILER_WORDS",
    "UB_ALIGN",
    "WORD_BYTES",
    "ExchangeLayout",
    "Layout",
    "SlotLayout",
    "align",
]
