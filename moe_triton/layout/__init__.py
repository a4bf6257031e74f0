"""Every offset in a window: where slots and status entries lie, and how a slot is packed.

This is the only source of offsets. Python asks a `Region` for them, Triton kernels get its strides,
Ascend C kernels get it as a struct from the generated header (`moe_triton.tools.codegen`), and
``moe-triton layout`` prints it. Everything in it is linear: a base and one stride per dimension.
"""

from __future__ import annotations

from moe_triton.core.config import Config
from moe_triton.core.records import ORIGIN, STAMP
from moe_triton.layout.call_word import CALL_WORD
from moe_triton.layout.common import (
    BLOCK_BYTES,
    BLOCK_DATA_BYTES,
    FLAG_BITS,
    NUM_ZONES,
    SCALE_BYTES,
    SLOT_ALIGN,
    STAMP_BYTES,
    STATUS_ENTRY_BYTES,
    TRAILER_MARK,
    TRAILER_WORDS,
    UB_ALIGN,
    WORD_BYTES,
    Layout,
    SlotLayout,
    align,
)
from moe_triton.layout.direct import DirectLayout
from moe_triton.layout.exchange import ExchangeLayout
from moe_triton.layout.fullmesh import (
    STATE_BYTES,
    STATE_COMBINE_OFFSET,
    STATE_ZONE_STRIDE,
    ExpertSlotsLayout,
    InbandLayout,
    WindowLayout,
)

__all__ = [
    "BLOCK_BYTES",
    "BLOCK_DATA_BYTES",
    "FLAG_BITS",
    "CALL_WORD",
    "NUM_ZONES",
    "ORIGIN",
    "SCALE_BYTES",
    "SLOT_ALIGN",
    "STAMP",
    "STAMP_BYTES",
    "STATE_BYTES",
    "STATE_COMBINE_OFFSET",
    "STATE_ZONE_STRIDE",
    "STATUS_ENTRY_BYTES",
    "TRAILER_MARK",
    "TRAILER_WORDS",
    "UB_ALIGN",
    "WORD_BYTES",
    "DirectLayout",
    "ExchangeLayout",
    "ExpertSlotsLayout",
    "InbandLayout",
    "Layout",
    "SlotLayout",
    "WindowLayout",
    "align",
    "exchange_layout_of",
    "layout_of",
    "slots_layout_of",
]


def layout_of(config: Config) -> Layout:
    """The window layout of a scheme."""
    return DirectLayout(config) if config.scheme == "direct" else slots_layout_of(config)


def exchange_layout_of(config: Config, rank: int) -> ExchangeLayout:
    """The window between a rank and its tensor-parallel peer."""
    return ExchangeLayout(config.hidden, config.receive_capacity(rank), config.num_ranks)


def slots_layout_of(config: Config) -> WindowLayout:
    """The window layout of a scheme that has slots."""
    if config.version == 1:
        return ExpertSlotsLayout(config)
    return InbandLayout(config) if config.scheme == "fullmesh_v2" else WindowLayout(config)
